"""A workspace's quota of tasks that wait to run, held where the database counts them."""

from uuid import UUID

from tenuto.model.errors import TooMany
from tenuto.model.limits.quota import Quota, effective, quota_of
from tenuto.store.protocol import Script, Statement

AGAIN_S = 5.0
"""Seconds after which whoever was refused may find room."""


def check_pending(workspace: UUID, ceiling: Quota, coming: int = 0) -> Script[None]:
    """Raise `TooMany` if more tasks wait, with those that are coming, than the quota allows.

    What the caller has made in this transaction counts already, and goes with the error. Whoever
    makes tasks at the same time waits for the workspace's row, so the last counts them all.
    """
    rows = yield Statement("workspace_lock", {"workspace": workspace})
    most = effective(quota_of(rows[0]["quota"] if rows else None), ceiling).pending
    if most is None:
        return
    # A statement of its own: it must see what the last holder of the lock made.
    params = {"workspace": workspace, "most": most + 1}
    load = (yield Statement("workspace_pending", params))[0]["load"]
    if load + coming > most:
        raise TooMany(
            f"the workspace may have {most:,} tasks waiting to run",
            "quota_exceeded",
            retry_after=AGAIN_S,
        )


def check_flow(workspace: UUID, ceiling: Quota) -> Script[None]:
    """Raise `TooMany` if a new flow, which counts as one task, is more than the quota allows.

    A workspace without such a quota is not held.
    """
    rows = yield Statement("lanes_version", {"workspace": workspace})
    if rows and effective(quota_of(rows[0]["quota"]), ceiling).pending is not None:
        yield from check_pending(workspace, ceiling, 1)
