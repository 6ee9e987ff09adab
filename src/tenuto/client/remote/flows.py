"""Flows, group runs and the inbox over HTTP, with the methods of the engine."""

from contextlib import suppress
from typing import Any
from uuid import UUID

from tenuto.client.remote.generated import FlowsCalls, FlowViewsCalls, InboxCalls
from tenuto.engine.agents.inbox import InboxItem
from tenuto.engine.flows.views import FlowView
from tenuto.model.errors import NotFound
from tenuto.model.limits.budgets import Budget


class RemoteFlows(FlowsCalls, FlowViewsCalls):
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
        return (await self._call(FlowView, "POST", "flows", body, once=True)).id

    async def revive(self, flow: UUID) -> None:
        """Continues a flow from its failed tasks."""
        await self._call(FlowView, "POST", f"flows/{flow}/rerun", {"fromFailed": True})

    async def find(self, name: str) -> UUID:
        """Returns an id as it is; for a key, the id of its newest flow. Raises `NotFound`."""
        with suppress(ValueError):
            return UUID(name)
        rows = (await self.page(key=name, limit=1)).flows
        if not rows:
            raise NotFound(f"no flow of {name[:60]!r}")
        return rows[0].id

    async def find_group(self, name: str) -> UUID:
        """Returns an id as it is; for a key, the id of its newest run. Raises `NotFound`."""
        with suppress(ValueError):
            return UUID(name)
        rows = (await self.groups(key=name, limit=1)).groups
        if not rows:
            raise NotFound(f"no group {name[:60]}")
        return rows[0].id


class RemoteInbox(InboxCalls):
    """The inbox of the token's workspace."""

    async def answer(
        self,
        item: UUID,
        *,
        approve: bool,
        comment: str | None = None,
        budget: Budget | None = None,
    ) -> None:
        """Approves or rejects an item and so its task; `Conflict` if answered before."""
        action = "approve" if approve else "reject"
        body: dict[str, Any] = {"comment": comment}
        if budget is not None:
            body["budget"] = budget
        await self._call(InboxItem, "POST", f"inbox/{item}/{action}", body)
