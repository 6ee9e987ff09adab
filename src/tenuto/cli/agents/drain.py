"""`orchestrate worker drain`: let workers finish and end."""

from typing import TYPE_CHECKING

import click

from tenuto.cli.base import Globals, command
from tenuto.cli.connection import call

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tenuto.client.remote.engine import AnyEngine
    from tenuto.engine.views import WorkerView

LOOK_S = 1.0
_ALIVE = ("RUNNING", "DRAINING")


@command(
    "drain",
    "orchestrate worker drain build-3:4711:0190c1",
    "orchestrate worker drain --host build-3 --wait",
)
@click.argument("worker", required=False, metavar="[ID]")
@click.option("--host", metavar="H", help="All workers of this host.")
@click.option("--wait", is_flag=True, help="Return when they have ended.")
@click.pass_obj
def worker_drain(given: Globals, worker: str | None, host: str | None, wait: bool) -> None:
    """Ask workers to take no more tasks, finish or give back what they run, and end.

    A worker is named by its id or the beginning of it. It hears of it with its next heartbeat.
    """
    from tenuto.cli.output import tell_list

    if (worker is None) == (host is None):
        raise click.UsageError("name a worker by its id, or a host with --host")

    async def order(engine: "AnyEngine") -> "Sequence[WorkerView]":
        chosen = _chosen(await engine.workers(), worker, host)
        for each in chosen:
            await engine.drain_worker(each)
        while True:
            found = [each for each in await engine.workers() if each.id in chosen]
            if not wait or not any(each.status in _ALIVE for each in found):
                return found
            await engine.clock.sleep(LOOK_S)

    columns = {
        "ID": lambda each: each.id,
        "STATUS": lambda each: each.status,
        "BUSY": lambda each: f"{each.running}/{each.slots}",
        "ASKED": lambda each: each.drain_requested_at,
    }
    tell_list(given, "workers", call(given, order), columns, wide="ID")


def _chosen(workers: "Sequence[WorkerView]", worker: str | None, host: str | None) -> set[str]:
    """The living workers that are meant; an id may be cut short where that names one alone."""
    from tenuto.model.errors import Invalid, NotFound

    living = [each for each in workers if each.status in _ALIVE]
    if host is not None:
        found = {each.id for each in living if each.host == host}
    else:
        named = worker or ""
        found = {each.id for each in living if each.id == named} or {
            each.id for each in living if each.id.startswith(named)
        }
        if len(found) > 1:
            raise Invalid(f"{len(found)} workers begin with {named!r}; tell more of the id")
    if not found:
        raise NotFound(f"no worker {worker or 'of host ' + str(host)!r} is at work")
    return found
