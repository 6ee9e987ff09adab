"""Who bears which token, believed for a moment."""

from uuid import UUID

from tenuto.api.auth.attempt_tokens import AttemptTokens
from tenuto.engine.tenancy.accounts import Identity
from tenuto.model.errors import Unauthenticated
from tenuto.model.tenancy.access import Caller

BELIEVED_S = 1.0
"""Seconds that a token is believed without a look into the store: a revoked one dies so soon."""
REMEMBERED = 10_000
LONGEST_TOKEN = 4096


class TokenCache:
    """Who bears which token, believed for a moment."""

    def __init__(self, identity: Identity, attempts: AttemptTokens) -> None:
        self._identity = identity
        self._attempts = attempts
        self._known: dict[tuple[str, UUID | None], tuple[float, Caller]] = {}

    def forget(self) -> None:
        """Look everybody up again."""
        self._known.clear()

    async def of(self, token: str, wanted: UUID | None) -> Caller:
        """The bearer of a token; raises `Unauthenticated` unless it holds."""
        if len(token) > LONGEST_TOKEN or not token.isascii():
            raise Unauthenticated("the token is not one of ours")
        if token.count(".") == 2:
            return self._attempts.caller(token, wanted)
        now = self._identity.clock.elapsed()
        found = self._known.get((token, wanted))
        if found is not None and now - found[0] < BELIEVED_S:
            return found[1]
        caller = await self._identity.caller(token, wanted)
        if len(self._known) >= REMEMBERED:
            self._known.clear()
        self._known[token, wanted] = (now, caller)
        return caller
