"""`orchestrate chaos`: injects faults into a test deployment and checks the result."""

import sys
from typing import TYPE_CHECKING, Any

import click

from tenuto.cli.base import GlobalOptions, command
from tenuto.cli.parse import FiniteRange

if TYPE_CHECKING:
    from tenuto.clock import Clock


class ProgressLine:
    """Prints progress to standard error: one changing line on a terminal, else a line per 10 s."""

    EVERY_S = 10.0

    def __init__(self, clock: "Clock") -> None:
        self._clock = clock
        self._printed_at = -self.EVERY_S
        self._is_terminal = sys.stderr.isatty()

    def __call__(self, text: str) -> None:
        if self._is_terminal:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
        elif self._clock.elapsed() - self._printed_at >= self.EVERY_S:
            self._printed_at = self._clock.elapsed()
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Removes the progress line from the terminal."""
        if self._is_terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


@command(
    "chaos",
    "orchestrate chaos",
    "orchestrate chaos --minutes 10 --database postgresql:",
    "orchestrate chaos --tasks 500 --faults kill,stop --no-leader",
    "orchestrate chaos --database postgresql://localhost/postgres --seed 7 --json",
)
@click.option(
    "--minutes",
    type=FiniteRange(0, 24 * 60, min_open=True),
    metavar="M",
    help="Duration of the faults in minutes; default: 1.",
)
@click.option(
    "--tasks",
    type=click.IntRange(1),
    metavar="N",
    help="Run until N tasks were acknowledged and every fault has happened.",
)
@click.option(
    "--faults",
    metavar="LIST",
    help="Only these: kill, stop, crash; PostgreSQL: also cut, swallow; private one: restart.",
)
@click.option(
    "--leader/--no-leader",
    default=True,
    show_default=True,
    help="With a leader, or with all coordinators repairing at the same time.",
)
@click.option(
    "--seed",
    type=int,
    default=1,
    show_default=True,
    metavar="N",
    help="Random seed: the same seed gives the same faults.",
)
@click.pass_obj
def chaos(options: GlobalOptions, /, faults: str | None, **plan_options: Any) -> int:
    """Inject faults into a test deployment, and check that no task was lost.

    Real workers, coordinators and clients run on a new database: SQLite in a temporary folder, or a
    PostgreSQL named by --database. `postgresql:` starts a private PostgreSQL; an address creates a
    database on that server for the run and drops it afterwards. Your own data is not touched.

    The faults: kill (SIGKILL of a process), stop (SIGSTOP past the lease, then SIGCONT: a zombie),
    crash (a process exits at a crash point in the code), cut (all PostgreSQL connections end),
    swallow (a commit succeeds, but its response is lost), restart (the private PostgreSQL crashes
    and recovers).

    A file outside the system records acknowledged tasks and executions. After the faults, every
    task must finish, and the file and the database must agree. Only then, and only if every kind of
    fault has happened, the exit code is 0.
    """
    from tenuto.chaos.plan import ChaosPlan
    from tenuto.chaos.report import format_lines, to_json
    from tenuto.chaos.run import run_plan
    from tenuto.cli.render import print_json
    from tenuto.cli.signals import terminate_like_ctrl_c
    from tenuto.clock import Clock

    fault_names = tuple(part.strip() for part in (faults or "").split(",") if part.strip())
    if plan_options["minutes"] and plan_options["tasks"]:
        raise click.UsageError("give either --minutes or --tasks, not both")
    progress = ProgressLine(Clock())
    try:
        with terminate_like_ctrl_c():
            report = run_plan(
                ChaosPlan(database=options.database, faults=fault_names, **plan_options), progress
            )
    finally:
        progress.close()
    if options.json:
        print_json(to_json(report))
    else:
        print("\n".join(format_lines(report)))
    return 0 if report.holds else 1
