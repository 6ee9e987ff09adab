"""Who may do what: roles, scopes, and the caller a request comes from."""

from enum import IntEnum
from typing import Literal
from uuid import UUID

import msgspec

from tenuto.model.task import Fence

Scope = Literal["read", "write", "work", "admin"]
SCOPES: tuple[Scope, ...] = ("read", "write", "work", "admin")
"""read: look; write: make and control tasks; work: claim and report; admin: everything else."""


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
    """What its rate is counted by."""
    user: UUID | None = None
    session: UUID | None = None
    """The login, where a person asks."""
    agent: UUID | None = None
    """The one agent that it may work as."""
    fence: Fence | None = None
    """The one attempt that it may report for."""

    def may(self, role: Role, scope: Scope) -> bool:
        """Whether the caller has at least that role, and was given that scope."""
        return self.role >= role and scope in self.scopes
