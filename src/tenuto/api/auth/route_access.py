"""Who may call which route: one table that names them all, and the guard that reads it."""

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
    """What a caller needs for a route.

    `own`: an agent's token does, for its own agent or task. `attempt`: an attempt's does, too.
    """

    role: Role
    scope: Scope
    own: bool = False
    attempt: bool = False


PUBLIC = None
_SEE = RouteAccess(Role.VIEWER, "read")
_USE = RouteAccess(Role.MEMBER, "write")
_WORK = RouteAccess(Role.MEMBER, "work", own=True, attempt=True)
_HOST = RouteAccess(Role.MEMBER, "work", own=True)
_RULE = RouteAccess(Role.ADMIN, "admin")
_OWN = RouteAccess(Role.OWNER, "admin")

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
    f"GET {V1}/me": _SEE,
    f"PUT {V1}/me/password": RouteAccess(Role.VIEWER, "read"),
    f"POST {V1}/agent-tasks": _USE,
    f"POST {V1}/agent-tasks/bulk": _USE,
    f"POST {V1}/agent-tasks/actions": _USE,
    f"GET {V1}/agent-tasks": _SEE,
    f"GET {V1}/agent-tasks/{{task_id}}": _SEE,
    f"PATCH {V1}/agent-tasks/{{task_id}}": _USE,
    f"DELETE {V1}/agent-tasks/{{task_id}}": _USE,
    f"POST {V1}/agent-tasks/{{task_id}}/cancel": _USE,
    f"POST {V1}/agent-tasks/{{task_id}}/retry": _USE,
    f"POST {V1}/agent-tasks/{{task_id}}/pause": _USE,
    f"POST {V1}/agent-tasks/{{task_id}}/resume": _USE,
    f"POST {V1}/agent-tasks/{{task_id}}/start": _USE,
    f"POST {V1}/agent-tasks/{{task_id}}/rerun": _USE,
    f"POST {V1}/agent-tasks/{{task_id}}/assign": _USE,
    f"POST {V1}/agent-tasks/{{task_id}}/reassign": _USE,
    f"POST {V1}/agent-tasks/{{task_id}}/archive": _USE,
    f"GET {V1}/agent-tasks/{{task_id}}/logs": _SEE,
    f"GET {V1}/agent-tasks/{{task_id}}/attempts": _SEE,
    f"GET {V1}/agent-tasks/{{task_id}}/transcript": _SEE,
    f"GET {V1}/agent-tasks/{{task_id}}/explain": _SEE,
    f"GET {V1}/agent-tasks/{{task_id}}/events": _SEE,
    f"PATCH {V1}/agent-tasks/{{task_id}}/progress": _WORK,
    f"POST {V1}/agent-tasks/{{task_id}}/complete": _WORK,
    f"POST {V1}/agent-tasks/{{task_id}}/fail": _WORK,
    f"POST {V1}/agent-tasks/{{task_id}}/park": _WORK,
    f"POST {V1}/agent-tasks/{{task_id}}/release": _WORK,
    f"POST {V1}/agent-tasks/{{task_id}}/transcript": _WORK,
    f"GET {V1}/agent-tasks/find": _SEE,
    f"GET {V1}/agent-tasks/{{task_id}}/trail": _SEE,
    f"POST {V1}/agent-tasks/{{task_id}}/checkpoint": _WORK,
    f"GET {V1}/agent-tasks/{{task_id}}/steps": _WORK,
    f"POST {V1}/agent-tasks/{{task_id}}/steps": _WORK,
    f"POST {V1}/agent-tasks/{{task_id}}/children": _WORK,
    f"GET {V1}/agent-tasks/{{task_id}}/children": _SEE,
    f"POST {V1}/agent-tasks/{{task_id}}/ask": _WORK,
    f"POST {V1}/agent-tasks/{{task_id}}/not-started": _WORK,
    f"POST {V1}/agent-tasks/{{task_id}}/timed-out": _WORK,
    f"POST {V1}/agent-tasks/{{task_id}}/confirm-cancel": _WORK,
    f"POST {V1}/agent-tasks/{{task_id}}/confirm-pause": _WORK,
    f"POST {V1}/agent-tasks/{{task_id}}/confirm-gone": _WORK,
    f"GET {V1}/agents": _SEE,
    f"POST {V1}/agents": _HOST,
    f"GET {V1}/agents/{{agent_id}}": _SEE,
    f"PUT {V1}/agents/{{agent_id}}": _USE,
    f"DELETE {V1}/agents/{{agent_id}}": _RULE,
    f"GET {V1}/agents/{{agent_id}}/health": _SEE,
    f"GET {V1}/agents/{{agent_id}}/explain": _SEE,
    f"GET {V1}/agents/{{agent_id}}/tasks": _SEE,
    f"GET {V1}/agents/{{agent_id}}/messages": _SEE,
    f"POST {V1}/agents/{{agent_id}}/messages": _USE,
    f"POST {V1}/agents/{{agent_id}}/messages/dequeue": _WORK,
    f"POST {V1}/agents/{{agent_id}}/terminate": _USE,
    f"POST {V1}/agents/{{agent_id}}/token": _RULE,
    f"POST {V1}/agents/{{agent_id}}/claim": _HOST,
    f"POST {V1}/agents/{{agent_id}}/heartbeat": _WORK,
    f"GET {V1}/workers": _SEE,
    f"POST {V1}/workers/{{worker_id}}/drain": _RULE,
    f"POST {V1}/workers/{{worker_id}}/heartbeat": _HOST,
    f"POST {V1}/workers/{{worker_id}}/claim": _HOST,
    f"POST {V1}/workers/{{worker_id}}/sweep": _HOST,
    f"GET {V1}/definitions": _SEE,
    f"POST {V1}/definitions": _USE,
    f"POST {V1}/definitions/apply": _USE,
    f"GET {V1}/definitions/{{key}}": _SEE,
    f"PUT {V1}/definitions/{{key}}": _USE,
    f"DELETE {V1}/definitions/{{key}}": _USE,
    f"GET {V1}/flows": _SEE,
    f"POST {V1}/flows": _USE,
    f"GET {V1}/flows/{{flow_id}}": _SEE,
    f"GET {V1}/flows/{{flow_id}}/tasks": _SEE,
    f"GET {V1}/flows/{{flow_id}}/graph": _SEE,
    f"POST {V1}/flows/{{flow_id}}/cancel": _USE,
    f"POST {V1}/flows/{{flow_id}}/pause": _USE,
    f"POST {V1}/flows/{{flow_id}}/resume": _USE,
    f"POST {V1}/flows/{{flow_id}}/rerun": _USE,
    f"GET {V1}/groups": _SEE,
    f"POST {V1}/groups": _USE,
    f"GET {V1}/groups/{{group_id}}": _SEE,
    f"GET {V1}/groups/{{group_id}}/graph": _SEE,
    f"POST {V1}/groups/{{group_id}}/start": _USE,
    f"POST {V1}/groups/{{group_id}}/cancel": _USE,
    f"POST {V1}/groups/{{group_id}}/pause": _USE,
    f"POST {V1}/groups/{{group_id}}/resume": _USE,
    f"GET {V1}/inbox": _SEE,
    f"GET {V1}/inbox/{{item_id}}": _SEE,
    f"POST {V1}/inbox/{{item_id}}/approve": _USE,
    f"POST {V1}/inbox/{{item_id}}/reject": _USE,
    f"POST {V1}/inbox/{{item_id}}/answer": _USE,
    f"GET {V1}/gates": _SEE,
    f"POST {V1}/gates": _RULE,
    f"DELETE {V1}/gates/{{kind}}/{{subject}}": _RULE,
    f"GET {V1}/rate-limits": _SEE,
    f"PUT {V1}/rate-limits/{{name}}": _RULE,
    f"DELETE {V1}/rate-limits/{{name}}": _RULE,
    f"GET {V1}/complexity-levels": _SEE,
    f"PUT {V1}/complexity-levels": _RULE,
    f"GET {V1}/schedules": _SEE,
    f"POST {V1}/schedules": _USE,
    f"GET {V1}/schedules/{{schedule_id}}": _SEE,
    f"PATCH {V1}/schedules/{{schedule_id}}": _USE,
    f"DELETE {V1}/schedules/{{schedule_id}}": _USE,
    f"POST {V1}/schedules/{{schedule_id}}/pause": _USE,
    f"POST {V1}/schedules/{{schedule_id}}/resume": _USE,
    f"GET {V1}/schedules/{{schedule_id}}/next": _SEE,
    f"GET {V1}/triggers": _SEE,
    f"POST {V1}/triggers": _USE,
    f"GET {V1}/triggers/{{trigger_id}}": _SEE,
    f"PATCH {V1}/triggers/{{trigger_id}}": _USE,
    f"DELETE {V1}/triggers/{{trigger_id}}": _USE,
    f"POST {V1}/triggers/{{trigger_id}}/pause": _USE,
    f"POST {V1}/triggers/{{trigger_id}}/resume": _USE,
    f"GET {V1}/stats": _SEE,
    f"GET {V1}/events": _SEE,
    f"POST {V1}/events": _USE,
    f"GET {V1}/dead-letters": _SEE,
    f"POST {V1}/dead-letters/{{task_id}}/requeue": _USE,
    f"GET {V1}/coordinator/status": _RULE,
    f"POST {V1}/coordinator/recover": _RULE,
    f"GET {V1}/coordinator/logs": _RULE,
    f"GET {V1}/webhooks": _SEE,
    f"POST {V1}/webhooks": _RULE,
    f"GET {V1}/webhooks/{{webhook_id}}": _SEE,
    f"PATCH {V1}/webhooks/{{webhook_id}}": _RULE,
    f"DELETE {V1}/webhooks/{{webhook_id}}": _RULE,
    f"POST {V1}/webhooks/{{webhook_id}}/rotate-secret": _RULE,
    f"GET {V1}/webhooks/{{webhook_id}}/deliveries": _SEE,
    f"POST {V1}/webhooks/deliveries/{{delivery_id}}/redeliver": _RULE,
    f"GET {V1}/secrets": _RULE,
    f"PUT {V1}/secrets/{{name}}": _RULE,
    f"DELETE {V1}/secrets/{{name}}": _RULE,
    f"GET {V1}/workspaces": _SEE,
    f"POST {V1}/workspaces": _OWN,
    f"GET {V1}/workspaces/{{workspace_id}}": _SEE,
    f"PUT {V1}/workspaces/{{workspace_id}}/quota": _OWN,
    f"GET {V1}/users": _RULE,
    f"POST {V1}/users": _RULE,
    f"PATCH {V1}/users/{{user_id}}": _RULE,
    f"DELETE {V1}/users/{{user_id}}": _RULE,
    f"GET {V1}/tokens": _RULE,
    f"POST {V1}/tokens": _RULE,
    f"DELETE {V1}/tokens/{{token_id}}": _RULE,
}


