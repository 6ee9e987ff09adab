"""Sets of one row are passed to SQLite as plain parameters; results have the same names."""

import re
from typing import Any

import pytest
from tests.proof.sim.loop import run_now

from tenuto.store import sql
from tenuto.store.dialects import SQLITE
from tenuto.store.sqlite.store import SqliteStore


def queries() -> list[sql.Query]:
    return [query for query in sql.load(SQLITE).values() if query.rows]


@pytest.fixture(scope="module")
def raw() -> Any:
    store = SqliteStore(":memory:")
    run_now(store.migrate())
    return store._writer_connection().raw


def answered(raw: Any, query: sql.Query, single: frozenset[str]) -> list[list[str]]:
    """The names of the columns that each select answers; what writes is only prepared."""
    names = []
    for step in sql.for_sqlite(query, single):
        width = max((int(number) for number in re.findall(r"\?(\d+)", step.sql)), default=0)
        raw.execute(f"explain {step.sql}", [0] * width)
        if step.sql.startswith("select"):
            result = raw.execute(step.sql, [0] * width).description
            names.append([column[0] for column in result])
    return names


@pytest.mark.parametrize("query", queries(), ids=lambda query: query.name)
def test_single_row_set_returns_the_same_names_as_many(raw: Any, query: sql.Query) -> None:
    settled = sql.variant(query, frozenset(query.params), (), set(query.rows))
    many = answered(raw, settled, frozenset())
    assert answered(raw, settled, frozenset(query.rows)) == many
