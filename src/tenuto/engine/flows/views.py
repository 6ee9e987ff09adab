"""What people and programs see of flows and groups. Reads only."""

from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec

from tenuto.engine.core import Core
from tenuto.engine.flows.graph import MAX_NODES, MAX_WAITS, GraphBuilder, GraphView
from tenuto.engine.views import Page, summary_of
from tenuto.model import bounds
from tenuto.model.errors import Invalid, NotFound
from tenuto.model.flows.plan import Plan
from tenuto.model.flows.progress import FLOW_OPEN, GROUP_OPEN, FlowStatus, GroupStatus
from tenuto.model.tasks.task import Status
from tenuto.store.protocol import Row, Statement

MAX_GROUPS = 100
MAX_FAILURES = 10
"""Open groups and failed tasks that a flow is shown with."""
LOOKED_AT = 500
"""Open nodes from which is told what is still to come."""
_NAMES = {
    "flow": "flowId",
    "parent": "parentId",
    "kind": "type",
    "join_policy": "join",
}


def _rename(name: str) -> str:
    if name in _NAMES:
        return _NAMES[name]
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)


class FlowSummary(msgspec.Struct, frozen=True, kw_only=True, rename=_rename):
    """A flow as a row of a list."""

    id: UUID
    key: str
    title: str
    status: str
    priority: int | None
    source: str | None
    steps_left: int
    rerun_of: UUID | None
    trace_id: str | None
    created_by: str | None
    version: int
    created_at: datetime
    updated_at: datetime
    finished_at: datetime | None


class GroupSummary(msgspec.Struct, frozen=True, kw_only=True, rename=_rename):
    """A run of a group as a row of a list; `open` counts children that have not ended."""

    id: UUID
    flow: UUID
    key: str
    title: str
    activation: int
    parent: UUID | None
    slot: int
    kind: str
    status: str
    join_policy: str
    depth: int
    total: int
    open: int
    succeeded: int
    failed: int
    version: int
    created_at: datetime
    updated_at: datetime
    finished_at: datetime | None


class FailedTask(msgspec.Struct, frozen=True, kw_only=True, rename=_rename):
    """A task of a flow that ended badly."""

    id: UUID
    key: str | None
    title: str
    status: str
    last_error: str | None


class FlowView(FlowSummary, frozen=True, kw_only=True, rename=_rename):
    """A flow with how far it is: `tasks` counts those made so far, by status."""

    input: Any
    tasks: dict[str, int]
    progress_percent: int
    cost_usd: float | None
    open_groups: list[GroupSummary]
    failures: list[FailedTask]


class GroupView(GroupSummary, frozen=True, kw_only=True, rename=_rename):
    """A run of a group with how far it is: `tasks` counts those made in it, near and far."""

    tasks: int
    ended: int
    progress_percent: int
    cost_usd: float | None


class FlowStartArgs(msgspec.Struct, frozen=True):
    """What a flow was started with."""

    plan: Plan
    input: Any
    priority: int | None


class FlowPage(msgspec.Struct, frozen=True, rename="camel"):
    """Some flows and where the next ones begin."""

    flows: list[FlowSummary]
    next_cursor: UUID | None = None


class GroupPage(msgspec.Struct, frozen=True, rename="camel"):
    """Some runs of groups and where the next ones begin."""

    groups: list[GroupSummary]
    next_cursor: UUID | None = None


