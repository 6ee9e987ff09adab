"""Workspaces, users, members, logins and tokens. Acts as the system, not for one workspace."""

import hashlib
from collections.abc import Callable, Collection
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import msgspec

from tenuto.clock import Clock
from tenuto.engine.engine import DEFAULT_WORKSPACE
from tenuto.engine.lookup import require_one
from tenuto.engine.tenancy.passwords import PasswordChecker, hash_password
from tenuto.model import bounds
from tenuto.model.errors import Conflict, Forbidden, Invalid, NotFound, Unauthenticated
from tenuto.model.tenancy.access import (
    SCOPES,
    Action,
    Caller,
    Role,
    check_caller_covers,
    effective_role,
    loses_last_owner,
    quota_origin,
    token_expiry,
)
from tenuto.store.protocol import Row, Rows, Script, Statement, Store

API_PREFIX = "tnt_"
LOGIN_PREFIX = "tns_"
SESSION_LIFETIME = timedelta(hours=12)
_NOT_VALID = 'the token is unknown, expired or revoked; see "orchestrate token create"'


class NewToken(msgspec.Struct, frozen=True):
    """A new token. Its text is shown once; only a hash of it is stored."""

    id: UUID
    token: str
    expires_at: datetime | None = None
    workspace: UUID | None = None
    """The workspace given at login; `None` if none was given."""


