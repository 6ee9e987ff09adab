"""Measures Tenuto on the user's machine, on SQLite and optionally PostgreSQL.

On a noisy machine, figures differ from hour to hour; compare figures of the same run.
`bench/` in the repository compares with other job queues by the same rules.

measures: the measurements. api, flows, scale: larger measurements. server: the API server of `api`.
noop: handlers of the workers.
"""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import msgspec

from tenuto import app
from tenuto.bench.measures import MEASURES, Bench, Figures
from tenuto.clock import Clock
from tenuto.model.errors import Invalid, Unavailable
from tenuto.settings import sqlite_path

DEFAULT_TASKS = 10_000
DEFAULT_ROUNDS = 3


def run(
    *,
    database: str | None,
    tasks: int | None,
    rounds: int | None,
    json_file: str | None,
    only: Sequence[str] = (),
    as_json: bool = False,
) -> int:
    """Measures SQLite, and PostgreSQL if given; prints and stores figures; always returns 0.

    Without `only` it makes all usual measurements; raises `Invalid` for an unknown one. Progress
    goes to standard error.
    """
    unknown = set(only) - set(MEASURES)
    if unknown:
        raise Invalid(
            f"unknown measurement {', '.join(sorted(unknown))}; use some of {', '.join(MEASURES)}"
        )
    names = [name for name in MEASURES if name in only or (not only and MEASURES[name].usual)]
    if json_file is not None:
        _check_writable(json_file)
    if database is not None:
        app.run(_check_database(database))
    stores = {"sqlite": None} | ({"postgresql": database} if database else {})
    results: dict[str, Figures] = {}
    for store, url in stores.items():
        results[store] = app.run(
            _measure_rounds(store, url, names, tasks or DEFAULT_TASKS, rounds or DEFAULT_ROUNDS)
        )
    if as_json:
        print(msgspec.json.encode(results).decode())
    else:
        _print_figures(results)
    if database is None:
        _print_progress(
            "PostgreSQL was not measured: give its address with --database postgresql://..."
        )
    if json_file is not None:
        _write_file(json_file, msgspec.json.format(msgspec.json.encode(results)))
    return 0


def _check_writable(path: str) -> None:
    """Raises `Invalid` if the file cannot be written; leaves no new file."""
    try:
        existed = Path(path).exists()
        Path(path).open("ab").close()
        if not existed:
            Path(path).unlink()
    except (OSError, ValueError) as error:
        raise Invalid(f"cannot write {path}: {error}") from error


def _write_file(path: str, content: bytes) -> None:
    """Writes the file; raises `Unavailable` if that fails."""
    try:
        Path(path).write_bytes(content)
    except OSError as error:
        raise Unavailable(f"cannot write {path}: {error}", "storage_full") from error


async def _check_database(url: str) -> None:
    """Raises `Invalid` for SQLite, `Unavailable` if the server does not respond in time."""
    if sqlite_path(url) is not None:
        raise Invalid(
            "--database must be a PostgreSQL; SQLite is measured in a temporary file",
            "database_invalid",
        )
    store = app.create_store(url)
    try:
        await store.schema()
    finally:
        await store.close()


def _print_progress(text: str) -> None:
    """Prints to standard error."""
    if sys.stderr is not None:
        print(text, file=sys.stderr, flush=True)


async def _measure_rounds(
    store: str, url: str | None, names: Sequence[str], tasks: int, rounds: int
) -> Figures:
    """Runs the measurements `rounds` times and returns the median of each figure."""
    samples: dict[str, list[float]] = {}
    for number in range(rounds):
        for name in names:
            _print_progress(f"{store} round {number + 1}/{rounds}: {name}")
            for figure, value in (await _measure_once(store, url, name, tasks)).items():
                samples.setdefault(figure, []).append(value)
    return {figure: median(values) for figure, values in samples.items()}


async def _measure_once(store: str, url: str | None, name: str, tasks: int) -> Figures:
    """Runs one measurement in a temporary database or schema and returns its figures."""
    if url is None:
        with tempfile.TemporaryDirectory(prefix="tenuto-bench-") as folder:
            async with Bench.open(f"sqlite:///{folder}/bench.db", tasks) as bench:
                return await MEASURES[name].run(bench)
    from tenuto.store.postgres.admin import create_schema, drop_schema  # noqa: PLC0415  only when used

    del store
    schema = f"tenuto_bench_{Clock().new_id().hex[-12:]}"
    try:
        async with Bench.open(await create_schema(url, schema), tasks) as bench:
            return await MEASURES[name].run(bench)
    finally:
        await drop_schema(url, schema)


def _print_figures(results: dict[str, Figures]) -> None:
    """Prints a table with one row per figure and one column per store."""
    stores = list(results)
    width = max((len(name) for figures in results.values() for name in figures), default=10)
    print()
    print(" " * width, *(f"{store:>14}" for store in stores))
    names = dict.fromkeys(name for figures in results.values() for name in figures)
    for name in names:
        cells = (results[store].get(name) for store in stores)
        shown = ("-" if value is None else f"{value:,.2f}" for value in cells)
        print(f"{name:<{width}}", *(f"{cell:>14}" for cell in shown))
