"""Checks that each request may use its route, and replays requests that were answered before."""

from functools import lru_cache
from typing import Any
from uuid import UUID

from litestar import Litestar
from litestar.connection import ASGIConnection
from litestar.exceptions import MethodNotAllowedException
from litestar.handlers import BaseRouteHandler

from tenuto.api.auth import agent_tokens
from tenuto.api.edge import idempotency
from tenuto.api.operation import OPERATIONS, PUBLIC, RouteAccess, operation_of
from tenuto.api.service import RequestContext, service_of
from tenuto.model.errors import Forbidden, Invalid, NotFound, Unauthenticated
from tenuto.model.tenancy.access import Caller


async def admit(scope: Any) -> RouteAccess | None:
    """Authenticates a request, checks the access that its operation needs, and returns that access.

    Only the request line and headers are read: the body of an unauthenticated client is not.
    Stores the request context in the scope, except for public routes.
    """
    operation = operation_of(scope["route_handler"])
    if operation is None:  # the framework would allow OPTIONS on every path
        raise MethodNotAllowedException(headers={"Allow": _allowed_methods(scope["path_template"])})
    access = operation.access
    if access is not PUBLIC:
        await _authenticate_and_check(ASGIConnection(scope), access)
    return access


async def guard(connection: ASGIConnection[Any, Any, Any, Any], handler: BaseRouteHandler) -> None:
    """Raises `Invalid` for an unknown query parameter, `RepeatedRequest` for an answered request.

    On routes with `Idempotency-Key`, a new request is recorded.
    """
    operation = operation_of(handler)
    assert operation is not None, "`admit` refused the request"
    scope: Any = connection.scope
    if scope["query_string"]:
        _check_query(connection, operation.route)
    if operation.is_replayed and (key := connection.headers.get("idempotency-key")) is not None:
        await _replay_or_record(scope, operation.route, key)


def _allowed_methods(template: str) -> str:
    """Returns the methods of a path as the value of an `Allow` header."""
    routes = (route.split(" ") for route in OPERATIONS)
    return ", ".join(sorted(method for method, path in routes if path == template))


async def _replay_or_record(scope: Any, route: str, key: str) -> None:
    """Raises `RepeatedRequest` if answered before; else records the request, later its response."""
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
    """Returns the token of the request; raises `Unauthenticated` if there is none."""
    scheme, _, token = connection.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise Unauthenticated("a token is required; send the header Authorization: Bearer ...")
    return token.strip()


def _requested_workspace(connection: ASGIConnection[Any, Any, Any, Any]) -> UUID | None:
    """Returns the id in `X-Workspace-Id`, or `None`; raises `Forbidden` for an invalid one."""
    text = connection.headers.get("x-workspace-id")
    if text is None:
        return None
    try:
        return UUID(text)
    except ValueError:
        raise Forbidden(f"the token has no access to workspace {text[:60]!r}") from None


def context_of(scope: Any) -> RequestContext:
    """Returns the request context that `admit` stored in the scope; public routes have none."""
    ctx: RequestContext = scope["state"]["ctx"]
    return ctx
