"""Who a PostgreSQL connection acts as, and whether row-level security holds for it.

Row-level security rests on the role and on `app.workspace`. A pooler may drop both, so that the
login's own rights count. Every new connection therefore says who it acts as before it is used.
"""

import msgspec

SYSTEM = "tenuto_system"
TENANT = "tenuto_runtime"

IDENTITY = """
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
"""The question that a connection answers with the fields of an `Identity`."""


class Identity(msgspec.Struct, frozen=True):
    """Who a connection acts as."""

    login: str
    role: str
    """Whose rights count."""
    workspace: str
    """The workspace that the connection is bound to; empty: none."""
    bypasses: bool
    """Whether row-level security does not bind the role."""
    secured: bool
    """Whether row-level security is in force on the tables for this role."""
    sees_others: bool
    """Whether a read finds workspaces that the connection is not bound to."""
    power: str
    """What lets the login step round row-level security if it leaves the role; empty: nothing."""


def mistake(found: Identity, role: str, workspace: str = "") -> str | None:
    """What is wrong with a connection that should act in this role; `None` if it is right."""
    if found.role != role:
        return (
            f"the login {found.login} acts as {found.role} instead of {role}: a pooler dropped the"
            " start-up parameters, or the login has a role of its own; connect without the pooler"
            " or set pooler=transaction"
        )
    if role == SYSTEM:
        return None
    if found.workspace != workspace:
        return (
            f"a connection for workspace {workspace or '(none)'} is bound to"
            f" {found.workspace or '(none)'}: a pooler changes app.workspace; connect without the"
            " pooler or set pooler=transaction"
        )
    if found.bypasses or not found.secured or found.sees_others:
        return (
            f"row-level security does not bind {role}: tenants could read each other's tasks; see"
            " that the role is neither superuser nor BYPASSRLS and that the policies are in force"
        )
    return None
