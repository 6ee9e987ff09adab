"""Flows, group runs and the inbox for programs, over HTTP or on a database."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar
from uuid import UUID

from tenuto.client.follow import OUTAGE_S, POLL_S
from tenuto.client.paging import PAGE_SIZE, iterate_pages
from tenuto.client.remote.engine import AnyEngine, RemoteEngine
from tenuto.client.tasks import ID
from tenuto.engine.agents.inbox import InboxItem
from tenuto.engine.flows.definitions import DefinitionView
from tenuto.engine.flows.graph import GraphView
from tenuto.engine.flows.views import FlowSummary, FlowView, GroupSummary, GroupView
from tenuto.engine.views import TaskSummary
from tenuto.model.errors import Conflict, NotFound, Unavailable
from tenuto.model.flows.definition import GroupSpec, Join, Order
from tenuto.model.flows.groups import GROUP_OPEN
from tenuto.model.limits.budgets import Budget

SERVER_POLL_S = 1.0
"""Seconds between two reads of a flow's or group's status from a server."""
V = TypeVar("V", FlowView, GroupView)


class FlowFailed(Exception):
    """The flow or group run that `wait` waited for did not end as COMPLETED."""

    def __init__(self, view: FlowView | GroupView) -> None:
        self.view = view
        self.status = view.status
        super().__init__(f"{view.key} ({view.id}) is {view.status}")


class Flows:
    """The flows of a workspace. Methods accept a flow id, or a key for its newest flow."""

    def __init__(self, engine: AnyEngine) -> None:
        self._engine = engine

    async def start(
        self,
        key: str,
        input: Any = None,  # noqa: A002  public name
        *,
        steps: int | None = None,
        priority: int | None = None,
    ) -> FlowView:
        """Starts and returns a flow of a stored definition; `steps` is its maximum of jumps (goto).

        Raises `NotFound` if there is no definition with this key.
        """
        flow = await self._engine.flows.start(key, input, steps=steps, priority=priority)
        return await self._engine.flow_views.show(flow)

    async def show(self, flow: ID) -> FlowView:
        """Returns one flow: status, progress, tasks by status, open groups; raises `NotFound`."""
        return await self._engine.flow_views.show(await self._resolve_id(flow))

    async def list(
        self,
        *,
        status: str | None = None,
        key: str | None = None,
        limit: int | None = None,
        cursor: UUID | None = None,
    ) -> AsyncGenerator[FlowSummary, None]:
        """Yields flows, newest first; reads them page by page."""
        async for flow in iterate_pages(
            lambda size, after: self._engine.flow_views.page(status, key, size, after),
            lambda page: page.flows,
            limit,
            cursor,
        ):
            yield flow

    async def tasks(self, flow: ID) -> AsyncGenerator[TaskSummary, None]:
        """Yields the tasks of a flow, newest first; reads them page by page."""
        flow_id = await self._resolve_id(flow)
        async for task in iterate_pages(
            lambda size, after: self._engine.flow_views.tasks(flow_id, size, after),
            lambda page: page.tasks,
        ):
            yield task

    async def graph(self, flow: ID) -> GraphView:
        """Returns the flow's graph: nodes and edges that are activated or planned."""
        return await self._engine.flow_views.graph(await self._resolve_id(flow))

    async def wait(self, flow: ID, timeout: float | None = None) -> FlowView:  # noqa: ASYNC109
        """Waits until the flow finishes and returns it; raises `FlowFailed` unless it completed.

        Raises `TimeoutError` after `timeout` seconds.
        """
        flow_id = await self._resolve_id(flow)
        return await _wait_until_finished(
            self._engine, lambda: self._engine.flow_views.show(flow_id), timeout
        )

    async def cancel(self, flow: ID, reason: str | None = None) -> FlowView:
        """Cancels a flow at once; its running tasks end later, when their sessions are killed."""
        return await self._change(flow, lambda id_: self._engine.flows.cancel(id_, reason))

    async def pause(self, flow: ID) -> FlowView:
        """Pauses a flow and returns it; running sessions are stopped after a last checkpoint."""
        return await self._change(flow, self._engine.flows.pause)

    async def resume(self, flow: ID) -> FlowView:
        """Resumes a paused flow and returns it."""
        return await self._change(flow, self._engine.flows.resume)

    async def rerun(
        self, flow: ID, *, from_failed: bool = False, steps: int | None = None
    ) -> FlowView:
        """Starts a flow with the same plan and input; `from_failed`: continues this one instead.

        With `from_failed` the flow continues from its failed tasks. Returns the new or continued
        flow.
        """
        flow_id = await self._resolve_id(flow)
        if from_failed:
            await self._engine.flows.revive(flow_id)
        else:
            flow_id = await self._engine.rerun_flow(flow_id, steps=steps)
        return await self._engine.flow_views.show(flow_id)

    async def _change(self, flow: ID, command: Callable[[UUID], Awaitable[object]]) -> FlowView:
        """Runs a command on a flow, by its id, and returns the flow."""
        flow_id = await self._resolve_id(flow)
        await command(flow_id)
        return await self._engine.flow_views.show(flow_id)

    async def _resolve_id(self, flow: ID) -> UUID:
        """Returns a flow's id from an id, its text, or a key (the newest flow), or `NotFound`."""
        return flow if isinstance(flow, UUID) else await self._engine.flow_views.find(flow)


