"""`orchestrate worker list` and `coordinator status`, `recover`, `logs`: who works and repairs."""

from typing import TYPE_CHECKING

import click

from tenuto.cli.base import Globals, command
from tenuto.cli.connection import ask, call

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from tenuto.client.accounts import CoordinatorStatus
    from tenuto.client.client import AsyncClient
    from tenuto.client.remote.engine import AnyEngine
    from tenuto.engine.views import WorkerView


@command("list", "orchestrate worker list", "orchestrate worker list --json")
@click.pass_obj
def worker_list(given: Globals) -> None:
    """List the workers that were heard of lately."""
    from tenuto.cli.render import print_json, print_table, span

    async def read(engine: "AnyEngine") -> "tuple[Sequence[WorkerView], datetime]":
        return await engine.workers(), engine.clock.now()

    workers, now = call(given, read)
    if given.json:
        print_json({"workers": workers})
        return
    cells = [
        [
            each.id,
            each.status,
            f"{each.running}/{each.slots}",
            span(now - each.last_heartbeat),
            ", ".join(each.agents),
        ]
        for each in workers
    ]
    print_table(["ID", "STATUS", "BUSY", "SEEN", "AGENTS"], cells, wide="AGENTS")


@command("status", "orchestrate coordinator status", "orchestrate coordinator status --json")
@click.pass_obj
def coordinator_status(given: Globals) -> None:
    """Say which coordinator leads and how many tasks are in each status."""
    from tenuto.cli.render import moment, print_fields, print_json

    async def read(client: "AsyncClient") -> "tuple[CoordinatorStatus, dict[str, int]]":
        return await client.coordinator.status(), await client.engine.counts()

    leads, counts = ask(given, read)
    if given.json:
        print_json(
            {
                "active": leads.active,
                "holder": leads.instance_id,
                "epoch": leads.epoch if leads.instance_id else None,
                "since": leads.since,
                "until": leads.until,
                "cycles": leads.cycle_count,
                "lastCycle": leads.last_cycle,
                "standby": leads.standby,
                "tasks": counts,
            }
        )
        return
    who = leads.instance_id if leads.active else "nobody; `orchestrate up` starts one"
    cycle = leads.last_cycle
    print_fields(
        [
            ("leads", who),
            ("epoch", str(leads.epoch) if leads.instance_id else None),
            ("since", moment(leads.since)),
            ("cycles", str(leads.cycle_count) if leads.instance_id else None),
            ("last cycle", moment(leads.last_heartbeat)),
            ("it took", f"{cycle.seconds:.3f} s" if cycle else None),
            ("it did", _told(cycle.counts) if cycle else None),
            ("it failed", cycle.error if cycle else None),
            ("stand by", ", ".join(leads.standby) or None),
            *((name, str(n)) for name, n in counts.items() if n),
        ]
    )


def _told(counts: dict[str, int]) -> str:
    return ", ".join(f"{n} {name}" for name, n in counts.items() if n) or "nothing"


_WORKSPACE = click.option("--workspace", metavar="ID", help="Of this workspace, not of your own.")


@command(
    "recover",
    "orchestrate coordinator recover",
    "orchestrate coordinator recover --workspace 019b0000-0000-7000-8000-000000000000 --json",
)
@_WORKSPACE
@click.pass_obj
def coordinator_recover(given: Globals, workspace: str | None) -> None:
    """Look for expired leases and due timers now, not at the next tick.

    A server looks at the workspace that you ask for, by default your own; on a database itself,
    all of them are looked at.
    """
    from tenuto.cli.render import print_json
    from tenuto.client.target import as_id

    only = as_id(workspace)
    done = ask(given, lambda client: client.coordinator.recover(only))
    if given.json:
        print_json(done)
        return
    print(f"{done.expired} leases ended, {done.promoted} timers followed, {done.flowed} of flows")


@command(
    "logs",
    "orchestrate coordinator logs --level ERROR",
    "orchestrate coordinator logs --level INFO --json",
)
@_WORKSPACE
@click.option("--level", default="WARN", show_default=True, help="Only this grave or graver.")
@click.option(
    "--limit", type=click.IntRange(1, 1000), default=100, show_default=True, help="At most so many."
)
@click.pass_obj
def coordinator_logs(given: Globals, level: str, limit: int, workspace: str | None) -> None:
    """Print the newest grave events of all tasks, and of coordinators themselves."""
    from tenuto.cli.render import print_json
    from tenuto.cli.tasks.follow import log_text
    from tenuto.client.target import as_id

    only = as_id(workspace)
    lines = ask(given, lambda client: client.coordinator.logs(level, limit, only))
    if given.json:
        print_json({"logs": lines})
        return
    for line in lines:
        print(log_text(line))
