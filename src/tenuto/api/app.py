"""The ASGI application: routes, access guard, error responses, OpenAPI document."""

from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from litestar import Litestar, Request, Response
from litestar.config.app import AppConfig
from litestar.di import Provide
from litestar.openapi.config import OpenAPIConfig
from litestar.types import Receive, Scope, Send

from tenuto import __version__
from tenuto.api import routes
from tenuto.api.auth.route_access import context_of, guard
from tenuto.api.edge import idempotency, problems
from tenuto.api.edge.metrics import RequestMiddleware
from tenuto.api.edge.middleware import OuterMiddleware
from tenuto.api.edge.openapi import docs_page, openapi_document
from tenuto.api.edge.request_body import BodyLimit
from tenuto.api.operation import PUBLIC, all_operations, operation
from tenuto.api.service import RequestContext, Service, bind_service

for _module in iter_modules(routes.__path__):  # registers the operations of every module there
    import_module(f"{routes.__name__}.{_module.name}")


async def provide_context(request: Request[Any, Any, Any]) -> RequestContext:
    """Returns the context that `admit` created for the request; injected into handlers as `ctx`."""
    return context_of(request.scope)


@operation("GET", "/openapi.json", PUBLIC, prefix="", include_in_schema=False)
async def get_openapi(request: Request[Any, Any, Any]) -> Response[dict[str, Any]]:
    """Returns the OpenAPI document of this API."""
    return Response(openapi_document(request.app), media_type="application/json")


@operation("GET", "/docs", PUBLIC, prefix="", include_in_schema=False)
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
    return Litestar(
        route_handlers=[operation.handler for operation in all_operations()],
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
