"""The plans of flows, remembered: they never change. And the results that tasks refer to."""

from collections.abc import Iterable
from typing import Any
from uuid import UUID

import msgspec

from tenuto.engine.flows.rows import flow_of
from tenuto.engine.rows import decode
from tenuto.model.flows.definition import FROM, references
from tenuto.model.flows.plan import Plan
from tenuto.model.flows.progress import Flow, FlowStatus
from tenuto.store.protocol import Script, Statement

_MOST = 256
_MARK = f'"{FROM}"'


class _CachedPlan(msgspec.Struct, frozen=True):
    plan: Plan
    input: Any
    flow: Flow
    """As one that runs; what else of it changes is as it was once."""
    tied: frozenset[str]
    """The groups of which some children wait for others."""


class PlanCache:
    """What flows were started with. Its methods are scripts."""

    def __init__(self) -> None:
        self._known: dict[UUID, _CachedPlan] = {}

    def plan(self, flow: UUID) -> Script[Plan]:
        """The plan of a flow that exists."""
        return (yield from self._load(flow)).plan

    def known(self, flow: UUID) -> Plan | None:
        """The plan of a flow, if it need not be read."""
        known = self._known.get(flow)
        return None if known is None else known.plan

    def running(self, flow: UUID) -> tuple[Flow, Any] | None:
        """A flow that runs and what it was started with, if that need not be read."""
        known = self._known.get(flow)
        return None if known is None else (known.flow, known.input)

    def input(self, flow: UUID) -> Script[Any]:
        """What the flow was started with."""
        return (yield from self._load(flow)).input

    def _load(self, flow: UUID) -> Script[_CachedPlan]:
        known = self._known.get(flow)
        if known is None:
            rows = yield Statement("flow_plans", {"ids": [flow]})
            plan = msgspec.json.decode(rows[0]["plan"], type=Plan)
            known = self._keep(plan, rows[0]["input"], flow_of(rows[0]))
        return known

    def remember(self, plan: Plan, row: dict[str, Any]) -> None:
        """A flow that is about to be made of these columns: its plan need not be read."""
        made = Flow(
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
        self._keep(plan, row["input"], made)

    def _keep(self, plan: Plan, given: str | None, flow: Flow) -> _CachedPlan:
        running = msgspec.structs.replace(flow, status=FlowStatus.RUNNING)
        known = _CachedPlan(plan, decode(given), running, _tied(plan))
        if len(self._known) >= _MOST:
            del self._known[next(iter(self._known))]
        self._known[flow.id] = known
        return known

    def tied(self, flow: UUID) -> Script[frozenset[str]]:
        """The groups of a flow of which some children wait for others."""
        return (yield from self._load(flow)).tied

    def results(self, flow: UUID, texts: Iterable[str | None]) -> Script[dict[str, Any]]:
        """The latest results of the keys that these JSON texts refer to, where there are any."""
        keys: set[str] = set()
        for text in texts:
            if refers(text):
                keys |= references(decode(text))
        if not keys:
            return {}
        rows = yield Statement("flow_results", {"flow": flow, "keys": sorted(keys)})
        return {row["key"]: decode(row["output"]) for row in rows}


def _tied(plan: Plan) -> frozenset[str]:
    waiting = {key for key, new in plan.tasks.items() if new.depends_on}
    return frozenset(key for key, group in plan.groups.items() if waiting & set(group.children))


def refers(text: str | None) -> bool:
    """Whether JSON text may refer to a result: a glance that costs nothing."""
    return text is not None and _MARK in text
