"""Routes for administration: logins, workspaces, users, tokens, secrets and webhooks."""

from collections.abc import Sequence
from typing import Any
from uuid import UUID

import msgspec
from litestar import Request
from litestar.params import FromPath, FromQuery, JSONBody

from tenuto.api.operation import ADMIN, OWNER, PUBLIC, READ, operation
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
from tenuto.engine.tenancy.accounts import current_role_of
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
from tenuto.model.limits.quota import Quota, effective_quota, parse_quota
from tenuto.model.tenancy.access import SCOPES, Role, check_caller_covers, check_caller_permanent
from tenuto.store.protocol import Row


@operation("POST", "/login", PUBLIC, status_code=200)
async def login(request: Request[Any, Any, Any], data: JSONBody[LoginBody]) -> LoginToken:
    """Logs a user in with name and password, and returns a session token.

    User names are unique in a workspace. Without `workspace`, the first workspace is used.
    """
    service = service_of(request.scope)
    async with service.login_limiter.admit(_client_host(request), data.name, data.workspace):
        login_token = await service.identity.login(data.name, data.password, data.workspace)
    return LoginToken(
        login_token.id, login_token.token, login_token.expires_at, login_token.workspace
    )


def _client_host(request: Request[Any, Any, Any]) -> str:
    """Returns the client's address; `-` if it is unknown."""
    return request.client.host if request.client is not None else "-"


@operation("POST", "/logout", READ, status_code=204)
async def logout(ctx: InjectedContext) -> None:
    """Ends the login session of the caller's token."""
    if ctx.caller.session is None:
        raise Conflict("this token is not of a login session; revoke it instead")
    await ctx.service.identity.logout(ctx.caller.session)
    ctx.service.token_cache.clear()


@operation("GET", "/me", READ)
async def get_caller(ctx: InjectedContext) -> CallerView:
    """Returns the caller: actor, workspace, role and scopes."""
    caller = ctx.caller
    return CallerView(
        actor=caller.actor,
        workspace_id=caller.workspace,
        role=caller.role.name,
        scopes=sorted(caller.scopes),
        agent_id=caller.agent,
        user_id=caller.user,
    )


@operation("PUT", "/me/password", READ, status_code=204)
async def change_password(
    request: Request[Any, Any, Any], ctx: InjectedContext, data: JSONBody[PasswordBody]
) -> None:
    """Changes the caller's own password; all login sessions of the caller end, also this one."""
    user = ctx.caller.user
    if user is None or ctx.caller.session is None:
        raise Conflict("this token is not of a login session; log in to change your password")
    service = ctx.service
    async with service.login_limiter.admit(_client_host(request), str(user)):
        await service.identity.change_password(user, data.password, data.new_password)
    service.token_cache.clear()


@operation("GET", "/workspaces", READ)
async def list_workspaces(ctx: InjectedContext) -> Sequence[WorkspaceView]:
    """Returns the workspaces that the caller belongs to."""
    caller = ctx.caller
    if caller.session is None:
        rows = await ctx.service.identity.workspaces(only=caller.workspace)
    else:
        rows = await ctx.service.identity.workspaces(user=caller.user)
    return [_workspace_view(ctx, row, caller.role) for row in rows]


def _workspace_view(ctx: InjectedContext, row: Any, default_role: Role) -> WorkspaceView:
    """Returns the view of a workspace row; `default_role` counts if the row has no role."""
    return WorkspaceView(
        id=row["id"],
        name=row["name"],
        role=dict(row).get("role", default_role.name),
        quota=effective_quota(parse_quota(row["quota"]), ctx.service.settings.quota_ceiling()),
        created_at=row["created_at"],
    )


@operation("POST", "/workspaces", OWNER)
async def create_workspace(ctx: InjectedContext, data: JSONBody[WorkspaceBody]) -> NewWorkspace:
    """Creates a workspace that the caller owns.

    A caller that is not a user gets a token with the role OWNER for it.
    """
    check_caller_permanent(ctx.caller)
    identity, user = ctx.service.identity, ctx.caller.user
    token = None
    if user is None:
        workspace_id, owner_token = await identity.create_workspace_with_token(
            data.name, ctx.caller.actor, ctx.workspace
        )
        token = owner_token.token
    else:
        workspace_id = await identity.create_workspace(data.name, user, ctx.workspace)
    [row] = await identity.workspaces(only=workspace_id)
    ctx.service.token_cache.clear()
    return NewWorkspace(_workspace_view(ctx, row, Role.OWNER), token)


