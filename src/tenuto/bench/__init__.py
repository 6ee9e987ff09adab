"""Measures this program on the user's own machine, on SQLite and, when asked, PostgreSQL.

Figures of a noisy machine differ from hour to hour; within one run their ratios mean something.
`bench/` in the repository compares with other job queues by the same rules.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import msgspec

from tenuto import app
from tenuto.bench.measures import MEASURES, Bench, Figures
from tenuto.clock import Clock
from tenuto.model.errors import Invalid

TASKS = 10_000
ROUNDS = 3


def run(
    *,
    database: str | None,
    tasks: int | None,
    rounds: int | None,
    json_file: str | None,
    only: Sequence[str] = (),
) -> int:
    """Measure and print; the exit code."""
    unknown = set(only) - set(MEASURES)
    if unknown:
        raise Invalid(f"no measure {', '.join(sorted(unknown))}; there are {', '.join(MEASURES)}")
    chosen = [name for name in MEASURES if name in only or (not only and MEASURES[name].usual)]
    stores = {"sqlite": None} | ({"postgresql": database} if database else {})
    results: dict[str, Figures] = {}
    for store, url in stores.items():
        results[store] = app.run(_rounds(store, url, chosen, tasks or TASKS, rounds or ROUNDS))
    _print(results)
    if database is None:
        print("PostgreSQL not measured: give its address with --database postgresql://...")
    if json_file:
        Path(json_file).write_bytes(msgspec.json.format(msgspec.json.encode(results)))
    return 0


async def _rounds(
    store: str, url: str | None, chosen: Sequence[str], tasks: int, rounds: int
) -> Figures:
    """The median of each figure over the rounds."""
    found: dict[str, list[float]] = {}
    for number in range(rounds):
        for name in chosen:
            print(f"{store} round {number + 1}/{rounds}: {name}", flush=True)
            for figure, value in (await _one(store, url, name, tasks)).items():
                found.setdefault(figure, []).append(value)
    return {figure: median(values) for figure, values in found.items()}


async def _one(store: str, url: str | None, name: str, tasks: int) -> Figures:
    """One measure in a database of its own."""
    if url is None:
        with tempfile.TemporaryDirectory(prefix="tenuto-bench-") as folder:
            async with Bench.on(f"sqlite:///{folder}/bench.db", tasks) as bench:
                return await MEASURES[name].take(bench)
    from tenuto.store.postgres import drop_scratch, make_scratch  # noqa: PLC0415  only when used

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
