"""`orchestrate bench`: measures performance on the user's machine."""

import os
from typing import Any

import click

from tenuto.cli.base import GlobalOptions, command


@command(
    "bench",
    "orchestrate bench",
    "orchestrate bench --tasks 20000 --rounds 5 submit callers --json-file bench.json",
    "orchestrate bench api",
    "orchestrate bench flows --rounds 1",
    "orchestrate bench scale --rounds 1 --database postgresql://localhost/postgres",
)
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--tasks", type=click.IntRange(1), metavar="N", help="Tasks per measurement.")
@click.option(
    "--rounds", type=click.IntRange(1), metavar="N", help="Repetitions; the median counts."
)
@click.option("--json-file", metavar="FILE", help="Also write the figures to this file.")
@click.option("--only", multiple=True, metavar="NAME", help="Only this measurement; repeatable.")
@click.pass_obj
def bench(
    options: GlobalOptions, /, names: tuple[str, ...], only: tuple[str, ...], **limits: Any
) -> int:
    """Measure throughput and latency on this machine, in a temporary database.

    NAME selects measurements, like --only. SQLite is measured in a temporary file; --database
    names a PostgreSQL to measure as well.
    """
    from tenuto.bench import run
    from tenuto.cli.signals import terminate_like_ctrl_c
    from tenuto.client.target import URL, WORKSPACE

    for name in (URL, WORKSPACE):
        # The benchmark's workers must use the measured databases, not a server.
        os.environ.pop(name, None)
    with terminate_like_ctrl_c():
        return run(database=options.database, only=(*names, *only), as_json=options.json, **limits)
