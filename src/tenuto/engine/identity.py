"""Identity: workspaces, users, members, logins, tokens. Acts as the system, for no one tenant."""

import asyncio
import hashlib
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import msgspec

from tenuto.clock import Clock
from tenuto.model import limits
from tenuto.model.access import SCOPES, Caller, Role
from tenuto.model.errors import Conflict, Forbidden, Invalid, NotFound, Unauthenticated
from tenuto.store.protocol import Row, Rows, Script, Statement, Store

API = "tnt_"
LOGIN = "tns_"
SESSION_LASTS = timedelta(hours=12)
MIN_PASSWORD = 10
MAX_PASSWORD = 1000


class Made(msgspec.Struct, frozen=True):
    """A new token: shown once, stored nowhere."""

    id: UUID
    token: str
    expires_at: datetime | None = None


class Identity:
    """The identity family."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._decoy = ""

    @property
    def clock(self) -> Clock:
        return self._store.clock

    async def unowned(self) -> bool:
        """Whether nobody was ever given a token."""
        return not await self._store.fetch(Statement("tokens_any"))

    async def bootstrap(self, workspace: UUID, made: Made) -> bool:
        """Let the first owner's token hold, if nobody was ever given one.

        Of several processes that start at once, one gets its own.
        """
        params = _stored(made, workspace, "bootstrap", Role.OWNER, SCOPES, self.clock.now())

        def script() -> Script[bool]:
            # The row is held until the token is there for whoever looks next.
            yield Statement("workspace_lock", {"workspace": workspace})
            if (yield Statement("tokens_any")):
                return False
            yield Statement("token_make", params | {"created_by": "bootstrap"})
            return True

        return await self._store.transact(script)

    async def make_workspace(self, name: str, owner: UUID | None) -> UUID:
        """A workspace, with its first owner."""

        def settle(made: UUID, now: datetime) -> Script[None]:
            if owner is not None:
                yield _membership(made, owner, Role.OWNER, now)

        return await self._make_workspace(name, settle)

    async def make_keyed_workspace(self, name: str, created_by: str) -> tuple[UUID, Made]:
        """A workspace of no user, with the owner's token without which nobody could enter it."""
        key = self.fresh()

        def settle(made: UUID, now: datetime) -> Script[None]:
            params = _stored(key, made, "owner", Role.OWNER, SCOPES, now)
            yield Statement("token_make", params | {"created_by": created_by})

        return await self._make_workspace(name, settle), key

    async def _make_workspace(
        self, name: str, settle: Callable[[UUID, datetime], Script[None]]
    ) -> UUID:
        limits.text("name", name, limits.MAX_NAME, empty=False)
        made = self.clock.new_id()
        now = self.clock.now()

        def script() -> Script[bool]:
            if not (yield Statement("workspace_make", {"id": made, "name": name, "now": now})):
                return False
            yield from settle(made, now)
            return True

        if not await self._store.transact(script):
            raise Conflict(f"a workspace {name!r} exists already", "name_taken")
        return made

    async def workspaces(self, user: UUID | None = None, only: UUID | None = None) -> Rows:
        """All workspaces, those of a user, or one."""
        return await self._store.fetch(Statement("workspaces", {"user_id": user, "id": only}))

    async def set_quota(self, workspace: UUID, quota: Any) -> None:
        """What the workspace may use from now on."""
        encoded = limits.json_text("quota", quota)
        await self._change(
            "workspace_quota", f"no workspace {workspace}", id=workspace, quota=encoded
        )

    async def make_user(
        self, name: str, password: str, workspace: UUID | None = None, role: Role = Role.MEMBER
    ) -> UUID:
        """A user who may log in, and is a member of the workspace from the first moment."""
        limits.text("name", name, limits.MAX_NAME, empty=False)
        made, now = self.clock.new_id(), self.clock.now()
        params = {"id": made, "name": name, "password": await _hashed(password), "now": now}

        def script() -> Script[bool]:
            if not (yield Statement("user_make", params)):
                return False
            if workspace is not None:
                yield _membership(workspace, made, role, now)
            return True

        if not await self._store.transact(script):
            raise Conflict(f"a user {name!r} exists already", "name_taken")
        return made

    async def set_password(self, user: UUID, password: str) -> None:
        """Another password; every login of the user ends."""
        await self._change(
            "user_password",
            f"no user {user}",
            id=user,
            password=await _hashed(password),
            now=self.clock.now(),
        )

    async def members(self, workspace: UUID) -> Rows:
        """Who belongs to the workspace, and as what."""
        return await self._store.fetch(Statement("members", {"workspace": workspace}))

    async def put_member(self, workspace: UUID, user: UUID, role: Role) -> None:
        """Make a user a member, or change as what; the last owner stays one."""
        now = self.clock.now()

        def script() -> Script[None]:
            owners = yield Statement("owners", {"workspace": workspace})
            _keep_an_owner(owners, user, role)
            yield _membership(workspace, user, role, now)

        await self._store.transact(script)

    async def drop_member(self, workspace: UUID, user: UUID) -> None:
        """Take a user out of the workspace; the last owner stays."""

        def script() -> Script[Rows]:
            owners = yield Statement("owners", {"workspace": workspace})
            _keep_an_owner(owners, user, None)
            return (yield Statement("member_drop", {"workspace": workspace, "user_id": user}))

        if not await self._store.transact(script):
            raise NotFound(f"no member {user}")

    async def login(self, name: str, password: str) -> Made:
        """A session token for somebody who knows the password."""
        known = await self._user(name)
        stored = known["password"] if known is not None else None
        right = await self._matches(stored, password)
        if known is None or not right or known["disabled_at"] is not None:
            raise Unauthenticated("name or password is wrong", "login_refused")
        token = LOGIN + self.clock.new_token() + self.clock.new_token()
        now = self.clock.now()
        params: dict[str, Any] = {
            "id": self.clock.new_id(),
            "user_id": known["id"],
            "hash": _digest(token),
            "now": now,
            "expires_at": now + SESSION_LASTS,
        }

        def script() -> Script[None]:
            yield Statement("session_make", params)

        await self._store.once(script)
        return Made(params["id"], token, params["expires_at"])

    async def _user(self, name: str) -> Row | None:
        """The user of a name; nobody has one that cannot be stored."""
        if not limits.storable(name):
            return None
        rows = await self._store.fetch(Statement("user_by_name", {"name": name[:200]}))
        return rows[0] if rows else None

    async def logout(self, session: UUID) -> None:
        """End a login."""
        await self._change("session_end", "no such login", id=session, now=self.clock.now())

    async def make_token(
        self,
        workspace: UUID,
        name: str,
        role: Role,
        scopes: tuple[str, ...] = SCOPES,
        *,
        agent: UUID | None = None,
        user: UUID | None = None,
        created_by: str | None = None,
        expires_at: datetime | None = None,
    ) -> Made:
        """A program's key to the workspace."""
        limits.text("name", name, limits.MAX_NAME, empty=False)
        limits.instant("expires_at", expires_at)
        now = self.clock.now()
        if expires_at is not None and expires_at <= now:
            raise Invalid("expiresAt is over already", field="expiresAt")
        for scope in scopes:
            if scope not in SCOPES:
                raise Invalid(f"no scope {scope[:40]!r}; known are {', '.join(SCOPES)}")
        made = self.fresh(expires_at)
        more = {"agent": agent, "user_id": user, "created_by": created_by}
        params = _stored(made, workspace, name, role, scopes, now) | more

        def script() -> Script[None]:
            yield Statement("token_make", params)

        await self._store.once(script)
        return made

    def fresh(self, expires_at: datetime | None = None) -> Made:
        """A token that holds nowhere yet."""
        token = API + self.clock.new_token() + self.clock.new_token()
        return Made(self.clock.new_id(), token, expires_at)

    async def tokens(self, workspace: UUID) -> Rows:
        """The tokens of the workspace, without themselves."""
        return await self._store.fetch(Statement("tokens", {"workspace": workspace}))

    async def revoke_token(self, workspace: UUID, token: UUID) -> None:
        """End a token."""
        await self._change(
            "token_revoke", f"no token {token}", workspace=workspace, id=token, now=self.clock.now()
        )

    async def caller(self, token: str, wanted: UUID | None) -> Caller:
        """Who the token's bearer is, in the workspace that is wanted or else its first."""
        params = {"hash": _digest(token), "now": self.clock.now()}
        if token.startswith(API):
            rows = await self._store.fetch(Statement("token_by_hash", params))
            return _program(rows, wanted)
        if token.startswith(LOGIN):
            rows = await self._store.fetch(Statement("session_by_hash", params))
            return _person(rows, wanted)
        raise Unauthenticated("the token is not one of ours")

    async def _change(self, query: str, missing: str, **params: Any) -> None:
        def script() -> Script[Rows]:
            return (yield Statement(query, params))

        if not await self._store.transact(script):
            raise NotFound(missing)

    async def _matches(self, stored: str | None, password: str) -> bool:
        """Whether the password is right; takes as long for somebody who does not exist."""
        if not self._decoy:
            self._decoy = await _hashed("x" * MIN_PASSWORD)
        return await asyncio.to_thread(_verify, stored or self._decoy, password) and bool(stored)


