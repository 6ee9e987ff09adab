"""Response objects for tokens, members and workspaces."""

from datetime import datetime
from uuid import UUID

import msgspec

from tenuto.model.limits.quota import Quota


class NewTokenView(msgspec.Struct, frozen=True, rename="camel"):
    """A new token, with its text, which is shown once."""

    id: UUID
    token: str
    expires_at: datetime | None


class LoginToken(NewTokenView, frozen=True, rename="camel"):
    """A new login token, shown once; `workspace_id` is the workspace given at login."""

    workspace_id: UUID | None = None


class TokenView(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A stored token, without its text."""

    id: UUID
    name: str
    role: str
    effective_role: str | None = None
    """The role it has now; `None` if its user is no longer a member."""
    scopes: list[str]
    agent_id: UUID | None
    created_by: str | None
    created_by_token: UUID | None = None
    """The token it was created with; if that one is revoked, this one is revoked too."""
    below: int = 0
    """Tokens created with it, directly or indirectly; they are revoked together with it."""
    created_at: datetime
    expires_at: datetime | None


class CallerView(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The identity and the rights of the caller."""

    actor: str
    workspace_id: UUID
    role: str
    scopes: list[str]
    agent_id: UUID | None
    user_id: UUID | None


class WorkspaceView(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A workspace; `role` is the caller's role in it."""

    id: UUID
    name: str
    role: str | None
    quota: Quota
    created_at: datetime


class NewWorkspace(msgspec.Struct, frozen=True):
    """A new workspace. `token` is its first owner's, shown once, if the owner is not a user."""

    workspace: WorkspaceView
    token: str | None


class MemberView(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A user who is a member of the workspace."""

    id: UUID
    name: str
    role: str
    created_at: datetime
    disabled: bool