async def admit(scope: Any) -> RouteAccess | None:
    """Let a request through that its route's row of the table allows, and say who asks.

    This looks at nothing but the head of the request: the body of a stranger is not read.
    """
    route = f"{scope['method']} {scope['path_template']}"
    if route not in ROUTES:  # the framework would answer OPTIONS on every path
        raise MethodNotAllowedException(headers={"Allow": _methods(scope["path_template"])})
    access = ROUTES[route]
    if access is not PUBLIC:
        await _admit(ASGIConnection(scope), access)
    return access


async def guard(connection: ASGIConnection[Any, Any, Any, Any], handler: BaseRouteHandler) -> None:
    """Refuse unknown query parameters, and answer a repeated request as before."""
    del handler
    scope: Any = connection.scope
    route = f"{scope['method']} {scope['path_template']}"
    if scope["query_string"]:
        _check_query(connection, route)
    key = connection.headers.get("idempotency-key")
    if key is not None and route in idempotency.ROUTES:
        await _repeatable(scope, route, key)


def _methods(template: str) -> str:
    """The methods of a path, as an `Allow` header names them."""
    routes = (route.split(" ") for route in ROUTES)
    return ", ".join(sorted(method for method, path in routes if path == template))


async def _repeatable(scope: Any, route: str, key: str) -> None:
    """Answer as before, or see to it that the answer is kept."""
    desk = desk_of(scope)
    answers = idempotency.IdempotencyStore(
        desk.engine.core.store, desk.service.vault, desk.workspace
    )
    await answers.begin(key, route, scope["path"], scope["state"]["body"])

    async def end(status: int, body: bytes) -> None:
        await answers.end(key, route, status, body)

    scope["state"]["answered"] = end


