"""Pauses and rate limits over HTTP, with the methods of the engine."""

from collections.abc import Sequence
from datetime import datetime

import msgspec

from tenuto.client.remote.http import ApiRequest, ServerConnection, path_segment
from tenuto.client.remote.worker import V1
from tenuto.engine.limits.pauses import PauseView
from tenuto.engine.limits.rate_limits import RateLimitView
from tenuto.model.limits.pauses import WORKSPACE_SUBJECT, PauseKind
from tenuto.model.limits.rate_limits import RateLimit


class _GateList(msgspec.Struct):
    gates: list[PauseView]


class _RateLimitList(msgspec.Struct, rename="camel"):
    rate_limits: list[RateLimitView]


class RemotePauses:
    """The pauses (gates) of the token's workspace."""

    def __init__(self, connection: ServerConnection) -> None:
        self._connection = connection

    async def list(self) -> Sequence[PauseView]:
        """Returns the active pauses by kind and subject."""
        request = ApiRequest(method="GET", path=f"{V1}/gates", repeatable=True)
        return (await self._connection.request(_GateList, request)).gates

    async def close(
        self,
        kind: PauseKind,
        subject: str = WORKSPACE_SUBJECT,
        reason: str | None = None,
        until: datetime | None = None,
    ) -> PauseView:
        """Pauses a kind and subject: matching tasks are not claimed; running tasks continue."""
        body = {"kind": kind, "subject": subject, "reason": reason, "until": until}
        request = ApiRequest(method="POST", path=f"{V1}/gates", body=body, repeatable=True)
        return await self._connection.request(PauseView, request)

    async def open(self, kind: PauseKind, subject: str = WORKSPACE_SUBJECT) -> None:
        """Removes a pause; workers poll at once."""
        path = f"{V1}/gates/{kind}/{path_segment(subject)}"
        await self._connection.request(type(None), ApiRequest(method="DELETE", path=path))


class RemoteRateLimits:
    """Rate limits of providers, models and accounts, shared by all workers of the workspace."""

    def __init__(self, connection: ServerConnection) -> None:
        self._connection = connection

    async def list(self) -> Sequence[RateLimitView]:
        """Returns the limits by name."""
        request = ApiRequest(method="GET", path=f"{V1}/rate-limits", repeatable=True)
        return (await self._connection.request(_RateLimitList, request)).rate_limits

    async def put(self, limit: RateLimit) -> RateLimitView:
        """Creates or replaces the limit with its name; what was used already still counts."""
        limit.check()
        body = {
            "provider": limit.provider,
            "model": limit.model,
            "account": limit.account,
            "requestsPerMinute": limit.requests_per_minute,
            "tokensPerMinute": limit.tokens_per_minute,
        }
        path = f"{V1}/rate-limits/{path_segment(limit.name)}"
        request = ApiRequest(method="PUT", path=path, body=body, repeatable=True)
        return await self._connection.request(RateLimitView, request)

    async def delete(self, name: str) -> None:
        """Deletes a limit; workers poll at once."""
        path = f"{V1}/rate-limits/{path_segment(name)}"
        await self._connection.request(type(None), ApiRequest(method="DELETE", path=path))
