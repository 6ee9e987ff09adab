"""A claim reads about as many rows as it takes, however deep its lanes are."""

from typing import Any

import asyncpg
import msgspec
import pytest
from tests.contract.conftest import ManualClock, new, profile

from tenuto.engine.engine import Engine
from tenuto.store import sql
from tenuto.store.dialects import POSTGRES
from tenuto.store.postgres.sessions import WRITE_SETTINGS
from tenuto.store.sqlite.store import SqliteStore

LANES = 4
WANTED = 10
DEEP = 200


async def filled(engine: Engine, depth: int) -> dict[str, Any]:
    """Returns the parameters of a claim over lanes of that depth."""
    types = [f"type {number}" for number in range(LANES)]
    assert isinstance(engine.clock, ManualClock)
    for _ in range(depth):
        await engine.submit_many([new(task_type=item) for item in types])
        engine.clock.advance(60)
    agent = profile(workspace=engine.workspace, task_types=tuple(types))
    result = await engine.core.lanes.open_lanes(agent, engine.clock.now())
    assert len(result.free) == LANES
    return {
        "lanes": result.free,
        "workspace": engine.workspace,
        "lanes_version": result.version,
        "n": WANTED,
        "status": "RUNNING",
        "agent": agent.id,
        "worker": "worker",
        "token": "token",
        "lease_s": 30,
        "now": engine.clock.now(),
    }


def scanned(node: dict[str, Any]) -> int:
    """The most rows that one step of a plan went through."""
    seen = node["Actual Rows"] + node.get("Rows Removed by Filter", 0)
    below = [scanned(item) for item in node.get("Plans", [])]
    return max(int(seen * node["Actual Loops"]), *below, 0)


async def test_claim_on_postgresql_reads_few_rows_of_deep_lanes(
    postgres_engine: Engine, postgres_url: str
) -> None:
    params = await filled(postgres_engine, DEEP)
    query = sql.variant(sql.load(POSTGRES)["claim"], frozenset(params), (), set())
    compiled = sql.for_postgres(query)
    connection = await asyncpg.connect(postgres_url, server_settings=WRITE_SETTINGS)
    try:
        [[reported]] = await connection.fetch(
            f"explain (analyze, format json) {compiled.sql}",
            *(params[str(name)] for name in compiled.arguments),
        )
    finally:
        await connection.close()
    [plan] = msgspec.json.decode(reported)
    taken = plan["Plan"]["Actual Rows"]
    assert taken == WANTED
    assert scanned(plan["Plan"]) <= 3 * WANTED + LANES * 2


@pytest.mark.parametrize("n", [1, WANTED])
async def test_claim_on_sqlite_takes_as_many_steps_in_deep_lanes(
    sqlite_engine: Engine, n: int
) -> None:
    store = sqlite_engine.store
    assert isinstance(store, SqliteStore)
    steps = [0]

    def count() -> int:
        steps[0] += 1
        return 0

    took = []
    for depth in (2 * WANTED, DEEP):
        params = await filled(sqlite_engine, depth) | {"n": n}
        agent = profile(task_types=tuple(f"type {number}" for number in range(LANES)))
        raw = store._writer_connection().raw
        steps[0] = 0
        raw.set_progress_handler(count, 10)
        claimed = await sqlite_engine.claim(agent, "worker", params["n"])
        raw.set_progress_handler(None, 0)
        assert len(claimed) == n
        took.append(steps[0])
    shallow, deep = took
    assert deep < 1.2 * shallow
