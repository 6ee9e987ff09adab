"""Administration: tokens, users, workspaces and webhooks of a server; whoever coordinates."""

from collections.abc import AsyncGenerator, Sequence
from datetime import datetime
from typing import Any, TypeVar
from uuid import UUID

import msgspec

from tenuto.client.agents import needs_a_server
from tenuto.client.remote.bodies import camel
from tenuto.client.remote.engine import AnyEngine, RemoteEngine
from tenuto.client.remote.http import ApiRequest, ServerConnection
from tenuto.client.remote.worker import V1
from tenuto.engine.operations.coordination import RecoverResult, happened, recover
from tenuto.engine.tasks.maintenance import CycleReport
from tenuto.engine.tenancy.views import (
    CallerView,
    LoginToken,
    MemberView,
    NewTokenView,
    NewWorkspace,
    TokenView,
    WorkspaceView,
)
from tenuto.engine.views import LogLine
from tenuto.engine.webhooks.endpoints import (
    DeliveryPage,
    DeliveryView,
    WebhookPage,
    WebhookSecret,
    WebhookView,
)

T = TypeVar("T")
PAGE = 500
LEADER = "coordinator"


class CoordinatorStatus(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Who coordinates since when, how its last cycle went, and who would take over."""

    active: bool
    instance_id: str | None = None
    epoch: int = 0
    cycle_count: int = 0
    last_heartbeat: datetime | None = None
    since: datetime | None = None
    until: datetime | None = None
    last_cycle: CycleReport | None = None
    standby: list[str] = []


class _Lines(msgspec.Struct):
    lines: list[LogLine]


class Resource:
    """One kind of thing that a server keeps."""

    what = "this"

    def __init__(self, engine: AnyEngine) -> None:
        self._engine = engine

    @property
    def _link(self) -> ServerConnection:
        if not isinstance(self._engine, RemoteEngine):
            raise needs_a_server(self.what)
        return self._engine.link

    async def _get(self, kind: type[T], path: str, **params: Any) -> T:
        ask = ApiRequest(method="GET", path=f"{V1}/{path}", params=params, repeatable=True)
        return await self._link.ask(kind, ask)

    async def _send(self, kind: type[T], method: str, path: str, body: Any = msgspec.UNSET) -> T:
        return await self._link.ask(kind, ApiRequest(method=method, path=f"{V1}/{path}", body=body))


class Tokens(Resource):
    """The keys of programs to the workspace."""

    what = "a token"

    async def list(self) -> Sequence[TokenView]:
        """The tokens of the workspace, without themselves."""
        return await self._get(list[TokenView], "tokens")

    async def create(self, name: str, **fields: Any) -> NewTokenView:
        """A key with `role`, `scopes` and `expires_at` as given; shown once."""
        return await self._send(NewTokenView, "POST", "tokens", _body(name=name, **fields))

    async def revoke(self, token: UUID | str) -> None:
        """End a token and those made with it, at once."""
        await self._send(type(None), "DELETE", f"tokens/{token}")


class Users(Resource):
    """Who belongs to the workspace."""

    what = "a user"

    async def list(self) -> Sequence[MemberView]:
        """Who belongs to the workspace."""
        return await self._get(list[MemberView], "users")

    async def create(self, name: str, password: str, role: str = "MEMBER") -> MemberView:
        """A new user who belongs to the workspace."""
        body = {"name": name, "password": password, "role": role}
        return await self._send(MemberView, "POST", "users", body)

    async def update(self, user: UUID | str, role: str) -> MemberView:
        """Change as what somebody belongs to the workspace."""
        return await self._send(MemberView, "PATCH", f"users/{user}", {"role": role})

    async def delete(self, user: UUID | str) -> None:
        """Take somebody out of the workspace."""
        await self._send(type(None), "DELETE", f"users/{user}")


class Workspaces(Resource):
    """The tenants that the caller belongs to."""

    what = "a workspace"

    async def list(self) -> Sequence[WorkspaceView]:
        """The workspaces that the caller belongs to."""
        return await self._get(list[WorkspaceView], "workspaces")

    async def get(self, workspace: UUID | str) -> WorkspaceView:
        """The caller's workspace."""
        return await self._get(WorkspaceView, f"workspaces/{workspace}")

    async def create(self, name: str) -> NewWorkspace:
        """A new tenant, owned by the caller."""
        return await self._send(NewWorkspace, "POST", "workspaces", {"name": name})

    async def quota(self, workspace: UUID | str, **limits: int | None) -> WorkspaceView:
        """What the workspace may use from now on: `tasks_per_minute`, `pending`."""
        path = f"workspaces/{workspace}/quota"
        return await self._send(WorkspaceView, "PUT", path, _body(**limits))


class Webhooks(Resource):
    """The endpoints that hear of events."""

    what = "a webhook"

    async def list(self) -> AsyncGenerator[WebhookView, None]:
        """The endpoints, newest first."""
        cursor = None
        while True:
            page = await self._get(WebhookPage, "webhooks", limit=PAGE, cursor=cursor)
            for webhook in page.webhooks:
                yield webhook
            if (cursor := page.next_cursor) is None:
                return

    async def get(self, webhook: UUID | str) -> WebhookView:
        """One endpoint."""
        return await self._get(WebhookView, f"webhooks/{webhook}")

    async def create(
        self, url: str, events: Sequence[str], description: str | None = None
    ) -> WebhookSecret:
        """Tell an endpoint of events from now on; the answer holds the secret, once."""
        body = _body(url=url, events=list(events), description=description)
        return await self._send(WebhookSecret, "POST", "webhooks", body)

    async def update(self, webhook: UUID | str, **fields: Any) -> WebhookView:
        """Change `url`, `events` or `description`, or turn it off and on with `enabled`."""
        return await self._send(WebhookView, "PATCH", f"webhooks/{webhook}", _body(**fields))

    async def delete(self, webhook: UUID | str) -> None:
        """Tell an endpoint nothing more."""
        await self._send(type(None), "DELETE", f"webhooks/{webhook}")

    async def rotate_secret(self, webhook: UUID | str) -> WebhookSecret:
        """A new secret; messages are signed with the old one as well for now."""
        return await self._send(WebhookSecret, "POST", f"webhooks/{webhook}/rotate-secret")

    async def deliveries(
        self, webhook: UUID | str, limit: int = 100, cursor: UUID | None = None
    ) -> DeliveryPage:
        """What was sent to an endpoint, newest first."""
        path = f"webhooks/{webhook}/deliveries"
        return await self._get(DeliveryPage, path, limit=limit, cursor=cursor)

    async def redeliver(self, delivery: UUID | str) -> DeliveryView:
        """Send a message again."""
        return await self._send(DeliveryView, "POST", f"webhooks/deliveries/{delivery}/redeliver")


class Coordinators(Resource):
    """Who repairs and promotes."""

    async def status(self) -> CoordinatorStatus:
        """Who coordinates."""
        if isinstance(self._engine, RemoteEngine):
            return await self._get(CoordinatorStatus, "coordinator/status")
        leader = await self._engine.upkeep.leader(LEADER)
        standby = await self._engine.upkeep.standbys(LEADER)
        if leader is None:
            return CoordinatorStatus(active=False, standby=standby)
        return CoordinatorStatus(
            active=leader.until > self._engine.clock.now(),
            instance_id=leader.holder,
            epoch=leader.epoch,
            cycle_count=leader.cycles,
            last_heartbeat=leader.seen_at,
            since=leader.since,
            until=leader.until,
            last_cycle=leader.cycle,
            standby=standby,
        )

    async def recover(self, workspace: UUID | None = None) -> RecoverResult:
        """Look for expired leases and due timers now, not at the next tick.

        A server looks at the caller's workspace unless another one is named; on a database itself
        all of them are looked at.
        """
        if isinstance(self._engine, RemoteEngine):
            body = _body(workspace_id=workspace)
            return await self._send(RecoverResult, "POST", "coordinator/recover", body)
        return await recover(self._engine.system, self._engine.actor or LEADER, workspace)

    async def logs(
        self, level: str = "WARN", limit: int = 100, workspace: UUID | None = None
    ) -> Sequence[LogLine]:
        """The newest events of at least that level: a workspace's, and the coordinators' own."""
        if isinstance(self._engine, RemoteEngine):
            asked = {"level": level, "limit": limit, "workspace": workspace}
            return (await self._get(_Lines, "coordinator/logs", **asked)).lines
        return await happened(self._engine, level, limit, workspace)


class Access(Resource):
    """Logins."""

    what = "a login"

    async def login(self, name: str, password: str, workspace: str | None = None) -> LoginToken:
        """A session token for somebody who knows the password.

        `workspace`, an id or a name, says which user of that name is meant; else one of the first
        workspace.
        """
        body = _body(name=name, password=password, workspace=workspace)
        return await self._send(LoginToken, "POST", "login", body)

    async def logout(self) -> None:
        """End the login whose token this is."""
        await self._send(type(None), "POST", "logout")

    async def change_password(self, password: str, new_password: str) -> None:
        """Change the caller's own password; every login of the caller ends, this one too."""
        body = _body(password=password, new_password=new_password)
        await self._send(type(None), "PUT", "me/password", body)

    async def me(self) -> CallerView:
        """Who the caller is, and where."""
        return await self._get(CallerView, "me")


def _body(**fields: Any) -> dict[str, Any]:
    """The fields that are given, under their names in JSON."""
    return {camel(name): value for name, value in fields.items() if value is not None}
