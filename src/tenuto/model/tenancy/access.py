"""Permissions: roles, scopes, the caller of a request, and which rights a caller may grant."""

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
"""read: read; write: create and control tasks; work: claim and report; admin: everything else."""
Action = Literal["give", "change", "end"]
"""What a caller does with the rights of a user or token."""


class Role(IntEnum):
    """A role in a workspace; a higher role may do everything that a lower role may."""

    VIEWER = 1
    MEMBER = 2
    ADMIN = 3
    OWNER = 4


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """The user or token that a request comes from, with its rights."""

    workspace: UUID
    role: Role
    scopes: frozenset[str]
    actor: str
    """The name that the audit trail shows."""
    key: str
    """The key that counts its requests, streams and bytes: one per token, one per user."""
    user: UUID | None = None
    session: UUID | None = None
    """The login session of a user."""
    token: UUID | None = None
    """The API token; tokens that it creates are its children."""
    expires_at: datetime | None = None
    """When the token expires."""
    agent: UUID | None = None
    """The only agent that the token may work as."""
    fence: Fence | None = None
    """The only attempt that the token may report for."""

    def may(self, role: Role, scope: Scope) -> bool:
        """True if the caller has at least this role, and has this scope."""
        return self.role >= role and scope in self.scopes


def effective_role(
    token_role: Role, user: UUID | None, user_role: Role | None, *, disabled: bool
) -> Role | None:
    """Returns the role that a token has now; `None` if the token is not valid.

    A user's token has the lower one of `token_role` and `user_role`, the user's present role in the
    workspace. It is not valid if the user is no member or is disabled. A token without a user keeps
    its own role.
    """
    if user is None:
        return token_role
    if user_role is None or disabled:
        return None
    return min(token_role, user_role)


def check_caller_covers(
    caller: Caller, action: Action, role: Role, scopes: Collection[str] = frozenset()
) -> None:
    """Raises `Forbidden` if the rights exceed the caller's own.

    No caller may give, change or end rights above its own. `scopes` are the scopes to give; a user
    gets all scopes.
    """
    if role > caller.role:
        raise Forbidden(
            f"the caller has the role {caller.role.name} and cannot {action} the rights of"
            f" {role.name}; ask a user with the role {role.name}"
        )
    missing = sorted(set(scopes) - caller.scopes)
    if missing:
        raise Forbidden(
            f"the caller cannot {action} the scope {missing[0]!r}, which it does not have itself"
        )


def check_caller_permanent(caller: Caller) -> None:
    """Raises `Forbidden` if the caller is a token that expires: its grants must expire with it."""
    if caller.expires_at is not None:
        raise Forbidden(
            "a token that expires cannot create users or workspaces or change roles, because these"
            " would outlive it; log in, or use a token without expiry"
        )


def token_expiry(requested: datetime | None, issuer_expiry: datetime | None) -> datetime | None:
    """Returns when a new token expires, `None`: never; `Invalid` if later than the issuing token.

    Without a requested expiry it expires with the issuing token, if that one expires.
    """
    if issuer_expiry is None:
        return requested
    if requested is not None and requested > issuer_expiry:
        raise Invalid(
            f"expiresAt {requested.isoformat()} is after {issuer_expiry.isoformat()}, when the"
            " issuing token expires; request an earlier time",
            field="expiresAt",
        )
    return requested or issuer_expiry


def loses_last_owner(
    owners: Collection[UUID],
    tokens: Collection[UUID],
    *,
    demoted_user: UUID | None = None,
    ended_tokens: Collection[UUID] = frozenset(),
) -> bool:
    """True if the workspace has an OWNER now and would have none after the change.

    `owners` are the users with the role OWNER. `tokens` are the OWNER tokens that belong to no user
    and never expire. `demoted_user` loses the role; `ended_tokens` become invalid.
    """
    if not owners and not tokens:
        return False
    return not (set(owners) - {demoted_user}) and not (set(tokens) - set(ended_tokens))


def quota_origin(workspace: UUID, origin: UUID | None, first_workspace: UUID) -> UUID:
    """Returns the workspace whose limit counts a new workspace that is created from `workspace`.

    `origin` is the origin of `workspace`. A workspace created from `first_workspace` is a tenant of
    its own. All workspaces created from a tenant, directly or indirectly, count for the tenant.
    """
    return workspace if origin in (None, first_workspace) else origin
