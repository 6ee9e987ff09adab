"""The route `/metrics`; a request id, a trace, a log line and a measurement per request."""

import asyncio
import hmac
import logging
import re
from collections.abc import Iterable
from typing import Any

from litestar import MediaType, Request, Response
from litestar.enums import ScopeType
from litestar.types import ASGIApp, Message, Receive, Scope, Send
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4

from tenuto import tracing
from tenuto.api.edge.problems import INTERNAL_ERROR
from tenuto.api.operation import PUBLIC, operation
from tenuto.api.service import Service, service_of
from tenuto.clock import Clock
from tenuto.coordinator.coordinator import NAME
from tenuto.coordinator.duties import ALERTS
from tenuto.engine.core import Core
from tenuto.engine.operations.metrics import MetricsRecorder, sample_once
from tenuto.logs import REQUEST
from tenuto.metrics import OTHER, PROCESS_METRICS
from tenuto.model.errors import TenutoError, Unauthenticated
from tenuto.periodic import run_periodically

log = logging.getLogger("tenuto.api")
access_log = logging.getLogger("tenuto.access")

SAMPLE_S = 5.0
UNMATCHED = "unmatched"
"""Label for paths without a route: labels must not contain text from untrusted clients."""
CLIENT_CLOSED = 499
"""Status in metrics and logs if the client disconnected before the response."""
_METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})
_VALID_ID = re.compile(rb"[\w.:-]{1,64}", flags=re.A)


@operation("GET", "/metrics", PUBLIC, prefix="", media_type=MediaType.TEXT)
async def get_metrics(request: Request[Any, Any, Any]) -> Response[str]:
    """Returns the metrics of this process in the Prometheus text format."""
    service = service_of(request.scope)
    if metrics_token := service.settings.metrics_token:
        authorization = request.headers.get("authorization", "")
        if not hmac.compare_digest(authorization.encode(), f"Bearer {metrics_token}".encode()):
            raise Unauthenticated(
                "the metrics token is required; send the header Authorization: Bearer ..."
            )
    return Response(PROCESS_METRICS.text().decode(), media_type=CONTENT_TYPE_PLAIN_0_0_4)


async def start_metrics(service: Service, stop: asyncio.Event) -> "asyncio.Task[None]":
    """Starts counting events and sampling gauges until `stop`; returns the sampling task."""
    core = Core(service.store, service.wakeups)
    await service.hub.add_sink(MetricsRecorder(core, PROCESS_METRICS).process_events)

    async def sample() -> None:
        """Samples the gauges once; logs an outage instead of raising it."""
        try:
            await sample_once(core, PROCESS_METRICS, NAME, ALERTS)
        except TenutoError as error:
            log.warning("metrics could not be sampled, the next cycle retries: %s", error)

    return asyncio.create_task(run_periodically(sample, lambda: SAMPLE_S, stop, service.clock))


class RequestMiddleware:
    """Gives each request an id and a trace context; logs and measures its outcome."""

    def __init__(self, app: ASGIApp, clock: Clock) -> None:
        self._app = app
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != ScopeType.HTTP:
            await self._app(scope, receive, send)
            return
        started, status = self._clock.elapsed(), CLIENT_CLOSED
        headers = dict(scope["headers"])
        request_id = self._request_id(headers.get(b"x-request-id", b""))

        async def send_with_id(message: Message) -> None:
            """Adds the request id to the response."""
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = _add_request_id(message.get("headers", ()), request_id)
            await send(message)

        token = REQUEST.set(request_id)
        try:
            with tracing.use_parent_trace(
                headers.get(b"traceparent", b"").decode("latin-1") or None
            ):
                await self._app(scope, receive, send_with_id)
        except Exception:
            status = INTERNAL_ERROR
            raise
        finally:
            self._record_request(scope, status, self._clock.elapsed() - started)
            REQUEST.reset(token)

    def _request_id(self, header: bytes) -> str:
        """Returns the client's request id if it is valid, else a new one."""
        return header.decode() if _VALID_ID.fullmatch(header) else str(self._clock.new_id())

    def _record_request(self, scope: Scope, status: int, seconds: float) -> None:
        """Adds the request to the metrics and the log."""
        state: Any = scope
        method = state["method"] if state["method"] in _METHODS else OTHER
        route = state.get("path_template") or UNMATCHED
        PROCESS_METRICS.observe("tenuto_http_request_seconds", seconds, method, route, str(status))
        ctx = state.get("state", {}).get("ctx")
        actor = "-" if ctx is None else ctx.caller.actor
        milliseconds = round(seconds * 1000, 1)
        client = state.get("client")
        fields = {
            "method": method,
            "route": route,
            "status": status,
            "ms": milliseconds,
            "actor": actor,
            "client": "-" if client is None else client[0],
        }
        access_log.info(
            "%s %s %d %.1f ms %s",
            method,
            route,
            status,
            milliseconds,
            actor,
            extra={"fields": fields},
        )


def _add_request_id(
    headers: Iterable[tuple[bytes, bytes]], request_id: str
) -> list[tuple[bytes, bytes]]:
    """Returns the headers with the request id added."""
    return [*headers, (b"x-request-id", request_id.encode())]