class Identity:
    """Creates, reads and deletes workspaces, users, members, logins and tokens."""

    def __init__(self, store: Store, max_workspaces: int = 0) -> None:
        self._store = store
        self._max_workspaces = max_workspaces
        """Workspaces that can be created from one workspace; 0: no limit."""
        self._passwords = PasswordChecker()

    @property
    def clock(self) -> Clock:
        return self._store.clock

    async def has_no_tokens(self) -> bool:
        """True if no token was ever issued in this database."""
        return not await self._store.fetch(Statement("tokens_exist"))

    async def bootstrap(self, workspace: UUID, token: NewToken) -> bool:
        """Stores the first owner's token; false if a token was ever issued before.

        If several processes start at the same time, only one of them stores its token.
        """
        params = _token_row(token, workspace, "bootstrap", Role.OWNER, SCOPES, self.clock.now())

        def script() -> Script[bool]:
            # The lock is held until commit, so the next process sees the token.
            yield Statement("workspace_lock", {"workspace": workspace})
            if (yield Statement("tokens_exist")):
                return False
            yield Statement("token_insert", params | {"created_by": "bootstrap"})
            return True

        return await self._store.transact(script)

    async def create_workspace(
        self, name: str, owner: UUID | None, created_from: UUID | None = None
    ) -> UUID:
        """Creates a workspace, with `owner` if given, and returns its id; `Conflict` at the limit.

        With `created_from`, the new workspace counts against the limit of that workspace.
        """

        def add_owner(workspace: UUID, now: datetime) -> Script[None]:
            if owner is not None:
                yield _membership_statement(workspace, owner, Role.OWNER, now)

        return await self._insert_workspace(name, created_from, add_owner)

    async def create_workspace_with_token(
        self, name: str, created_by: str, created_from: UUID
    ) -> tuple[UUID, NewToken]:
        """Creates a workspace without users; returns id, owner token. `Conflict`: limit reached."""
        token = self.new_token()

        def add_owner(workspace: UUID, now: datetime) -> Script[None]:
            params = _token_row(token, workspace, "owner", Role.OWNER, SCOPES, now)
            yield Statement("token_insert", params | {"created_by": created_by})

        return await self._insert_workspace(name, created_from, add_owner), token

    async def _insert_workspace(
        self,
        name: str,
        created_from: UUID | None,
        add_owner: Callable[[UUID, datetime], Script[None]],
    ) -> UUID:
        """Inserts a workspace, runs `add_owner` in the same transaction, and returns the id."""
        bounds.check_text("name", name, bounds.MAX_NAME, empty=False)
        workspace = self.clock.new_id()
        now = self.clock.now()

        def script() -> Script[None]:
            origin = None if created_from is None else (yield from self._lock_origin(created_from))
            new = {"id": workspace, "name": name, "origin": origin, "now": now}
            yield Statement("workspace_insert", new)
            yield from add_owner(workspace, now)

        await self._store.transact(script)
        return workspace

    def _lock_origin(self, workspace: UUID) -> Script[UUID]:
        """Locks and returns the workspace whose limit counts a new one; `Conflict` if reached."""
        rows = yield Statement("workspace_origin", {"id": workspace})
        origin = quota_origin(workspace, rows[0]["origin"], DEFAULT_WORKSPACE)
        yield Statement("workspace_lock", {"workspace": origin})
        maximum = self._max_workspaces
        if maximum:
            existing: int = (yield Statement("workspace_count", {"origin": origin}))[0]["n"]
            if existing >= maximum:
                raise Conflict(
                    f"{existing:,} workspaces were created from this one, the limit is {maximum:,};"
                    " the operator sets it (setting workspaces_per_owner)",
                    "too_many_workspaces",
                )
        return origin

    async def workspaces(self, user: UUID | None = None, only: UUID | None = None) -> Rows:
        """Returns the rows of all workspaces, of a user's workspaces, or of the one `only`."""
        return await self._store.fetch(Statement("workspaces", {"user_id": user, "id": only}))

    async def set_quota(self, workspace: UUID, quota: Any) -> None:
        """Sets the workspace's quota, from now on; raises `NotFound`."""
        encoded = bounds.to_json_text("quota", quota)
        await self._execute_on_one(
            "workspace_quota", f"no workspace {workspace}", id=workspace, quota=encoded
        )

    async def create_user(
        self, name: str, password: str, workspace: UUID, role: Role = Role.MEMBER
    ) -> UUID:
        """Creates a user, a member of the workspace; returns the id. `Conflict`: name taken there.

        The name is unique in this workspace; other workspaces can have a user with the same name.
        """
        bounds.check_text("name", name, bounds.MAX_NAME, empty=False)
        user, now = self.clock.new_id(), self.clock.now()
        params = {
            "id": user,
            "name": name,
            "password": await hash_password(password),
            "workspace": workspace,
            "now": now,
        }

        def script() -> Script[bool]:
            if not (yield Statement("user_insert", params)):
                return False
            yield _membership_statement(workspace, user, role, now)
            return True

        if not await self._store.transact(script):
            text = f"the workspace already has a user {name!r}; choose another name"
            raise Conflict(text, "name_taken")
        return user

    async def change_password(self, user: UUID, password: str, new: str) -> None:
        """Changes a password and ends the user's logins; `Forbidden` if `password` is wrong."""
        rows = await self._store.fetch(Statement("user_by_id", {"id": user}))
        if not rows or not await self._passwords.is_right(rows[0]["password"], password):
            raise Forbidden("the current password is wrong")
        await self._execute_on_one(
            "user_password",
            f"no user {user}",
            id=user,
            password=await hash_password(new),
            now=self.clock.now(),
        )

    async def members(self, workspace: UUID) -> Rows:
        """Returns the rows of the workspace's members, with their roles."""
        return await self._store.fetch(Statement("members", {"workspace": workspace}))

    async def member(self, workspace: UUID, user: UUID) -> Row:
        """Returns the row of one member; raises `NotFound`."""
        params = {"workspace": workspace, "user_id": user}
        return require_one(await self._store.fetch(Statement("member", params)), "user", user)

    async def set_member_role(self, caller: Caller, user: UUID, role: Role) -> None:
        """Changes a member's role. Raises `NotFound`, `Forbidden`, or `Conflict`: last owner."""
        check_caller_covers(caller, "give", role, SCOPES)
        now = self.clock.now()

        def script() -> Script[None]:
            yield from self._lock_member(caller, "change", user)
            if role is not Role.OWNER:
                yield from _check_owner_remains(caller.workspace, user=user)
            yield _membership_statement(caller.workspace, user, role, now)

        await self._store.transact(script)

    async def remove_member(self, caller: Caller, user: UUID) -> None:
        """Removes a member, deletes a user left without workspace; `Conflict` for the last owner.

        Raises `NotFound`, or `Forbidden` if the member has a higher role than the caller.
        """

        def script() -> Script[None]:
            yield from self._lock_member(caller, "end", user)
            yield from _check_owner_remains(caller.workspace, user=user)
            yield Statement("member_delete", {"workspace": caller.workspace, "user_id": user})
            yield Statement("user_delete", {"id": user})

        await self._store.transact(script)

    def _lock_member(self, caller: Caller, action: Action, user: UUID) -> Script[None]:
        """Locks the workspace; `NotFound` if the user is no member, `Forbidden`: higher role."""
        workspace = {"workspace": caller.workspace}
        yield Statement("workspace_lock", workspace)
        rows = yield Statement("member", workspace | {"user_id": user})
        check_caller_covers(caller, action, Role[require_one(rows, "user", user)["role"]])

    async def login(self, name: str, password: str, workspace: str | None = None) -> NewToken:
        """Returns a new session token; raises `Unauthenticated` if name or password is wrong.

        Without a workspace, the name is looked up in the first workspace. Every refusal has the
        same text and takes the same work, and does not depend on data of other workspaces.
        """
        user = await self._find_user(name, workspace)
        stored = user["password"] if user is not None else None
        is_right = await self._passwords.is_right(stored, password)
        if user is None or not is_right or user["disabled_at"] is not None:
            raise Unauthenticated("name or password is wrong", "login_refused")
        token = LOGIN_PREFIX + self.clock.new_token() + self.clock.new_token()
        now = self.clock.now()
        params: dict[str, Any] = {
            "id": self.clock.new_id(),
            "user_id": user["id"],
            "hash": _token_hash(token),
            "now": now,
            "expires_at": now + SESSION_LIFETIME,
        }

        def script() -> Script[None]:
            yield Statement("session_insert", params)

        await self._store.transact_one(script)
        given_workspace = None if workspace is None else user["workspace"]
        return NewToken(params["id"], token, params["expires_at"], given_workspace)

    async def _find_user(self, name: str, workspace: str | None) -> Row | None:
        """Returns the user's row, or `None`; a name that cannot be stored matches no user."""
        if not bounds.is_storable(name) or not bounds.is_storable(workspace or ""):
            return None
        params = {"name": name[:200], "first": DEFAULT_WORKSPACE}
        statement = Statement("user_by_name", params)
        if workspace is not None:
            statement = Statement("user_in_workspace", params | _workspace_param(workspace))
        rows = await self._store.fetch(statement)
        return rows[0] if rows else None

    async def logout(self, session: UUID) -> None:
        """Ends a login session; raises `NotFound` if it has ended already."""
        missing = "the login session does not exist or has ended"
        await self._execute_on_one("session_end", missing, id=session, now=self.clock.now())

    async def create_token(
        self,
        workspace: UUID,
        name: str,
        role: Role,
        scopes: tuple[str, ...] = SCOPES,
        *,
        agent: UUID | None = None,
        creator: Caller | None = None,
        expires_at: datetime | None = None,
    ) -> NewToken:
        """Creates and returns a token; `Forbidden` if it has more rights than its creator.

        It expires with the creator's at the latest. Raises `Invalid` for an unknown scope or a past
        time.
        """
        bounds.check_text("name", name, bounds.MAX_NAME, empty=False)
        bounds.check_instant("expires_at", expires_at)
        now = self.clock.now()
        if expires_at is not None and expires_at <= now:
            raise Invalid("expiresAt is in the past", field="expiresAt")
        for scope in scopes:
            if scope not in SCOPES:
                raise Invalid(f"unknown scope {scope[:40]!r}; scopes are {', '.join(SCOPES)}")
        creator_fields: dict[str, Any] = {"agent": agent}
        if creator is not None:
            check_caller_covers(creator, "give", role, scopes)
            expires_at = token_expiry(expires_at, creator.expires_at)
            creator_fields |= {
                "user_id": creator.user,
                "created_by": creator.actor,
                "made_by": creator.token,
            }
        token = self.new_token(expires_at)
        params = _token_row(token, workspace, name, role, scopes, now) | creator_fields

        def script() -> Script[None]:
            # If the creator's token is revoked at the same time, either the revocation sees the new
            # token, or the new token is refused.
            yield Statement("workspace_lock", {"workspace": workspace})
            if params["made_by"] is not None:
                creator_token = {"workspace": workspace, "id": params["made_by"], "now": now}
                if not (yield Statement("token_if_valid", creator_token)):
                    raise Unauthenticated(_NOT_VALID)
            yield Statement("token_insert", params)

        await self._store.transact(script)
        return token

    def new_token(self, expires_at: datetime | None = None) -> NewToken:
        """Returns a new token that is not stored yet, so it is not valid yet."""
        token = API_PREFIX + self.clock.new_token() + self.clock.new_token()
        return NewToken(self.clock.new_id(), token, expires_at)

    async def tokens(self, workspace: UUID) -> Rows:
        """Returns the newest 1,000 tokens of the workspace, not revoked, without their texts."""
        return await self._store.fetch(Statement("tokens", {"workspace": workspace}))

    async def revoke_token(self, caller: Caller, token: UUID) -> None:
        """Revokes a token and all below it; `NotFound`, `Forbidden`, `Conflict` (last owner)."""
        workspace = {"workspace": caller.workspace}
        now = self.clock.now()

        def script() -> Script[None]:
            yield Statement("workspace_lock", workspace)
            rows = yield Statement("token_tree", workspace | {"id": token})
            target = next((row for row in rows if row["id"] == token), None)
            if target is None:
                raise NotFound(f"no token {token}")
            if (role := current_role_of(target)) is not None:
                check_caller_covers(caller, "end", role)
            ids = [row["id"] for row in rows]
            yield from _check_owner_remains(caller.workspace, ended_tokens=ids)
            yield Statement("tokens_revoke", workspace | {"ids": ids, "now": now})

        await self._store.transact(script)

    async def authenticate(self, token: str, requested: UUID | None) -> Caller:
        """Returns the caller that the token belongs to, in the requested or its first workspace.

        Raises `Unauthenticated` for an invalid token, `Forbidden` for another workspace.
        """
        params = {"hash": _token_hash(token), "now": self.clock.now()}
        if token.startswith(API_PREFIX):
            rows = await self._store.fetch(Statement("token_by_hash", params))
            return _token_caller(rows, requested)
        if token.startswith(LOGIN_PREFIX):
            rows = await self._store.fetch(Statement("session_by_hash", params))
            return _login_caller(rows, requested)
        raise Unauthenticated("the token has an invalid format")

    async def _execute_on_one(self, query: str, missing: str, **params: Any) -> None:
        """Executes a query that changes one row; raises `NotFound` (text: `missing`) if none."""

        def script() -> Script[Rows]:
            return (yield Statement(query, params))

        if not await self._store.transact(script):
            raise NotFound(missing)


