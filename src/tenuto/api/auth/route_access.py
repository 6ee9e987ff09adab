"""Role and scope that each route needs: one table of all routes, and the checks that use it."""

from functools import lru_cache
from typing import Any
from uuid import UUID

import msgspec
from litestar import Litestar
from litestar.connection import ASGIConnection
from litestar.exceptions import MethodNotAllowedException
from litestar.handlers import BaseRouteHandler

from tenuto.api.auth import agent_tokens
from tenuto.api.edge import idempotency
from tenuto.api.service import RequestContext, service_of
from tenuto.model.errors import Forbidden, Invalid, NotFound, Unauthenticated
from tenuto.model.tenancy.access import Caller, Role, Scope


class RouteAccess(msgspec.Struct, frozen=True):
    """Role and scope that a caller needs for a route.

    `agent_token`: an agent's token is allowed, for its own agent and tasks.
    `attempt_token`: an attempt's token is allowed, for its own task.
    """

    role: Role
    scope: Scope
    agent_token: bool = False
    attempt_token: bool = False


PUBLIC = None
_READ = RouteAccess(Role.VIEWER, "read")
_WRITE = RouteAccess(Role.MEMBER, "write")
_WORK = RouteAccess(Role.MEMBER, "work", agent_token=True, attempt_token=True)
_HOST = RouteAccess(Role.MEMBER, "work", agent_token=True)
_ADMIN = RouteAccess(Role.ADMIN, "admin")
_OWNER = RouteAccess(Role.OWNER, "admin")

