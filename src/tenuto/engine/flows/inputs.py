"""Builds a claimed task's input: group prompts and referenced results."""

from collections.abc import Mapping
from typing import Any
from uuid import UUID

from tenuto.engine.flows.plans import PlanCache, has_reference_marker
from tenuto.engine.flows.rows import context_of
from tenuto.engine.rows import decode_json
from tenuto.model.errors import Invalid, TenutoError
from tenuto.model.flows.definition import resolve_references
from tenuto.model.flows.progress import build_prompt
from tenuto.store.protocol import Row, Rows, Script, Statement

InputOrError = dict[str, Any] | TenutoError


class InputBuilder:
    """Builds the inputs of claimed tasks. `build_inputs` is a script."""

    def __init__(self, plans: PlanCache) -> None:
        self._plans = plans

    def build_inputs(
        self, rows: Rows, inputs: Mapping[UUID, Any]
    ) -> Script[dict[UUID, InputOrError]]:
        """Returns, by task id, `prompt`, `previous`, `input` if not as in the row; or an error.

        `inputs` has each task's input with the values of the secrets that its row only names.
        """
        dependency_results = yield from self._load_dependency_results(
            [row for row in rows if row["flow"] is None]
        )
        built: dict[UUID, InputOrError] = {}
        for row in rows:
            try:
                built[row["id"]] = yield from self._build_input(
                    row, inputs[row["id"]], dependency_results
                )
            except Invalid as error:
                built[row["id"]] = error
        return built

    def _build_input(
        self, row: Row, input_value: Any, dependency_results: dict[UUID, dict[str, Any]]
    ) -> Script[dict[str, Any]]:
        """Returns a task's `prompt`, `previous`, `input` if not as in the row; raises `Invalid`."""
        changes: dict[str, Any] = {}
        flow = row["flow"]
        if flow is not None:
            plan = self._plans.cached_plan(flow) or (yield from self._plans.load_plan(flow))
            context = context_of(row["context"])
            changes["prompt"] = build_prompt(plan, context, row["prompt"])
            changes["previous"] = decode_json(row["previous"])
        if has_reference_marker(row["input"]):
            results = dependency_results.get(row["id"], {})
            if flow is not None:
                results = yield from self._plans.load_results(flow, [row["input"]])
            changes["input"] = resolve_references(input_value, results)
        return changes

    def _load_dependency_results(self, rows: Rows) -> Script[dict[UUID, dict[str, Any]]]:
        """Returns, by task id, results of completed dependencies, each under its id and key."""
        ids = sorted(row["id"] for row in rows)
        if not ids:
            return {}
        results: dict[UUID, dict[str, Any]] = {task: {} for task in ids}
        for row in (yield Statement("dependency_results", {"ids": ids})):
            if row["status"] == "COMPLETED":
                result = decode_json(row["output"])
                results[row["task"]][str(row["needs"])] = result
                if row["key"] is not None:
                    results[row["task"]][row["key"]] = result
        return results
