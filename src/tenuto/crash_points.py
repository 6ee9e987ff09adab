"""Named places where a test can make a process kill itself: `CRASH_AT=worker.before_complete`."""

import os
import signal

POINTS = frozenset(
    {
        "worker.before_claim",
        "worker.claimed",
        "worker.before_start",
        "worker.session_spawned",
        "worker.running",
        "worker.before_heartbeat",
        "worker.heartbeat_answered",
        "worker.before_checkpoint",
        "worker.checkpoint_saved",
        "worker.before_complete",
        "worker.complete_answered",
        "worker.before_fail",
        "worker.draining",
        "worker.released",
        "coordinator.leading",
        "coordinator.expired",
        "coordinator.promoted",
        "coordinator.before_resign",
        "dispatch.claimed",
        "dispatch.spawned",
        "dispatch.begun",
        "relay.before_publish",
        "relay.published",
        "relay.moved",
        "engine.before_commit",
        "engine.committed",
        "engine.before_announce",
        "flow.before_commit",
        "flow.committed",
        "flow.before_piece",
        "webhooks.noted",
        "webhooks.taken",
        "webhooks.sent",
    }
)
_CRASH_AT = os.environ.get("CRASH_AT")
assert _CRASH_AT is None or _CRASH_AT in POINTS, f"CRASH_AT names no crash point: {_CRASH_AT!r}"


def crash_point(name: str) -> None:
    """Kills this process with SIGKILL if `CRASH_AT` has this name; simulates a power cut."""
    if _CRASH_AT is not None and name == _CRASH_AT:
        os.kill(os.getpid(), signal.SIGKILL)
