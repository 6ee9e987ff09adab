"""The first look at a request: who asks, whether they may, and what their body is."""

from collections.abc import Callable
from typing import Any

from litestar.enums import ScopeType
from litestar.types import ASGIApp, Receive, Scope, Send

from tenuto.api.auth.route_access import PUBLIC, admit
from tenuto.api.edge.connection import ADMITTED
from tenuto.api.service import service_of
from tenuto.model.errors import Invalid
from tenuto.model.tenancy.access import Role

_AT_END = "at_end"
SMALL_BYTES = 64 * 1024
"""Bytes that a body may have where no token is needed, or one of a VIEWER does: no work is sent."""


class BodyLimit:
    """Lets in who may, then reads a body up to its limit and refuses what is not clear JSON."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != ScopeType.HTTP:
            await self._app(scope, receive, send)
            return
        access = await admit(scope)
        if access is not PUBLIC:
            _tell_connection(scope)
        if scope["method"] in ("GET", "HEAD", "OPTIONS"):
            try:
                await self._app(scope, receive, send)
            finally:
                if (end := scope["state"].get(_AT_END)) is not None:
                    end()
            return
        service = service_of(scope)
        if access is PUBLIC:
            small = min(service.body_bytes, SMALL_BYTES)
            await self._answer(scope, receive, send, small, _uncounted)
            return
        limit = service.body_bytes
        if access.role <= Role.VIEWER:
            limit = min(limit, SMALL_BYTES)
        held = service.body_budget.of(scope["state"]["desk"].caller)
        try:
            await self._answer(scope, receive, send, limit, held.grow)
        finally:
            held.end()

    async def _answer(
        self, scope: Scope, receive: Receive, send: Send, limit: int, grow: Callable[[int], None]
    ) -> None:
        """Answer a request with a body, of which `grow` is told how large it is by now."""
        body = await _read(scope, receive, limit, grow)
        if body is None:
            return
        if body:
            _check_media_type(scope)
            desk = scope["state"].get("desk")
            await service_of(scope).body_checks.check(
                body, None if desk is None else desk.workspace
            )
        scope["state"]["body"] = body
        await self._app(scope, _replay(body, receive), _keeping(scope, send))


def _uncounted(size: int) -> None:
    """Small bodies are bounded by the number of connections."""


def _tell_connection(scope: Scope) -> None:
    """Let the connection keep its place: the token is good."""
    extensions: Any = scope.get("extensions") or {}
    if (admitted := extensions.get(ADMITTED)) is not None:
        admitted["call"]()


def at_end(scope: Scope, end: Callable[[], None]) -> None:
    """Have a GET request's handler's means given back when the request is over.

    A stream's generator cannot see to it: of one that was never asked for anything no `finally`
    runs.
    """
    scope["state"][_AT_END] = end


async def _read(
    scope: Scope, receive: Receive, limit: int, grow: Callable[[int], None]
) -> bytes | None:
    """The body; `None` when the client left."""
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and int(value) > limit:
            raise _too_large(limit)
    parts: list[bytes] = []
    size = 0
    while True:
        message: Any = await receive()
        if message["type"] == "http.disconnect":
            return None
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        grow(size)
        parts.append(part)
        if not message.get("more_body"):
            return b"".join(parts)


def _too_large(limit: int) -> Invalid:
    return Invalid(f"a body has at most {limit:,} bytes here", "body_too_large")


def _check_media_type(scope: Scope) -> None:
    kind = next((value for name, value in scope["headers"] if name == b"content-type"), b"")
    media = kind.split(b";")[0].strip().lower()
    if media != b"application/json" and not media.endswith(b"+json"):
        raise Invalid("the body must be application/json", "unsupported_media_type")


def _replay(body: bytes, receive: Receive) -> Receive:
    given = False

    async def again() -> Any:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


def _keeping(scope: Scope, send: Send) -> Send:
    """Sends an answer that is to be kept when it is: whoever got it may repeat the request."""
    started: Any = None
    parts: list[bytes] = []

    async def keep(message: Any) -> None:
        nonlocal started
        end = scope["state"].get("answered")
        if end is None:
            await send(message)
        elif message["type"] == "http.response.start":
            started = message
        else:
            parts.append(message.get("body", b""))
            if not message.get("more_body"):
                await end(started["status"], b"".join(parts))
                await send(started)
                message["body"] = b"".join(parts)
                await send(message)

    return keep
