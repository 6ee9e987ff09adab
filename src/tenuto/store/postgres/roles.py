"""Checks the role of a PostgreSQL connection, and that row-level security applies to it.

Row-level security depends on the role and on `app.workspace`. A pooler may drop both, so that the
login's own rights apply. So every new connection is checked before it is used.
"""

import msgspec

SYSTEM = "tenuto_system"
TENANT = "tenuto_runtime"

IDENTITY_QUERY = """
select session_user::text as login,
  current_user::text as role,
  coalesce(current_setting('app.workspace', true), '') as workspace,
  (select rolsuper or rolbypassrls from pg_roles where rolname = current_user) as bypasses,
  row_security_active('task') and row_security_active('workspace') as secured,
  exists (
    select from workspace where id::text <> coalesce(current_setting('app.workspace', true), '')
  ) as sees_others,
  case
    when (select rolsuper from pg_roles where rolname = session_user) then 'is a superuser'
    when (select rolbypassrls from pg_roles where rolname = session_user) then 'has BYPASSRLS'
    when pg_has_role(session_user, (select relowner from pg_class where oid = 'task'::regclass),
      'member') then 'owns the tables'
    else ''
  end as power
"""
"""Returns the fields of an `Identity`."""


class Identity(msgspec.Struct, frozen=True):
    """The login, role and workspace of a connection, and its rights."""

    login: str
    role: str
    """The role whose rights apply."""
    workspace: str
    """The workspace that the connection is bound to; empty: none."""
    bypasses: bool
    """True if the role bypasses row-level security."""
    secured: bool
    """True if row-level security is active on the tables for this role."""
    sees_others: bool
    """True if the connection can read workspaces that it is not bound to."""
    power: str
    """Why the login could bypass row-level security after it left the role; empty: it cannot."""


def role_error(identity: Identity, role: str, workspace: str = "") -> str | None:
    """Returns why a connection's role, workspace or row-level security is wrong; or `None`."""
    if identity.role != role:
        return (
            f"login {identity.login} acts as {identity.role} instead of {role}: a pooler dropped"
            " the start-up parameters, or the login has a role of its own; connect without the"
            " pooler or set pooler=transaction"
        )
    if role == SYSTEM:
        return None
    if identity.workspace != workspace:
        return (
            f"a connection for workspace {workspace or '(none)'} is bound to"
            f" {identity.workspace or '(none)'}: a pooler changes app.workspace; connect without"
            " the pooler or set pooler=transaction"
        )
    if identity.bypasses or not identity.secured or identity.sees_others:
        return (
            f"row-level security does not bind {role}: tenants could read each other's tasks; check"
            " that the role is neither superuser nor BYPASSRLS and that the policies are in force"
        )
    return None
