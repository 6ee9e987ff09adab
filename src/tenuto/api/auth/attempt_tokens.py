"""Tokens of attempts: a signed fence, good for one agent, task and attempt while it is current.

Whether it is current only the store knows: every write under such a token carries its fence. The
token's own end is far away and moves on with each heartbeat.
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
KIND = "attempt+jwt"
ALGORITHM = "HS256"
PURPOSE = "attempt-token"
LASTS = timedelta(hours=24)


class _Claims(msgspec.Struct, frozen=True):
    """What a token says, each claim of its one type."""

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
    """Issues and reads them, with keys of the vault's ring."""

    def __init__(self, vault: KeyRing, clock: Clock) -> None:
        self._vault = vault
        self._clock = clock

    def issue(self, agent: UUID, workspace: UUID, fence: Fence) -> tuple[str, datetime]:
        """A token for an attempt, and when it ends unless it is renewed."""
        now = self._clock.now()
        claims = {
            "iss": ISSUER,
            "aud": AUDIENCE,
            "iat": int(now.timestamp()),
            "exp": int((now + LASTS).timestamp()),
            "sub": str(agent),
            "ws": str(workspace),
            "task": str(fence.task),
            "att": fence.attempt,
            "tok": fence.token,
        }
        key = self._vault.derive(PURPOSE)
        headers = {"kid": self._vault.current, "typ": KIND}
        return jwt.encode(claims, key, algorithm=ALGORITHM, headers=headers), now + LASTS

    def caller(self, token: str, wanted: UUID | None) -> Caller:
        """The attempt that bears the token."""
        claims = self._claims(token)
        if wanted not in (None, claims.ws):
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

    def _claims(self, token: str) -> _Claims:
        try:
            header = jwt.get_unverified_header(token)
            key = self._vault.derive_from(header["kid"], PURPOSE)
            if header.get("typ") != KIND:
                raise Unauthenticated("the token is not one of ours")
            # Time is checked below, by the clock that rules in the store.
            said: dict[str, Any] = jwt.decode(
                token,
                key,
                algorithms=[ALGORITHM],
                audience=AUDIENCE,
                issuer=ISSUER,
                options={"verify_exp": False, "verify_iat": False, "verify_nbf": False},
            )
            claims = msgspec.convert(said, _Claims)
        except (jwt.PyJWTError, KeyError, TypeError, ValueError, Incompatible, Invalid) as error:
            raise Unauthenticated("the token is not one of ours") from error
        if claims.exp <= self._clock.now().timestamp():
            raise Unauthenticated("the token has ended")
        return claims