def _membership(workspace: UUID, user: UUID, role: Role, now: datetime) -> Statement:
    params = {"workspace": workspace, "user_id": user, "role": role.name, "now": now}
    return Statement("member_put", params)


def _keep_an_owner(owners: Rows, user: UUID, role: Role | None) -> None:
    if role is not Role.OWNER and {row["id"] for row in owners} == {user}:
        raise Conflict("the workspace would have no owner left", "last_owner")


def _stored(
    made: Made, workspace: UUID, name: str, role: Role, scopes: tuple[str, ...], now: datetime
) -> dict[str, Any]:
    """What is stored of a token that is nobody's in particular."""
    return {
        "id": made.id,
        "workspace": workspace,
        "user_id": None,
        "name": name,
        "hash": _digest(made.token),
        "role": role.name,
        "scopes": msgspec.json.encode(sorted(set(scopes))).decode(),
        "agent": None,
        "created_by": None,
        "now": now,
        "expires_at": made.expires_at,
    }


def _digest(token: str) -> str:
    """Tokens are 256 random bits: a plain hash tells nobody anything."""
    return hashlib.sha256(token.encode("utf-8", "replace")).hexdigest()


def _program(rows: Rows, wanted: UUID | None) -> Caller:
    if not rows:
        raise Unauthenticated("the token does not hold")
    row = rows[0]
    if wanted not in (None, row["workspace"]):
        raise Forbidden("the token is for another workspace")
    return Caller(
        workspace=row["workspace"],
        role=Role[row["role"]],
        scopes=frozenset(msgspec.json.decode(row["scopes"])),
        actor=f"token:{row['name']}",
        key=str(row["id"]),
        user=row["user_id"],
        agent=row["agent"],
    )


