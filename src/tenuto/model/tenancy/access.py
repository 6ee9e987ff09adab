"""Who may do what: roles, scopes, the caller a request comes from, and what it reaches."""

from collections.abc import Collection
from datetime import datetime
from enum import IntEnum
from typing import Literal
from uuid import UUID

import msgspec

from tenuto.model.errors import Forbidden, Invalid
from tenuto.model.tasks.task import Fence

Scope = Literal["read", "write", "work", "admin"]
SCOPES: tuple[Scope, ...] = ("read", "write", "work", "admin")
"""read: look; write: make and control tasks; work: claim and report; admin: everything else."""
Action = Literal["give", "change", "end"]
"""What is done to somebody's rights."""


class Role(IntEnum):
    """What somebody is in a workspace; a higher one may do all that a lower one may."""

    VIEWER = 1
    MEMBER = 2
    ADMIN = 3
    OWNER = 4


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """Who a request comes from, and as what."""

    workspace: UUID
    role: Role
    scopes: frozenset[str]
    actor: str
    """The name that the audit trail shows."""
    key: str
    """What its rate, streams and bytes are counted by: a token, a user whatever the login."""
    user: UUID | None = None
    session: UUID | None = None
    """The login, where a person asks."""
    token: UUID | None = None
    """The API token, where a program asks: tokens that it makes are below it."""
    expires_at: datetime | None = None
    """When that token ends."""
    agent: UUID | None = None
    """The one agent that it may work as."""
    fence: Fence | None = None
    """The one attempt that it may report for."""

    def may(self, role: Role, scope: Scope) -> bool:
        """Whether the caller has at least that role, and was given that scope."""
        return self.role >= role and scope in self.scopes


def effective_role(
    own: Role, user: UUID | None, present: Role | None, *, disabled: bool
) -> Role | None:
    """The role that a token is worth now; `None` if it does not hold.

    A user's token is worth the lesser of its own role and the user's `present` role in the
    workspace, and nothing without membership or for a disabled user.
    """
    if user is None:
        return own
    if present is None or disabled:
        return None
    return min(own, present)


def check_reach(
    caller: Caller, action: Action, role: Role, scopes: Collection[str] = frozenset()
) -> None:
    """Raise `Forbidden` if rights are above the caller's own: nobody gives, changes or ends those.

    `scopes` are those that are given; a user is given all of them.
    """
    if role > caller.role:
        raise Forbidden(
            f"the caller is {caller.role.name} and cannot {action} the rights of {role.name};"
            f" ask somebody who is {role.name}"
        )
    beyond = sorted(set(scopes) - caller.scopes)
    if beyond:
        raise Forbidden(f"the caller has no scope {beyond[0]!r} to {action}")


def check_lasting(caller: Caller) -> None:
    """Raise `Forbidden` if the caller is a token with an end: what it may give must end with it."""
    if caller.expires_at is not None:
        raise Forbidden(
            "a token with an end makes no users and no workspaces, and changes no roles: those"
            " would last longer; use a login, or a token without an end"
        )


def bounded_end(asked: datetime | None, maker: datetime | None) -> datetime | None:
    """When a new token ends: no later than its maker, and with it if no end is asked for."""
    if maker is None:
        return asked
    if asked is not None and asked > maker:
        raise Invalid(
            f"expiresAt {asked.isoformat()} is after {maker.isoformat()}, when the token that asks"
            " ends; ask for an earlier end",
            field="expiresAt",
        )
    return asked or maker


def loses_last_owner(
    owners: Collection[UUID],
    tokens: Collection[UUID],
    *,
    user: UUID | None = None,
    ended: Collection[UUID] = frozenset(),
) -> bool:
    """True if nobody could enter as OWNER any more, though somebody can now.

    `owners` are the users who are OWNER, `tokens` the OWNER tokens that belong to no user and have
    no end. `user` will be OWNER no more, `ended` are the tokens that will not hold any more.
    """
    if not owners and not tokens:
        return False
    return not (set(owners) - {user}) and not (set(tokens) - set(ended))


def origin_of(workspace: UUID, origin: UUID | None, first: UUID) -> UUID:
    """Whose ceiling a workspace counts for that is made from `workspace`.

    One made from the `first` workspace is a tenant of its own; all that is made from a tenant, and
    from what it made, counts for the tenant.
    """
    return workspace if origin in (None, first) else origin
