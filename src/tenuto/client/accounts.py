"""Administration of a server: tokens, users, workspaces, webhooks, logins and the coordinator."""

from collections.abc import AsyncGenerator, Sequence
from datetime import datetime
from typing import Any, TypeVar
from uuid import UUID

import msgspec

from tenuto.client.agents import server_required_error
from tenuto.client.paging import iterate_pages
from tenuto.client.remote.bodies import to_camel
from tenuto.client.remote.engine import AnyEngine, RemoteEngine
from tenuto.client.remote.http import ApiRequest, ServerConnection
from tenuto.client.remote.resource import V1
from tenuto.engine.operations.coordination import RecoverResult, recent_logs, recover
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
LEADER_NAME = "coordinator"


class CoordinatorStatus(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The active coordinator, the result of its last cycle, and the ids of standby coordinators."""

    active: bool
    instance_id: str | None = None
    epoch: int = 0
    cycle_count: int = 0
    last_heartbeat: datetime | None = None
    since: datetime | None = None
    until: datetime | None = None
    last_cycle: CycleReport | None = None
    standby: list[str] = []


class _LogLines(msgspec.Struct):
    lines: list[LogLine]


class Resource:
    """Base of the resources that need a server. `noun` names the resource in error messages."""

    noun = "this"

    def __init__(self, engine: AnyEngine) -> None:
        self._engine = engine

    @property
    def _connection(self) -> ServerConnection:
        """The connection to the server; raises `Invalid` if the client uses a database."""
        if not isinstance(self._engine, RemoteEngine):
            raise server_required_error(self.noun)
        return self._engine.connection

    async def _get(self, response_type: type[T], path: str, **params: Any) -> T:
        """Sends a GET request, with retries, and returns the decoded response."""
        request = ApiRequest(method="GET", path=f"{V1}/{path}", params=params, repeatable=True)
        return await self._connection.request(response_type, request)

    async def _send(
        self, response_type: type[T], method: str, path: str, body: Any = msgspec.UNSET
    ) -> T:
        """Sends a request, again only if it was not executed, and returns the decoded response."""
        return await self._connection.request(
            response_type, ApiRequest(method=method, path=f"{V1}/{path}", body=body)
        )


class Tokens(Resource):
    """API tokens of the workspace."""

    noun = "a token"

    async def list(self) -> Sequence[TokenView]:
        """Returns the tokens that are not revoked, newest first, without the secret token text."""
        return await self._get(list[TokenView], "tokens")

    async def create(self, name: str, **fields: Any) -> NewTokenView:
        """Creates a token with `role`, `scopes` and `expires_at`; returns its text only once."""
        return await self._send(NewTokenView, "POST", "tokens", _json_body(name=name, **fields))

    async def revoke(self, token: UUID | str) -> None:
        """Revokes a token and those created with it; `Conflict` for the last owner's."""
        await self._send(type(None), "DELETE", f"tokens/{token}")


class Users(Resource):
    """The users of the workspace."""

    noun = "a user"

    async def list(self) -> Sequence[MemberView]:
        """Returns the users of the workspace with their roles, by name."""
        return await self._get(list[MemberView], "users")

    async def create(self, name: str, password: str, role: str = "MEMBER") -> MemberView:
        """Creates a user who can log in and is a member of the workspace, and returns the user."""
        body = {"name": name, "password": password, "role": role}
        return await self._send(MemberView, "POST", "users", body)

    async def update(self, user: UUID | str, role: str) -> MemberView:
        """Changes a user's role and returns the user; `Conflict` for the role of the last owner."""
        return await self._send(MemberView, "PATCH", f"users/{user}", {"role": role})

    async def delete(self, user: UUID | str) -> None:
        """Removes a user from this workspace only; `Conflict` for the last owner."""
        await self._send(type(None), "DELETE", f"users/{user}")


class Workspaces(Resource):
    """The workspaces (tenants) that the caller is a member of."""

    noun = "a workspace"

    async def list(self) -> Sequence[WorkspaceView]:
        """Returns the workspaces of the user; with an API token only the token's own."""
        return await self._get(list[WorkspaceView], "workspaces")

    async def get(self, workspace: UUID | str) -> WorkspaceView:
        """Returns the caller's current workspace; raises `NotFound` for another id."""
        return await self._get(WorkspaceView, f"workspaces/{workspace}")

    async def create(self, name: str) -> NewWorkspace:
        """Creates a workspace that the caller owns; a caller who is no user gets a token."""
        return await self._send(NewWorkspace, "POST", "workspaces", {"name": name})

    async def quota(self, workspace: UUID | str, **limits: int | None) -> WorkspaceView:
        """Replaces the quota (`tasks_per_minute`, `pending`, `running`); not given: no limit."""
        path = f"workspaces/{workspace}/quota"
        return await self._send(WorkspaceView, "PUT", path, _json_body(**limits))


class Webhooks(Resource):
    """The webhook endpoints that receive events."""

    noun = "a webhook"

    async def list(self) -> AsyncGenerator[WebhookView, None]:
        """Yields the webhooks, newest first."""
        async for webhook in iterate_pages(
            lambda size, after: self._get(WebhookPage, "webhooks", limit=size, cursor=after),
            lambda page: page.webhooks,
        ):
            yield webhook

    async def get(self, webhook: UUID | str) -> WebhookView:
        """Returns one webhook, without its secret; raises `NotFound`."""
        return await self._get(WebhookView, f"webhooks/{webhook}")

    async def create(
        self, url: str, events: Sequence[str], description: str | None = None
    ) -> WebhookSecret:
        """Creates a webhook for new events; the signing secret is returned only once, here."""
        body = _json_body(url=url, events=list(events), description=description)
        return await self._send(WebhookSecret, "POST", "webhooks", body)

    async def update(self, webhook: UUID | str, **fields: Any) -> WebhookView:
        """Changes `url`, `events` or `description`; `enabled` turns the webhook on or off.

        Returns the webhook. Turning it off cancels its waiting deliveries.
        """
        return await self._send(WebhookView, "PATCH", f"webhooks/{webhook}", _json_body(**fields))

    async def delete(self, webhook: UUID | str) -> None:
        """Deletes a webhook: it receives no more events, and its waiting deliveries fail."""
        await self._send(type(None), "DELETE", f"webhooks/{webhook}")

    async def rotate_secret(self, webhook: UUID | str) -> WebhookSecret:
        """Creates and returns a new signing secret; for a while the old one signs messages, too."""
        return await self._send(WebhookSecret, "POST", f"webhooks/{webhook}/rotate-secret")

    async def deliveries(
        self, webhook: UUID | str, limit: int = 100, cursor: UUID | None = None
    ) -> DeliveryPage:
        """Returns a page of sent and waiting deliveries to a webhook, newest first."""
        path = f"webhooks/{webhook}/deliveries"
        return await self._get(DeliveryPage, path, limit=limit, cursor=cursor)

    async def redeliver(self, delivery: UUID | str) -> DeliveryView:
        """Sends a delivery again and returns it; raises `Conflict` while it is still being sent."""
        return await self._send(DeliveryView, "POST", f"webhooks/deliveries/{delivery}/redeliver")


class Coordinators(Resource):
    """The coordinator: the process that repairs and promotes tasks."""

    async def status(self) -> CoordinatorStatus:
        """Returns the leader, active or not, its last cycle, and the ids of standby ones."""
        if isinstance(self._engine, RemoteEngine):
            return await self._get(CoordinatorStatus, "coordinator/status")
        leader = await self._engine.maintenance.leader(LEADER_NAME)
        standby = await self._engine.maintenance.standbys(LEADER_NAME)
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
        """Handles expired leases and due timers now, up to a limit; returns how many of each.

        A server handles the caller's workspace, or `workspace` if given. On a database, `None`
        means all workspaces.
        """
        if isinstance(self._engine, RemoteEngine):
            body = _json_body(workspace_id=workspace)
            return await self._send(RecoverResult, "POST", "coordinator/recover", body)
        return await recover(self._engine.system, self._engine.actor or LEADER_NAME, workspace)

    async def logs(
        self, level: str = "WARN", limit: int = 100, workspace: UUID | None = None
    ) -> Sequence[LogLine]:
        """Returns the latest events from `level` up, oldest first, of workspace and coordinator."""
        if isinstance(self._engine, RemoteEngine):
            params = {"level": level, "limit": limit, "workspace": workspace}
            return (await self._get(_LogLines, "coordinator/logs", **params)).lines
        return await recent_logs(self._engine, level, limit, workspace)


class Access(Resource):
    """Logins of users, and the caller's own identity."""

    noun = "a login"

    async def login(self, name: str, password: str, workspace: str | None = None) -> LoginToken:
        """Logs a user in and returns a session token; `Unauthenticated` if the password is wrong.

        `workspace`, an id or a name, selects the workspace of the user; the default is the first
        workspace.
        """
        body = _json_body(name=name, password=password, workspace=workspace)
        return await self._send(LoginToken, "POST", "login", body)

    async def logout(self) -> None:
        """Ends the login that the client's token belongs to."""
        await self._send(type(None), "POST", "logout")

    async def change_password(self, password: str, new_password: str) -> None:
        """Changes the caller's password and ends every login of the caller, including this one.

        Raises `Forbidden` if `password` is not the current one.
        """
        body = _json_body(password=password, new_password=new_password)
        await self._send(type(None), "PUT", "me/password", body)

    async def me(self) -> CallerView:
        """Returns the caller's user or token, role and workspace."""
        return await self._get(CallerView, "me")


def _json_body(**fields: Any) -> dict[str, Any]:
    """Returns the fields that are not `None`, under their camelCase names."""
    return {to_camel(name): value for name, value in fields.items() if value is not None}
