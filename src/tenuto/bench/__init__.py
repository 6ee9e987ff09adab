"""Measures this program on the user's own machine, on SQLite and, when asked, PostgreSQL.

Figures of a noisy machine differ from hour to hour; within one run their ratios mean something.
`bench/` in the repository compares with other job queues by the same rules.
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

TASKS = 10_000
ROUNDS = 3


def run(
    *,
    database: str | None,
    tasks: int | None,
    rounds: int | None,
    json_file: str | None,
    only: Sequence[str] = (),
    as_json: bool = False,
) -> int:
    """Measure and print the figures, progress on standard error; the exit code."""
    unknown = set(only) - set(MEASURES)
    if unknown:
        raise Invalid(f"no measure {', '.join(sorted(unknown))}; there are {', '.join(MEASURES)}")
    chosen = [name for name in MEASURES if name in only or (not only and MEASURES[name].usual)]
    if json_file is not None:
        _check_writable(json_file)
    if database is not None:
        app.run(_check_database(database))
    stores = {"sqlite": None} | ({"postgresql": database} if database else {})
    results: dict[str, Figures] = {}
    for store, url in stores.items():
        results[store] = app.run(_rounds(store, url, chosen, tasks or TASKS, rounds or ROUNDS))
    if as_json:
        print(msgspec.json.encode(results).decode())
    else:
        _print(results)
    if database is None:
        _tell("PostgreSQL not measured: give its address with --database postgresql://...")
    if json_file is not None:
        _write(json_file, msgspec.json.format(msgspec.json.encode(results)))
    return 0


def _check_writable(path: str) -> None:
    """Refuse, before hours are spent, a file that cannot be written; leaves no trace of it."""
    try:
        known = Path(path).exists()
        Path(path).open("ab").close()
        if not known:
            Path(path).unlink()
    except (OSError, ValueError) as error:
        raise Invalid(f"cannot write {path}: {error}") from error


def _write(path: str, content: bytes) -> None:
    try:
        Path(path).write_bytes(content)
    except OSError as error:
        raise Unavailable(f"cannot write {path}: {error}", "storage_full") from error


async def _check_database(url: str) -> None:
    """Refuse what is no PostgreSQL, and one that does not answer."""
    if app.sqlite_path(url) is not None:
        raise Invalid(
            "SQLite is measured in a file of its own; --database is for a PostgreSQL",
            "database_invalid",
        )
    store = app.open_store(url)
    try:
        await store.schema()
    finally:
        await store.close()


def _tell(text: str) -> None:
    if sys.stderr is not None:
        print(text, file=sys.stderr, flush=True)


async def _rounds(
    store: str, url: str | None, chosen: Sequence[str], tasks: int, rounds: int
) -> Figures:
    """The median of each figure over the rounds."""
    found: dict[str, list[float]] = {}
    for number in range(rounds):
        for name in chosen:
            _tell(f"{store} round {number + 1}/{rounds}: {name}")
            for figure, value in (await _one(store, url, name, tasks)).items():
                found.setdefault(figure, []).append(value)
    return {figure: median(values) for figure, values in found.items()}


async def _one(store: str, url: str | None, name: str, tasks: int) -> Figures:
    """One measure in a database of its own."""
    if url is None:
        with tempfile.TemporaryDirectory(prefix="tenuto-bench-") as folder:
            async with Bench.on(f"sqlite:///{folder}/bench.db", tasks) as bench:
                return await MEASURES[name].take(bench)
    from tenuto.store.postgres.admin import drop_scratch, make_scratch  # noqa: PLC0415  only when used

    del store
    schema = f"tenuto_bench_{Clock().new_id().hex[-12:]}"
    try:
        async with Bench.on(await make_scratch(url, schema), tasks) as bench:
            return await MEASURES[name].take(bench)
    finally:
        await drop_scratch(url, schema)


def _print(results: dict[str, Figures]) -> None:
    stores = list(results)
    width = max((len(name) for figures in results.values() for name in figures), default=10)
    print()
    print(" " * width, *(f"{store:>14}" for store in stores))
    names = dict.fromkeys(name for figures in results.values() for name in figures)
    for name in names:
        cells = (results[store].get(name) for store in stores)
        shown = ("-" if value is None else f"{value:,.2f}" for value in cells)
        print(f"{name:<{width}}", *(f"{cell:>14}" for cell in shown))