V1 = "/api/v1"
ROUTES: dict[str, RouteAccess | None] = {
    "GET /health/live": PUBLIC,
    "GET /health/ready": PUBLIC,
    "GET /health/coordinator": PUBLIC,
    "GET /metrics": PUBLIC,
    "GET /openapi.json": PUBLIC,
    "GET /docs": PUBLIC,
    f"POST {V1}/login": PUBLIC,
    f"POST {V1}/logout": RouteAccess(Role.VIEWER, "read"),
    f"GET {V1}/me": _READ,
    f"PUT {V1}/me/password": RouteAccess(Role.VIEWER, "read"),
    f"POST {V1}/agent-tasks": _WRITE,
    f"POST {V1}/agent-tasks/bulk": _WRITE,
    f"POST {V1}/agent-tasks/actions": _WRITE,
    f"GET {V1}/agent-tasks": _READ,
    f"GET {V1}/agent-tasks/{{task_id}}": _READ,
    f"PATCH {V1}/agent-tasks/{{task_id}}": _WRITE,
    f"DELETE {V1}/agent-tasks/{{task_id}}": _WRITE,
    f"POST {V1}/agent-tasks/{{task_id}}/cancel": _WRITE,
    f"POST {V1}/agent-tasks/{{task_id}}/retry": _WRITE,
    f"POST {V1}/agent-tasks/{{task_id}}/pause": _WRITE,
    f"POST {V1}/agent-tasks/{{task_id}}/resume": _WRITE,
    f"POST {V1}/agent-tasks/{{task_id}}/start": _WRITE,
    f"POST {V1}/agent-tasks/{{task_id}}/rerun": _WRITE,
    f"POST {V1}/agent-tasks/{{task_id}}/assign": _WRITE,
    f"POST {V1}/agent-tasks/{{task_id}}/reassign": _WRITE,
    f"POST {V1}/agent-tasks/{{task_id}}/archive": _WRITE,
    f"GET {V1}/agent-tasks/{{task_id}}/logs": _READ,
    f"GET {V1}/agent-tasks/{{task_id}}/attempts": _READ,
    f"GET {V1}/agent-tasks/{{task_id}}/transcript": _READ,
    f"GET {V1}/agent-tasks/{{task_id}}/explain": _READ,
    f"GET {V1}/agent-tasks/{{task_id}}/events": _READ,
    f"PATCH {V1}/agent-tasks/{{task_id}}/progress": _WORK,
    f"POST {V1}/agent-tasks/{{task_id}}/complete": _WORK,
    f"POST {V1}/agent-tasks/{{task_id}}/fail": _WORK,
    f"POST {V1}/agent-tasks/{{task_id}}/park": _WORK,
    f"POST {V1}/agent-tasks/{{task_id}}/release": _WORK,
    f"POST {V1}/agent-tasks/{{task_id}}/transcript": _WORK,
    f"GET {V1}/agent-tasks/find": _READ,
    f"GET {V1}/agent-tasks/{{task_id}}/trail": _READ,
    f"POST {V1}/agent-tasks/{{task_id}}/checkpoint": _WORK,
    f"GET {V1}/agent-tasks/{{task_id}}/steps": _WORK,
    f"POST {V1}/agent-tasks/{{task_id}}/steps": _WORK,
    f"POST {V1}/agent-tasks/{{task_id}}/children": _WORK,
    f"GET {V1}/agent-tasks/{{task_id}}/children": _READ,
    f"POST {V1}/agent-tasks/{{task_id}}/ask": _WORK,
    f"POST {V1}/agent-tasks/{{task_id}}/not-started": _WORK,
    f"POST {V1}/agent-tasks/{{task_id}}/timed-out": _WORK,
    f"POST {V1}/agent-tasks/{{task_id}}/confirm-cancel": _WORK,
    f"POST {V1}/agent-tasks/{{task_id}}/confirm-pause": _WORK,
    f"POST {V1}/agent-tasks/{{task_id}}/confirm-gone": _WORK,
    f"GET {V1}/agents": _READ,
    f"POST {V1}/agents": _HOST,
    f"GET {V1}/agents/{{agent_id}}": _READ,
    f"PUT {V1}/agents/{{agent_id}}": _WRITE,
    f"DELETE {V1}/agents/{{agent_id}}": _ADMIN,
    f"GET {V1}/agents/{{agent_id}}/health": _READ,
    f"GET {V1}/agents/{{agent_id}}/explain": _READ,
    f"GET {V1}/agents/{{agent_id}}/tasks": _READ,
    f"GET {V1}/agents/{{agent_id}}/messages": _READ,
    f"POST {V1}/agents/{{agent_id}}/messages": _WRITE,
    f"POST {V1}/agents/{{agent_id}}/messages/dequeue": _WORK,
    f"POST {V1}/agents/{{agent_id}}/terminate": _WRITE,
    f"POST {V1}/agents/{{agent_id}}/token": _ADMIN,
    f"POST {V1}/agents/{{agent_id}}/claim": _HOST,
    f"POST {V1}/agents/{{agent_id}}/heartbeat": _WORK,
    f"GET {V1}/workers": _READ,
    f"POST {V1}/workers/{{worker_id}}/drain": _ADMIN,
    f"POST {V1}/workers/{{worker_id}}/heartbeat": _HOST,
    f"POST {V1}/workers/{{worker_id}}/claim": _HOST,
    f"POST {V1}/workers/{{worker_id}}/sweep": _HOST,
    f"GET {V1}/definitions": _READ,
    f"POST {V1}/definitions": _WRITE,
    f"POST {V1}/definitions/apply": _WRITE,
    f"GET {V1}/definitions/{{key}}": _READ,
    f"PUT {V1}/definitions/{{key}}": _WRITE,
    f"DELETE {V1}/definitions/{{key}}": _WRITE,
    f"GET {V1}/flows": _READ,
    f"POST {V1}/flows": _WRITE,
    f"GET {V1}/flows/{{flow_id}}": _READ,
    f"GET {V1}/flows/{{flow_id}}/tasks": _READ,
    f"GET {V1}/flows/{{flow_id}}/graph": _READ,
    f"POST {V1}/flows/{{flow_id}}/cancel": _WRITE,
    f"POST {V1}/flows/{{flow_id}}/pause": _WRITE,
    f"POST {V1}/flows/{{flow_id}}/resume": _WRITE,
    f"POST {V1}/flows/{{flow_id}}/rerun": _WRITE,
    f"GET {V1}/groups": _READ,
    f"POST {V1}/groups": _WRITE,
    f"GET {V1}/groups/{{group_id}}": _READ,
    f"GET {V1}/groups/{{group_id}}/graph": _READ,
    f"POST {V1}/groups/{{group_id}}/start": _WRITE,
    f"POST {V1}/groups/{{group_id}}/cancel": _WRITE,
    f"POST {V1}/groups/{{group_id}}/pause": _WRITE,
    f"POST {V1}/groups/{{group_id}}/resume": _WRITE,
    f"GET {V1}/inbox": _READ,
    f"GET {V1}/inbox/{{item_id}}": _READ,
    f"POST {V1}/inbox/{{item_id}}/approve": _WRITE,
    f"POST {V1}/inbox/{{item_id}}/reject": _WRITE,
    f"POST {V1}/inbox/{{item_id}}/answer": _WRITE,
    f"GET {V1}/gates": _READ,
    f"POST {V1}/gates": _ADMIN,
    f"DELETE {V1}/gates/{{kind}}/{{subject}}": _ADMIN,
    f"GET {V1}/rate-limits": _READ,
    f"PUT {V1}/rate-limits/{{name}}": _ADMIN,
    f"DELETE {V1}/rate-limits/{{name}}": _ADMIN,
    f"GET {V1}/complexity-levels": _READ,
    f"PUT {V1}/complexity-levels": _ADMIN,
    f"GET {V1}/schedules": _READ,
    f"POST {V1}/schedules": _WRITE,
    f"GET {V1}/schedules/{{schedule_id}}": _READ,
    f"PATCH {V1}/schedules/{{schedule_id}}": _WRITE,
    f"DELETE {V1}/schedules/{{schedule_id}}": _WRITE,
    f"POST {V1}/schedules/{{schedule_id}}/pause": _WRITE,
    f"POST {V1}/schedules/{{schedule_id}}/resume": _WRITE,
    f"GET {V1}/schedules/{{schedule_id}}/next": _READ,
    f"GET {V1}/triggers": _READ,
    f"POST {V1}/triggers": _WRITE,
    f"GET {V1}/triggers/{{trigger_id}}": _READ,
    f"PATCH {V1}/triggers/{{trigger_id}}": _WRITE,
    f"DELETE {V1}/triggers/{{trigger_id}}": _WRITE,
    f"POST {V1}/triggers/{{trigger_id}}/pause": _WRITE,
    f"POST {V1}/triggers/{{trigger_id}}/resume": _WRITE,
    f"GET {V1}/stats": _READ,
    f"GET {V1}/events": _READ,
    f"POST {V1}/events": _WRITE,
    f"GET {V1}/dead-letters": _READ,
    f"POST {V1}/dead-letters/{{task_id}}/requeue": _WRITE,
    f"GET {V1}/coordinator/status": _ADMIN,
    f"POST {V1}/coordinator/recover": _ADMIN,
    f"GET {V1}/coordinator/logs": _ADMIN,
    f"GET {V1}/webhooks": _READ,
    f"POST {V1}/webhooks": _ADMIN,
    f"GET {V1}/webhooks/{{webhook_id}}": _READ,
    f"PATCH {V1}/webhooks/{{webhook_id}}": _ADMIN,
    f"DELETE {V1}/webhooks/{{webhook_id}}": _ADMIN,
    f"POST {V1}/webhooks/{{webhook_id}}/rotate-secret": _ADMIN,
    f"GET {V1}/webhooks/{{webhook_id}}/deliveries": _READ,
    f"POST {V1}/webhooks/deliveries/{{delivery_id}}/redeliver": _ADMIN,
    f"GET {V1}/secrets": _ADMIN,
    f"PUT {V1}/secrets/{{name}}": _ADMIN,
    f"DELETE {V1}/secrets/{{name}}": _ADMIN,
    f"GET {V1}/workspaces": _READ,
    f"POST {V1}/workspaces": _OWNER,
    f"GET {V1}/workspaces/{{workspace_id}}": _READ,
    f"PUT {V1}/workspaces/{{workspace_id}}/quota": _OWNER,
    f"GET {V1}/users": _ADMIN,
    f"POST {V1}/users": _ADMIN,
    f"PATCH {V1}/users/{{user_id}}": _ADMIN,
    f"DELETE {V1}/users/{{user_id}}": _ADMIN,
    f"GET {V1}/tokens": _ADMIN,
    f"POST {V1}/tokens": _ADMIN,
    f"DELETE {V1}/tokens/{{token_id}}": _ADMIN,
}


