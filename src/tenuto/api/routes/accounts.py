"""Administration: logins, workspaces, members, tokens, secrets, webhooks."""

from collections.abc import Sequence
from typing import Any
from uuid import UUID

import msgspec
from litestar import Request, delete, get, patch, post, put
from litestar.params import FromPath, FromQuery, JSONBody

from tenuto.api.routes.bodies import (
    LoginBody,
    PasswordBody,
    SecretBody,
    TokenBody,
    UserBody,
    UserPatch,
    WebhookBody,
    WebhookPatch,
    WorkspaceBody,
)
from tenuto.api.routes.tasks import IfMatch, Limit, version_of
from tenuto.api.service import InjectedContext, service_of
from tenuto.engine.tenancy.accounts import worth_of
from tenuto.engine.tenancy.views import (
    CallerView,
    LoginToken,
    MemberView,
    NewTokenView,
    NewWorkspace,
    TokenView,
    WorkspaceView,
)
from tenuto.engine.views import SecretView
from tenuto.engine.webhooks.endpoints import (
    DeliveryPage,
    DeliveryView,
    WebhookChange,
    WebhookPage,
    WebhookSecret,
    WebhookView,
)
from tenuto.model.errors import Conflict, NotFound
from tenuto.model.limits.quota import Quota, effective, quota_of
from tenuto.model.tenancy.access import SCOPES, Role, check_lasting, check_reach
from tenuto.store.protocol import Row


@post("/login", status_code=200)
async def login(request: Request[Any, Any, Any], data: JSONBody[LoginBody]) -> LoginToken:
    """A session token for somebody who knows the password.

    Names are unique in a workspace: without one the users of the first workspace are meant.
    """
    service = service_of(request.scope)
    async with service.logins.trying(_address(request), data.name, data.workspace):
        made = await service.identity.login(data.name, data.password, data.workspace)
    return LoginToken(made.id, made.token, made.expires_at, made.workspace)


def _address(request: Request[Any, Any, Any]) -> str:
    return request.client.host if request.client is not None else "-"


@post("/logout", status_code=204)
async def logout(desk: InjectedContext) -> None:
    """End the login whose token this is."""
    if desk.caller.session is None:
        raise Conflict("this token is not a login; revoke it instead")
    await desk.service.identity.logout(desk.caller.session)
    desk.service.callers.forget()


@get("/me")
async def me(desk: InjectedContext) -> CallerView:
    """Who the caller is, and where."""
    caller = desk.caller
    return CallerView(
        actor=caller.actor,
        workspace_id=caller.workspace,
        role=caller.role.name,
        scopes=sorted(caller.scopes),
        agent_id=caller.agent,
        user_id=caller.user,
    )


@put("/me/password", status_code=204)
async def change_password(
    request: Request[Any, Any, Any], desk: InjectedContext, data: JSONBody[PasswordBody]
) -> None:
    """Change the caller's own password; every login of the caller ends, this one too."""
    user = desk.caller.user
    if user is None or desk.caller.session is None:
        raise Conflict("this token is not a login; log in to change your password")
    service = desk.service
    async with service.logins.trying(_address(request), str(user)):
        await service.identity.change_password(user, data.password, data.new_password)
    service.callers.forget()


@get("/workspaces")
async def workspaces(desk: InjectedContext) -> Sequence[WorkspaceView]:
    """The workspaces that the caller belongs to."""
    caller = desk.caller
    if caller.session is None:
        rows = await desk.service.identity.workspaces(only=caller.workspace)
    else:
        rows = await desk.service.identity.workspaces(user=caller.user)
    return [_workspace(desk, row, caller.role) for row in rows]


def _workspace(desk: InjectedContext, row: Any, role: Role) -> WorkspaceView:
    return WorkspaceView(
        id=row["id"],
        name=row["name"],
        role=dict(row).get("role", role.name),
        quota=effective(quota_of(row["quota"]), desk.service.settings.ceiling()),
        created_at=row["created_at"],
    )


@post("/workspaces")
async def make_workspace(desk: InjectedContext, data: JSONBody[WorkspaceBody]) -> NewWorkspace:
    """A new tenant, owned by the caller; a caller that is no user gets an owner's token for it."""
    check_lasting(desk.caller)
    identity, user = desk.service.identity, desk.caller.user
    token = None
    if user is None:
        made, owner = await identity.make_keyed_workspace(
            data.name, desk.caller.actor, desk.workspace
        )
        token = owner.token
    else:
        made = await identity.make_workspace(data.name, user, desk.workspace)
    [row] = await identity.workspaces(only=made)
    desk.service.callers.forget()
    return NewWorkspace(_workspace(desk, row, Role.OWNER), token)