async def _admit(connection: ASGIConnection[Any, Any, Any, Any], access: RouteAccess) -> None:
    service = service_of(connection.scope)
    token = _token(connection)
    caller = await service.callers.of(token, _wanted(connection))
    service.rates.request(caller.key)
    _check(caller, access, connection.path_params)
    desk = connection.scope["state"]["desk"] = service.request_context(caller, token)
    if caller.fence is None and "task_id" in connection.path_params:
        await agent_tokens.check_task(desk, connection.path_params["task_id"])


def _check_query(connection: ASGIConnection[Any, Any, Any, Any], route: str) -> None:
    """A misspelt filter would answer everything: refuse what the contract does not name."""
    known = query_names(connection.app).get(route, frozenset())
    for name in connection.query_params:
        if name not in known:
            raise Invalid(f"there is no query parameter {name[:60]!r}", field=name[:60])


@lru_cache(maxsize=4)
def query_names(app: Litestar) -> dict[str, frozenset[str]]:
    """The query parameters of each route."""
    found = {}
    for path, methods in app.openapi_schema.to_schema()["paths"].items():
        for method, operation in methods.items():
            names = {each["name"] for each in operation.get("parameters", ())}
            found[f"{method.upper()} {path}"] = frozenset(
                names | ({"priority>"} if "priority" in names else set())
            )
    return found


