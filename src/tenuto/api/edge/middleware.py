"""Adds security headers to every response, and handles request bodies that were not read."""

import asyncio
import contextlib
from typing import Any

from litestar.enums import ScopeType
from litestar.types import ASGIApp, Message, Receive, Scope, Send

from tenuto.api.operation import V1

UNREAD_BODY_S = 5.0
"""Seconds that a client may go on sending a body that no handler reads."""
UNREAD_BYTES = 16 * 1024 * 1024
"""Maximum bytes of such a body that are discarded."""
_NOSNIFF = (b"x-content-type-options", b"nosniff")
_NO_STORE = (b"cache-control", b"no-store")
_POLICY = (
    b"default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none';"
    b" frame-ancestors 'none'"
)
_CSP = (b"content-security-policy", _POLICY)


class OuterMiddleware:
    """Adds security headers, and lets a response arrive though its request body was not read."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != ScopeType.HTTP:
            await self._app(scope, receive, send)
            return
        extra_headers = _headers_for(scope["path"])
        unread = _UnreadBodyGuard(receive, send) if _has_body(scope) else None

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *extra_headers]
            if unread is None:
                await send(message)
            else:
                await unread.send(message)

        if unread is None:
            await self._app(scope, receive, send_with_headers)
        else:
            await self._app(scope, unread.receive, send_with_headers)
            await unread.finish()


def _headers_for(path: str) -> tuple[tuple[bytes, bytes], ...]:
    """Returns the security headers for responses of a path."""
    if path.startswith(V1):
        return (_NOSNIFF, _NO_STORE)
    return (_NOSNIFF, _CSP) if path == "/docs" else (_NOSNIFF,)


def _has_body(scope: Scope) -> bool:
    """True if the request's headers announce a body."""
    return any(
        name == b"transfer-encoding" or (name == b"content-length" and value != b"0")
        for name, value in scope["headers"]
    )


class _UnreadBodyGuard:
    """Handles a request body that was not read to its end before the response starts.

    The response then gets the header `connection: close`. After the response is sent, the rest of
    the body is read and discarded within bounds. Otherwise a client that is still sending when the
    connection closes would lose the response.
    """

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._is_read = False
        self._closes_connection = False

    async def receive(self) -> Any:
        """Receives a message and notes when the body has been read."""
        message: Any = await self._receive()
        self._is_read = self._is_read or not message.get("more_body", False)
        return message

    async def send(self, message: Any) -> None:
        """Sends a message; if the body is unread, announces the close; `finish` must follow."""
        if message["type"] == "http.response.start" and not self._is_read:
            self._closes_connection = True
            message["headers"] = [*message["headers"], (b"connection", b"close")]
        elif self._closes_connection:
            message["more_body"] = True  # `finish` ends the response and the connection
        await self._send(message)

    async def finish(self) -> None:
        """If the body was unread, discards the rest of it and ends the response."""
        if self._closes_connection:
            await self._drain()
            end: Any = {"type": "http.response.body", "body": b"", "more_body": False}
            await self._send(end)

    async def _drain(self) -> None:
        """Reads and drops the rest of the body, up to a limit of time and size."""
        size = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(UNREAD_BODY_S):
                while not self._is_read and size <= UNREAD_BYTES:
                    size += len((await self.receive()).get("body", b""))