@get("/workspaces/{workspace_id:uuid}")
async def workspace(desk: InjectedContext, workspace_id: FromPath[UUID]) -> WorkspaceView:
    """The caller's workspace."""
    [row] = await _own(desk, workspace_id)
    return _workspace(desk, row, desk.caller.role)


@put("/workspaces/{workspace_id:uuid}/quota")
async def quota(
    desk: InjectedContext, workspace_id: FromPath[UUID], data: JSONBody[Quota]
) -> WorkspaceView:
    """What the workspace may use; no more than the operator allows any."""
    await _own(desk, workspace_id)
    data.check()
    data.check_below(desk.service.settings.ceiling())
    await desk.service.identity.set_quota(workspace_id, msgspec.to_builtins(data))
    desk.service.rates.forget(workspace_id)
    [row] = await desk.service.identity.workspaces(only=workspace_id)
    return _workspace(desk, row, desk.caller.role)


async def _own(desk: InjectedContext, workspace_id: UUID) -> Sequence[Any]:
    if workspace_id != desk.workspace:
        raise NotFound(f"no workspace {workspace_id}")
    return await desk.service.identity.workspaces(only=workspace_id)


@get("/users")
async def users(desk: InjectedContext) -> Sequence[MemberView]:
    """Who belongs to the workspace."""
    rows = await desk.service.identity.members(desk.workspace)
    return [_shown(row) for row in rows]


def _shown(row: Row) -> MemberView:
    return MemberView(
        id=row["id"],
        name=row["name"],
        role=row["role"],
        created_at=row["created_at"],
        disabled=row["disabled_at"] is not None,
    )


@post("/users")
async def make_user(desk: InjectedContext, data: JSONBody[UserBody]) -> MemberView:
    """A new user who belongs to the workspace, with all scopes of the role."""
    role = Role[data.role]
    check_reach(desk.caller, "give", role, SCOPES)
    check_lasting(desk.caller)
    identity = desk.service.identity
    made = await identity.make_user(data.name, data.password, desk.workspace, role)
    return await _member(desk, made)


@patch("/users/{user_id:uuid}")
async def change_user(
    desk: InjectedContext, user_id: FromPath[UUID], data: JSONBody[UserPatch]
) -> MemberView:
    """Change as what somebody belongs to the workspace."""
    if data.role is not None:
        check_lasting(desk.caller)
        await desk.service.identity.change_member(desk.caller, user_id, Role[data.role])
        desk.service.callers.forget()
    return await _member(desk, user_id)


@delete("/users/{user_id:uuid}")
async def drop_user(desk: InjectedContext, user_id: FromPath[UUID]) -> None:
    """Take somebody out of the workspace; the user's tokens there hold no more."""
    await desk.service.identity.drop_member(desk.caller, user_id)
    desk.service.callers.forget()


async def _member(desk: InjectedContext, user_id: UUID) -> MemberView:
    return _shown(await desk.service.identity.member(desk.workspace, user_id))


@get("/tokens")
async def tokens(desk: InjectedContext) -> Sequence[TokenView]:
    """The tokens of the workspace, without themselves."""
    rows = await desk.service.identity.tokens(desk.workspace)
    return [_token(row) for row in rows]


def _token(row: Row) -> TokenView:
    worth = worth_of(row)
    return TokenView(
        id=row["id"],
        name=row["name"],
        role=row["role"],
        effective_role=None if worth is None else worth.name,
        scopes=msgspec.json.decode(row["scopes"]),
        agent_id=row["agent"],
        created_by=row["created_by"],
        created_by_token=row["made_by"],
        below=row["below"],
        created_at=row["created_at"],
        expires_at=row["expires_at"],
    )


@post("/tokens")
async def make_token(desk: InjectedContext, data: JSONBody[TokenBody]) -> NewTokenView:
    """A program's key to the workspace, shown once; never more than the caller may itself.

    One that a token makes ends with it, and no later.
    """
    made = await desk.service.identity.make_token(
        desk.workspace,
        data.name,
        Role[data.role],
        tuple(data.scopes),
        maker=desk.caller,
        expires_at=data.expires_at,
    )
    return NewTokenView(made.id, made.token, made.expires_at)


