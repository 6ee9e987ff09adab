"""`orchestrate worker drain`: lets workers finish their tasks and stop."""

from typing import TYPE_CHECKING

import click

from tenuto.cli.base import GlobalOptions, command
from tenuto.cli.connection import call_engine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tenuto.client.remote.engine import AnyEngine
    from tenuto.engine.views import WorkerView

POLL_S = 1.0
_ALIVE = ("RUNNING", "DRAINING")


@command(
    "drain",
    "orchestrate worker drain build-3:4711:0190c1",
    "orchestrate worker drain --host build-3 --wait",
)
@click.argument("worker", required=False, metavar="[ID]")
@click.option("--host", metavar="H", help="All workers of this host.")
@click.option("--wait", is_flag=True, help="Wait until they have stopped.")
@click.pass_obj
def worker_drain(options: GlobalOptions, worker: str | None, host: str | None, wait: bool) -> None:
    """Ask workers to claim no more tasks, finish or release their running tasks, and stop.

    A worker is named by its id or the first characters of it. It gets the request with its next
    heartbeat.
    """
    from tenuto.cli.output import Columns, columns, print_list

    if (worker is None) == (host is None):
        raise click.UsageError("give either a worker id or --host")

    async def drain(engine: "AnyEngine") -> "Sequence[WorkerView]":
        worker_ids = _select_alive(await engine.workers(), worker, host)
        for worker_id in worker_ids:
            await engine.drain_worker(worker_id)
        while True:
            selected = [view for view in await engine.workers() if view.id in worker_ids]
            if not wait or not any(view.status in _ALIVE for view in selected):
                return selected
            await engine.clock.sleep(POLL_S)

    headings: Columns = {
        **columns("ID, STATUS"),
        "BUSY": lambda worker: f"{worker.running}/{worker.slots}",
        **columns("REQUESTED: drain_requested_at"),
    }
    print_list(options, "workers", call_engine(options, drain), headings, wide="ID")


def _select_alive(
    workers: "Sequence[WorkerView]", worker: str | None, host: str | None
) -> set[str]:
    """Returns the ids of live workers on `host`, or of the one whose id begins with `worker`.

    Raises `NotFound` if there is none, `Invalid` if several ids begin so.
    """
    from tenuto.model.errors import Invalid, NotFound

    alive = [view for view in workers if view.status in _ALIVE]
    if host is not None:
        selected = {view.id for view in alive if view.host == host}
    else:
        prefix = worker or ""
        selected = {view.id for view in alive if view.id == prefix} or {
            view.id for view in alive if view.id.startswith(prefix)
        }
        if len(selected) > 1:
            raise Invalid(f"{len(selected)} worker ids begin with {prefix!r}; give more characters")
    if not selected:
        raise NotFound(f"no running worker {worker or 'on host ' + str(host)!r}")
    return selected
