"""What surrounds every answer: headers that protect its reader, and bodies that nobody read."""

import asyncio
import contextlib
from typing import Any

from litestar.enums import ScopeType
from litestar.types import ASGIApp, Message, Receive, Scope, Send

from tenuto.api.auth.route_access import V1

PATIENCE_S = 5.0
"""How long a client may go on sending a body that is not read."""
UNREAD_BYTES = 16 * 1024 * 1024
_NOSNIFF = (b"x-content-type-options", b"nosniff")
_NO_STORE = (b"cache-control", b"no-store")
_POLICY = (
    b"default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none';"
    b" frame-ancestors 'none'"
)
_CSP = (b"content-security-policy", _POLICY)


class OuterMiddleware:
    """Adds protective headers, and answers before a body is read without losing the answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != ScopeType.HTTP:
            await self._app(scope, receive, send)
            return
        added = _headers_for(scope["path"])
        unread = _Unread(receive, send) if _has_body(scope) else None

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *added]
            if unread is None:
                await send(message)
            else:
                await unread.send(message)

        if unread is None:
            await self._app(scope, receive, answer)
        else:
            await self._app(scope, unread.receive, answer)
            await unread.finish()


def _headers_for(path: str) -> tuple[tuple[bytes, bytes], ...]:
    if path.startswith(V1):
        return (_NOSNIFF, _NO_STORE)
    return (_NOSNIFF, _CSP) if path == "/docs" else (_NOSNIFF,)


def _has_body(scope: Scope) -> bool:
    return any(
        name == b"transfer-encoding" or (name == b"content-length" and value != b"0")
        for name, value in scope["headers"]
    )


class _Unread:
    """Sees whether a body was read to its end before the answer.

    If it was not, the answer says that the connection closes. The client gets all of it first, and
    may then finish within bounds: one that still sends when the connection closes loses the answer.
    """

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._over = False
        self._closes = False

    async def receive(self) -> Any:
        message: Any = await self._receive()
        self._over = self._over or not message.get("more_body", False)
        return message

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start" and not self._over:
            self._closes = True
            message["headers"] = [*message["headers"], (b"connection", b"close")]
        elif self._closes:
            message["more_body"] = True  # `finish` ends it, and with it the connection
        await self._send(message)

    async def finish(self) -> None:
        """Throws the rest of the body away, and ends the answer."""
        if self._closes:
            await self._drain()
            end: Any = {"type": "http.response.body", "body": b"", "more_body": False}
            await self._send(end)

    async def _drain(self) -> None:
        size = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                while not self._over and size <= UNREAD_BYTES:
                    size += len((await self.receive()).get("body", b""))
