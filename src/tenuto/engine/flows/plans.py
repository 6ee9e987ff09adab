"""Caches the plans of flows, which never change; loads the results that tasks refer to."""

from collections.abc import Iterable
from typing import Any
from uuid import UUID

import msgspec

from tenuto.engine.flows.rows import flow_of
from tenuto.engine.rows import decode_json
from tenuto.model.flows.definition import REFERENCE_KEY, referenced_keys
from tenuto.model.flows.plan import Plan
from tenuto.model.flows.progress import Flow, FlowStatus
from tenuto.store.protocol import Script, Statement

_MAX_CACHED = 256
_REFERENCE_MARK = f'"{REFERENCE_KEY}"'


class _CachedPlan(msgspec.Struct, frozen=True):
    plan: Plan
    input: Any
    flow: Flow
    """The flow as it was when cached, with status RUNNING; other fields may be outdated."""
    dependent_groups: frozenset[str]
    """Keys of groups in which children depend on each other."""


class PlanCache:
    """Caches the plans and inputs of flows. The `load_` methods are scripts."""

    def __init__(self) -> None:
        self._by_flow: dict[UUID, _CachedPlan] = {}

    def load_plan(self, flow: UUID) -> Script[Plan]:
        """Returns the plan of an existing flow, cached or read."""
        return (yield from self._load(flow)).plan

    def cached_plan(self, flow: UUID) -> Plan | None:
        """Returns the plan of a flow, `None` if it is not cached."""
        cached = self._by_flow.get(flow)
        return None if cached is None else cached.plan

    def cached_flow(self, flow: UUID) -> tuple[Flow, Any] | None:
        """Returns a flow as it was when cached, as RUNNING, and its input; or `None`."""
        cached = self._by_flow.get(flow)
        return None if cached is None else (cached.flow, cached.input)

    def load_input(self, flow: UUID) -> Script[Any]:
        """Returns the input of an existing flow, cached or read."""
        return (yield from self._load(flow)).input

    def _load(self, flow: UUID) -> Script[_CachedPlan]:
        """Returns a flow's plan and input from the cache, or reads and caches them."""
        cached = self._by_flow.get(flow)
        if cached is None:
            rows = yield Statement("flow_plans", {"ids": [flow]})
            plan = msgspec.json.decode(rows[0]["plan"], type=Plan)
            cached = self._cache_plan(plan, rows[0]["input"], flow_of(rows[0]))
        return cached

    def cache_new_flow(self, plan: Plan, row: dict[str, Any]) -> None:
        """Caches the plan and input of a flow that is about to be inserted with these columns."""
        flow = Flow(
            id=row["id"],
            workspace=row["workspace"],
            key=row["key"],
            title=row["title"],
            status=FlowStatus.RUNNING,
            steps_left=row["steps"],
            open=1,
            failed=0,
            priority=row["priority"],
            source=row["source"],
            rerun_of=row["rerun_of"],
            trace_id=row["trace_id"],
            created_by=row["actor"],
            version=1,
            created_at=row["now"],
            updated_at=row["now"],
            finished_at=None,
        )
        self._cache_plan(plan, row["input"], flow)

    def _cache_plan(self, plan: Plan, input_json: str | None, flow: Flow) -> _CachedPlan:
        """Caches and returns a flow's plan and input; drops the oldest entry of a full cache."""
        running = msgspec.structs.replace(flow, status=FlowStatus.RUNNING)
        cached = _CachedPlan(plan, decode_json(input_json), running, _dependent_groups(plan))
        if len(self._by_flow) >= _MAX_CACHED:
            del self._by_flow[next(iter(self._by_flow))]
        self._by_flow[flow.id] = cached
        return cached

    def load_dependent_groups(self, flow: UUID) -> Script[frozenset[str]]:
        """Returns the keys of a flow's groups in which children depend on each other."""
        return (yield from self._load(flow)).dependent_groups

    def load_results(self, flow: UUID, texts: Iterable[str | None]) -> Script[dict[str, Any]]:
        """Returns, by key, the latest results that JSON texts refer to; leaves out missing ones."""
        keys: set[str] = set()
        for text in texts:
            if has_reference_marker(text):
                keys |= referenced_keys(decode_json(text))
        if not keys:
            return {}
        rows = yield Statement("flow_results", {"flow": flow, "keys": sorted(keys)})
        return {row["key"]: decode_json(row["output"]) for row in rows}


def _dependent_groups(plan: Plan) -> frozenset[str]:
    """Returns the keys of groups that have a child with dependencies."""
    dependents = {key for key, new in plan.tasks.items() if new.depends_on}
    return frozenset(key for key, group in plan.groups.items() if dependents & set(group.children))


def has_reference_marker(text: str | None) -> bool:
    """True if JSON text contains the marker of a reference, perhaps as mere text."""
    return text is not None and _REFERENCE_MARK in text
