"""Sends one message to one URL: no redirects, proxies or cookies; size and time are limited."""

import asyncio
import ssl
from collections.abc import Mapping
from ipaddress import IPv6Address

import httpx2
import msgspec

from tenuto.model import bounds
from tenuto.model.errors import Invalid
from tenuto.model.webhooks import MAX_RESPONSE_TEXT
from tenuto.tls import ssl_context
from tenuto.webhooks.url_guard import Address, CheckedUrl, UrlGuard

DEADLINE_S = 10.0
MAX_READ = 64 * 1024
_MAX_ADDRESSES = 3
_CONNECTION_ERRORS = (httpx2.TransportError, OSError)


class SendResult(msgspec.Struct, frozen=True):
    """The HTTP status, if there was one, and the error, if it failed."""

    status: int | None = None
    error: str | None = None


class _PartialResponse:
    """The part of the response received so far; used when time is up."""

    def __init__(self) -> None:
        self.status: int | None = None
        self.body = b""

    def result(self) -> SendResult:
        """Returns a success for a 2xx status, else an error with the status and the body."""
        assert self.status is not None
        if 200 <= self.status < 300:
            return SendResult(self.status)
        text = bounds.make_storable(self.body.decode("utf-8", "replace"), MAX_RESPONSE_TEXT)
        return SendResult(
            self.status, f"HTTP {self.status}: {text}" if text else f"HTTP {self.status}"
        )


class Sender:
    """Posts messages to URLs that the guard allows."""

    def __init__(
        self, guard: UrlGuard, deadline_s: float = DEADLINE_S, tls: ssl.SSLContext | None = None
    ) -> None:
        """`deadline_s`: seconds for one message; `tls`: context for tests, else the default one."""
        self._guard = guard
        self.deadline_s = deadline_s
        self._tls = tls

    async def post(self, url: str, headers: Mapping[str, str], body: bytes) -> SendResult:
        """Posts the body; returns a result, also for a failure, within the deadline. No retry."""
        partial = _PartialResponse()
        try:
            async with asyncio.timeout(self.deadline_s):
                checked = await self._guard.resolve_allowed(url)
                await self._post(checked, headers, body, partial)
        except Invalid as error:
            return SendResult(error=error.message)
        except TimeoutError:
            if partial.status is None:
                return SendResult(error=f"no response within {self.deadline_s:g} s")
        except _CONNECTION_ERRORS as error:
            if partial.status is None:
                reason = bounds.make_storable(str(error) or type(error).__name__, MAX_RESPONSE_TEXT)
                return SendResult(error=f"cannot be reached: {reason}")
        return partial.result()

    async def _post(
        self,
        checked: CheckedUrl,
        headers: Mapping[str, str],
        body: bytes,
        partial: _PartialResponse,
    ) -> None:
        """Posts to up to three addresses until one connects; fills `partial`, or raises."""
        *others, last = checked.addresses[:_MAX_ADDRESSES]
        for address in others:
            try:
                await self._post_to(address, checked, headers, body, partial)
            except httpx2.ConnectError:
                continue
            else:
                return
        await self._post_to(last, checked, headers, body, partial)

    async def _post_to(
        self,
        address: Address,
        checked: CheckedUrl,
        headers: Mapping[str, str],
        body: bytes,
        partial: _PartialResponse,
    ) -> None:
        """Posts to one address and reads the response into `partial`."""
        target = checked.target
        host = f"[{address}]" if isinstance(address, IPv6Address) else str(address)
        request = httpx2.Request(
            "POST",
            f"{target.scheme}://{host}:{target.port}/",
            headers={
                "host": target.authority,
                "content-type": "application/json",
                "user-agent": "Tenuto-Webhooks/1",
                "accept-encoding": "identity",
                "connection": "close",
                **headers,
            },
            content=body,
            # The connection goes to the address; the certificate must match the name.
            extensions={"sni_hostname": target.host, "target": target.path.encode()},
        )
        # A transport has no redirects, cookies and proxies. It is not reused: two names may share
        # an address, but must not share a connection.
        async with httpx2.AsyncHTTPTransport(verify=self._tls or ssl_context()) as transport:
            response = await transport.handle_async_request(request)
            partial.status = response.status_code
            try:
                await _read_body(response, partial)
            finally:
                await response.aclose()


async def _read_body(response: httpx2.Response, partial: _PartialResponse) -> None:
    """Reads up to 64 KiB of the response; appends its beginning to `partial.body`."""
    size = 0
    async for part in response.aiter_raw():
        size += len(part)
        if len(partial.body) < 4 * MAX_RESPONSE_TEXT:
            partial.body += part[: 4 * MAX_RESPONSE_TEXT]
        if size >= MAX_READ:
            return
