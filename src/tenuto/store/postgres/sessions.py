"""How PostgreSQL connections and their transactions begin: settings, role and workspace.

On a connection of our own the settings are start-up parameters and cost no round trip. A pooler in
transaction mode passes none of them on: there every transaction begins with `set local`, and the
role is the login's own.
"""

from typing import Literal
from uuid import UUID

import msgspec

from tenuto.store.postgres.roles import SYSTEM

Use = Literal["read", "write"]

ANSWER_S = 15.0
"""Seconds that the server has to answer a statement: less than the default lease."""
SLOW_S = 600.0
"""The same for maintenance that reads or writes whole tables."""
MIGRATION_S = 6 * 3600.0
"""The same for a migration, which may rewrite every table."""
_SERVER_SHARE = 0.8
"""The server gives up a statement after this share, so that one who lives says so itself."""

NAMED = {"application_name": "tenuto"}
# With the server's own probes it frees the locks of a program whose machine is gone.
DIRECT = {
    **NAMED,
    "tcp_keepalives_idle": "5",
    "tcp_keepalives_interval": "2",
    "tcp_keepalives_count": "3",
    "tcp_user_timeout": "10000",
}
# The statements that write are written so that one plan is right at every size: rows are found by
# key, by place, or in order of an index. So plans are made once, and scans, which look good as long
# as a table is small, are off.
WRITE = {
    "jit": "off",
    "enable_seqscan": "off",
    "enable_mergejoin": "off",
    "plan_cache_mode": "force_generic_plan",
    "idle_in_transaction_session_timeout": "30s",
}
# Before a table is counted, a bitmap of all rows of a workspace looks good, too. Only the system
# needs bitmaps: to find what is old.
_TENANT_WRITE = {"enable_bitmapscan": "off"}
READ = {"jit": "off", "plan_cache_mode": "force_custom_plan"}


class Session(msgspec.Struct, frozen=True):
    """How the connections of one pool begin."""

    role: str
    workspace: str
    """The workspace that each connection is bound to; empty: none."""
    parameters: dict[str, str]
    """What is sent at start-up."""
    opening: str
    """What every transaction begins with; empty where start-up has said it all."""


def limit(answer_s: float) -> dict[str, str]:
    """How long the server works on a statement whose answer is waited for so long."""
    return {"statement_timeout": f"{answer_s * _SERVER_SHARE * 1000:.0f}ms"}


def direct(role: str, workspace: UUID | None, use: Use, answer_s: float) -> Session:
    """A session on a connection of our own, bound to a workspace if one is given."""
    bound = "" if workspace is None else str(workspace)
    parameters = DIRECT | _settings(role, use) | limit(answer_s) | {"role": role}
    if use == "read":
        parameters["default_transaction_read_only"] = "on"
    if bound:
        parameters["app.workspace"] = bound
    return Session(role, bound, parameters, "")


def pooled(role: str, use: Use, answer_s: float) -> Session:
    """A session through a pooler in transaction mode; the login brings the role."""
    settings = _settings(role, use) | limit(answer_s)
    if use == "read":
        settings["transaction_read_only"] = "on"
    local = (f"; set local {name} = '{value}'" for name, value in settings.items())
    return Session(role, "", NAMED, "begin" + "".join(local))


def within(opening: str, workspace: UUID) -> str:
    """The same beginning for a transaction that is one workspace's."""
    return f"{opening or 'begin'}; set local app.workspace = '{workspace}'"


def _settings(role: str, use: Use) -> dict[str, str]:
    if use == "read":
        return READ
    return WRITE if role == SYSTEM else WRITE | _TENANT_WRITE