def _person(rows: Rows, wanted: UUID | None) -> Caller:
    if not rows:
        raise Unauthenticated("the login has ended")
    own = [row for row in rows if row["workspace"] is not None]
    chosen = [row for row in own if wanted in (None, row["workspace"])]
    if not chosen:
        raise Forbidden("no such workspace of yours")
    row = chosen[0]
    return Caller(
        workspace=row["workspace"],
        role=Role[row["role"]],
        scopes=frozenset(SCOPES),
        actor=f"user:{row['name']}",
        key=str(row["id"]),
        user=row["user_id"],
        session=row["id"],
    )


async def _hashed(password: str) -> str:
    if not MIN_PASSWORD <= len(password) <= MAX_PASSWORD or not limits.storable(password):
        raise Invalid(
            f"a password has {MIN_PASSWORD} to {MAX_PASSWORD} characters", field="password"
        )
    return await asyncio.to_thread(_hash, password)


def _hash(password: str) -> str:
    from argon2 import PasswordHasher  # noqa: PLC0415  slow to load, rarely needed

    return PasswordHasher().hash(password)


def _verify(stored: str, password: str) -> bool:
    from argon2 import PasswordHasher  # noqa: PLC0415
    from argon2.exceptions import InvalidHashError, VerificationError  # noqa: PLC0415

    try:
        return PasswordHasher().verify(stored, password)
    except (VerificationError, InvalidHashError):
        return False
