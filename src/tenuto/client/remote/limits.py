"""Pauses and rate limits over HTTP, with the methods of the engine."""

from collections.abc import Sequence
from datetime import datetime

import msgspec

from tenuto.client.remote.http import path_segment
from tenuto.client.remote.resource import RemoteResource
from tenuto.engine.limits.pauses import PauseView
from tenuto.engine.limits.rate_limits import RateLimitView
from tenuto.model.limits.pauses import WORKSPACE_SUBJECT, PauseKind
from tenuto.model.limits.rate_limits import RateLimit


class _GateList(msgspec.Struct):
    gates: list[PauseView]


class _RateLimitList(msgspec.Struct, rename="camel"):
    rate_limits: list[RateLimitView]


class RemotePauses(RemoteResource):
    """The pauses (gates) of the token's workspace."""

    async def list(self) -> Sequence[PauseView]:
        """Returns the active pauses by kind and subject."""
        return (await self._call(_GateList, "GET", "gates")).gates

    async def close(
        self,
        kind: PauseKind,
        subject: str = WORKSPACE_SUBJECT,
        reason: str | None = None,
        until: datetime | None = None,
    ) -> PauseView:
        """Creates or replaces a pause: matching tasks are not claimed; running ones continue."""
        body = {"kind": kind, "subject": subject, "reason": reason, "until": until}
        return await self._call(PauseView, "POST", "gates", body, repeatable=True)

    async def open(self, kind: PauseKind, subject: str = WORKSPACE_SUBJECT) -> None:
        """Removes a pause, so that workers poll at once; raises `NotFound` if there is none."""
        await self._call(type(None), "DELETE", f"gates/{kind}/{path_segment(subject)}")


class RemoteRateLimits(RemoteResource):
    """Rate limits of providers, models and accounts, shared by all workers of the workspace."""

    async def list(self) -> Sequence[RateLimitView]:
        """Returns the rate limits, ordered by name."""
        return (await self._call(_RateLimitList, "GET", "rate-limits")).rate_limits

    async def put(self, limit: RateLimit) -> RateLimitView:
        """Creates or replaces a limit and returns it; what was used under its name still counts."""
        limit.check()
        body = {
            "provider": limit.provider,
            "model": limit.model,
            "account": limit.account,
            "requestsPerMinute": limit.requests_per_minute,
            "tokensPerMinute": limit.tokens_per_minute,
        }
        return await self._call(
            RateLimitView, "PUT", f"rate-limits/{path_segment(limit.name)}", body
        )

    async def delete(self, name: str) -> None:
        """Deletes a limit, so that workers poll at once; raises `NotFound`."""
        await self._call(type(None), "DELETE", f"rate-limits/{path_segment(name)}")