def _membership_statement(workspace: UUID, user: UUID, role: Role, now: datetime) -> Statement:
    """Returns the statement that adds a member, or changes the role of one."""
    params = {"workspace": workspace, "user_id": user, "role": role.name, "now": now}
    return Statement("member_put", params)


def _check_owner_remains(
    workspace: UUID, *, user: UUID | None = None, ended_tokens: Collection[UUID] = ()
) -> Script[None]:
    """Raises `Conflict` (`last_owner`) if no owner remains without this user or these tokens.

    The caller has locked the workspace's row. So if two calls remove the last two owners at the
    same time, one of them is refused.
    """
    owners = yield Statement("owners", {"workspace": workspace})
    tokens = yield Statement("owner_tokens", {"workspace": workspace})
    owner_token_ids = [row["id"] for row in tokens if "admin" in msgspec.json.decode(row["scopes"])]
    if loses_last_owner(
        [row["id"] for row in owners], owner_token_ids, demoted_user=user, ended_tokens=ended_tokens
    ):
        raise Conflict(
            "the workspace would have no owner left: neither a user with the role OWNER, nor an"
            " OWNER token that never expires; create another one first",
            "last_owner",
        )


def current_role_of(row: Row) -> Role | None:
    """Returns the effective role of a token's row; `None` if the token is not valid."""
    current_role = None if row["present"] is None else Role[row["present"]]
    is_disabled = row["disabled_at"] is not None
    return effective_role(Role[row["role"]], row["user_id"], current_role, disabled=is_disabled)


