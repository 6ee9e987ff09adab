"""Tokens of attempts: signed JWTs that hold the fence of one attempt.

Only the store knows whether the attempt still owns its task: every write with such a token presents
its fence. The token itself expires after 24 hours, and each agent heartbeat returns a new one.
"""

from datetime import datetime, timedelta
from typing import Annotated, Any
from uuid import UUID

import jwt
import msgspec

from tenuto.clock import Clock
from tenuto.encryption_keys import KeyRing
from tenuto.model import bounds
from tenuto.model.errors import Forbidden, Incompatible, Invalid, Unauthenticated
from tenuto.model.tasks.task import Fence
from tenuto.model.tenancy.access import Caller, Role

ISSUER = "tenuto"
AUDIENCE = "tenuto-attempt"
JWT_TYPE = "attempt+jwt"
ALGORITHM = "HS256"
PURPOSE = "attempt-token"
LIFETIME = timedelta(hours=24)


class _Claims(msgspec.Struct, frozen=True):
    """The JWT claims of an attempt token."""

    iss: str
    aud: str
    iat: int
    exp: int
    sub: UUID
    ws: UUID
    task: UUID
    att: Annotated[int, msgspec.Meta(ge=1, le=bounds.MAX_COUNT)]
    tok: Annotated[str, msgspec.Meta(pattern=r"^[!-~]{1,200}$")]


class AttemptTokens:
    """Issues and verifies attempt tokens, signed with keys derived from the key ring."""

    def __init__(self, vault: KeyRing, clock: Clock) -> None:
        self._vault = vault
        self._clock = clock

    def issue(self, agent: UUID, workspace: UUID, fence: Fence) -> tuple[str, datetime]:
        """Returns a token for the attempt and the time when it expires."""
        now = self._clock.now()
        claims = {
            "iss": ISSUER,
            "aud": AUDIENCE,
            "iat": int(now.timestamp()),
            "exp": int((now + LIFETIME).timestamp()),
            "sub": str(agent),
            "ws": str(workspace),
            "task": str(fence.task),
            "att": fence.attempt,
            "tok": fence.token,
        }
        key = self._vault.derive(PURPOSE)
        headers = {"kid": self._vault.current, "typ": JWT_TYPE}
        return jwt.encode(claims, key, algorithm=ALGORITHM, headers=headers), now + LIFETIME

    def caller_of(self, token: str, workspace: UUID | None) -> Caller:
        """Returns the token's attempt as a caller; raises `Unauthenticated` or `Forbidden`.

        Whether the attempt still owns its task is not checked. `Forbidden`: `workspace` is another
        one than the token's.
        """
        claims = self._decode(token)
        if workspace not in (None, claims.ws):
            raise Forbidden("the token is for another workspace")
        return Caller(
            workspace=claims.ws,
            role=Role.MEMBER,
            scopes=frozenset({"work"}),
            actor=f"agent:{claims.sub}",
            key=str(claims.sub),
            agent=claims.sub,
            fence=Fence(claims.task, claims.att, claims.tok),
        )

    def _decode(self, token: str) -> _Claims:
        """Returns the claims of a valid token; `Unauthenticated` for any other or expired one."""
        try:
            header = jwt.get_unverified_header(token)
            key = self._vault.derive_from(header["kid"], PURPOSE)
            if header.get("typ") != JWT_TYPE:
                raise Unauthenticated("the token is not valid")
            # Expiry is checked below, with the clock of the store.
            payload: dict[str, Any] = jwt.decode(
                token,
                key,
                algorithms=[ALGORITHM],
                audience=AUDIENCE,
                issuer=ISSUER,
                options={"verify_exp": False, "verify_iat": False, "verify_nbf": False},
            )
            claims = msgspec.convert(payload, _Claims)
        except (jwt.PyJWTError, KeyError, TypeError, ValueError, Incompatible, Invalid) as error:
            raise Unauthenticated("the token is not valid") from error
        if claims.exp <= self._clock.now().timestamp():
            raise Unauthenticated("the token has expired")
        return claims
