"""One server over HTTP: what may be asked twice is, until an answer comes or time is up."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

import httpx2
import msgspec

from tenuto import __version__, tracing
from tenuto.client.remote.errors import error_from_response, is_retryable, retry_after, unreachable
from tenuto.clock import Clock
from tenuto.model.errors import Invalid, Unavailable
from tenuto.tls import trusted_for

T = TypeVar("T")

DEADLINE_S = 30.0
"""Seconds for a call with all its repetitions."""
CONNECT_S = 5.0
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 3.0
SILENCE_S = 60.0
"""Seconds without a byte after which a stream is taken for dead; the server sends some each 15."""
_NOT_SENT = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout)


class ApiRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request. `repeatable`: it may be sent again though it may have been done already."""

    method: str
    path: str
    body: Any = msgspec.UNSET
    params: Mapping[str, Any] = {}
    headers: Mapping[str, str] = {}
    repeatable: bool = False
    wait_s: float = 0.0
    """Seconds that the server was asked to wait before it answers."""


class ServerConnection:
    """Requests to one server, on behalf of whoever bears the token."""

    def __init__(
        self,
        url: str,
        token: str | None = None,
        workspace: str | None = None,
        *,
        deadline_s: float = DEADLINE_S,
        clock: Clock | None = None,
    ) -> None:
        self.url = checked(url)
        self.clock = clock or Clock()
        self._deadline_s = deadline_s
        headers = {"User-Agent": f"tenuto/{__version__}"}
        if token is not None:
            if not token.isascii() or not token.isprintable():
                raise Invalid("the token is not one of ours", field="token")
            headers["Authorization"] = f"Bearer {token}"
        if workspace is not None:
            headers["X-Workspace-Id"] = workspace
        self._http = httpx2.AsyncClient(
            base_url=self.url,
            headers=headers,
            timeout=httpx2.Timeout(deadline_s, connect=CONNECT_S),
            verify=trusted_for(self.url),
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def ask(self, kind: type[T], ask: ApiRequest) -> T:
        """The answer; raises what the engine would, `Unavailable` when none comes in time."""
        answer = await self._insist(ask)
        if kind is type(None):
            return None
        try:
            return msgspec.json.decode(answer.content, type=kind)
        except msgspec.MsgspecError as error:
            raise Unavailable(
                f"{self.url} answers in a way that this version does not understand: {error}",
                "server_unreachable",
            ) from error

    async def _insist(self, ask: ApiRequest) -> httpx2.Response:
        until = self.clock.elapsed() + self._deadline_s + ask.wait_s
        pause = FIRST_PAUSE_S
        while True:
            least = 0.0
            try:
                answer = await self._send(ask)
            except httpx2.InvalidURL as error:
                raise Invalid(f"{self.url}: {error}", field="url") from error
            except httpx2.TransportError as error:
                failure: Exception = unreachable(self.url, error)
                again = ask.repeatable or isinstance(error, _NOT_SENT)
            else:
                if answer.is_success:
                    return answer
                failure = error_from_response(answer)
                again = is_retryable(answer, failure) and (
                    ask.repeatable or answer.status_code == 429
                )
                least = retry_after(answer) or 0.0
            rest = max(least, pause * (0.5 + self.clock.random()))
            if not again or self.clock.elapsed() + rest > until:
                raise failure
            await self.clock.sleep(rest)
            pause = min(pause * 2, LONGEST_PAUSE_S)

    async def _send(self, ask: ApiRequest) -> httpx2.Response:
        headers = dict(ask.headers)
        if (place := tracing.current_traceparent()) is not None:
            headers["traceparent"] = place
        content = None
        if ask.body is not msgspec.UNSET:
            content = msgspec.json.encode(ask.body)
            headers["Content-Type"] = "application/json"
        return await self._http.request(
            ask.method,
            ask.path,
            content=content,
            params={name: _word(value) for name, value in ask.params.items() if value is not None},
            headers=headers,
            timeout=httpx2.Timeout(self._deadline_s + ask.wait_s, connect=CONNECT_S),
        )

    @asynccontextmanager
    async def events(self, path: str, last: str | None) -> AsyncIterator[httpx2.EventSource]:
        """A live stream, on from the event whose id is `last`; once, without repetition."""
        headers = {"Accept": "text/event-stream"} | ({"Last-Event-ID": last} if last else {})
        timeout = httpx2.Timeout(SILENCE_S, connect=CONNECT_S)
        try:
            async with self._http.stream("GET", path, headers=headers, timeout=timeout) as answer:
                if not answer.is_success:
                    await answer.aread()
                    raise error_from_response(answer)
                yield httpx2.EventSource(answer)
        except httpx2.TransportError as error:
            raise unreachable(self.url, error) from error


def checked(url: str) -> str:
    """A server's address without what comes after its last slash."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise Invalid(f"{url!r} is not a server's address: {error}", field="url") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username:
        raise Invalid(f"{url!r} is not a server's address like http://host:8484", field="url")
    return url.rstrip("/")


def part(text: object) -> str:
    """Text as one part of a path."""
    return quote(str(text), safe="")


def _word(value: Any) -> str:
    found = msgspec.to_builtins(value)
    return found if isinstance(found, str) else msgspec.json.encode(found).decode()
