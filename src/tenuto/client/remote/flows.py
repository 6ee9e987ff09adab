"""Flows, group runs and the inbox over HTTP, with the methods of the engine."""

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


class _InboxItems(msgspec.Struct):
    items: list[InboxItem]


class _RemoteResource:
    """Base: sends requests to one server."""

    def __init__(self, connection: ServerConnection) -> None:
        self._connection = connection

    async def _get(self, response_type: type[T], path: str, **params: Any) -> T:
        request = ApiRequest(method="GET", path=f"{V1}/{path}", params=params, repeatable=True)
        return await self._connection.request(response_type, request)

    async def _post(self, response_type: type[T], path: str, body: Any = msgspec.UNSET) -> T:
        return await self._connection.request(
            response_type, ApiRequest(method="POST", path=f"{V1}/{path}", body=body)
        )

    async def _create_once(self, response_type: type[T], path: str, body: Any) -> T:
        """Posts a body with an idempotency key: created once even if the response is lost."""
        headers = {"Idempotency-Key": str(self._connection.clock.new_id())}
        request = ApiRequest(
            method="POST", path=f"{V1}/{path}", body=body, headers=headers, repeatable=True
        )
        return await self._connection.request(response_type, request)


class RemoteFlows(_RemoteResource):
    """Starts, controls and reads the flows and group runs of the token's workspace."""

    async def start(
        self,
        key: str,
        input: Any = None,  # noqa: A002  public name
        *,
        steps: int | None = None,
        priority: int | None = None,
    ) -> UUID:
        """Starts a flow, only once even if the response is lost; returns its id."""
        body = {"key": key, "input": input, "steps": steps, "priority": priority}
        return (await self._create_once(FlowView, "flows", body)).id

    async def rerun(self, flow: UUID, *, steps: int | None = None) -> UUID:
        """Starts a new flow with the same plan and input; returns its id."""
        return (await self._create_once(FlowView, f"flows/{flow}/rerun", {"steps": steps})).id

    async def revive(self, flow: UUID) -> None:
        """Continues a flow from its failed tasks."""
        await self._post(FlowView, f"flows/{flow}/rerun", {"fromFailed": True})

    async def cancel(self, flow: UUID, reason: str | None = None) -> None:
        """Cancels a flow and everything open in it; running sessions are killed first."""
        await self._post(FlowView, f"flows/{flow}/cancel", {"reason": reason})

    async def pause(self, flow: UUID) -> None:
        """Pauses a flow; running sessions are stopped after a last checkpoint."""
        await self._post(FlowView, f"flows/{flow}/pause")

    async def resume(self, flow: UUID) -> None:
        """Resumes a paused flow."""
        await self._post(FlowView, f"flows/{flow}/resume")

    async def cancel_group(self, group: UUID, reason: str | None = None) -> None:
        """Cancels a group run and everything open in it."""
        await self._post(GroupView, f"groups/{group}/cancel", {"reason": reason})

    async def pause_group(self, group: UUID) -> None:
        """Pauses a group run."""
        await self._post(GroupView, f"groups/{group}/pause")

    async def resume_group(self, group: UUID) -> None:
        """Resumes a paused group run."""
        await self._post(GroupView, f"groups/{group}/resume")

    async def page(
        self,
        status: str | None = None,
        key: str | None = None,
        limit: int = 100,
        cursor: UUID | None = None,
    ) -> FlowPage:
        """Returns a page of flows, newest first."""
        return await self._get(
            FlowPage, "flows", status=status, key=key, limit=limit, cursor=cursor
        )

    async def show(self, flow: UUID) -> FlowView:
        """Returns one flow with its progress."""
        return await self._get(FlowView, f"flows/{flow}")

    async def tasks(self, flow: UUID, limit: int = 100, cursor: UUID | None = None) -> Page:
        """Returns a page of the tasks of a flow, newest first."""
        return await self._get(Page, f"flows/{flow}/tasks", limit=limit, cursor=cursor)

    async def graph(self, flow: UUID) -> GraphView:
        """Returns the flow's graph: nodes and edges that are activated or planned."""
        return await self._get(GraphView, f"flows/{flow}/graph")

    async def find(self, name: str) -> UUID:
        """Returns the flow id for an id as text, or for a key the id of its newest flow."""
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
        """Returns a page of group runs, newest first."""
        return await self._get(
            GroupPage, "groups", status=status, key=key, flowId=flow, limit=limit, cursor=cursor
        )

    async def group(self, group: UUID) -> GroupView:
        """Returns one group run with its progress."""
        return await self._get(GroupView, f"groups/{group}")

    async def group_graph(self, group: UUID) -> GraphView:
        """Returns the graph of a group run: nodes and edges that are activated or planned."""
        return await self._get(GraphView, f"groups/{group}/graph")

    async def find_group(self, name: str) -> UUID:
        """Returns the group run id for an id as text, or for a key the id of its newest run."""
        with suppress(ValueError):
            return UUID(name)
        rows = (await self.groups(key=name, limit=1)).groups
        if not rows:
            raise NotFound(f"no group {name[:60]}")
        return rows[0].id


class RemoteInbox(_RemoteResource):
    """The inbox of the token's workspace."""

    async def list(
        self, status: str | None = "OPEN", limit: int = 100, cursor: UUID | None = None
    ) -> Sequence[InboxItem]:
        """Returns items, newest first; with `status=None` also the answered ones."""
        reply = await self._get(_InboxItems, "inbox", status=status, limit=limit, cursor=cursor)
        return reply.items

    async def show(self, item: UUID) -> InboxItem:
        """Returns one inbox item."""
        return await self._get(InboxItem, f"inbox/{item}")

    async def answer(
        self,
        item: UUID,
        *,
        approve: bool,
        comment: str | None = None,
        budget: Budget | None = None,
    ) -> None:
        """Approves or rejects an item; the first answer counts and decides about the task."""
        action = "approve" if approve else "reject"
        body: dict[str, Any] = {"comment": comment}
        if budget is not None:
            body["budget"] = budget
        await self._post(InboxItem, f"inbox/{item}/{action}", body)

    async def dismiss(self, item: UUID, comment: str) -> None:
        """Answers an item that is not an approval: a person has handled it."""
        await self._post(InboxItem, f"inbox/{item}/answer", {"comment": comment})
