"""Gates and rate limits behind a server: the calls of the engine's own."""

from collections.abc import Sequence
from datetime import datetime

import msgspec

from tenuto.client.remote.http import ApiRequest, ServerConnection, part
from tenuto.client.remote.worker import V1
from tenuto.engine.limits.pauses import PauseView
from tenuto.engine.limits.rate_limits import RateLimitView
from tenuto.model.limits.pauses import EVERYTHING, GateKind
from tenuto.model.limits.rate_limits import RateLimit


class _Gates(msgspec.Struct):
    gates: list[PauseView]


class _Limits(msgspec.Struct, rename="camel"):
    rate_limits: list[RateLimitView]


class RemotePauses:
    """What people hold back in a token's workspace."""

    def __init__(self, link: ServerConnection) -> None:
        self._link = link

    async def list(self) -> Sequence[PauseView]:
        """What is held back now, by kind and subject."""
        ask = ApiRequest(method="GET", path=f"{V1}/gates", repeatable=True)
        return (await self._link.ask(_Gates, ask)).gates

    async def close(
        self,
        kind: GateKind,
        subject: str = EVERYTHING,
        reason: str | None = None,
        until: datetime | None = None,
    ) -> PauseView:
        """Let nobody claim what is meant, from now on; what runs goes on."""
        body = {"kind": kind, "subject": subject, "reason": reason, "until": until}
        ask = ApiRequest(method="POST", path=f"{V1}/gates", body=body, repeatable=True)
        return await self._link.ask(PauseView, ask)

    async def open(self, kind: GateKind, subject: str = EVERYTHING) -> None:
        """Let what was held back go on; workers look at once."""
        path = f"{V1}/gates/{kind}/{part(subject)}"
        await self._link.ask(type(None), ApiRequest(method="DELETE", path=path))


class RemoteRateLimits:
    """What all workers of a token's workspace share of providers, models and accounts."""

    def __init__(self, link: ServerConnection) -> None:
        self._link = link

    async def list(self) -> Sequence[RateLimitView]:
        """The limits by name."""
        ask = ApiRequest(method="GET", path=f"{V1}/rate-limits", repeatable=True)
        return (await self._link.ask(_Limits, ask)).rate_limits

    async def put(self, limit: RateLimit) -> RateLimitView:
        """Keep a limit under its name, in place of any other; what was used stays used."""
        limit.check()
        body = {
            "provider": limit.provider,
            "model": limit.model,
            "account": limit.account,
            "requestsPerMinute": limit.requests_per_minute,
            "tokensPerMinute": limit.tokens_per_minute,
        }
        path = f"{V1}/rate-limits/{part(limit.name)}"
        ask = ApiRequest(method="PUT", path=path, body=body, repeatable=True)
        return await self._link.ask(RateLimitView, ask)

    async def delete(self, name: str) -> None:
        """Forget a limit; workers look at once."""
        path = f"{V1}/rate-limits/{part(name)}"
        await self._link.ask(type(None), ApiRequest(method="DELETE", path=path))
