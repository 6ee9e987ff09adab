"""Sends requests to one server over HTTP; repeatable ones are retried until a deadline."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

import httpx2
import msgspec

from tenuto import __version__, tracing
from tenuto.client.remote.errors import (
    error_from_response,
    is_retryable,
    retry_after_s,
    unreachable_error,
)
from tenuto.clock import Clock
from tenuto.model.errors import Invalid, Unavailable
from tenuto.tls import verify_option

T = TypeVar("T")

DEADLINE_S = 30.0
"""Seconds for a request with all its retries."""
CONNECT_S = 5.0
FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 3.0
STREAM_TIMEOUT_S = 60.0
"""Seconds without a byte after which a stream counts as broken; the server sends some every 15."""
_NEVER_SENT_ERRORS = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout)


class ApiRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request. `repeatable`: sending it again is safe even if it was executed already."""

    method: str
    path: str
    body: Any = msgspec.UNSET
    params: Mapping[str, Any] = {}
    headers: Mapping[str, str] = {}
    repeatable: bool = False
    wait_s: float = 0.0
    """Seconds that the server may wait before it responds (long poll)."""


class ServerConnection:
    """A connection to one server, with the rights of the token."""

    def __init__(
        self,
        url: str,
        token: str | None = None,
        workspace: str | None = None,
        *,
        deadline_s: float = DEADLINE_S,
        clock: Clock | None = None,
    ) -> None:
        self.url = normalize_url(url)
        self.clock = clock or Clock()
        self._deadline_s = deadline_s
        headers = {"User-Agent": f"tenuto/{__version__}"}
        if token is not None:
            if not token.isascii() or not token.isprintable():
                raise Invalid(
                    "the token has invalid characters; only printable ASCII is allowed",
                    field="token",
                )
            headers["Authorization"] = f"Bearer {token}"
        if workspace is not None:
            headers["X-Workspace-Id"] = workspace
        self._http = httpx2.AsyncClient(
            base_url=self.url,
            headers=headers,
            timeout=httpx2.Timeout(deadline_s, connect=CONNECT_S),
            verify=verify_option(self.url),
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def request(self, response_type: type[T], request: ApiRequest) -> T:
        """Returns the decoded response, or raises the engine's exception or `Unavailable`.

        `Unavailable` if no response arrives in time or it cannot be decoded. For the type of `None`
        the response is not decoded.
        """
        response = await self._send_with_retries(request)
        if response_type is type(None):
            return None
        try:
            return msgspec.json.decode(response.content, type=response_type)
        except msgspec.MsgspecError as error:
            raise Unavailable(
                f"{self.url}: unexpected response ({error}); client and server versions may differ",
                "server_unreachable",
            ) from error

    async def _send_with_retries(self, request: ApiRequest) -> httpx2.Response:
        """Returns the successful response; retries until the deadline, then raises the failure.

        A request that is not `repeatable` is retried only if it was never executed.
        """
        deadline = self.clock.elapsed() + self._deadline_s + request.wait_s
        backoff_s = FIRST_BACKOFF_S
        while True:
            min_delay_s = 0.0
            try:
                response = await self._send(request)
            except httpx2.InvalidURL as error:
                raise Invalid(f"{self.url}: {error}", field="url") from error
            except httpx2.TransportError as error:
                failure: Exception = unreachable_error(self.url, error)
                retry = request.repeatable or isinstance(error, _NEVER_SENT_ERRORS)
            else:
                if response.is_success:
                    return response
                failure = error_from_response(response)
                retry = is_retryable(response, failure) and (
                    request.repeatable or response.status_code == 429
                )
                min_delay_s = retry_after_s(response) or 0.0
            delay_s = max(min_delay_s, backoff_s * (0.5 + self.clock.random()))
            if not retry or self.clock.elapsed() + delay_s > deadline:
                raise failure
            await self.clock.sleep(delay_s)
            backoff_s = min(backoff_s * 2, MAX_BACKOFF_S)

    async def _send(self, request: ApiRequest) -> httpx2.Response:
        """Sends a request once and returns the response, also one that reports an error."""
        headers = dict(request.headers)
        if (traceparent := tracing.current_traceparent()) is not None:
            headers["traceparent"] = traceparent
        content = None
        if request.body is not msgspec.UNSET:
            content = msgspec.json.encode(request.body)
            headers["Content-Type"] = "application/json"
        return await self._http.request(
            request.method,
            request.path,
            content=content,
            params={
                name: _query_text(value)
                for name, value in request.params.items()
                if value is not None
            },
            headers=headers,
            timeout=httpx2.Timeout(self._deadline_s + request.wait_s, connect=CONNECT_S),
        )

    @asynccontextmanager
    async def events(
        self, path: str, last_event_id: str | None
    ) -> AsyncIterator[httpx2.EventSource]:
        """Opens a live stream after the event with id `last_event_id`; does not retry.

        Raises the server's refusal, or `Unavailable` if the connection breaks.
        """
        headers = {"Accept": "text/event-stream"} | (
            {"Last-Event-ID": last_event_id} if last_event_id else {}
        )
        timeout = httpx2.Timeout(STREAM_TIMEOUT_S, connect=CONNECT_S)
        try:
            async with self._http.stream("GET", path, headers=headers, timeout=timeout) as response:
                if not response.is_success:
                    await response.aread()
                    raise error_from_response(response)
                yield httpx2.EventSource(response)
        except httpx2.TransportError as error:
            raise unreachable_error(self.url, error) from error


def normalize_url(url: str) -> str:
    """Returns a server URL without trailing slashes; raises `Invalid` if it is not one."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise Invalid(f"{url!r} is not a valid server URL: {error}", field="url") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username:
        raise Invalid(f"{url!r} is not a server URL like http://host:8484", field="url")
    return url.rstrip("/")


def path_segment(text: object) -> str:
    """Returns text quoted as one segment of a URL path."""
    return quote(str(text), safe="")


def _query_text(value: Any) -> str:
    """Returns a value as text for a query parameter."""
    plain = msgspec.to_builtins(value)
    return plain if isinstance(plain, str) else msgspec.json.encode(plain).decode()
