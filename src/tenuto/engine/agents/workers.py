"""Workers as the registry knows them: that they live, that they go, that they are to end."""

from collections.abc import Sequence
from uuid import UUID

import msgspec

from tenuto.engine.core import Core
from tenuto.engine.tasks.report import WorkerInfo
from tenuto.model import bounds
from tenuto.model.agents.lifecycle import STALE_AFTER_S
from tenuto.model.errors import NotFound
from tenuto.store.protocol import Row, Script, Statement


async def beat(core: Core, workspace: UUID, who: WorkerInfo, registered_by: UUID | None) -> bool:
    """Note that a worker lives, or that it is going; answers whether it is asked to end.

    `registered_by` is the agent whose own token says so: `NotFound` for a worker of others.
    """
    for text in (who.worker, who.host, who.status, *who.agents):
        bounds.text("worker", text, bounds.MAX_TITLE)
    for field, number in (("pid", who.pid), ("slots", who.slots)):
        bounds.number(field, number, 0, bounds.MAX_COUNT)
    params = {
        "id": who.worker,
        "workspace": workspace,
        "host": who.host,
        "pid": who.pid,
        "agents": msgspec.json.encode(who.agents).decode(),
        "slots": who.slots,
        "status": who.status,
        "now": core.now(),
        "names": who.agents,
        "stale_s": STALE_AFTER_S,
        "registered_by": registered_by,
    }

    def script() -> Script[bool]:
        rows = yield Statement("worker_beat", params)
        if not rows:
            raise NotFound(f"no worker {who.worker!r}")
        return rows[0]["drain_requested_at"] is not None

    return await core.store.once(script)


async def drain(core: Core, workspace: UUID, worker: str) -> None:
    """Ask a worker to take no more tasks, finish or give back what it runs, and end."""
    bounds.text("worker", worker, bounds.MAX_TITLE, empty=False)
    params = {"workspace": workspace, "id": worker, "now": core.now()}

    def script() -> Script[Sequence[Row]]:
        rows: Sequence[Row] = yield Statement("worker_drain", params)
        return rows

    if not await core.store.once(script):
        raise NotFound(f"no worker {worker!r} is at work")
    core.wakeups.announce({f"worker:{worker}"})
