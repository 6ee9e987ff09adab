"""The application: routes, guard, problems, OpenAPI."""

from functools import cache
from typing import Any

from litestar import Litestar, Request, Response, Router, get
from litestar.config.app import AppConfig
from litestar.di import Provide
from litestar.openapi.config import OpenAPIConfig
from litestar.types import Receive, Scope, Send

from tenuto import __version__
from tenuto.api.auth.route_access import V1, desk_of, guard
from tenuto.api.edge import idempotency, problems
from tenuto.api.edge.metrics import RequestMiddleware, metrics
from tenuto.api.edge.middleware import OuterMiddleware
from tenuto.api.edge.openapi import document, page
from tenuto.api.edge.request_body import BodyLimit
from tenuto.api.routes import (
    accounts,
    agent_protocol,
    agents,
    complexity,
    definitions,
    flows,
    groups,
    inbox,
    limits,
    mailbox,
    operations,
    schedules,
    streams,
    tasks,
    triggers,
    worker_protocol,
)
from tenuto.api.service import RequestContext, Service, bind


async def provide_desk(request: Request[Any, Any, Any]) -> RequestContext:
    """The means that the guard gave the request."""
    return desk_of(request.scope)


@get("/openapi.json", include_in_schema=False)
async def openapi(request: Request[Any, Any, Any]) -> Response[dict[str, Any]]:
    """The contract of this API."""
    return Response(document(request.app), media_type="application/json")


@get("/docs", include_in_schema=False)
async def docs(request: Request[Any, Any, Any]) -> Response[str]:
    """The same for people."""
    return Response(page(document(request.app)), media_type="text/html")


class Application:
    """The API over a service that is open."""

    def __init__(self, service: Service) -> None:
        self._service = service
        # Around all of it, the framework's refusals of unknown paths included.
        self._app = OuterMiddleware(RequestMiddleware(routes(), service.clock))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        bind(scope, self._service)
        await self._app(scope, receive, send)


@cache
def routes() -> Litestar:
    """All routes; building them takes a quarter of a second, so that servers share them."""
    handlers = [
        *accounts.PUBLIC,
        *accounts.HANDLERS,
        *tasks.HANDLERS,
        *agent_protocol.HANDLERS,
        *agents.HANDLERS,
        *complexity.HANDLERS,
        *definitions.HANDLERS,
        *flows.HANDLERS,
        *limits.HANDLERS,
        *groups.HANDLERS,
        *inbox.HANDLERS,
        *mailbox.HANDLERS,
        *operations.HANDLERS,
        *worker_protocol.HANDLERS,
        *schedules.HANDLERS,
        *streams.HANDLERS,
        *triggers.HANDLERS,
    ]
    return Litestar(
        route_handlers=[
            Router(V1, route_handlers=handlers),
            *operations.PUBLIC,
            metrics,
            openapi,
            docs,
        ],
        guards=[guard],
        dependencies={"desk": Provide(provide_desk)},
        exception_handlers={
            idempotency.RepeatedRequest: idempotency.repeated,
            Exception: problems.respond,
        },
        middleware=[BodyLimit],
        request_max_body_size=None,
        openapi_config=OpenAPIConfig(title="Tenuto", version=__version__, path="/_schema"),
        on_app_init=[_quiet],
        logging_config=None,
    )


def _quiet(config: AppConfig) -> AppConfig:
    """The framework's own pages are not ours; everything is said by `/openapi.json`."""
    if config.openapi_config is not None:
        config.openapi_config.enabled_endpoints = set()
    return config
