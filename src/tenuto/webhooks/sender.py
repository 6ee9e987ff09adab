"""One message to one URL: no redirect, no proxy, no cookie, and an end to everything."""

import asyncio
import ssl
from collections.abc import Mapping
from ipaddress import IPv6Address

import httpx2
import msgspec

from tenuto.model import bounds
from tenuto.model.errors import Invalid
from tenuto.model.webhooks import MAX_SAID
from tenuto.tls import trusted
from tenuto.webhooks.url_guard import Address, CheckedUrl, UrlGuard

DEADLINE_S = 10.0
MAX_READ = 64 * 1024
_MOST_ADDRESSES = 3
_NO_ANSWER = (httpx2.TransportError, OSError)


class SendResult(msgspec.Struct, frozen=True):
    """What came of it: the status if there was one, and why it is no success."""

    status: int | None = None
    error: str | None = None


class _PartialResponse:
    """What has arrived so far, for when time is up."""

    def __init__(self) -> None:
        self.status: int | None = None
        self.body = b""

    def answer(self) -> SendResult:
        assert self.status is not None
        if 200 <= self.status < 300:
            return SendResult(self.status)
        said = bounds.clean(self.body.decode("utf-8", "replace"), MAX_SAID)
        return SendResult(
            self.status, f"HTTP {self.status}: {said}" if said else f"HTTP {self.status}"
        )


class Sender:
    """Posts messages where the guard lets them go."""

    def __init__(
        self, guard: UrlGuard, deadline_s: float = DEADLINE_S, tls: ssl.SSLContext | None = None
    ) -> None:
        self._guard = guard
        self.deadline_s = deadline_s
        self._tls = tls

    async def post(self, url: str, headers: Mapping[str, str], body: bytes) -> SendResult:
        """Post the body; whatever the other side does is an answer, within the deadline."""
        heard = _PartialResponse()
        try:
            async with asyncio.timeout(self.deadline_s):
                checked = await self._guard.look_up(url)
                await self._post(checked, headers, body, heard)
        except Invalid as error:
            return SendResult(error=error.message)
        except TimeoutError:
            if heard.status is None:
                return SendResult(error=f"no answer within {self.deadline_s:g} s")
        except _NO_ANSWER as error:
            if heard.status is None:
                said = bounds.clean(str(error) or type(error).__name__, MAX_SAID)
                return SendResult(error=f"cannot be reached: {said}")
        return heard.answer()

    async def _post(
        self, checked: CheckedUrl, headers: Mapping[str, str], body: bytes, heard: _PartialResponse
    ) -> None:
        *others, last = checked.addresses[:_MOST_ADDRESSES]
        for address in others:
            try:
                await self._post_to(address, checked, headers, body, heard)
            except httpx2.ConnectError:
                continue
            else:
                return
        await self._post_to(last, checked, headers, body, heard)

    async def _post_to(
        self,
        address: Address,
        checked: CheckedUrl,
        headers: Mapping[str, str],
        body: bytes,
        heard: _PartialResponse,
    ) -> None:
        target = checked.target
        place = f"[{address}]" if isinstance(address, IPv6Address) else str(address)
        request = httpx2.Request(
            "POST",
            f"{target.scheme}://{place}:{target.port}/",
            headers={
                "host": target.authority,
                "content-type": "application/json",
                "user-agent": "Tenuto-Webhooks/1",
                "accept-encoding": "identity",
                "connection": "close",
                **headers,
            },
            content=body,
            # The connection goes to the address; the certificate has to be the name's.
            extensions={"sni_hostname": target.host, "target": target.path.encode()},
        )
        # Redirects, cookies and proxies are a client's; a transport has none. It is not kept: two
        # names may share an address, and must not share a connection.
        async with httpx2.AsyncHTTPTransport(verify=self._tls or trusted()) as transport:
            response = await transport.handle_async_request(request)
            heard.status = response.status_code
            try:
                await _read(response, heard)
            finally:
                await response.aclose()


async def _read(response: httpx2.Response, heard: _PartialResponse) -> None:
    """Read a part of the answer, as it is: nothing is unpacked."""
    size = 0
    async for part in response.aiter_raw():
        size += len(part)
        if len(heard.body) < 4 * MAX_SAID:
            heard.body += part[: 4 * MAX_SAID]
        if size >= MAX_READ:
            return
