"""What a claimed task is handed beyond its own row: prompts around it, results before it."""

from collections.abc import Mapping
from typing import Any
from uuid import UUID

from tenuto.engine.flows.plans import PlanCache, refers
from tenuto.engine.flows.rows import context_of
from tenuto.engine.rows import decode
from tenuto.model.errors import Invalid, TenutoError
from tenuto.model.flows.definition import resolved
from tenuto.model.flows.progress import effective_prompt
from tenuto.store.protocol import Row, Rows, Script, Statement

InputOrError = dict[str, Any] | TenutoError


class InputBuilder:
    """Reads what flows add to the works of an engine."""

    def __init__(self, plans: PlanCache) -> None:
        self._plans = plans

    def build_inputs(
        self, rows: Rows, given: Mapping[UUID, Any]
    ) -> Script[dict[UUID, InputOrError]]:
        """The fields of each work that differ from its row, or why it cannot be run.

        `given` has the input of each, with the secrets that its row only names.
        """
        alone = yield from self._load_dependency_results(
            [row for row in rows if row["flow"] is None]
        )
        found: dict[UUID, InputOrError] = {}
        for row in rows:
            try:
                found[row["id"]] = yield from self._build_input(row, given[row["id"]], alone)
            except Invalid as error:
                found[row["id"]] = error
        return found

    def _build_input(
        self, row: Row, given: Any, alone: dict[UUID, dict[str, Any]]
    ) -> Script[dict[str, Any]]:
        changes: dict[str, Any] = {}
        flow = row["flow"]
        if flow is not None:
            plan = self._plans.known(flow) or (yield from self._plans.plan(flow))
            context = context_of(row["context"])
            changes["prompt"] = effective_prompt(plan, context, row["prompt"])
            changes["previous"] = decode(row["previous"])
        if refers(row["input"]):
            results = alone.get(row["id"], {})
            if flow is not None:
                results = yield from self._plans.results(flow, [row["input"]])
            changes["input"] = resolved(given, results)
        return changes

    def _load_dependency_results(self, rows: Rows) -> Script[dict[UUID, dict[str, Any]]]:
        """What tasks without a flow refer to: results they waited for, by key and by id."""
        ids = sorted(row["id"] for row in rows)
        if not ids:
            return {}
        found: dict[UUID, dict[str, Any]] = {each: {} for each in ids}
        for row in (yield Statement("results_needed", {"ids": ids})):
            if row["status"] == "COMPLETED":
                result = decode(row["output"])
                found[row["task"]][str(row["needs"])] = result
                if row["key"] is not None:
                    found[row["task"]][row["key"]] = result
        return found