@operation("GET", "/workspaces/{workspace_id:uuid}", READ)
async def get_workspace(ctx: InjectedContext, workspace_id: FromPath[UUID]) -> WorkspaceView:
    """Returns the caller's workspace."""
    [row] = await _own_workspace_rows(ctx, workspace_id)
    return _workspace_view(ctx, row, ctx.caller.role)


@operation("PUT", "/workspaces/{workspace_id:uuid}/quota", OWNER)
async def set_workspace_quota(
    ctx: InjectedContext, workspace_id: FromPath[UUID], data: JSONBody[Quota]
) -> WorkspaceView:
    """Sets the quota of the workspace; it cannot exceed the operator's limit for workspaces."""
    await _own_workspace_rows(ctx, workspace_id)
    data.check()
    data.check_below(ctx.service.settings.quota_ceiling())
    await ctx.service.identity.set_quota(workspace_id, msgspec.to_builtins(data))
    ctx.service.throttle.evict_quota(workspace_id)
    [row] = await ctx.service.identity.workspaces(only=workspace_id)
    return _workspace_view(ctx, row, ctx.caller.role)


async def _own_workspace_rows(ctx: InjectedContext, workspace_id: UUID) -> Sequence[Any]:
    """Returns the caller's workspace as a list of one row; raises `NotFound` for another id."""
    if workspace_id != ctx.workspace:
        raise NotFound(f"no workspace {workspace_id}")
    return await ctx.service.identity.workspaces(only=workspace_id)


@operation("GET", "/users", ADMIN)
async def list_users(ctx: InjectedContext) -> Sequence[MemberView]:
    """Returns the users of the workspace."""
    rows = await ctx.service.identity.members(ctx.workspace)
    return [_member_view(row) for row in rows]


def _member_view(row: Row) -> MemberView:
    return MemberView(
        id=row["id"],
        name=row["name"],
        role=row["role"],
        created_at=row["created_at"],
        disabled=row["disabled_at"] is not None,
    )


@operation("POST", "/users", ADMIN)
async def create_user(ctx: InjectedContext, data: JSONBody[UserBody]) -> MemberView:
    """Creates a user in the workspace, with a role and all scopes."""
    role = Role[data.role]
    check_caller_covers(ctx.caller, "give", role, SCOPES)
    check_caller_permanent(ctx.caller)
    identity = ctx.service.identity
    user_id = await identity.create_user(data.name, data.password, ctx.workspace, role)
    return await _load_member(ctx, user_id)


@operation("PATCH", "/users/{user_id:uuid}", ADMIN)
async def update_user(
    ctx: InjectedContext, user_id: FromPath[UUID], data: JSONBody[UserPatch]
) -> MemberView:
    """Changes the role of a user in the workspace."""
    if data.role is not None:
        check_caller_permanent(ctx.caller)
        await ctx.service.identity.set_member_role(ctx.caller, user_id, Role[data.role])
        ctx.service.token_cache.clear()
    return await _load_member(ctx, user_id)


@operation("DELETE", "/users/{user_id:uuid}", ADMIN)
async def remove_user(ctx: InjectedContext, user_id: FromPath[UUID]) -> None:
    """Removes a user from the workspace; the user's tokens for it become invalid."""
    await ctx.service.identity.remove_member(ctx.caller, user_id)
    ctx.service.token_cache.clear()


async def _load_member(ctx: InjectedContext, user_id: UUID) -> MemberView:
    return _member_view(await ctx.service.identity.member(ctx.workspace, user_id))


@operation("GET", "/tokens", ADMIN)
async def list_tokens(ctx: InjectedContext) -> Sequence[TokenView]:
    """Returns the tokens of the workspace, without their secret values."""
    rows = await ctx.service.identity.tokens(ctx.workspace)
    return [_token_view(row) for row in rows]


def _token_view(row: Row) -> TokenView:
    role = current_role_of(row)
    return TokenView(
        id=row["id"],
        name=row["name"],
        role=row["role"],
        effective_role=None if role is None else role.name,
        scopes=msgspec.json.decode(row["scopes"]),
        agent_id=row["agent"],
        created_by=row["created_by"],
        created_by_token=row["made_by"],
        below=row["below"],
        created_at=row["created_at"],
        expires_at=row["expires_at"],
    )


@operation("POST", "/tokens", ADMIN)
async def create_token(ctx: InjectedContext, data: JSONBody[TokenBody]) -> NewTokenView:
    """Creates a token for a program; its value is returned only once.

    It cannot have more rights than the caller. A token that was created with another token becomes
    invalid when that one does.
    """
    created = await ctx.service.identity.create_token(
        ctx.workspace,
        data.name,
        Role[data.role],
        tuple(data.scopes),
        creator=ctx.caller,
        expires_at=data.expires_at,
    )
    return NewTokenView(created.id, created.token, created.expires_at)


