"""The first middleware: authenticates a request, then reads and checks its body."""

from collections.abc import Callable
from typing import Any

from litestar.enums import ScopeType
from litestar.types import ASGIApp, Receive, Scope, Send

from tenuto.api.auth.route_access import admit
from tenuto.api.edge.connection import ADMITTED
from tenuto.api.operation import PUBLIC
from tenuto.api.service import service_of
from tenuto.model.errors import Invalid
from tenuto.model.tenancy.access import Role

_ON_REQUEST_END = "at_end"
SMALL_BYTES = 64 * 1024
"""Maximum body of routes that need no token, or only the role VIEWER: no work is sent there."""


class BodyLimit:
    """Checks access, then reads the body up to its limit and refuses ambiguous JSON."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != ScopeType.HTTP:
            await self._app(scope, receive, send)
            return
        access = await admit(scope)
        if access is not PUBLIC:
            _mark_admitted(scope)
        if scope["method"] in ("GET", "HEAD", "OPTIONS"):
            try:
                await self._app(scope, receive, send)
            finally:
                if (release := scope["state"].get(_ON_REQUEST_END)) is not None:
                    release()
            return
        service = service_of(scope)
        if access is PUBLIC:
            limit = min(service.max_body_bytes, SMALL_BYTES)
            await self._handle_with_body(scope, receive, send, limit, _reserve_nothing)
            return
        limit = service.max_body_bytes
        if access.role <= Role.VIEWER:
            limit = min(limit, SMALL_BYTES)
        reservation = service.body_budget.new_reservation(scope["state"]["ctx"].caller)
        try:
            await self._handle_with_body(scope, receive, send, limit, reservation.grow_to)
        finally:
            reservation.release()

    async def _handle_with_body(
        self, scope: Scope, receive: Receive, send: Send, limit: int, reserve: Callable[[int], None]
    ) -> None:
        """Reads and checks the body, then runs the handler; not if the client disconnects before.

        `reserve` is called with the size of the body so far after each part.
        """
        body = await _read_body(scope, receive, limit, reserve)
        if body is None:
            return
        if body:
            _check_media_type(scope)
            ctx = scope["state"].get("ctx")
            await service_of(scope).json_checker.check(body, None if ctx is None else ctx.workspace)
        scope["state"]["body"] = body
        await self._app(scope, _replay_body(body, receive), _store_before_send(scope, send))


def _reserve_nothing(size: int) -> None:
    """Does nothing: small bodies need no budget, the number of connections bounds them."""


def _mark_admitted(scope: Scope) -> None:
    """Reports to the connection that the token is valid, so that it is not closed for another."""
    extensions: Any = scope.get("extensions") or {}
    if (admitted := extensions.get(ADMITTED)) is not None:
        admitted["call"]()


def on_request_end(scope: Scope, release: Callable[[], None]) -> None:
    """Registers the function that runs at the end of a GET request; replaces an earlier one.

    It releases resources of a stream. The stream's generator cannot do it: the `finally` of a
    generator that was never started does not run.
    """
    scope["state"][_ON_REQUEST_END] = release


async def _read_body(
    scope: Scope, receive: Receive, limit: int, reserve: Callable[[int], None]
) -> bytes | None:
    """Returns the body; `None` if the client disconnected. Raises `Invalid`, or as `reserve`."""
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and int(value) > limit:
            raise _too_large_error(limit)
    parts: list[bytes] = []
    size = 0
    while True:
        message: Any = await receive()
        if message["type"] == "http.disconnect":
            return None
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise _too_large_error(limit)
        reserve(size)
        parts.append(part)
        if not message.get("more_body"):
            return b"".join(parts)


def _too_large_error(limit: int) -> Invalid:
    return Invalid(
        f"the body exceeds the limit of {limit:,} bytes for this route", "body_too_large"
    )


def _check_media_type(scope: Scope) -> None:
    """Raises `Invalid` unless the body is declared as JSON."""
    content_type = next((value for name, value in scope["headers"] if name == b"content-type"), b"")
    media = content_type.split(b";")[0].strip().lower()
    if media != b"application/json" and not media.endswith(b"+json"):
        raise Invalid(
            "the Content-Type of the body must be application/json", "unsupported_media_type"
        )


def _replay_body(body: bytes, receive: Receive) -> Receive:
    """Returns a `receive` that first delivers the body that was read already."""
    is_delivered = False

    async def receive_again() -> Any:
        """Returns the whole body first, then what the connection sends."""
        nonlocal is_delivered
        if is_delivered:
            return await receive()
        is_delivered = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_again


def _store_before_send(scope: Scope, send: Send) -> Send:
    """Returns a `send` that stores a response with an `Idempotency-Key` before it sends it.

    A client that has received the response can then repeat the request safely.
    """
    response_start: Any = None
    parts: list[bytes] = []

    async def send_stored(message: Any) -> None:
        """Holds the response back until it is stored, if the request asks for that."""
        nonlocal response_start
        store_response = scope["state"].get("store_response")
        if store_response is None:
            await send(message)
        elif message["type"] == "http.response.start":
            response_start = message
        else:
            parts.append(message.get("body", b""))
            if not message.get("more_body"):
                await store_response(response_start["status"], b"".join(parts))
                await send(response_start)
                message["body"] = b"".join(parts)
                await send(message)

    return send_stored
