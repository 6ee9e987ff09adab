"""A gateway: the HTTP service that spawns and kills sessions for us. Named by the operator only."""

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote

import httpx2
import msgspec

from tenuto.model import bounds
from tenuto.model.errors import Invalid
from tenuto.model.tenancy.redact import Redactor
from tenuto.tls import trusted_for

MAX_READ = 64 * 1024
MAX_SAID = 200
KILL_S = 10.0
"""Seconds that a gateway has to answer a kill."""
_OURS = frozenset({401, 403, 408, 425, 429})
"""Refusals that are about the gateway or our key to it, not about the task."""
_GONE = frozenset({404, 410})


class SpawnRejected(Exception):
    """The gateway works, and will not spawn this session."""


class GatewayError(Exception):
    """The gateway did not answer as one that works."""


class _Session(msgspec.Struct, frozen=True, rename="camel"):
    session_key: str


class _Spawned(msgspec.Struct, frozen=True):
    session: _Session


class Gateway:
    """One gateway. No redirect, no proxy, and an end to every call."""

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
            verify=trusted_for(url),
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def spawn(self, body: Mapping[str, Any], secrets: Iterable[str] = ()) -> str:
        """The key of the session that was spawned; raises `Refused` or `Broken`.

        `secrets` are what the body holds: a gateway may repeat them when it says what is wrong.
        """
        content = msgspec.json.encode(body)
        status, said = await self._post("/api/agents/spawn", content, self.deadline_s)
        if 400 <= status < 500 and status not in _OURS:
            raise SpawnRejected(self._told(status, said, secrets))
        if not 200 <= status < 300:
            raise GatewayError(self._told(status, said, secrets))
        try:
            key = msgspec.json.decode(said, type=_Spawned).session.session_key
            return bounds.text("sessionKey", key, bounds.MAX_TITLE, empty=False)
        except (msgspec.MsgspecError, ValueError, Invalid) as error:
            raise GatewayError(f"its answer to a spawn cannot be understood: {error}") from error

    async def kill(self, session_key: str) -> str:
        """How the session ended: `killed`, or `gone` when the gateway knows none; or `Broken`."""
        path = f"/api/agents/sessions/{quote(session_key, safe='')}/kill"
        status, said = await self._post(path, b"{}", KILL_S)
        if status in _GONE:
            return "gone"
        if 200 <= status < 300:
            return "killed"
        raise GatewayError(self._told(status, said))

    async def _post(self, path: str, content: bytes, deadline_s: float) -> tuple[int, bytes]:
        try:
            async with (
                asyncio.timeout(deadline_s),
                self._client.stream("POST", self._base + path, content=content) as answer,
            ):
                said = b""
                async for part in answer.aiter_bytes():
                    said += part
                    if len(said) > MAX_READ:
                        raise GatewayError(f"it answered with more than {MAX_READ:,} bytes")
                return answer.status_code, said
        except TimeoutError:
            raise GatewayError(f"no answer within {deadline_s:g} s") from None
        except (httpx2.HTTPError, OSError) as error:
            said_ = bounds.clean(str(error) or type(error).__name__, MAX_SAID)
            raise GatewayError(f"cannot be reached: {said_}") from error

    def _told(self, status: int, body: bytes, secrets: Iterable[str] = ()) -> str:
        # Struck before it is cut: half of a secret is not known again. Our key to it is one, too.
        whole = Redactor([*secrets, self._token]).text(body.decode("utf-8", "replace"))
        said = bounds.clean(whole, MAX_SAID)
        return f"HTTP {status}: {said}" if said else f"HTTP {status}"
