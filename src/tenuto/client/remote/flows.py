"""Flows, groups and the inbox behind a server: the calls of the engine's own."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TypeVar
from uuid import UUID

import msgspec

from tenuto.client.remote.http import ApiRequest, ServerConnection
from tenuto.client.remote.worker import V1
from tenuto.engine.agents.inbox import InboxItem
from tenuto.engine.flows.graph import GraphView
from tenuto.engine.flows.views import FlowPage, FlowView, GroupPage, GroupView
from tenuto.engine.views import Page
from tenuto.model.errors import NotFound
from tenuto.model.limits.budgets import Budget

T = TypeVar("T")


class _Items(msgspec.Struct):
    items: list[InboxItem]


class _Asking:
    """Requests to one server."""

    def __init__(self, link: ServerConnection) -> None:
        self._link = link

    async def _get(self, kind: type[T], path: str, **params: Any) -> T:
        ask = ApiRequest(method="GET", path=f"{V1}/{path}", params=params, repeatable=True)
        return await self._link.ask(kind, ask)

    async def _post(self, kind: type[T], path: str, body: Any = msgspec.UNSET) -> T:
        return await self._link.ask(kind, ApiRequest(method="POST", path=f"{V1}/{path}", body=body))

    async def _make(self, kind: type[T], path: str, body: Any) -> T:
        """Make something once, though the answer be lost."""
        headers = {"Idempotency-Key": str(self._link.clock.new_id())}
        ask = ApiRequest(
            method="POST", path=f"{V1}/{path}", body=body, headers=headers, repeatable=True
        )
        return await self._link.ask(kind, ask)


class RemoteFlows(_Asking):
    """The flows and groups of a token's workspace: to start, control and look at."""

    async def start(
        self,
        key: str,
        input: Any = None,  # noqa: A002  the name that users know
        *,
        steps: int | None = None,
        priority: int | None = None,
    ) -> UUID:
        """Run a definition, once though the answer be lost; answers the flow."""
        body = {"key": key, "input": input, "steps": steps, "priority": priority}
        return (await self._make(FlowView, "flows", body)).id

    async def rerun(self, flow: UUID, *, steps: int | None = None) -> UUID:
        """A new flow of the same plan and input; answers its id."""
        return (await self._make(FlowView, f"flows/{flow}/rerun", {"steps": steps})).id

    async def revive(self, flow: UUID) -> None:
        """Go on with a flow from what failed in it."""
        await self._post(FlowView, f"flows/{flow}/rerun", {"fromFailed": True})

    async def cancel(self, flow: UUID, reason: str | None = None) -> None:
        """End a flow with all that is open in it; running sessions are killed first."""
        await self._post(FlowView, f"flows/{flow}/cancel", {"reason": reason})

    async def pause(self, flow: UUID) -> None:
        """Hold everything of a flow; running sessions are stopped after a last checkpoint."""
        await self._post(FlowView, f"flows/{flow}/pause")

    async def resume(self, flow: UUID) -> None:
        """Let a paused flow go on."""
        await self._post(FlowView, f"flows/{flow}/resume")

    async def cancel_group(self, group: UUID, reason: str | None = None) -> None:
        """End a run of a group with all that is open in it."""
        await self._post(GroupView, f"groups/{group}/cancel", {"reason": reason})

    async def pause_group(self, group: UUID) -> None:
        """Hold everything of a run of a group."""
        await self._post(GroupView, f"groups/{group}/pause")

    async def resume_group(self, group: UUID) -> None:
        """Let a paused run of a group go on."""
        await self._post(GroupView, f"groups/{group}/resume")

    async def page(
        self,
        status: str | None = None,
        key: str | None = None,
        limit: int = 100,
        cursor: UUID | None = None,
    ) -> FlowPage:
        """Flows newest first."""
        return await self._get(
            FlowPage, "flows", status=status, key=key, limit=limit, cursor=cursor
        )

    async def show(self, flow: UUID) -> FlowView:
        """One flow with how far it is."""
        return await self._get(FlowView, f"flows/{flow}")

    async def tasks(self, flow: UUID, limit: int = 100, cursor: UUID | None = None) -> Page:
        """The tasks of a flow, newest first."""
        return await self._get(Page, f"flows/{flow}/tasks", limit=limit, cursor=cursor)

    async def graph(self, flow: UUID) -> GraphView:
        """What was made in a flow and what is to come, as nodes and edges."""
        return await self._get(GraphView, f"flows/{flow}/graph")

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
        return await self._get(
            GroupPage, "groups", status=status, key=key, flowId=flow, limit=limit, cursor=cursor
        )

    async def group(self, group: UUID) -> GroupView:
        """One run of a group with how far it is."""
        return await self._get(GroupView, f"groups/{group}")

    async def group_graph(self, group: UUID) -> GraphView:
        """What was made in a run of a group and what is to come in it."""
        return await self._get(GraphView, f"groups/{group}/graph")

    async def find_group(self, name: str) -> UUID:
        """The run of a group that an id names, or the newest of a key."""
        with suppress(ValueError):
            return UUID(name)
        rows = (await self.groups(key=name, limit=1)).groups
        if not rows:
            raise NotFound(f"no group {name[:60]}")
        return rows[0].id


class RemoteInbox(_Asking):
    """The inbox of a token's workspace."""

    async def list(
        self, status: str | None = "OPEN", limit: int = 100, cursor: UUID | None = None
    ) -> Sequence[InboxItem]:
        """Items newest first; with no status, those that were answered as well."""
        found = await self._get(_Items, "inbox", status=status, limit=limit, cursor=cursor)
        return found.items

    async def show(self, item: UUID) -> InboxItem:
        """One item."""
        return await self._get(InboxItem, f"inbox/{item}")

    async def answer(
        self,
        item: UUID,
        *,
        approve: bool,
        comment: str | None = None,
        budget: Budget | None = None,
    ) -> None:
        """Approve or reject; the first answer counts, and the task goes on by it."""
        what = "approve" if approve else "reject"
        body: dict[str, Any] = {"comment": comment}
        if budget is not None:
            body["budget"] = budget
        await self._post(InboxItem, f"inbox/{item}/{what}", body)

    async def dismiss(self, item: UUID, comment: str) -> None:
        """Answer an item that is no approval: somebody has seen to it."""
        await self._post(InboxItem, f"inbox/{item}/answer", {"comment": comment})
