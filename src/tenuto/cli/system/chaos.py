"""`orchestrate chaos`: faults against a deployment of its own, and what is left of it."""

import sys
from typing import TYPE_CHECKING, Any

import click

from tenuto.cli.base import Globals, command
from tenuto.cli.parse import Finite

if TYPE_CHECKING:
    from tenuto.clock import Clock


class ProgressLine:
    """Tells how far a run is: one line that changes, or a line now and then."""

    EVERY_S = 10.0

    def __init__(self, clock: "Clock") -> None:
        self._clock = clock
        self._told = -self.EVERY_S
        self._alive = sys.stderr.isatty()

    def __call__(self, text: str) -> None:
        if self._alive:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
        elif self._clock.elapsed() - self._told >= self.EVERY_S:
            self._told = self._clock.elapsed()
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._alive:
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
    type=Finite(0, 24 * 60, min_open=True),
    metavar="M",
    help="How long faults happen; 1 if nothing is said.",
)
@click.option(
    "--tasks",
    type=click.IntRange(1),
    metavar="N",
    help="Until so many tasks were taken, and every fault has happened.",
)
@click.option(
    "--faults",
    metavar="LIST",
    help="Only these: kill, stop, crash; on PostgreSQL cut, swallow; restart on a private one.",
)
@click.option(
    "--leader/--no-leader",
    default=True,
    show_default=True,
    help="Whether coordinators elect one; without, they all repair at once.",
)
@click.option(
    "--seed",
    type=int,
    default=1,
    show_default=True,
    metavar="N",
    help="Decides what strikes whom.",
)
@click.pass_obj
def chaos(given: Globals, /, faults: str | None, **options: Any) -> int:
    """Break a deployment of its own on purpose, and check that nothing was lost.

    Real workers, coordinators and clients run on a new database in a temporary folder, on SQLite
    unless --database names a PostgreSQL: `postgresql:` starts a private one, an address makes a
    database on that server for the run and drops it afterwards. Nothing of yours is touched.

    The faults: kill (SIGKILL of a process), stop (SIGSTOP past the lease, then SIGCONT: a zombie),
    crash (a process dies at a named place of the program), cut (all connections to PostgreSQL end),
    swallow (a commit succeeds, but its answer is lost), restart (the private PostgreSQL crashes and
    recovers).

    A file outside of the system notes what was acknowledged and what was executed. When faults are
    over, everything must come to an end, and the file and the database must agree. Exit code 0 only
    then, and only if every kind of fault has happened.
    """
    from tenuto.chaos.plan import ChaosPlan
    from tenuto.chaos.report import document, lines
    from tenuto.chaos.run import perform
    from tenuto.cli.render import print_json
    from tenuto.cli.signals import as_ctrl_c
    from tenuto.clock import Clock

    chosen = tuple(part.strip() for part in (faults or "").split(",") if part.strip())
    if options["minutes"] and options["tasks"]:
        raise click.UsageError("--minutes and --tasks are two ways to say when it ends")
    live = ProgressLine(Clock())
    try:
        with as_ctrl_c():
            report = perform(ChaosPlan(database=given.database, faults=chosen, **options), live)
    finally:
        live.close()
    if given.json:
        print_json(document(report))
    else:
        print("\n".join(lines(report)))
    return 0 if report.holds else 1
