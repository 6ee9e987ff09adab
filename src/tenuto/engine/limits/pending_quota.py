"""Enforces a workspace's quota of pending tasks, with the database's own count."""

from uuid import UUID

from tenuto.model.errors import TooMany
from tenuto.model.limits.quota import Quota, effective_quota, parse_quota
from tenuto.store.protocol import Script, Statement

RETRY_AFTER_S = 5.0
"""Seconds after which a refused client should try again."""


def check_pending(workspace: UUID, ceiling: Quota, new_tasks: int = 0) -> Script[None]:
    """Locks the workspace; `TooMany` if tasks waiting to run plus `new_tasks` exceed its quota.

    `ceiling` is the operator's quota for every workspace. Tasks inserted in this transaction count
    already; the error rolls them back. Concurrent transactions that create tasks wait for the lock
    on the workspace's row, so the last one counts all tasks.
    """
    rows = yield Statement("workspace_lock", {"workspace": workspace})
    limit = effective_quota(parse_quota(rows[0]["quota"] if rows else None), ceiling).pending
    if limit is None:
        return
    # A separate statement: it must see the tasks that the previous lock holder inserted.
    params = {"workspace": workspace, "most": limit + 1}
    load = (yield Statement("workspace_pending", params))[0]["load"]
    if load + new_tasks > limit:
        raise TooMany(
            f"the workspace has reached its quota of {limit:,} tasks waiting to run",
            "quota_exceeded",
            retry_after=RETRY_AFTER_S,
        )


def check_new_flow(workspace: UUID, ceiling: Quota) -> Script[None]:
    """Raises `TooMany` if a new flow, which counts as one task, exceeds the quota.

    Locks nothing if the workspace has no such quota.
    """
    rows = yield Statement("lanes_version", {"workspace": workspace})
    if rows and effective_quota(parse_quota(rows[0]["quota"]), ceiling).pending is not None:
        yield from check_pending(workspace, ceiling, 1)
