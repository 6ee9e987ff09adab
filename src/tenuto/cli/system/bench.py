"""`orchestrate bench`: measurements on the user's own machine."""

import os
from typing import Any

import click

from tenuto.cli.base import Globals, command


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
@click.option("--rounds", type=click.IntRange(1), metavar="N", help="Measurements; median counts.")
@click.option("--json-file", metavar="FILE", help="Write the figures there too.")
@click.option("--only", multiple=True, metavar="NAME", help="Only this measurement; repeatable.")
@click.pass_obj
def bench(given: Globals, /, names: tuple[str, ...], only: tuple[str, ...], **options: Any) -> int:
    """Measure throughput and latency on this machine, in a database of its own.

    NAME picks measurements, as --only does. SQLite is measured in a file of its own; --database
    names a PostgreSQL to measure as well.
    """
    from tenuto.bench import run
    from tenuto.cli.signals import as_ctrl_c
    from tenuto.client.target import URL, WORKSPACE

    for name in (URL, WORKSPACE):
        # Its workers work on the databases that are measured, whatever server there is.
        os.environ.pop(name, None)
    with as_ctrl_c():
        return run(database=given.database, only=(*names, *only), as_json=given.json, **options)