@delete("/tokens/{token_id:uuid}")
async def revoke_token(desk: InjectedContext, token_id: FromPath[UUID]) -> None:
    """End a token, at once, and all that were made with it."""
    await desk.service.identity.revoke_token(desk.caller, token_id)
    desk.service.callers.forget()


@get("/secrets")
async def secrets(desk: InjectedContext) -> Sequence[SecretView]:
    """The named secrets, without their values."""
    return await desk.engine.secrets.list()


@put("/secrets/{name:str}", status_code=204)
async def put_secret(
    desk: InjectedContext, name: FromPath[str], data: JSONBody[SecretBody]
) -> None:
    """Keep a value that only running attempts get to see, and say who may use it."""
    await desk.engine.secrets.put(name, data.value, data.use)


@delete("/secrets/{name:str}")
async def drop_secret(desk: InjectedContext, name: FromPath[str]) -> None:
    """Forget a named secret."""
    await desk.engine.secrets.delete(name)


@get("/webhooks")
async def webhooks(
    desk: InjectedContext, limit: Limit = 100, cursor: FromQuery[UUID | None] = None
) -> WebhookPage:
    """The endpoints that hear of events, newest first."""
    return await desk.hooks.page(desk.workspace, limit, cursor)


@post("/webhooks")
async def make_webhook(desk: InjectedContext, data: JSONBody[WebhookBody]) -> WebhookSecret:
    """Tell an endpoint of events from now on; the answer holds the secret, once."""
    return await desk.hooks.create(
        data.url, data.events, desk.workspace, desk.caller.actor, data.description
    )


@get("/webhooks/{webhook_id:uuid}")
async def webhook(desk: InjectedContext, webhook_id: FromPath[UUID]) -> WebhookView:
    """One endpoint."""
    return await desk.hooks.show(webhook_id, desk.workspace)


@patch("/webhooks/{webhook_id:uuid}")
async def change_webhook(
    desk: InjectedContext,
    webhook_id: FromPath[UUID],
    data: JSONBody[WebhookPatch],
    if_match: IfMatch = None,
) -> WebhookView:
    """Change an endpoint, or turn it off and on."""
    given = {
        name: value
        for name in data.__struct_fields__
        if (value := getattr(data, name)) is not msgspec.UNSET
    }
    version = version_of(if_match)
    return await desk.hooks.update(webhook_id, desk.workspace, WebhookChange(**given), version)


@delete("/webhooks/{webhook_id:uuid}")
async def drop_webhook(desk: InjectedContext, webhook_id: FromPath[UUID]) -> None:
    """Tell an endpoint nothing more."""
    await desk.hooks.delete(webhook_id, desk.workspace)


@post("/webhooks/{webhook_id:uuid}/rotate-secret", status_code=200)
async def rotate_webhook(desk: InjectedContext, webhook_id: FromPath[UUID]) -> WebhookSecret:
    """A new secret; messages are signed with the old one as well for now."""
    return await desk.hooks.rotate_secret(webhook_id, desk.workspace)


@get("/webhooks/{webhook_id:uuid}/deliveries")
async def deliveries(
    desk: InjectedContext,
    webhook_id: FromPath[UUID],
    limit: Limit = 100,
    cursor: FromQuery[UUID | None] = None,
) -> DeliveryPage:
    """What was sent to an endpoint, newest first."""
    return await desk.hooks.deliveries(webhook_id, desk.workspace, limit, cursor)


@post("/webhooks/deliveries/{delivery_id:uuid}/redeliver", status_code=200)
async def redeliver(desk: InjectedContext, delivery_id: FromPath[UUID]) -> DeliveryView:
    """Send a message again."""
    return await desk.hooks.redeliver(delivery_id, desk.workspace)


PUBLIC = [login]
HANDLERS = [
    logout,
    me,
    change_password,
    workspaces,
    make_workspace,
    workspace,
    quota,
    users,
    make_user,
    change_user,
    drop_user,
    tokens,
    make_token,
    revoke_token,
    secrets,
    put_secret,
    drop_secret,
    webhooks,
    make_webhook,
    webhook,
    change_webhook,
    drop_webhook,
    rotate_webhook,
    deliveries,
    redeliver,
]
