"""Flows, groups and the inbox as a program asks for them, over HTTP or on a database itself."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar
from uuid import UUID

from tenuto.client.follow import EVERY, OUTAGE_S
from tenuto.client.remote.engine import AnyEngine, RemoteEngine
from tenuto.engine.agents.inbox import InboxItem
from tenuto.engine.flows.definitions import DefinitionView
from tenuto.engine.flows.graph import GraphView
from tenuto.engine.flows.views import FlowSummary, FlowView, GroupSummary, GroupView
from tenuto.engine.views import TaskSummary
from tenuto.model.errors import Conflict, NotFound, Unavailable
from tenuto.model.flows.definition import GroupSpec, Join, Order
from tenuto.model.flows.progress import GROUP_OPEN
from tenuto.model.limits.budgets import Budget

PAGE = 500
LOOK_S = 1.0
"""Seconds between looks at what a server has."""
ID = UUID | str
V = TypeVar("V", FlowView, GroupView)


class FlowFailed(Exception):
    """A flow or group that was waited for ended, and not well."""

    def __init__(self, view: FlowView | GroupView) -> None:
        self.view = view
        self.status = view.status
        super().__init__(f"{view.key} ({view.id}) is {view.status}")


class Flows:
    """The flows of a workspace. A flow is named by its id, or by its key: the newest of it."""

    def __init__(self, engine: AnyEngine) -> None:
        self._engine = engine

    async def start(
        self,
        key: str,
        input: Any = None,  # noqa: A002  the name that users know
        *,
        steps: int | None = None,
        priority: int | None = None,
    ) -> FlowView:
        """Run a stored definition; `steps` are the jumps that it may make."""
        flow = await self._engine.flows.start(key, input, steps=steps, priority=priority)
        return await self._engine.flow_views.show(flow)

    async def show(self, flow: ID) -> FlowView:
        """One flow: how far it is, its tasks by status, its open groups."""
        return await self._engine.flow_views.show(await self._found(flow))

    async def list(
        self,
        *,
        status: str | None = None,
        key: str | None = None,
        limit: int | None = None,
        cursor: UUID | None = None,
    ) -> AsyncGenerator[FlowSummary, None]:
        """Flows newest first, page after page."""
        left = limit
        while left is None or left > 0:
            size = PAGE if left is None else min(left, PAGE)
            page = await self._engine.flow_views.page(status, key, size, cursor)
            for flow in page.flows:
                yield flow
            left = None if left is None else left - len(page.flows)
            if (cursor := page.next_cursor) is None:
                return

    async def tasks(self, flow: ID) -> AsyncGenerator[TaskSummary, None]:
        """The tasks of a flow, newest first, page after page."""
        found = await self._found(flow)
        cursor = None
        while True:
            page = await self._engine.flow_views.tasks(found, PAGE, cursor)
            for task in page.tasks:
                yield task
            if (cursor := page.next_cursor) is None:
                return

    async def graph(self, flow: ID) -> GraphView:
        """What was made in a flow and what is to come, as nodes and edges."""
        return await self._engine.flow_views.graph(await self._found(flow))

    async def wait(self, flow: ID, timeout: float | None = None) -> FlowView:  # noqa: ASYNC109
        """The flow when it is COMPLETED; raises `FlowFailed` for any other end.

        `TimeoutError` when it has not ended after so many seconds.
        """
        found = await self._found(flow)
        return await _ended(self._engine, lambda: self._engine.flow_views.show(found), timeout)

    async def cancel(self, flow: ID, reason: str | None = None) -> FlowView:
        """End a flow with all that is open in it; running sessions are killed first."""
        found = await self._found(flow)
        await self._engine.flows.cancel(found, reason)
        return await self._engine.flow_views.show(found)

    async def pause(self, flow: ID) -> FlowView:
        """Hold everything of a flow; running sessions are stopped after a last checkpoint."""
        found = await self._found(flow)
        await self._engine.flows.pause(found)
        return await self._engine.flow_views.show(found)

    async def resume(self, flow: ID) -> FlowView:
        """Let a paused flow go on."""
        found = await self._found(flow)
        await self._engine.flows.resume(found)
        return await self._engine.flow_views.show(found)

    async def rerun(
        self, flow: ID, *, from_failed: bool = False, steps: int | None = None
    ) -> FlowView:
        """A new flow of the same plan and input, or the same flow on from what failed in it."""
        found = await self._found(flow)
        if from_failed:
            await self._engine.flows.revive(found)
        else:
            found = await self._engine.rerun_flow(found, steps=steps)
        return await self._engine.flow_views.show(found)

    async def _found(self, flow: ID) -> UUID:
        return flow if isinstance(flow, UUID) else await self._engine.flow_views.find(flow)


class Groups:
    """The groups of a workspace. A run is named by its id, or by a key: the newest run of it."""

    def __init__(self, engine: AnyEngine) -> None:
        self._engine = engine

    async def create(
        self,
        key: str,
        children: Sequence[str] = (),
        *,
        title: str | None = None,
        order: Order = "sequential",
        next: str | None = None,  # noqa: A002  the name that users know
        join: Join = "all_succeeded",
        prompt: str | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> DefinitionView:
        """Define a group of what is defined by these keys; a key that is taken is refused."""
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
            raise Conflict(f"there is a definition {key!r} already", "name_taken") from error

    async def start(
        self,
        key: str,
        input: Any = None,  # noqa: A002
        *,
        steps: int | None = None,
        priority: int | None = None,
    ) -> FlowView:
        """Run a group; answers its flow."""
        if (await self._engine.definitions.get(key)).kind != "group":
            raise NotFound(f"no group {key}")
        return await Flows(self._engine).start(key, input, steps=steps, priority=priority)

    async def show(self, group: ID) -> GroupView:
        """One run of a group: how far it is, and what it cost."""
        return await self._engine.flow_views.group(await self._found(group))

    async def list(
        self,
        *,
        status: str | None = None,
        key: str | None = None,
        flow: UUID | None = None,
        limit: int | None = None,
        cursor: UUID | None = None,
    ) -> AsyncGenerator[GroupSummary, None]:
        """Runs of groups newest first, page after page."""
        left = limit
        while left is None or left > 0:
            size = PAGE if left is None else min(left, PAGE)
            page = await self._engine.flow_views.groups(status, key, flow, size, cursor)
            for group in page.groups:
                yield group
            left = None if left is None else left - len(page.groups)
            if (cursor := page.next_cursor) is None:
                return

    async def graph(self, group: ID) -> GraphView:
        """What was made in a run of a group and what is to come in it."""
        return await self._engine.flow_views.group_graph(await self._found(group))

    async def wait(self, group: ID, timeout: float | None = None) -> GroupView:  # noqa: ASYNC109
        """The run when it is COMPLETED; raises `FlowFailed` for any other end."""
        found = await self._found(group)
        return await _ended(self._engine, lambda: self._engine.flow_views.group(found), timeout)

    async def cancel(self, group: ID, reason: str | None = None) -> GroupView:
        """End a run of a group with all that is open in it."""
        found = await self._found(group)
        await self._engine.flows.cancel_group(found, reason)
        return await self._engine.flow_views.group(found)

    async def pause(self, group: ID) -> GroupView:
        """Hold everything of a run of a group."""
        found = await self._found(group)
        await self._engine.flows.pause_group(found)
        return await self._engine.flow_views.group(found)

    async def resume(self, group: ID) -> GroupView:
        """Let a paused run of a group go on."""
        found = await self._found(group)
        await self._engine.flows.resume_group(found)
        return await self._engine.flow_views.group(found)

    async def _found(self, group: ID) -> UUID:
        return group if isinstance(group, UUID) else await self._engine.flow_views.find_group(group)


class InboxItems:
    """What waits for people."""

    def __init__(self, engine: AnyEngine) -> None:
        self._engine = engine

    async def list(
        self,
        status: str | None = "OPEN",
        *,
        limit: int | None = None,
        cursor: UUID | None = None,
    ) -> AsyncGenerator[InboxItem, None]:
        """Items newest first, page after page; without a status, the answered ones as well."""
        left = limit
        while left is None or left > 0:
            size = PAGE if left is None else min(left, PAGE)
            items = await self._engine.inbox.list(status, size, cursor)
            for item in items:
                yield item
            left = None if left is None else left - len(items)
            if len(items) < size:
                return
            cursor = items[-1].id

    async def show(self, item: ID) -> InboxItem:
        """One item."""
        return await self._engine.inbox.show(_uuid(item))

    async def approve(
        self, item: ID, comment: str | None = None, budget: Budget | None = None
    ) -> InboxItem:
        """Say yes; the first answer counts, and the task goes on by it.

        `budget` is for a task whose budget is used up; without one it may use twice as much.
        """
        await self._engine.inbox.answer(_uuid(item), approve=True, comment=comment, budget=budget)
        return await self.show(item)

    async def reject(self, item: ID, comment: str | None = None) -> InboxItem:
        """Say no; the first answer counts, and the task fails or is skipped by it."""
        await self._engine.inbox.answer(_uuid(item), approve=False, comment=comment)
        return await self.show(item)

    async def answer(self, item: ID, comment: str) -> InboxItem:
        """Answer an item that asks for no yes or no."""
        await self._engine.inbox.dismiss(_uuid(item), comment)
        return await self.show(item)


def _uuid(item: ID) -> UUID:
    return item if isinstance(item, UUID) else UUID(item)


async def poll_until_finished(
    engine: AnyEngine, look: Callable[[], Awaitable[V]]
) -> AsyncGenerator[V, None]:
    """A flow or group as it is now, then again and again, the last time when it has ended.

    A database or server that restarts meanwhile is waited for.
    """
    pause = LOOK_S if isinstance(engine, RemoteEngine) else EVERY
    heard = engine.clock.elapsed()
    while True:
        try:
            view = await look()
        except Unavailable:
            if engine.clock.elapsed() - heard > OUTAGE_S:
                raise
        else:
            heard = engine.clock.elapsed()
            yield view
            if view.status not in GROUP_OPEN:
                return
        await engine.clock.sleep(pause)


async def _ended(
    engine: AnyEngine,
    look: Callable[[], Awaitable[V]],
    timeout: float | None,  # noqa: ASYNC109
) -> V:
    async with asyncio.timeout(timeout), aclosing(poll_until_finished(engine, look)) as views:
        async for view in views:
            last = view
    if last.status != "COMPLETED":
        raise FlowFailed(last)
    return last
