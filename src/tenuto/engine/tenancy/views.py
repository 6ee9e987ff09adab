"""What people and programs see of tokens, members and workspaces."""

from datetime import datetime
from uuid import UUID

import msgspec

from tenuto.model.limits.quota import Quota


class NewTokenView(msgspec.Struct, frozen=True, rename="camel"):
    """A token, shown once."""

    id: UUID
    token: str
    expires_at: datetime | None


class LoginToken(NewTokenView, frozen=True, rename="camel"):
    """A login, shown once; the workspace is the one that was named."""

    workspace_id: UUID | None = None


class TokenView(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What may be seen of a token."""

    id: UUID
    name: str
    role: str
    effective_role: str | None = None
    """What it is worth now; `None` when its user is no member any more."""
    scopes: list[str]
    agent_id: UUID | None
    created_by: str | None
    created_by_token: UUID | None = None
    """The token that it was made with, and ends with."""
    below: int = 0
    """How many tokens were made with it, and with those: they end with it."""
    created_at: datetime
    expires_at: datetime | None


class CallerView(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Who the caller is."""

    actor: str
    workspace_id: UUID
    role: str
    scopes: list[str]
    agent_id: UUID | None
    user_id: UUID | None


class WorkspaceView(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A tenant."""

    id: UUID
    name: str
    role: str | None
    quota: Quota
    created_at: datetime


class NewWorkspace(msgspec.Struct, frozen=True):
    """A tenant, and the token of its first owner where that is no user; shown once."""

    workspace: WorkspaceView
    token: str | None


class MemberView(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Somebody who belongs to the workspace."""

    id: UUID
    name: str
    role: str
    created_at: datetime
    disabled: bool
