"""Identity: workspaces, users, members, logins, tokens. Acts as the system, for no one tenant."""

import asyncio
import hashlib
from collections.abc import Callable, Collection
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import msgspec

from tenuto.clock import Clock
from tenuto.engine.engine import DEFAULT_WORKSPACE
from tenuto.model import bounds
from tenuto.model.errors import Conflict, Forbidden, Invalid, NotFound, Unauthenticated
from tenuto.model.tenancy.access import (
    SCOPES,
    Action,
    Caller,
    Role,
    bounded_end,
    check_reach,
    effective_role,
    loses_last_owner,
    origin_of,
)
from tenuto.store.protocol import Row, Rows, Script, Statement, Store

API = "tnt_"
LOGIN = "tns_"
SESSION_LASTS = timedelta(hours=12)
PASSWORD_COST = (3, 65_536, 4)
"""Passes, KiB and lanes of argon2id (RFC 9106): the cost of one guess at a stolen hash."""
MIN_PASSWORD = 10
MAX_PASSWORD = 1000


class NewToken(msgspec.Struct, frozen=True):
    """A new token: shown once, stored nowhere."""

    id: UUID
    token: str
    expires_at: datetime | None = None
    workspace: UUID | None = None
    """The workspace that a login named."""


class Identity:
    """The identity family."""

    def __init__(self, store: Store, most_workspaces: int = 0) -> None:
        self._store = store
        self._most_workspaces = most_workspaces
        """How many workspaces may be made from one; 0: any number."""
        self._decoy = ""

    @property
    def clock(self) -> Clock:
        return self._store.clock

    async def has_no_tokens(self) -> bool:
        """Whether nobody was ever given a token."""
        return not await self._store.fetch(Statement("tokens_any"))

    async def bootstrap(self, workspace: UUID, made: NewToken) -> bool:
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

    async def make_workspace(
        self, name: str, owner: UUID | None, made_from: UUID | None = None
    ) -> UUID:
        """A workspace with its first owner, made from another one if that is named."""

        def settle(made: UUID, now: datetime) -> Script[None]:
            if owner is not None:
                yield _membership(made, owner, Role.OWNER, now)

        return await self._make_workspace(name, made_from, settle)

    async def make_keyed_workspace(
        self, name: str, created_by: str, made_from: UUID
    ) -> tuple[UUID, NewToken]:
        """A workspace of no user, with the owner's token without which nobody could enter it."""
        key = self.unsaved_token()

        def settle(made: UUID, now: datetime) -> Script[None]:
            params = _stored(key, made, "owner", Role.OWNER, SCOPES, now)
            yield Statement("token_make", params | {"created_by": created_by})

        return await self._make_workspace(name, made_from, settle), key

    async def _make_workspace(
        self,
        name: str,
        made_from: UUID | None,
        settle: Callable[[UUID, datetime], Script[None]],
    ) -> UUID:
        bounds.text("name", name, bounds.MAX_NAME, empty=False)
        made = self.clock.new_id()
        now = self.clock.now()

        def script() -> Script[None]:
            origin = None if made_from is None else (yield from self._origin(made_from))
            new = {"id": made, "name": name, "origin": origin, "now": now}
            yield Statement("workspace_make", new)
            yield from settle(made, now)

        await self._store.transact(script)
        return made

    def _origin(self, workspace: UUID) -> Script[UUID]:
        """The workspace that a new one counts for, held; `Conflict` when that made its most."""
        rows = yield Statement("workspace_origin", {"id": workspace})
        origin = origin_of(workspace, rows[0]["origin"], DEFAULT_WORKSPACE)
        yield Statement("workspace_lock", {"workspace": origin})
        most = self._most_workspaces
        if most:
            made: int = (yield Statement("workspaces_made", {"origin": origin}))[0]["n"]
            if made >= most:
                raise Conflict(
                    f"{made:,} workspaces were made from here and at most {most:,} may be;"
                    " the operator sets workspaces_per_owner",
                    "too_many_workspaces",
                )
        return origin

    async def workspaces(self, user: UUID | None = None, only: UUID | None = None) -> Rows:
        """All workspaces, those of a user, or one."""
        return await self._store.fetch(Statement("workspaces", {"user_id": user, "id": only}))

    async def set_quota(self, workspace: UUID, quota: Any) -> None:
        """What the workspace may use from now on."""
        encoded = bounds.json_text("quota", quota)
        await self._change(
            "workspace_quota", f"no workspace {workspace}", id=workspace, quota=encoded
        )

    async def make_user(
        self, name: str, password: str, workspace: UUID, role: Role = Role.MEMBER
    ) -> UUID:
        """A user who may log in, and is a member of the workspace from the first moment.

        The name is unique there; elsewhere somebody else may be called the same.
        """
        bounds.text("name", name, bounds.MAX_NAME, empty=False)
        made, now = self.clock.new_id(), self.clock.now()
        params = {
            "id": made,
            "name": name,
            "password": await _hashed(password),
            "workspace": workspace,
            "now": now,
        }

        def script() -> Script[bool]:
            if not (yield Statement("user_make", params)):
                return False
            yield _membership(workspace, made, role, now)
            return True

        if not await self._store.transact(script):
            raise Conflict(f"the workspace has a user {name!r} already", "name_taken")
        return made

    async def change_password(self, user: UUID, password: str, new: str) -> None:
        """Give a user another password; every login of the user ends.

        `Forbidden` when the present password is another.
        """
        rows = await self._store.fetch(Statement("user_by_id", {"id": user}))
        if not rows or not await self._matches(rows[0]["password"], password):
            raise Forbidden("the present password is wrong")
        await self._change(
            "user_password",
            f"no user {user}",
            id=user,
            password=await _hashed(new),
            now=self.clock.now(),
        )

    async def members(self, workspace: UUID) -> Rows:
        """Who belongs to the workspace, and as what."""
        return await self._store.fetch(Statement("members", {"workspace": workspace}))

    async def member(self, workspace: UUID, user: UUID) -> Row:
        """One of them; `NotFound` for anybody else."""
        params = {"workspace": workspace, "user_id": user}
        rows = await self._store.fetch(Statement("member", params))
        if not rows:
            raise NotFound(f"no user {user}")
        return rows[0]

    async def change_member(self, caller: Caller, user: UUID, role: Role) -> None:
        """Change as what a member belongs to the caller's workspace; an owner stays."""
        check_reach(caller, "give", role, SCOPES)
        now = self.clock.now()

        def script() -> Script[None]:
            yield from self._hold_member(caller, "change", user)
            if role is not Role.OWNER:
                yield from _keep_owner(caller.workspace, user=user)
            yield _membership(caller.workspace, user, role, now)

        await self._store.transact(script)

    async def drop_member(self, caller: Caller, user: UUID) -> None:
        """Take a user out of the caller's workspace; the last owner stays.

        A user who belongs to no workspace then is deleted.
        """

        def script() -> Script[None]:
            yield from self._hold_member(caller, "end", user)
            yield from _keep_owner(caller.workspace, user=user)
            yield Statement("member_drop", {"workspace": caller.workspace, "user_id": user})
            yield Statement("user_forget", {"id": user})

        await self._store.transact(script)

    def _hold_member(self, caller: Caller, action: Action, user: UUID) -> Script[None]:
        """Hold the workspace, and raise unless it has the member and the caller may act on it."""
        workspace = {"workspace": caller.workspace}
        yield Statement("workspace_lock", workspace)
        rows = yield Statement("member", workspace | {"user_id": user})
        if not rows:
            raise NotFound(f"no user {user}")
        check_reach(caller, action, Role[rows[0]["role"]])

    async def login(self, name: str, password: str, workspace: str | None = None) -> NewToken:
        """A session token for somebody who knows the password.

        Without a workspace the users of the first one are meant. Every refusal is the same, after
        the same work, and nothing that another tenant has decides it.
        """
        known = await self._user(name, workspace)
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
        chosen = None if workspace is None else known["workspace"]
        return NewToken(params["id"], token, params["expires_at"], chosen)

    async def _user(self, name: str, workspace: str | None) -> Row | None:
        """The user who is meant; nobody has a name that cannot be stored."""
        if not bounds.storable(name) or not bounds.storable(workspace or ""):
            return None
        named = {"name": name[:200], "first": DEFAULT_WORKSPACE}
        wanted = Statement("user_by_name", named)
        if workspace is not None:
            wanted = Statement("user_in_workspace", named | _workspace_named(workspace))
        rows = await self._store.fetch(wanted)
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
        maker: Caller | None = None,
        expires_at: datetime | None = None,
    ) -> NewToken:
        """A program's key to the workspace; one that a caller makes is never worth more than it."""
        bounds.text("name", name, bounds.MAX_NAME, empty=False)
        bounds.instant("expires_at", expires_at)
        now = self.clock.now()
        if expires_at is not None and expires_at <= now:
            raise Invalid("expiresAt is over already", field="expiresAt")
        for scope in scopes:
            if scope not in SCOPES:
                raise Invalid(f"no scope {scope[:40]!r}; known are {', '.join(SCOPES)}")
        more: dict[str, Any] = {"agent": agent}
        if maker is not None:
            check_reach(maker, "give", role, scopes)
            expires_at = bounded_end(expires_at, maker.expires_at)
            more |= {"user_id": maker.user, "created_by": maker.actor, "made_by": maker.token}
        made = self.unsaved_token(expires_at)
        params = _stored(made, workspace, name, role, scopes, now) | more

        def script() -> Script[None]:
            # Whoever revokes the maker at this moment finds the new token, or it is not made.
            yield Statement("workspace_lock", {"workspace": workspace})
            if params["made_by"] is not None:
                holds = {"workspace": workspace, "id": params["made_by"], "now": now}
                if not (yield Statement("token_holds", holds)):
                    raise Unauthenticated("the token does not hold")
            yield Statement("token_make", params)

        await self._store.transact(script)
        return made

    def unsaved_token(self, expires_at: datetime | None = None) -> NewToken:
        """A token that holds nowhere yet."""
        token = API + self.clock.new_token() + self.clock.new_token()
        return NewToken(self.clock.new_id(), token, expires_at)

    async def tokens(self, workspace: UUID) -> Rows:
        """The tokens of the workspace, without themselves."""
        return await self._store.fetch(Statement("tokens", {"workspace": workspace}))

    async def revoke_token(self, caller: Caller, token: UUID) -> None:
        """End a token of the caller's workspace and all below it; an owner stays."""
        workspace = {"workspace": caller.workspace}
        now = self.clock.now()

        def script() -> Script[None]:
            yield Statement("workspace_lock", workspace)
            rows = yield Statement("token_tree", workspace | {"id": token})
            target = next((row for row in rows if row["id"] == token), None)
            if target is None:
                raise NotFound(f"no token {token}")
            if (worth := worth_of(target)) is not None:
                check_reach(caller, "end", worth)
            ids = [row["id"] for row in rows]
            yield from _keep_owner(caller.workspace, ended=ids)
            yield Statement("tokens_revoke", workspace | {"ids": ids, "now": now})

        await self._store.transact(script)

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


