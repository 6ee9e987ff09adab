"""A column that two sets share row by row is sent to PostgreSQL once."""

import re

from tests.contract.conftest import new

from tenuto.clock import Clock
from tenuto.engine.rows import hot_row, plain_body_row
from tenuto.store import sql
from tenuto.store.dialects import POSTGRES

SHARED = {("hot", 0): ("body", 0), ("hot", 1): ("body", 1), ("hot", 2): ("body", 2)}


def spelled(same: sql.ConstantColumns) -> sql.PostgresQuery:
    query = sql.load(POSTGRES)["submit_new"]
    return sql.for_postgres(sql.variant(query, frozenset({"now"}), (), {"body", "hot"}), same)


def test_shared_column_is_sent_once() -> None:
    assert sql.load(POSTGRES)["submit_new"].twins == SHARED
    compiled = spelled(frozenset())
    assert not set(SHARED) & set(compiled.arguments)
    assert len(compiled.arguments) == 1 + 9 + 8 - 3
    ids = compiled.arguments.index(("body", 0)) + 1
    assert len(re.findall(rf"\${ids}::uuid\[\]", compiled.sql)) == 3  # body, task and event


def test_column_folded_by_one_set_only_is_sent_twice() -> None:
    compiled = spelled(frozenset({("body", 2)}))
    assert {("body", 2), ("hot", 2)} <= set(compiled.arguments)


def test_row_sets_of_a_task_share_the_same_columns() -> None:
    clock, task = Clock(), new()
    created, workspace = clock.new_ids(2)
    rows = {
        "body": plain_body_row(task, created, workspace, "me"),
        "hot": hot_row(task, created, workspace, 5, "me", clock.now()),
    }
    for (one, index), (other, position) in SHARED.items():
        assert rows[one][index] == rows[other][position]