class Groups:
    """Group runs of a workspace. Methods accept a group run id, or a key for its newest run."""

    def __init__(self, engine: AnyEngine) -> None:
        self._engine = engine

    async def create(
        self,
        key: str,
        children: Sequence[str] = (),
        *,
        title: str | None = None,
        order: Order = "sequential",
        next: str | None = None,  # noqa: A002  public name
        join: Join = "all_succeeded",
        prompt: str | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> DefinitionView:
        """Stores a group definition with these child keys; `Conflict` if the key exists already."""
        spec = GroupSpec(
            key=key,
            title=title or key,
            order=order,
            children=tuple(children),
            next=next,
            join=join,
            prompt=prompt,
            metadata=metadata,
        )
        try:
            return await self._engine.definitions.put(spec, 0)
        except Conflict as error:
            if error.code != "version_conflict":
                raise
            raise Conflict(
                f"definition {key!r} exists already; choose another key", "name_taken"
            ) from error

    async def start(
        self,
        key: str,
        input: Any = None,  # noqa: A002
        *,
        steps: int | None = None,
        priority: int | None = None,
    ) -> FlowView:
        """Starts a flow of a stored group and returns it; `NotFound` if the key is no group's."""
        if (await self._engine.definitions.get(key)).kind != "group":
            raise NotFound(f"no group {key}")
        return await Flows(self._engine).start(key, input, steps=steps, priority=priority)

    async def show(self, group: ID) -> GroupView:
        """Returns one group run: status, progress and cost."""
        return await self._engine.flow_views.group(await self._resolve_id(group))

    async def list(
        self,
        *,
        status: str | None = None,
        key: str | None = None,
        flow: UUID | None = None,
        limit: int | None = None,
        cursor: UUID | None = None,
    ) -> AsyncGenerator[GroupSummary, None]:
        """Yields group runs, newest first; reads them page by page."""
        async for run in iterate_pages(
            lambda size, after: self._engine.flow_views.groups(status, key, flow, size, after),
            lambda page: page.groups,
            limit,
            cursor,
        ):
            yield run

    async def graph(self, group: ID) -> GraphView:
        """Returns the graph of a group run: nodes and edges that are activated or planned."""
        return await self._engine.flow_views.group_graph(await self._resolve_id(group))

    async def wait(self, group: ID, timeout: float | None = None) -> GroupView:  # noqa: ASYNC109
        """Waits until the group run finishes and returns it.

        Raises `FlowFailed` if its status is not COMPLETED, `TimeoutError` after `timeout` seconds.
        """
        group_id = await self._resolve_id(group)
        return await _wait_until_finished(
            self._engine, lambda: self._engine.flow_views.group(group_id), timeout
        )

    async def cancel(self, group: ID, reason: str | None = None) -> GroupView:
        """Cancels a group run with all its open tasks and returns it; sessions are killed first."""
        return await self._change(group, lambda id_: self._engine.flows.cancel_group(id_, reason))

    async def pause(self, group: ID) -> GroupView:
        """Pauses a group run with its tasks and returns the group run."""
        return await self._change(group, self._engine.flows.pause_group)

    async def resume(self, group: ID) -> GroupView:
        """Resumes a paused group run and returns it."""
        return await self._change(group, self._engine.flows.resume_group)

    async def _change(self, group: ID, command: Callable[[UUID], Awaitable[object]]) -> GroupView:
        """Runs a command on a group run, by its id, and returns the group run."""
        group_id = await self._resolve_id(group)
        await command(group_id)
        return await self._engine.flow_views.group(group_id)

    async def _resolve_id(self, group: ID) -> UUID:
        """Returns a run's id from an id, its text, or a key (its newest run), or `NotFound`."""
        return group if isinstance(group, UUID) else await self._engine.flow_views.find_group(group)


class InboxItems:
    """The inbox: items that wait for an answer by a person."""

    def __init__(self, engine: AnyEngine) -> None:
        self._engine = engine

    async def list(
        self,
        status: str | None = "OPEN",
        *,
        limit: int | None = None,
        cursor: UUID | None = None,
    ) -> AsyncGenerator[InboxItem, None]:
        """Yields inbox items, newest first; with `status=None` also the answered ones."""
        remaining = limit
        while remaining is None or remaining > 0:
            size = PAGE_SIZE if remaining is None else min(remaining, PAGE_SIZE)
            items = await self._engine.inbox.list(status, size, cursor)
            for item in items:
                yield item
            remaining = None if remaining is None else remaining - len(items)
            if len(items) < size:
                return
            cursor = items[-1].id

    async def show(self, item: ID) -> InboxItem:
        """Returns one inbox item."""
        return await self._engine.inbox.show(_parse_uuid(item))

    async def approve(
        self, item: ID, comment: str | None = None, budget: Budget | None = None
    ) -> InboxItem:
        """Approves an item and returns it: its task continues. `Conflict` if answered before.

        `budget` is the new budget of a task whose budget is exhausted; the default is twice the old
        one.
        """
        await self._engine.inbox.answer(
            _parse_uuid(item), approve=True, comment=comment, budget=budget
        )
        return await self.show(item)

    async def reject(self, item: ID, comment: str | None = None) -> InboxItem:
        """Rejects an item and returns it: its task fails, is skipped or gets the rejection.

        Raises `Conflict` if the item was answered before.
        """
        await self._engine.inbox.answer(_parse_uuid(item), approve=False, comment=comment)
        return await self.show(item)

    async def answer(self, item: ID, comment: str) -> InboxItem:
        """Answers an item and returns it; `Conflict` for approvals, budgets and answered items."""
        await self._engine.inbox.dismiss(_parse_uuid(item), comment)
        return await self.show(item)


def _parse_uuid(item: ID) -> UUID:
    """Returns the id of an inbox item; raises `ValueError` if the text is not an id."""
    return item if isinstance(item, UUID) else UUID(item)


async def poll_until_finished(
    engine: AnyEngine, fetch: Callable[[], Awaitable[V]]
) -> AsyncGenerator[V, None]:
    """Yields a flow or group run at intervals until it has finished; the last one is finished.

    During an outage of the database or server, reads are retried for OUTAGE_S seconds.
    """
    interval_s = SERVER_POLL_S if isinstance(engine, RemoteEngine) else POLL_S
    last_answer_at = engine.clock.elapsed()
    while True:
        try:
            view = await fetch()
        except Unavailable:
            if engine.clock.elapsed() - last_answer_at > OUTAGE_S:
                raise
        else:
            last_answer_at = engine.clock.elapsed()
            yield view
            if view.status not in GROUP_OPEN:
                return
        await engine.clock.sleep(interval_s)


async def _wait_until_finished(
    engine: AnyEngine,
    fetch: Callable[[], Awaitable[V]],
    timeout: float | None,  # noqa: ASYNC109
) -> V:
    """Returns the finished run; `FlowFailed` unless it is COMPLETED, or `TimeoutError`."""
    async with asyncio.timeout(timeout), aclosing(poll_until_finished(engine, fetch)) as views:
        async for view in views:
            final_view = view
    if final_view.status != "COMPLETED":
        raise FlowFailed(final_view)
    return final_view
