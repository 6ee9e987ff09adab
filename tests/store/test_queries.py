"""Every query is valid on its database, with any of its optional parts."""

import re
import sqlite3
from collections.abc import Iterator
from itertools import combinations

import asyncpg
import pytest
from tests.contract.conftest import ManualClock, opened

from tenuto.store import schema, sql
from tenuto.store.dialects import POSTGRES, SQLITE

OPTIONAL = re.compile(r"\[(\w+): ")
LITERAL = re.compile(r"\{literal:(\w+)\}")
NUMBERED = re.compile(r"\?(\d+)")
FEW = 2
"""So many optional parts are in it at least, or left out: any two of them meet."""


def variants(query: sql.Query) -> Iterator[sql.Query]:
    """The query with all its sets, and with few or most of its optional parts."""
    text = "\n".join(step.text for step in query.steps)
    literals = tuple((name, ("word",)) for name in sorted(set(LITERAL.findall(text))))
    optional = sorted(set(OPTIONAL.findall(text)))
    chosen: set[frozenset[str]] = set()
    for size in range(FEW + 1):
        for few in combinations(optional, size):
            chosen |= {frozenset(few), frozenset(optional).difference(few)}
    for some in sorted(chosen, key=sorted):
        yield sql.variant(query, some, literals, set(query.rows))


def statements(query: sql.Query) -> set[str]:
    """Returns SQLite's texts of the query, for sets of one row and of many."""
    return {
        text
        for variant in variants(query)
        for single in (set[str](), set(variant.rows))
        for step in sql.for_sqlite(variant, single)
        for text in (step.sql, step.one)
    }


def test_every_query_is_valid_on_sqlite() -> None:
    """With the schema that the program needs: it runs with no later one."""
    raw = sqlite3.connect(":memory:")
    for migration in schema.migrations():
        if migration.number <= schema.REQUIRED_SCHEMA:
            for text in schema.statements(migration, "sqlite"):
                raw.execute(text)
    wrong = {}
    for name, query in sql.load(SQLITE).items():
        for text in statements(query):
            positions = max(map(int, NUMBERED.findall(text)), default=0)
            try:
                raw.execute(f"explain {text}", [None] * positions)
            except sqlite3.Error as error:
                wrong[name] = f"{error}: {text}"
    raw.close()
    assert wrong == {}


async def test_every_query_is_valid_on_postgres(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the schema that the program needs, like SQLite."""
    required = [m for m in schema.migrations() if m.number <= schema.REQUIRED_SCHEMA]
    monkeypatch.setattr(schema, "migrations", lambda: required)
    async with opened(postgres_url, ManualClock()):
        connection = await asyncpg.connect(postgres_url)
        wrong = {}
        for name, query in sql.load(POSTGRES).items():
            for text in {sql.for_postgres(variant).sql for variant in variants(query)}:
                try:
                    await connection.prepare(text)
                except asyncpg.PostgresError as error:
                    wrong[name] = f"{error}: {text}"
        await connection.close()
    assert wrong == {}


def test_one_notation_writes_audit_rows() -> None:
    """`{event of ...}` alone inserts into `event`; columns that it does not name get defaults."""
    assert "insert into event " not in sql.source_text()
    quarantine = sql.load(SQLITE)["quarantine"]
    assert quarantine.steps[-1].text == (
        "insert into event (task, seq, workspace, xid, kind, level, message, previous, new,"
        " attempt, actor, data, at)\n"
        "select old.id, old.version + 1, old.workspace, max(old.event_xid, 0), 'failed',"
        " 'CRITICAL', :message, old.status, 'FAILED', old.attempt, :actor,"
        ' \'{"error_class": "corrupt"}\', :now\n'
        "from {old}"
    )
    heartbeat = sql.load(POSTGRES)["agent_heartbeat"]
    assert heartbeat.steps[-1].text == (
        "insert into event (task, seq, workspace, xid, kind, level, message, attempt, agent, at)\n"
        "select silent.id, silent.version + 1, silent.workspace,"
        " (select pg_current_xact_id()::text::bigint), 'agent_recovered', 'INFO', silent.name, 0,"
        " silent.id, :now\n"
        "from {silent} where true\non conflict do nothing"
    )
