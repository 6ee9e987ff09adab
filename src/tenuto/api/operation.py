"""`operation`: declares a route, with the access rule that it must have, beside its handler."""

import re
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from litestar.handlers import BaseRouteHandler, HTTPRouteHandler
from litestar.types import Method

from tenuto.model.tenancy.access import Role, Scope

V1 = "/api/v1"


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
READ = RouteAccess(Role.VIEWER, "read")
WRITE = RouteAccess(Role.MEMBER, "write")
WORK = RouteAccess(Role.MEMBER, "work", agent_token=True, attempt_token=True)
HOST = RouteAccess(Role.MEMBER, "work", agent_token=True)
ADMIN = RouteAccess(Role.ADMIN, "admin")
OWNER = RouteAccess(Role.OWNER, "admin")


class Operation(msgspec.Struct, frozen=True):
    """A declared route.

    `route` is its method and path as in the OpenAPI document.
    `is_replayed`: a request repeated with the same `Idempotency-Key` gets the stored response.
    `remote`: the engine method that clients call by this route.
    """

    route: str
    access: RouteAccess | None
    is_replayed: bool
    handler: HTTPRouteHandler
    remote: Callable[..., Any] | None


OPERATIONS: dict[str, Operation] = {}
"""All operations by route, such as `GET /api/v1/agents/{agent_id}`; `tenuto.api.app` fills it."""

Handler = Callable[..., Awaitable[Any]]
_KEY = "operation"
_PATH_TYPE = re.compile(r":\w+(?=})")


def operation(
    method: Method,
    path: str,
    access: RouteAccess | None,
    *,
    prefix: str = V1,
    idempotent: bool = False,
    remote: Callable[..., Any] | None = None,
    **options: Any,
) -> Callable[[Handler], HTTPRouteHandler]:
    """Returns a decorator that registers a function as the handler of a route.

    `idempotent`: repeated requests with the same `Idempotency-Key` get the stored response.
    `remote`: `docs/generate.py` writes this engine method for clients, with a call of this route.
    `options` are those of Litestar's route handlers, such as `status_code`.
    """

    def register(function: Handler) -> HTTPRouteHandler:
        handler = HTTPRouteHandler(prefix + path, http_method=method, **options)(function)
        route = f"{method} {_PATH_TYPE.sub('', prefix + path)}"
        assert route not in OPERATIONS, f"{route} is declared twice"
        OPERATIONS[route] = Operation(route, access, idempotent, handler, remote)
        handler.opt[_KEY] = OPERATIONS[route]
        return handler

    return register


def all_operations() -> list[Operation]:
    """Returns all operations, sorted by path and method, whatever the order of imports."""
    return sorted(OPERATIONS.values(), key=lambda operation: operation.route.split(" ")[::-1])


def operation_of(handler: BaseRouteHandler) -> Operation | None:
    """Returns the operation of a handler; `None` for the OPTIONS handlers of the framework."""
    operation: Operation | None = handler.opt.get(_KEY)
    return operation
