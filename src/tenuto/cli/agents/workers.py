"""`orchestrate worker list` and `coordinator status`, `recover`, `logs`."""

from typing import TYPE_CHECKING

import click

from tenuto.cli.base import GlobalOptions, command
from tenuto.cli.connection import call_client, call_engine

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from tenuto.client.accounts import CoordinatorStatus
    from tenuto.client.client import AsyncClient
    from tenuto.client.remote.engine import AnyEngine
    from tenuto.engine.views import WorkerView


@command("list", "orchestrate worker list", "orchestrate worker list --json")
@click.pass_obj
def worker_list(options: GlobalOptions) -> None:
    """List the workers that sent a heartbeat recently."""
    from tenuto.cli.render import format_duration, print_json, print_table

    async def read_workers(engine: "AnyEngine") -> "tuple[Sequence[WorkerView], datetime]":
        return await engine.workers(), engine.clock.now()

    workers, now = call_engine(options, read_workers)
    if options.json:
        print_json({"workers": workers})
        return
    cells = [
        [
            worker.id,
            worker.status,
            f"{worker.running}/{worker.slots}",
            format_duration(now - worker.last_heartbeat),
            ", ".join(worker.agents),
        ]
        for worker in workers
    ]
    print_table(["ID", "STATUS", "BUSY", "SEEN", "AGENTS"], cells, wide="AGENTS")


@command("status", "orchestrate coordinator status", "orchestrate coordinator status --json")
@click.pass_obj
def coordinator_status(options: GlobalOptions) -> None:
    """Show the leading coordinator and the number of tasks in each status."""
    from tenuto.cli.render import format_time, print_fields, print_json

    async def read_status(client: "AsyncClient") -> "tuple[CoordinatorStatus, dict[str, int]]":
        return await client.coordinator.status(), await client.engine.counts()

    status, counts = call_client(options, read_status)
    if options.json:
        print_json(
            {
                "active": status.active,
                "holder": status.instance_id,
                "epoch": status.epoch if status.instance_id else None,
                "since": status.since,
                "until": status.until,
                "cycles": status.cycle_count,
                "lastCycle": status.last_cycle,
                "standby": status.standby,
                "tasks": counts,
            }
        )
        return
    leader = status.instance_id if status.active else "none; `orchestrate up` starts one"
    cycle = status.last_cycle
    print_fields(
        [
            ("leader", leader),
            ("epoch", str(status.epoch) if status.instance_id else None),
            ("since", format_time(status.since)),
            ("cycles", str(status.cycle_count) if status.instance_id else None),
            ("last cycle", format_time(status.last_heartbeat)),
            ("cycle time", f"{cycle.seconds:.3f} s" if cycle else None),
            ("work done", _format_counts(cycle.counts) if cycle else None),
            ("error", cycle.error if cycle else None),
            ("standby", ", ".join(status.standby) or None),
            *((name, str(n)) for name, n in counts.items() if n),
        ]
    )


def _format_counts(counts: dict[str, int]) -> str:
    """Formats the counts above zero; `nothing` if there are none."""
    return ", ".join(f"{n} {name}" for name, n in counts.items() if n) or "nothing"


_WORKSPACE = click.option("--workspace", metavar="ID", help="Workspace id; default: your own.")


@command(
    "recover",
    "orchestrate coordinator recover",
    "orchestrate coordinator recover --workspace 019b0000-0000-7000-8000-000000000000 --json",
)
@_WORKSPACE
@click.pass_obj
def coordinator_recover(options: GlobalOptions, workspace: str | None) -> None:
    """Expire leases and handle due timers now instead of at the next tick.

    A server handles one workspace, by default your own. Directly on a database, all workspaces are
    handled.
    """
    from tenuto.cli.render import print_json
    from tenuto.client.target import parse_workspace_id

    workspace_id = parse_workspace_id(workspace)
    result = call_client(options, lambda client: client.coordinator.recover(workspace_id))
    if options.json:
        print_json(result)
        return
    print(
        f"{result.expired} expired leases, {result.promoted} due timers, {result.flowed} flow steps"
    )


@command(
    "logs",
    "orchestrate coordinator logs --level ERROR",
    "orchestrate coordinator logs --level INFO --json",
)
@_WORKSPACE
@click.option("--level", default="WARN", show_default=True, help="Minimum level.")
@click.option(
    "--limit", type=click.IntRange(1, 1000), default=100, show_default=True, help="Maximum number."
)
@click.pass_obj
def coordinator_logs(options: GlobalOptions, level: str, limit: int, workspace: str | None) -> None:
    """Print the newest events of all tasks and coordinators, from the minimum level up."""
    from tenuto.cli.render import print_json
    from tenuto.cli.tasks.follow import format_log_line
    from tenuto.client.target import parse_workspace_id

    workspace_id = parse_workspace_id(workspace)
    lines = call_client(options, lambda client: client.coordinator.logs(level, limit, workspace_id))
    if options.json:
        print_json({"logs": lines})
        return
    for line in lines:
        print(format_log_line(line))