async def admit(scope: Any) -> RouteAccess | None:
    """Authenticates a request, checks its route's row of `ROUTES`, and returns that row.

    Only the request line and headers are read: the body of an unauthenticated client is not.
    Stores the request context in the scope, except for public routes.
    """
    route = f"{scope['method']} {scope['path_template']}"
    if route not in ROUTES:  # the framework would allow OPTIONS on every path
        raise MethodNotAllowedException(headers={"Allow": _allowed_methods(scope["path_template"])})
    access = ROUTES[route]
    if access is not PUBLIC:
        await _authenticate_and_check(ASGIConnection(scope), access)
    return access


async def guard(connection: ASGIConnection[Any, Any, Any, Any], handler: BaseRouteHandler) -> None:
    """Refuses unknown query parameters, and replays repeated requests.

    On routes with `Idempotency-Key` it raises `RepeatedRequest` or records the request.
    """
    del handler
    scope: Any = connection.scope
    route = f"{scope['method']} {scope['path_template']}"
    if scope["query_string"]:
        _check_query(connection, route)
    key = connection.headers.get("idempotency-key")
    if key is not None and route in idempotency.ROUTES:
        await _replay_or_record(scope, route, key)


def _allowed_methods(template: str) -> str:
    """Returns the methods of a path as the value of an `Allow` header."""
    routes = (route.split(" ") for route in ROUTES)
    return ", ".join(sorted(method for method, path in routes if path == template))


