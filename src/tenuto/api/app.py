"""The ASGI application: routes, access guard, error responses, OpenAPI document."""

from functools import cache
from typing import Any

from litestar import Litestar, Request, Response, Router, get
from litestar.config.app import AppConfig
from litestar.di import Provide
from litestar.openapi.config import OpenAPIConfig
from litestar.types import Receive, Scope, Send

from tenuto import __version__
from tenuto.api.auth.route_access import V1, context_of, guard
from tenuto.api.edge import idempotency, problems
from tenuto.api.edge.metrics import RequestMiddleware, get_metrics
from tenuto.api.edge.middleware import OuterMiddleware
from tenuto.api.edge.openapi import docs_page, openapi_document
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
from tenuto.api.service import RequestContext, Service, bind_service


async def provide_context(request: Request[Any, Any, Any]) -> RequestContext:
    """Returns the context that `admit` created for the request; injected into handlers as `ctx`."""
    return context_of(request.scope)


@get("/openapi.json", include_in_schema=False)
async def get_openapi(request: Request[Any, Any, Any]) -> Response[dict[str, Any]]:
    """Returns the OpenAPI document of this API."""
    return Response(openapi_document(request.app), media_type="application/json")


@get("/docs", include_in_schema=False)
async def get_docs(request: Request[Any, Any, Any]) -> Response[str]:
    """Returns an HTML page that lists all routes."""
    return Response(docs_page(openapi_document(request.app)), media_type="text/html")


class Application:
    """The ASGI application for one open `Service`."""

    def __init__(self, service: Service) -> None:
        self._service = service
        # Wraps the whole framework, so that its 404 responses get the headers, too.
        self._app = OuterMiddleware(RequestMiddleware(litestar_app(), service.clock))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        bind_service(scope, self._service)
        await self._app(scope, receive, send)


@cache
def litestar_app() -> Litestar:
    """Returns the application with all routes.

    Cached and shared by all servers of a process: building it takes a quarter of a second.
    """
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
            get_metrics,
            get_openapi,
            get_docs,
        ],
        guards=[guard],
        dependencies={"ctx": Provide(provide_context)},
        exception_handlers={
            idempotency.RepeatedRequest: idempotency.replay_response,
            Exception: problems.problem_response,
        },
        middleware=[BodyLimit],
        request_max_body_size=None,
        openapi_config=OpenAPIConfig(title="Tenuto", version=__version__, path="/_schema"),
        on_app_init=[_disable_builtin_pages],
        logging_config=None,
    )


def _disable_builtin_pages(config: AppConfig) -> AppConfig:
    """Turns off the framework's own OpenAPI pages; `/openapi.json` and `/docs` replace them."""
    if config.openapi_config is not None:
        config.openapi_config.enabled_endpoints = set()
    return config