class FlowViews:
    """The flows and groups of one workspace, to look at."""

    def __init__(self, core: Core, workspace: UUID) -> None:
        self._core = core
        self._workspace = workspace

    async def page(
        self,
        status: str | None = None,
        key: str | None = None,
        limit: int = 100,
        cursor: UUID | None = None,
    ) -> FlowPage:
        """Flows newest first."""
        _check_filter(FlowStatus, status, key, limit)
        rows = await self._fetch(
            "flow_page", status=_word(status), key=key, before=cursor, most=limit + 1
        )
        flows = [_summary(FlowSummary, row) for row in rows[:limit]]
        return FlowPage(flows, flows[-1].id if len(rows) > limit else None)

    async def show(self, flow: UUID) -> FlowView:
        """One flow with how far it is."""
        row = await self._flow(flow)
        counts = await self._fetch("flow_counts", flow=flow)
        [progress] = await self._fetch("flow_progress", flow=flow)
        groups = await self._fetch("flow_groups_open", flow=flow, most=MAX_GROUPS)
        failed = await self._fetch("flow_failures", flow=flow, most=MAX_FAILURES)
        ahead = 0
        if row["status"] in FLOW_OPEN:
            live = await self._fetch("flow_graph", flow=flow, live=True, most=LOOKED_AT)
            ahead = GraphBuilder(await self._plan(flow), live).to_come()
        found = {each["status"]: each["n"] for each in counts}
        return FlowView(
            **{name: row[name] for name in FlowSummary.__struct_fields__},
            input=await self._core.read(self._core.plans.input(flow)),
            tasks={status.value: found[status] for status in Status if status in found},
            progress_percent=_percent(row["status"], progress, ahead),
            cost_usd=progress["cost_usd"],
            open_groups=[_summary(GroupSummary, each) for each in groups],
            failures=[_summary(FailedTask, each) for each in failed],
        )

    async def tasks(self, flow: UUID, limit: int = 100, cursor: UUID | None = None) -> Page:
        """The tasks of a flow, newest first."""
        bounds.number("limit", limit, 1, bounds.MAX_PAGE)
        await self._flow(flow)
        rows = await self._fetch("flow_tasks", flow=flow, before=cursor, most=limit + 1)
        found = [summary_of(row) for row in rows[:limit]]
        return Page(found, found[-1].id if len(rows) > limit else None)

    async def graph(self, flow: UUID) -> GraphView:
        """What was made in a flow and what is to come, as nodes and edges."""
        row = await self._flow(flow)
        nodes = await self._fetch("flow_graph", flow=flow, most=MAX_NODES + 1)
        waits = await self._fetch("flow_waits", flow=flow, most=MAX_WAITS + 1)
        drawing = GraphBuilder(await self._plan(flow), nodes, waits)
        return drawing.view(planned=row["status"] in FLOW_OPEN)

    async def origin(self, flow: UUID) -> FlowStartArgs:
        """What a flow was started with, to start another of it."""
        row = await self._flow(flow)
        given = await self._core.read(self._core.plans.input(flow))
        return FlowStartArgs(await self._plan(flow), given, row["priority"])

    async def find(self, name: str) -> UUID:
        """The flow that an id names, or the newest of a key."""
        with suppress(ValueError):
            return UUID(name)
        rows = (await self.page(key=name, limit=1)).flows
        if not rows:
            raise NotFound(f"no flow of {name[:60]!r}")
        return rows[0].id

    async def groups(
        self,
        status: str | None = None,
        key: str | None = None,
        flow: UUID | None = None,
        limit: int = 100,
        cursor: UUID | None = None,
    ) -> GroupPage:
        """Runs of groups newest first."""
        _check_filter(GroupStatus, status, key, limit)
        rows = await self._fetch(
            "group_page", status=_word(status), key=key, flow=flow, before=cursor, most=limit + 1
        )
        groups = [_summary(GroupSummary, row) for row in rows[:limit]]
        return GroupPage(groups, groups[-1].id if len(rows) > limit else None)

    async def group(self, group: UUID) -> GroupView:
        """One run of a group with how far it is."""
        row = await self._group(group)
        [progress] = await self._fetch("group_progress", group_id=group)
        ahead = 0
        if row["status"] in GROUP_OPEN:
            live = await self._fetch("group_graph", group_id=group, live=True, most=LOOKED_AT)
            ahead = GraphBuilder(await self._plan(row["flow"]), live, root=group).to_come()
        return GroupView(
            **{name: row[name] for name in GroupSummary.__struct_fields__},
            tasks=progress["tasks"],
            ended=progress["ended"] or 0,
            progress_percent=_percent(row["status"], progress, ahead),
            cost_usd=progress["cost_usd"],
        )

    async def group_graph(self, group: UUID) -> GraphView:
        """What was made in a run of a group and what is to come in it."""
        row = await self._group(group)
        nodes = await self._fetch("group_graph", group_id=group, most=MAX_NODES + 1)
        waits = await self._fetch("flow_waits", flow=row["flow"], most=MAX_WAITS + 1)
        drawing = GraphBuilder(await self._plan(row["flow"]), nodes, waits, root=group)
        return drawing.view(planned=row["status"] in GROUP_OPEN)

    async def find_group(self, name: str) -> UUID:
        """The run of a group that an id names, or the newest of a key."""
        with suppress(ValueError):
            return UUID(name)
        rows = (await self.groups(key=name, limit=1)).groups
        if not rows:
            raise NotFound(f"no group {name[:60]}")
        return rows[0].id

    async def _flow(self, flow: UUID) -> Row:
        rows = await self._fetch("flow_show", id=flow)
        if not rows:
            raise NotFound(f"no flow {flow}")
        return rows[0]

    async def _group(self, group: UUID) -> Row:
        rows = await self._fetch("group_show", id=group)
        if not rows:
            raise NotFound(f"no group {group}")
        return rows[0]

    async def _plan(self, flow: UUID) -> Plan:
        return await self._core.read(self._core.plans.plan(flow))

    async def _fetch(self, query: str, **params: Any) -> Sequence[Row]:
        params["workspace"] = self._workspace
        return await self._core.store.fetch(Statement(query, params))


def _summary(kind: Any, row: Row) -> Any:
    return kind(**{name: row[name] for name in kind.__struct_fields__})


def _word(status: str | None) -> str | None:
    return None if status is None else status.upper()


def _check_filter(known: Any, status: str | None, key: str | None, limit: int) -> None:
    bounds.number("limit", limit, 1, bounds.MAX_PAGE)
    if key is not None:
        bounds.text("key", key, bounds.MAX_NAME)
    if status is not None and status.upper() not in known.__members__:
        raise Invalid(f"no status {status[:40]!r}; known are {', '.join(known)}", "invalid_filter")


def _percent(status: str, progress: Row, ahead: int) -> int:
    """How far something is, by what was made and what is to come; 100 when all of it is done."""
    if status == FlowStatus.COMPLETED:
        return 100
    every = progress["tasks"] + ahead
    found = 0 if every == 0 else int(progress["percents"] or 0) // every
    return min(found, 99) if status in GROUP_OPEN else found
