"""Settings, role and workspace at the start of PostgreSQL connections and transactions.

On a direct connection the settings are start-up parameters and cost no round trip. A pooler in
transaction mode does not pass them on: there every transaction starts with `set local`, and the
role is that of the login.
"""

from typing import Literal
from uuid import UUID

import msgspec

from tenuto.store.postgres.roles import SYSTEM

Use = Literal["read", "write"]

STATEMENT_S = 15.0
"""Timeout of a statement in seconds: shorter than the default lease."""
MAINTENANCE_S = 600.0
"""Timeout of a statement that reads or writes whole tables for maintenance, in seconds."""
MIGRATION_S = 6 * 3600.0
"""Timeout of a statement of a migration, which may rewrite every table, in seconds."""
_SERVER_SHARE = 0.8
"""Share of the timeout after which the server stops a statement itself: if it is alive, it
reports the timeout before the client gives up."""

APPLICATION = {"application_name": "tenuto"}
# With keepalive the server releases the locks of a program whose machine is lost.
DIRECT_SETTINGS = {
    **APPLICATION,
    "tcp_keepalives_idle": "5",
    "tcp_keepalives_interval": "2",
    "tcp_keepalives_count": "3",
    "tcp_user_timeout": "10000",
}
# Statements that write are written so that one plan is right at every table size: rows are found by
# key, by place, or in index order. So plans are created once, and sequential scans, which look
# cheap while a table is small, are off.
WRITE_SETTINGS = {
    "jit": "off",
    "enable_seqscan": "off",
    "enable_mergejoin": "off",
    "plan_cache_mode": "force_generic_plan",
    "idle_in_transaction_session_timeout": "30s",
}
# Before a table is analyzed, a bitmap of all rows of a workspace looks cheap, too. Only the system
# needs bitmap scans: to find old rows.
_TENANT_WRITE_SETTINGS = {"enable_bitmapscan": "off"}
READ_SETTINGS = {"jit": "off", "plan_cache_mode": "force_custom_plan"}


class Session(msgspec.Struct, frozen=True):
    """The start of the connections and transactions of one pool."""

    role: str
    workspace: str
    """The workspace that each connection is bound to; empty: none."""
    parameters: dict[str, str]
    """Start-up parameters."""
    opening: str
    """Statements that start every transaction; empty if start-up parameters are enough."""


def statement_timeout(timeout_s: float) -> dict[str, str]:
    """Returns the server's setting for a statement timeout of 80% of the client's `timeout_s`."""
    return {"statement_timeout": f"{timeout_s * _SERVER_SHARE * 1000:.0f}ms"}


def direct_session(role: str, workspace: UUID | None, use: Use, timeout_s: float) -> Session:
    """Returns a session on a direct connection, bound to a workspace if one is given."""
    bound = "" if workspace is None else str(workspace)
    parameters = (
        DIRECT_SETTINGS
        | _planner_settings(role, use)
        | statement_timeout(timeout_s)
        | {"role": role}
    )
    if use == "read":
        parameters["default_transaction_read_only"] = "on"
    if bound:
        parameters["app.workspace"] = bound
    return Session(role, bound, parameters, "")


def pooled_session(role: str, use: Use, timeout_s: float) -> Session:
    """Returns a session behind a pooler: each transaction starts with its settings.

    `role` is not set there: it must be the login's own role.
    """
    settings = _planner_settings(role, use) | statement_timeout(timeout_s)
    if use == "read":
        settings["transaction_read_only"] = "on"
    local = (f"; set local {name} = '{value}'" for name, value in settings.items())
    return Session(role, "", APPLICATION, "begin" + "".join(local))


def opening_for_workspace(opening: str, workspace: UUID) -> str:
    """Returns the opening with the workspace added: statements that start a bound transaction."""
    return f"{opening or 'begin'}; set local app.workspace = '{workspace}'"


def _planner_settings(role: str, use: Use) -> dict[str, str]:
    """Returns the settings of a role's connections for reads or writes."""
    if use == "read":
        return READ_SETTINGS
    return WRITE_SETTINGS if role == SYSTEM else WRITE_SETTINGS | _TENANT_WRITE_SETTINGS