def _keep_owner(
    workspace: UUID, *, user: UUID | None = None, ended: Collection[UUID] = ()
) -> Script[None]:
    """Raise `Conflict` if nobody could enter as OWNER once that user or those tokens are not.

    The caller holds the workspace's row: of two who take away the last two owners, one is refused.
    """
    owners = yield Statement("owners", {"workspace": workspace})
    tokens = yield Statement("owner_tokens", {"workspace": workspace})
    keys = [row["id"] for row in tokens if "admin" in msgspec.json.decode(row["scopes"])]
    if loses_last_owner([row["id"] for row in owners], keys, user=user, ended=ended):
        raise Conflict(
            "the workspace would have no owner left: no user who is OWNER, and no OWNER token"
            " without an end; make another one first",
            "last_owner",
        )


def worth_of(row: Row) -> Role | None:
    """The role that a token's row is worth now; `None` if it does not hold."""
    present = None if row["present"] is None else Role[row["present"]]
    disabled = row["disabled_at"] is not None
    return effective_role(Role[row["role"]], row["user_id"], present, disabled=disabled)


def _workspace_named(text: str) -> dict[str, Any]:
    """A workspace by its id, or by its name."""
    try:
        return {"id": UUID(text)}
    except ValueError:
        return {"called": text[:200]}


