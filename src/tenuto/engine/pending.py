"""A workspace's quota of tasks that wait to run, held where the database counts them."""

from uuid import UUID

from tenuto.model.errors import TooMany
from tenuto.model.quota import quota_of
from tenuto.store.protocol import Script, Statement

AGAIN_S = 5.0
"""Seconds after which whoever was refused may find room."""


def check_pending(workspace: UUID, quota: str | None) -> Script[None]:
    """Raise `TooMany` if more tasks wait than the quota, as its row has it, allows.

    The caller has made the task already: with an error its transaction leaves nothing. Whoever
    makes tasks at the same time waits for the workspace's row, so the last counts them all.
    """
    if quota_of(quota).pending is None:
        return
    rows = yield Statement("workspace_lock", {"workspace": workspace})
    most = quota_of(rows[0]["quota"] if rows else None).pending
    if most is None:
        return
    # A statement of its own: it must see what the last holder of the lock made.
    params = {"workspace": workspace, "most": most + 1}
    load = (yield Statement("workspace_pending", params))[0]["load"]
    if load > most:
        raise TooMany(
            f"the workspace may have {most:,} tasks waiting to run",
            "quota_exceeded",
            retry_after=AGAIN_S,
        )
