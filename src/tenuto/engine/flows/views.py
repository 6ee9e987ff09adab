"""Reads flows and groups for users and the API. Writes nothing."""

from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec

from tenuto.engine.core import Core
from tenuto.engine.flows.graph import MAX_DEPENDENCIES, MAX_NODES, GraphBuilder, GraphView
from tenuto.engine.lookup import page_of
from tenuto.engine.views import Page, task_summary
from tenuto.model import bounds
from tenuto.model.errors import Invalid, NotFound
from tenuto.model.flows.groups import GROUP_OPEN, GroupStatus
from tenuto.model.flows.plan import Plan
from tenuto.model.flows.progress import FLOW_OPEN, FlowStatus
from tenuto.model.tasks.task import Status
from tenuto.store.protocol import Row, Statement

MAX_GROUPS = 100
MAX_FAILURES = 10
"""How many failed tasks a flow is shown with; `MAX_GROUPS` limits open groups."""
MAX_OPEN_NODES = 500
"""Open nodes from which planned tasks are counted."""
_FIELD_NAMES = {
    "flow": "flowId",
    "parent": "parentId",
    "kind": "type",
    "join_policy": "join",
}


def _json_name(name: str) -> str:
    """Returns the JSON name of a field, in camel case."""
    if name in _FIELD_NAMES:
        return _FIELD_NAMES[name]
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)


class FlowSummary(msgspec.Struct, frozen=True, kw_only=True, rename=_json_name):
    """A flow as an entry of a list."""

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


class GroupSummary(msgspec.Struct, frozen=True, kw_only=True, rename=_json_name):
    """A run of a group as an entry of a list; `open` counts unfinished children."""

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


class FailedTask(msgspec.Struct, frozen=True, kw_only=True, rename=_json_name):
    """A failed task of a flow."""

    id: UUID
    key: str | None
    title: str
    status: str
    last_error: str | None


class FlowView(FlowSummary, frozen=True, kw_only=True, rename=_json_name):
    """A flow with its progress: `tasks` counts the tasks created so far, by status."""

    input: Any
    tasks: dict[str, int]
    progress_percent: int
    cost_usd: float | None
    open_groups: list[GroupSummary]
    failures: list[FailedTask]


class GroupView(GroupSummary, frozen=True, kw_only=True, rename=_json_name):
    """A run of a group with its progress: `tasks` counts tasks created in it, also nested."""

    tasks: int
    ended: int
    progress_percent: int
    cost_usd: float | None


class FlowStartArgs(msgspec.Struct, frozen=True):
    """The plan, input and priority that a flow was started with."""

    plan: Plan
    input: Any
    priority: int | None


class FlowPage(msgspec.Struct, frozen=True, rename="camel"):
    """One page of flows, and the cursor of the next page."""

    flows: list[FlowSummary]
    next_cursor: UUID | None = None


class GroupPage(msgspec.Struct, frozen=True, rename="camel"):
    """One page of group runs, and the cursor of the next page."""

    groups: list[GroupSummary]
    next_cursor: UUID | None = None


