"""The clients of gateways, which are services that spawn and kill sessions: HTTP.

Only operators configure gateways.
"""

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any, Protocol
from urllib.parse import quote

import httpx2
import msgspec

from tenuto.model import bounds
from tenuto.model.errors import Invalid
from tenuto.model.tenancy.redact import Redactor
from tenuto.tls import verify_option

MAX_READ = 64 * 1024
MAX_ERROR_TEXT = 200
KILL_TIMEOUT_S = 10.0
"""Timeout of a kill call in seconds."""
_NOT_ABOUT_TASK = frozenset({401, 403, 408, 425, 429})
"""Client error statuses about the gateway or its token, not about the task."""
_GONE = frozenset({404, 410})


class SpawnRejected(Exception):
    """The gateway works, but rejected this session."""


class GatewayError(Exception):
    """The gateway failed or gave an invalid response."""


class _Session(msgspec.Struct, frozen=True, rename="camel"):
    session_key: str


class _Spawned(msgspec.Struct, frozen=True):
    session: _Session


class Gateway(Protocol):
    """The client of one gateway, as the dispatcher uses it."""

    name: str
    deadline_s: float
    """Seconds that a spawn may take."""

    async def close(self) -> None:
        """Closes the connections."""

    async def spawn(self, body: Mapping[str, Any], secrets: Iterable[str] = ()) -> str:
        """Spawns a session and returns its key; raises `SpawnRejected` or `GatewayError`.

        `secrets` are the secrets in the body: a gateway may repeat them in its error text.
        """

    async def kill(self, session_key: str) -> str:
        """Kills a session; returns `killed`, or `gone` if it is unknown; raises `GatewayError`."""


class HttpGateway:
    """Client of a gateway over HTTP: no redirects, no proxies, and a timeout for every call."""

    def __init__(self, name: str, url: str, token: str = "", *, deadline_s: float = 60.0) -> None:
        self.name = name
        self.deadline_s = deadline_s
        self._base = url.rstrip("/")
        self._token = token
        self._headers = {"content-type": "application/json", "user-agent": "Tenuto/1"}
        if token:
            self._headers["authorization"] = f"Bearer {token}"
        self._client = httpx2.AsyncClient(
            timeout=None,
            trust_env=False,
            follow_redirects=False,
            headers=self._headers,
            verify=verify_option(url),
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def spawn(self, body: Mapping[str, Any], secrets: Iterable[str] = ()) -> str:
        """Spawns a session and returns its key; raises `SpawnRejected` or `GatewayError`."""
        content = msgspec.json.encode(body)
        status, reply = await self._post("/api/agents/spawn", content, self.deadline_s)
        if 400 <= status < 500 and status not in _NOT_ABOUT_TASK:
            raise SpawnRejected(self._error_text(status, reply, secrets))
        if not 200 <= status < 300:
            raise GatewayError(self._error_text(status, reply, secrets))
        try:
            key = msgspec.json.decode(reply, type=_Spawned).session.session_key
            return bounds.check_text("sessionKey", key, bounds.MAX_TITLE, empty=False)
        except (msgspec.MsgspecError, ValueError, Invalid) as error:
            raise GatewayError(f"its response to a spawn is invalid: {error}") from error

    async def kill(self, session_key: str) -> str:
        """Kills a session; returns `killed`, or `gone` if it is unknown; raises `GatewayError`."""
        path = f"/api/agents/sessions/{quote(session_key, safe='')}/kill"
        status, reply = await self._post(path, b"{}", KILL_TIMEOUT_S)
        if status in _GONE:
            return "gone"
        if 200 <= status < 300:
            return "killed"
        raise GatewayError(self._error_text(status, reply))

    async def _post(self, path: str, content: bytes, deadline_s: float) -> tuple[int, bytes]:
        """Posts; returns status and body, also of an error status; else raises `GatewayError`."""
        try:
            async with (
                asyncio.timeout(deadline_s),
                self._client.stream("POST", self._base + path, content=content) as response,
            ):
                reply = b""
                async for part in response.aiter_bytes():
                    reply += part
                    if len(reply) > MAX_READ:
                        raise GatewayError(f"its response is longer than {MAX_READ:,} bytes")
                return response.status_code, reply
        except TimeoutError:
            raise GatewayError(f"no answer within {deadline_s:g} s") from None
        except (httpx2.HTTPError, OSError) as error:
            reason = bounds.make_storable(str(error) or type(error).__name__, MAX_ERROR_TEXT)
            raise GatewayError(f"cannot be reached: {reason}") from error

    def _error_text(self, status: int, body: bytes, secrets: Iterable[str] = ()) -> str:
        """Returns status and shortened response, without secrets."""
        # Redact before shortening: a part of a secret is not recognised. The token is secret, too.
        redacted = Redactor([*secrets, self._token]).redact_text(body.decode("utf-8", "replace"))
        text = bounds.make_storable(redacted, MAX_ERROR_TEXT)
        return f"HTTP {status}: {text}" if text else f"HTTP {status}"
