"""Named places where a test makes a process kill itself: `CRASH_AT=worker.before_complete`."""

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
_AT = os.environ.get("CRASH_AT")
assert _AT is None or _AT in POINTS, f"no crash point {_AT!r}"


def crash_point(name: str) -> None:
    """Die here, as by a power cut, when the environment says so."""
    if _AT is not None and name == _AT:
        os.kill(os.getpid(), signal.SIGKILL)
