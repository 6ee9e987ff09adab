"""The registry of worker processes: heartbeats, shutdown reports and drain requests."""

from collections.abc import Sequence
from uuid import UUID

import msgspec

from tenuto.engine.core import Core
from tenuto.engine.tasks.report import WorkerInfo
from tenuto.model import bounds
from tenuto.model.agents.lifecycle import STALE_AFTER_S
from tenuto.model.errors import NotFound
from tenuto.store.protocol import Row, Script, Statement


async def record_heartbeat(
    core: Core, workspace: UUID, worker: WorkerInfo, registered_by: UUID | None
) -> bool:
    """Stores a heartbeat of a worker and its agents, or its shutdown; true if asked to drain.

    `registered_by` is the agent whose token is used; `None` for other tokens. Raises `NotFound`
    if that agent did not register the worker.
    """
    for text in (worker.worker, worker.host, worker.status, *worker.agents):
        bounds.check_text("worker", text, bounds.MAX_TITLE)
    for field, number in (("pid", worker.pid), ("slots", worker.slots)):
        bounds.check_number(field, number, 0, bounds.MAX_COUNT)
    params = {
        "id": worker.worker,
        "workspace": workspace,
        "host": worker.host,
        "pid": worker.pid,
        "agents": msgspec.json.encode(worker.agents).decode(),
        "slots": worker.slots,
        "status": worker.status,
        "now": core.now(),
        "names": worker.agents,
        "stale_s": STALE_AFTER_S,
        "registered_by": registered_by,
    }

    def script() -> Script[bool]:
        rows = yield Statement("worker_heartbeat", params)
        if not rows:
            raise NotFound(f"no worker {worker.worker!r}")
        return rows[0]["drain_requested_at"] is not None

    return await core.store.transact_one(script)


async def drain(core: Core, workspace: UUID, worker: str) -> None:
    """Asks a live worker (else `NotFound`) to claim no more, end or release its tasks, and exit."""
    bounds.check_text("worker", worker, bounds.MAX_TITLE, empty=False)
    params = {"workspace": workspace, "id": worker, "now": core.now()}

    def script() -> Script[Sequence[Row]]:
        rows: Sequence[Row] = yield Statement("worker_drain", params)
        return rows

    if not await core.store.transact_one(script):
        raise NotFound(f"no live worker {worker!r}")
    core.wakeups.notify({f"worker:{worker}"})
