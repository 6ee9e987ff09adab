"""The first look at a request: how large it is, and whether its body is JSON with one meaning."""

import asyncio
import contextlib
import json
from collections import Counter
from typing import Any

import msgspec
from litestar.enums import ScopeType
from litestar.types import ASGIApp, Receive, Scope, Send

from tenuto.api import problems
from tenuto.model.errors import Invalid, TenutoError

_PATIENCE_S = 5
_DRAINED = 64 * 1024 * 1024


class Gate:
    """Reads a body up to its limit, refuses what two readers could understand differently."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != ScopeType.HTTP or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self._app(scope, receive, send)
            return
        try:
            body = await self._read(scope, receive)
            if body is None:
                return
            _check(scope, body)
        except TenutoError as error:
            await _refuse(send, error)
            return
        scope.setdefault("state", {})["body"] = body
        await self._app(scope, _replay(body, receive), _keeping(scope, send))

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """The body; `None` when the client left."""
        for name, value in scope["headers"]:
            if name == b"content-length" and value.isdigit() and int(value) > self._limit:
                await _drain(receive)
                raise self._too_large()
        parts: list[bytes] = []
        size = 0
        while True:
            message: Any = await receive()
            if message["type"] == "http.disconnect":
                return None
            part = message.get("body", b"")
            size += len(part)
            if size > self._limit:
                if message.get("more_body"):
                    await _drain(receive)
                raise self._too_large()
            parts.append(part)
            if not message.get("more_body"):
                return b"".join(parts)

    def _too_large(self) -> Invalid:
        return Invalid(f"a body has at most {self._limit:,} bytes", "body_too_large")


def _check(scope: Scope, body: bytes) -> None:
    if not body:
        return
    kind = next((value for name, value in scope["headers"] if name == b"content-type"), b"")
    media = kind.split(b";")[0].strip().lower()
    if media != b"application/json" and not media.endswith(b"+json"):
        raise Invalid("the body must be application/json", "unsupported_media_type")
    try:
        json.loads(body, object_pairs_hook=_unique, parse_constant=_no_constant)
    except RecursionError as error:
        raise Invalid("the body is nested too deep", "too_deep") from error
    except ValueError as error:
        raise Invalid(f"the body is not JSON: {str(error)[:200]}", "invalid_json") from error


def _unique(pairs: list[tuple[str, Any]]) -> None:
    if len({name for name, _ in pairs}) != len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = next(name for name, count in counts.items() if count > 1)
        raise Invalid(f"the name {twice[:60]!r} is given twice", "invalid_json")


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


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


async def _drain(receive: Receive) -> None:
    """Let the client finish, within reason: one that still writes would not read the answer."""
    size = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_PATIENCE_S):
            while size < _DRAINED:
                message: Any = await receive()
                size += len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body"):
                    return


async def _refuse(send: Send, error: TenutoError) -> None:
    problem, headers = problems.of(error)
    body = msgspec.json.encode(problem)
    told = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    told += [
        (b"content-type", problems.MEDIA_TYPE.encode()),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": problem.status, "headers": told})
    await send({"type": "http.response.body", "body": body, "more_body": False})