@operation("DELETE", "/tokens/{token_id:uuid}", ADMIN)
async def revoke_token(ctx: InjectedContext, token_id: FromPath[UUID]) -> None:
    """Revokes a token at once, and all tokens that were created with it."""
    await ctx.service.identity.revoke_token(ctx.caller, token_id)
    ctx.service.token_cache.clear()


@operation("GET", "/secrets", ADMIN)
async def list_secrets(ctx: InjectedContext) -> Sequence[SecretView]:
    """Returns the named secrets, without their values."""
    return await ctx.engine.secrets.list()


@operation("PUT", "/secrets/{name:str}", ADMIN, status_code=204)
async def put_secret(ctx: InjectedContext, name: FromPath[str], data: JSONBody[SecretBody]) -> None:
    """Stores a named secret, which only running attempts can read, and who may use it."""
    await ctx.engine.secrets.put(name, data.value, data.use)


@operation("DELETE", "/secrets/{name:str}", ADMIN)
async def delete_secret(ctx: InjectedContext, name: FromPath[str]) -> None:
    """Deletes a named secret."""
    await ctx.engine.secrets.delete(name)


@operation("GET", "/webhooks", READ)
async def list_webhooks(
    ctx: InjectedContext, limit: Limit = 100, cursor: FromQuery[UUID | None] = None
) -> WebhookPage:
    """Returns the webhooks, newest first."""
    return await ctx.webhooks.page(ctx.workspace, limit, cursor)


@operation("POST", "/webhooks", ADMIN)
async def create_webhook(ctx: InjectedContext, data: JSONBody[WebhookBody]) -> WebhookSecret:
    """Creates a webhook, which gets events from now on.

    Its signing secret is returned only once.
    """
    return await ctx.webhooks.create(
        data.url, data.events, ctx.workspace, ctx.caller.actor, data.description
    )


@operation("GET", "/webhooks/{webhook_id:uuid}", READ)
async def get_webhook(ctx: InjectedContext, webhook_id: FromPath[UUID]) -> WebhookView:
    """Returns one webhook."""
    return await ctx.webhooks.show(webhook_id, ctx.workspace)


@operation("PATCH", "/webhooks/{webhook_id:uuid}", ADMIN)
async def update_webhook(
    ctx: InjectedContext,
    webhook_id: FromPath[UUID],
    data: JSONBody[WebhookPatch],
    if_match: IfMatch = None,
) -> WebhookView:
    """Changes, enables or disables a webhook."""
    changes = {
        name: value
        for name in data.__struct_fields__
        if (value := getattr(data, name)) is not msgspec.UNSET
    }
    version = version_of(if_match)
    return await ctx.webhooks.update(webhook_id, ctx.workspace, WebhookChange(**changes), version)


@operation("DELETE", "/webhooks/{webhook_id:uuid}", ADMIN)
async def delete_webhook(ctx: InjectedContext, webhook_id: FromPath[UUID]) -> None:
    """Deletes a webhook; it gets no more events."""
    await ctx.webhooks.delete(webhook_id, ctx.workspace)


@operation("POST", "/webhooks/{webhook_id:uuid}/rotate-secret", ADMIN, status_code=200)
async def rotate_webhook_secret(ctx: InjectedContext, webhook_id: FromPath[UUID]) -> WebhookSecret:
    """Creates a new signing secret; for a while deliveries are signed with the old one, too."""
    return await ctx.webhooks.rotate_secret(webhook_id, ctx.workspace)


@operation("GET", "/webhooks/{webhook_id:uuid}/deliveries", READ)
async def list_webhook_deliveries(
    ctx: InjectedContext,
    webhook_id: FromPath[UUID],
    limit: Limit = 100,
    cursor: FromQuery[UUID | None] = None,
) -> DeliveryPage:
    """Returns the deliveries of a webhook, newest first."""
    return await ctx.webhooks.deliveries(webhook_id, ctx.workspace, limit, cursor)


@operation("POST", "/webhooks/deliveries/{delivery_id:uuid}/redeliver", ADMIN, status_code=200)
async def redeliver_webhook(ctx: InjectedContext, delivery_id: FromPath[UUID]) -> DeliveryView:
    """Sends a delivery again."""
    return await ctx.webhooks.redeliver(delivery_id, ctx.workspace)
