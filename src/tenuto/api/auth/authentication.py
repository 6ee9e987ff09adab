"""Resolves tokens to callers; results are cached for one second."""

from uuid import UUID

from tenuto.api.auth.attempt_tokens import AttemptTokens
from tenuto.engine.tenancy.accounts import Identity
from tenuto.model.errors import Unauthenticated
from tenuto.model.tenancy.access import Caller

CACHE_S = 1.0
"""Seconds that a caller is cached; a revoked token is refused after this time at the latest."""
MAX_CACHED = 10_000
MAX_TOKEN_LENGTH = 4096


class TokenCache:
    """Resolves tokens to callers, with a cache for tokens of users, programs and agents.

    Tokens of attempts are verified by their signature and are not cached.
    """

    def __init__(self, identity: Identity, attempts: AttemptTokens) -> None:
        self._identity = identity
        self._attempts = attempts
        self._cache: dict[tuple[str, UUID | None], tuple[float, Caller]] = {}

    def clear(self) -> None:
        """Empties the cache, so that each token is looked up again."""
        self._cache.clear()

    async def caller_of(self, token: str, workspace: UUID | None) -> Caller:
        """Returns the token's caller, cached for a second; raises `Unauthenticated` or `Forbidden`.

        The caller acts in the requested workspace, if one is given; `Forbidden` if the token has no
        access to it.
        """
        if len(token) > MAX_TOKEN_LENGTH or not token.isascii():
            raise Unauthenticated("the token is not valid")
        if token.count(".") == 2:
            return self._attempts.caller_of(token, workspace)
        now = self._identity.clock.elapsed()
        cached = self._cache.get((token, workspace))
        if cached is not None and now - cached[0] < CACHE_S:
            return cached[1]
        caller = await self._identity.authenticate(token, workspace)
        if len(self._cache) >= MAX_CACHED:
            self._cache.clear()
        self._cache[token, workspace] = (now, caller)
        return caller