class FlowViews:
    """Reads the flows and groups of one workspace."""

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
        """Returns a page of flows with this status and key, newest first; may raise `Invalid`."""
        _check_filter(FlowStatus, status, key, limit)
        rows = await self._fetch(
            "flow_page", status=_upper(status), key=key, before=cursor, most=limit + 1
        )
        return FlowPage(*page_of(rows, limit, lambda row: _summary(FlowSummary, row)))

    async def show(self, flow: UUID) -> FlowView:
        """Returns one flow with its progress; raises `NotFound`."""
        row = await self._require_flow(flow)
        counts = await self._fetch("flow_counts", flow=flow)
        [progress] = await self._fetch("flow_progress", flow=flow)
        groups = await self._fetch("flow_groups_open", flow=flow, most=MAX_GROUPS)
        failed = await self._fetch("flow_failures", flow=flow, most=MAX_FAILURES)
        planned = 0
        if row["status"] in FLOW_OPEN:
            open_nodes = await self._fetch("flow_graph", flow=flow, live=True, most=MAX_OPEN_NODES)
            planned = GraphBuilder(await self._load_plan(flow), open_nodes).count_planned()
        counts_by_status = {row["status"]: row["n"] for row in counts}
        return FlowView(
            **{name: row[name] for name in FlowSummary.__struct_fields__},
            input=await self._core.read(self._core.plans.load_input(flow)),
            tasks={
                status.value: counts_by_status[status]
                for status in Status
                if status in counts_by_status
            },
            progress_percent=_percent(row["status"], progress, planned),
            cost_usd=progress["cost_usd"],
            open_groups=[_summary(GroupSummary, row) for row in groups],
            failures=[_summary(FailedTask, row) for row in failed],
        )

    async def tasks(self, flow: UUID, limit: int = 100, cursor: UUID | None = None) -> Page:
        """Returns a page of a flow's tasks, newest first; raises `NotFound`."""
        bounds.check_number("limit", limit, 1, bounds.MAX_PAGE)
        await self._require_flow(flow)
        rows = await self._fetch("flow_tasks", flow=flow, before=cursor, most=limit + 1)
        return Page(*page_of(rows, limit, task_summary))

    async def graph(self, flow: UUID) -> GraphView:
        """Returns a flow as a graph, with planned nodes while unfinished; raises `NotFound`."""
        row = await self._require_flow(flow)
        nodes = await self._fetch("flow_graph", flow=flow, most=MAX_NODES + 1)
        dependencies = await self._fetch("flow_dependencies", flow=flow, most=MAX_DEPENDENCIES + 1)
        builder = GraphBuilder(await self._load_plan(flow), nodes, dependencies)
        return builder.view(planned=row["status"] in FLOW_OPEN)

    async def start_args(self, flow: UUID) -> FlowStartArgs:
        """Returns the plan, input and priority of a flow; raises `NotFound`."""
        row = await self._require_flow(flow)
        flow_input = await self._core.read(self._core.plans.load_input(flow))
        return FlowStartArgs(await self._load_plan(flow), flow_input, row["priority"])

    async def find(self, name: str) -> UUID:
        """Returns an id in `name` unchecked; for a key, its newest flow's id, or `NotFound`."""
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
        """Returns a page of group runs by status, key, flow, newest first; may raise `Invalid`."""
        _check_filter(GroupStatus, status, key, limit)
        rows = await self._fetch(
            "group_page", status=_upper(status), key=key, flow=flow, before=cursor, most=limit + 1
        )
        return GroupPage(*page_of(rows, limit, lambda row: _summary(GroupSummary, row)))

    async def group(self, group: UUID) -> GroupView:
        """Returns one run of a group with its progress; raises `NotFound`."""
        row = await self._require_group(group)
        [progress] = await self._fetch("group_progress", group_id=group)
        planned = 0
        if row["status"] in GROUP_OPEN:
            open_nodes = await self._fetch(
                "group_graph", group_id=group, live=True, most=MAX_OPEN_NODES
            )
            planned = GraphBuilder(
                await self._load_plan(row["flow"]), open_nodes, root=group
            ).count_planned()
        return GroupView(
            **{name: row[name] for name in GroupSummary.__struct_fields__},
            tasks=progress["tasks"],
            ended=progress["ended"] or 0,
            progress_percent=_percent(row["status"], progress, planned),
            cost_usd=progress["cost_usd"],
        )

    async def group_graph(self, group: UUID) -> GraphView:
        """Returns a group run as a graph, with planned nodes while unfinished; or `NotFound`."""
        row = await self._require_group(group)
        nodes = await self._fetch("group_graph", group_id=group, most=MAX_NODES + 1)
        dependencies = await self._fetch(
            "flow_dependencies", flow=row["flow"], most=MAX_DEPENDENCIES + 1
        )
        builder = GraphBuilder(await self._load_plan(row["flow"]), nodes, dependencies, root=group)
        return builder.view(planned=row["status"] in GROUP_OPEN)

    async def find_group(self, name: str) -> UUID:
        """Returns an id in `name` unchecked; for a key, its newest run's id, or `NotFound`."""
        with suppress(ValueError):
            return UUID(name)
        rows = (await self.groups(key=name, limit=1)).groups
        if not rows:
            raise NotFound(f"no group {name[:60]}")
        return rows[0].id

    async def _require_flow(self, flow: UUID) -> Row:
        """Returns the flow's row; raises `NotFound`."""
        rows = await self._fetch("flow_show", id=flow)
        if not rows:
            raise NotFound(f"no flow {flow}")
        return rows[0]

    async def _require_group(self, group: UUID) -> Row:
        """Returns the group run's row; raises `NotFound`."""
        rows = await self._fetch("group_show", id=group)
        if not rows:
            raise NotFound(f"no group {group}")
        return rows[0]

    async def _load_plan(self, flow: UUID) -> Plan:
        """Returns the flow's plan."""
        return await self._core.read(self._core.plans.load_plan(flow))

    async def _fetch(self, query: str, **params: Any) -> Sequence[Row]:
        """Runs a query in this workspace; returns its rows."""
        params["workspace"] = self._workspace
        return await self._core.store.fetch(Statement(query, params))


def _summary(view_type: Any, row: Row) -> Any:
    """Returns a struct of `view_type` with the columns of the row that its fields name."""
    return view_type(**{name: row[name] for name in view_type.__struct_fields__})


def _upper(status: str | None) -> str | None:
    return None if status is None else status.upper()


def _check_filter(statuses: Any, status: str | None, key: str | None, limit: int) -> None:
    """Raises `Invalid` for an unknown status, a wrong limit or a key that is too long."""
    bounds.check_number("limit", limit, 1, bounds.MAX_PAGE)
    if key is not None:
        bounds.check_text("key", key, bounds.MAX_NAME)
    if status is not None and status.upper() not in statuses.__members__:
        raise Invalid(
            f"no status {status[:40]!r}; use one of {', '.join(statuses)}", "invalid_filter"
        )


def _percent(status: str, progress: Row, planned: int) -> int:
    """Returns the mean progress of created and planned tasks; at most 99 until finished."""
    if status == FlowStatus.COMPLETED:
        return 100
    total = progress["tasks"] + planned
    percent = 0 if total == 0 else int(progress["percents"] or 0) // total
    return min(percent, 99) if status in GROUP_OPEN else percent
