"""Tells how the API and the tasks are: `/metrics`, an id and a line of the log for each request."""

import asyncio
import hmac
import logging
import re
from collections.abc import Iterable
from typing import Any

from litestar import MediaType, Request, Response, get
from litestar.enums import ScopeType
from litestar.types import ASGIApp, Message, Receive, Scope, Send
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4

from tenuto import tracing
from tenuto.api.edge.problems import FAULT
from tenuto.api.service import Service, service_of
from tenuto.clock import Clock
from tenuto.coordinator.coordinator import ALERTS, NAME
from tenuto.engine.core import Core
from tenuto.engine.operations.metrics import MetricsRecorder, sample_once
from tenuto.logs import REQUEST
from tenuto.metrics import OTHER, PROCESS_METRICS
from tenuto.model.errors import TenutoError, Unauthenticated
from tenuto.periodic import run_periodically

log = logging.getLogger("tenuto.api")
access_log = logging.getLogger("tenuto.access")

SAMPLE_S = 5.0
NOWHERE = "unmatched"
"""Stands for paths that no route has: a label must not be what a stranger types."""
GONE = 499
"""Stands for the status of a request whose client left before it was answered."""
_METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})
_GOOD_ID = re.compile(rb"[\w.:-]{1,64}", flags=re.A)


@get("/metrics", media_type=MediaType.TEXT)
async def metrics(request: Request[Any, Any, Any]) -> Response[str]:
    """The metrics of this process, as Prometheus reads them."""
    service = service_of(request.scope)
    if wanted := service.settings.metrics_token:
        given = request.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {wanted}".encode()):
            raise Unauthenticated("send the token of the metrics: Authorization: Bearer ...")
    return Response(PROCESS_METRICS.text().decode(), media_type=CONTENT_TYPE_PLAIN_0_0_4)


async def watch(service: Service, stop: asyncio.Event) -> "asyncio.Task[None]":
    """Count every event from now on and sample the gauges, until `stop`; answers who does."""
    core = Core(service.store, service.wakeups)
    await service.hub.listen(MetricsRecorder(core, PROCESS_METRICS).process_events)

    async def sample() -> None:
        try:
            await sample_once(core, PROCESS_METRICS, NAME, ALERTS)
        except TenutoError as error:
            log.warning("no sample of metrics: %s", error)

    return asyncio.create_task(run_periodically(sample, lambda: SAMPLE_S, stop, service.clock))


class RequestMiddleware:
    """Gives each request an id and a place in its trace; logs and measures how it ended."""

    def __init__(self, app: ASGIApp, clock: Clock) -> None:
        self._app = app
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != ScopeType.HTTP:
            await self._app(scope, receive, send)
            return
        begun, status = self._clock.elapsed(), GONE
        given = dict(scope["headers"])
        request = self._request_id(given.get(b"x-request-id", b""))

        async def told(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = _with_id(message.get("headers", ()), request)
            await send(message)

        token = REQUEST.set(request)
        try:
            with tracing.use_parent_trace(given.get(b"traceparent", b"").decode("latin-1") or None):
                await self._app(scope, receive, told)
        except Exception:
            status = FAULT
            raise
        finally:
            self._note(scope, status, self._clock.elapsed() - begun)
            REQUEST.reset(token)

    def _request_id(self, given: bytes) -> str:
        return given.decode() if _GOOD_ID.fullmatch(given) else str(self._clock.new_id())

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        state: Any = scope
        method = state["method"] if state["method"] in _METHODS else OTHER
        route = state.get("path_template") or NOWHERE
        PROCESS_METRICS.observe("tenuto_http_request_seconds", seconds, method, route, str(status))
        desk = state.get("state", {}).get("desk")
        actor = "-" if desk is None else desk.caller.actor
        ms = round(seconds * 1000, 1)
        client = state.get("client")
        fields = {
            "method": method,
            "route": route,
            "status": status,
            "ms": ms,
            "actor": actor,
            "client": "-" if client is None else client[0],
        }
        access_log.info(
            "%s %s %d %.1f ms %s", method, route, status, ms, actor, extra={"fields": fields}
        )


def _with_id(headers: Iterable[tuple[bytes, bytes]], request: str) -> list[tuple[bytes, bytes]]:
    return [*headers, (b"x-request-id", request.encode())]