def _workspace_param(text: str) -> dict[str, Any]:
    """Returns the query parameter that selects a workspace by its id or name."""
    try:
        return {"id": UUID(text)}
    except ValueError:
        return {"called": text[:200]}


def _token_row(
    token: NewToken, workspace: UUID, name: str, role: Role, scopes: tuple[str, ...], now: datetime
) -> dict[str, Any]:
    """Returns the row of a token without user and agent; it has the token's hash, not its text."""
    return {
        "id": token.id,
        "workspace": workspace,
        "user_id": None,
        "name": name,
        "hash": _token_hash(token.token),
        "role": role.name,
        "scopes": msgspec.json.encode(sorted(set(scopes))).decode(),
        "agent": None,
        "created_by": None,
        "made_by": None,
        "now": now,
        "expires_at": token.expires_at,
    }


def _token_hash(token: str) -> str:
    """Returns the SHA-256 hash of a token. A token has 256 random bits, so no salt is needed."""
    return hashlib.sha256(token.encode("utf-8", "replace")).hexdigest()


def _token_caller(rows: Rows, requested: UUID | None) -> Caller:
    """Returns the caller of a token's row; raises `Unauthenticated` or `Forbidden`."""
    if not rows or (role := current_role_of(rows[0])) is None:
        raise Unauthenticated(_NOT_VALID)
    row = rows[0]
    if requested not in (None, row["workspace"]):
        raise Forbidden(f"the token has no access to workspace {requested}")
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


def _login_caller(rows: Rows, requested: UUID | None) -> Caller:
    """Returns the caller from the user's memberships; raises `Unauthenticated` or `Forbidden`."""
    if not rows:
        raise Unauthenticated('the login has ended; log in again with "orchestrate login"')
    own = [row for row in rows if row["workspace"] is not None]
    matching = [row for row in own if requested in (None, row["workspace"])]
    if not matching:
        text = "the user is not a member of "
        text += "any workspace" if requested is None else f"workspace {requested}"
        raise Forbidden(text)
    row = matching[0]
    return Caller(
        workspace=row["workspace"],
        role=Role[row["role"]],
        scopes=frozenset(SCOPES),
        actor=f"user:{row['name']}",
        key=str(row["user_id"]),
        user=row["user_id"],
        session=row["id"],
    )