def _check(caller: Caller, access: RouteAccess, path: dict[str, Any]) -> None:
    if not caller.may(access.role, access.scope):
        raise Forbidden(f"this needs the role {access.role.name} and the scope {access.scope!r}")
    if caller.agent is None:
        return
    # An agent's token is good for its own agent, an attempt's for its own task: a foreign one looks
    # like a missing one.
    if not access.own and access.scope == "work":
        raise Forbidden("an agent's token does not allow it")
    if caller.fence is not None and not access.attempt:
        raise Forbidden("an attempt's token does not allow it")
    if path.get("agent_id", caller.agent) != caller.agent:
        raise NotFound(f"no agent {path['agent_id']}")
    if caller.fence is not None and path.get("task_id", caller.fence.task) != caller.fence.task:
        raise NotFound(f"no task {path['task_id']}")


def _token(connection: ASGIConnection[Any, Any, Any, Any]) -> str:
    scheme, _, token = connection.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise Unauthenticated("send a token: Authorization: Bearer ...")
    return token.strip()


def _wanted(connection: ASGIConnection[Any, Any, Any, Any]) -> UUID | None:
    text = connection.headers.get("x-workspace-id")
    if text is None:
        return None
    try:
        return UUID(text)
    except ValueError:
        raise Forbidden("no such workspace of yours") from None


def desk_of(scope: Any) -> RequestContext:
    """The means that the guard gave a request."""
    desk: RequestContext = scope["state"]["desk"]
    return desk