def _stored(
    made: NewToken, workspace: UUID, name: str, role: Role, scopes: tuple[str, ...], now: datetime
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
        "made_by": None,
        "now": now,
        "expires_at": made.expires_at,
    }


def _digest(token: str) -> str:
    """Tokens are 256 random bits: a plain hash tells nobody anything."""
    return hashlib.sha256(token.encode("utf-8", "replace")).hexdigest()


def _program(rows: Rows, wanted: UUID | None) -> Caller:
    if not rows or (role := worth_of(rows[0])) is None:
        raise Unauthenticated("the token does not hold")
    row = rows[0]
    if wanted not in (None, row["workspace"]):
        raise Forbidden("the token is for another workspace")
    return Caller(
        workspace=row["workspace"],
        role=role,
        scopes=frozenset(msgspec.json.decode(row["scopes"])),
        actor=f"token:{row['name']}",
        key=str(row["id"]),
        user=row["user_id"],
        token=row["id"],
        expires_at=row["expires_at"],
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
        key=str(row["user_id"]),
        user=row["user_id"],
        session=row["id"],
    )


async def _hashed(password: str) -> str:
    if not MIN_PASSWORD <= len(password) <= MAX_PASSWORD or not bounds.storable(password):
        raise Invalid(
            f"a password has {MIN_PASSWORD} to {MAX_PASSWORD} characters", field="password"
        )
    return await asyncio.to_thread(_hash, password)


def _hash(password: str) -> str:
    from argon2 import PasswordHasher  # noqa: PLC0415  slow to load, rarely needed

    return PasswordHasher(*PASSWORD_COST).hash(password)


def _verify(stored: str, password: str) -> bool:
    from argon2 import PasswordHasher  # noqa: PLC0415
    from argon2.exceptions import InvalidHashError, VerificationError  # noqa: PLC0415

    try:
        return PasswordHasher().verify(stored, password)
    except (VerificationError, InvalidHashError):
        return False