async def _replay_or_record(scope: Any, route: str, key: str) -> None:
    """Raises `RepeatedRequest` with the stored response, or registers storing it later."""
    ctx = context_of(scope)
    responses = idempotency.IdempotencyStore(
        ctx.engine.core.store, ctx.service.vault, ctx.workspace
    )
    await responses.begin(key, route, scope["path"], scope["state"]["body"])

    async def store_response(status: int, body: bytes) -> None:
        await responses.store_response(key, route, status, body)

    scope["state"]["store_response"] = store_response


async def _authenticate_and_check(
    connection: ASGIConnection[Any, Any, Any, Any], access: RouteAccess
) -> None:
    """Resolves the token, counts the request, checks access, and stores the request context."""
    service = service_of(connection.scope)
    token = _bearer_token(connection)
    caller = await service.token_cache.caller_of(token, _requested_workspace(connection))
    service.throttle.count_request(caller.key)
    _check_access(caller, access, connection.path_params)
    ctx = connection.scope["state"]["ctx"] = service.request_context(caller, token)
    if caller.fence is None and "task_id" in connection.path_params:
        await agent_tokens.check_task(ctx, connection.path_params["task_id"])


def _check_query(connection: ASGIConnection[Any, Any, Any, Any], route: str) -> None:
    """Raises `Invalid` for a query parameter that the route does not have.

    A misspelt filter would otherwise return everything.
    """
    allowed = query_names(connection.app).get(route, frozenset())
    for name in connection.query_params:
        if name not in allowed:
            raise Invalid(f"unknown query parameter {name[:60]!r}", field=name[:60])


@lru_cache(maxsize=4)
def query_names(app: Litestar) -> dict[str, frozenset[str]]:
    """Returns the names of the query parameters by route, such as `GET /api/v1/tasks`."""
    names_by_route = {}
    for path, methods in app.openapi_schema.to_schema()["paths"].items():
        for method, operation in methods.items():
            names = {parameter["name"] for parameter in operation.get("parameters", ())}
            names_by_route[f"{method.upper()} {path}"] = frozenset(
                names | ({"priority>"} if "priority" in names else set())
            )
    return names_by_route


def _check_access(caller: Caller, access: RouteAccess, path: dict[str, Any]) -> None:
    """Raises `Forbidden` or `NotFound` unless the caller may call the route with this path."""
    if not caller.may(access.role, access.scope):
        raise Forbidden(
            f"this route needs the role {access.role.name} and the scope {access.scope!r}"
        )
    if caller.agent is None:
        return
    # An agent's token is valid for its own agent only, an attempt's for its own task only: other
    # agents and tasks look missing.
    if not access.agent_token and access.scope == "work":
        raise Forbidden("this route is not allowed with an agent's token")
    if caller.fence is not None and not access.attempt_token:
        raise Forbidden("this route is not allowed with an attempt's token")
    if path.get("agent_id", caller.agent) != caller.agent:
        raise NotFound(f"no agent {path['agent_id']}")
    if caller.fence is not None and path.get("task_id", caller.fence.task) != caller.fence.task:
        raise NotFound(f"no task {path['task_id']}")


def _bearer_token(connection: ASGIConnection[Any, Any, Any, Any]) -> str:
    scheme, _, token = connection.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise Unauthenticated("a token is required; send the header Authorization: Bearer ...")
    return token.strip()


def _requested_workspace(connection: ASGIConnection[Any, Any, Any, Any]) -> UUID | None:
    text = connection.headers.get("x-workspace-id")
    if text is None:
        return None
    try:
        return UUID(text)
    except ValueError:
        raise Forbidden(f"the token has no access to workspace {text[:60]!r}") from None


def context_of(scope: Any) -> RequestContext:
    """Returns the request context that `admit` stored in the scope."""
    ctx: RequestContext = scope["state"]["ctx"]
    return ctx
