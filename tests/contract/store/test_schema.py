"""The schema: equal to the golden dumps, migrated once, refused if incompatible."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.contract.conftest import AnyStore, ManualClock, Raw, make_store, new, opened, refusal
from tests.services.postgres import USER, PostgresServer

from tenuto.clock import Clock
from tenuto.engine.engine import Engine
from tenuto.model.errors import Incompatible
from tenuto.store import schema
from tenuto.store.postgres.store import PostgresStore
from tenuto.store.protocol import SchemaState
from tenuto.store.schema import MAX_COMPAT, REQUIRED_SCHEMA, Migration

GOLDEN = Path(__file__).parent / "golden"
REGENERATE = "TENUTO_GOLDEN=write .venv/bin/python -m pytest tests/contract/store/test_schema.py"
LATEST = max(migration.number for migration in schema.migrations())

COLUMNS = """
select table_name, column_name, data_type, is_nullable, column_default, is_identity
from information_schema.columns where table_schema = 'public'
order by table_name, ordinal_position
"""
# Newer versions list NOT NULL among the constraints; the columns say it already.
CONSTRAINTS = """
select conrelid::regclass::text, conname, pg_get_constraintdef(oid) from pg_constraint
where connamespace = 'public'::regnamespace and contype <> 'n' order by 1, 2
"""
INDEXES = "select indexdef from pg_indexes where schemaname = 'public' order by indexname"
POLICIES = """
select format('policy %s on %s to %s using %s check %s', policyname, tablename,
  array_to_string(roles, ', '), qual, with_check) from pg_policies
where schemaname = 'public' order by tablename, policyname
"""
OPTIONS = """
select relname, array_to_string(reloptions, ', ') from pg_class
where relnamespace = 'public'::regnamespace and reloptions is not null order by 1
"""


async def dump_sqlite(raw: Raw) -> str:
    rows = await raw.fetch(
        "select sql from sqlite_master where sql is not null and name not like 'sqlite_%'"
        " order by tbl_name, type desc, name"
    )
    return "".join(f"{row[0].strip()};\n" for row in rows)


async def dump_postgres(raw: Raw) -> str:
    lines = []
    table = ""
    for name, column, kind, nullable, default, identity in await raw.fetch(COLUMNS):
        if name != table:
            table = name
            lines.append(f"table {table}")
        words = [column, kind]
        words += ["not null"] if nullable == "NO" else []
        words += [f"default {default}"] if default is not None else []
        words += ["identity"] if identity == "YES" else []
        lines.append("  " + " ".join(words))
    for name, label, definition in await raw.fetch(CONSTRAINTS):
        lines.append(f"constraint {label} on {name} {' '.join(definition.split())}")
    lines += [row[0] for row in await raw.fetch(INDEXES)]
    lines += [" ".join(row[0].split()) for row in await raw.fetch(POLICIES)]
    lines += [f"options of {name}: {options}" for name, options in await raw.fetch(OPTIONS)]
    return "\n".join(lines) + "\n"


async def test_schema_equals_the_golden_dump(empty_url: str, clock: ManualClock) -> None:
    raw = Raw(empty_url)
    async with opened(empty_url, clock):
        dumped = await (dump_sqlite if raw.path else dump_postgres)(raw)
    golden = GOLDEN / ("sqlite.sql" if raw.path else "postgres.sql")
    if os.environ.get("TENUTO_GOLDEN") == "write":
        golden.write_text(dumped)
    reported = (
        f"the schema is not {golden.name}; if that is meant, regenerate it with\n  {REGENERATE}"
    )
    assert dumped == golden.read_text(), reported


async def test_schemas_of_both_databases_have_the_same_columns(
    sqlite_url: str, postgres_url: str, clock: ManualClock
) -> None:
    lite, post = Raw(sqlite_url), Raw(postgres_url)
    async with opened(sqlite_url, clock), opened(postgres_url, clock):
        tables = await lite.counts()
        assert tables.keys() == (await post.counts()).keys()
        for table in tables:
            rows = await lite.fetch(f"select name, \"notnull\" from pragma_table_info('{table}')")
            columns = {row[0] for row in rows}
            matches = await post.fetch(
                f"select column_name from information_schema.columns where table_name = '{table}'"
            )
            assert {row[0] for row in matches} ^ columns <= {"xid"}


PROCESS = """
import asyncio, sys
from tenuto.app import create_store

async def main():
    store = create_store(sys.argv[1])
    print("ready", flush=True)
    sys.stdin.readline()
    try:
        applied = await store.migrate()
        await store.open()
    finally:
        await store.close()
    print(applied, flush=True)

asyncio.run(main())
"""


def test_migration_by_eight_processes_runs_once(empty_url: str) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, empty_url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(8)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n", process.communicate()
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        reports = [process.communicate(timeout=60) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [error for _, error in reports if error] == []
    numbers = [migration.number for migration in schema.migrations()]
    assert sorted(out for out, _ in reports) == sorted(["[]\n"] * 7 + [f"{numbers}\n"])


async def test_migration_runs_once(empty_url: str, clock: ManualClock) -> None:
    stores = [make_store(empty_url, clock) for _ in range(4)]
    applied = await asyncio.gather(*(store.migrate() for store in stores))
    assert sorted(applied) == sorted([[], [], [], [m.number for m in schema.migrations()]])
    for store in stores:
        assert await store.migrate() == []
        await store.close()


async def test_failed_migration_leaves_nothing(
    store: AnyStore, raw: Raw, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "create table half (id bigint);\ncreate table half (id bigint);\n"
    broken = [*schema.migrations(), Migration(LATEST + 1, "broken", 1, text)]
    monkeypatch.setattr(schema, "migrations", lambda: broken)
    with pytest.raises(Exception, match="half"):
        await store.migrate()
    assert (await store.schema()).schema == LATEST
    assert "half" not in await raw.counts()
    monkeypatch.undo()
    assert (await Engine(store).submit(new())).created


async def test_empty_database_has_schema_zero(empty_url: str, clock: ManualClock) -> None:
    store = make_store(empty_url, clock)
    try:
        assert await store.schema() == SchemaState(0, 0)
        assert await refusal(store.open()) == "schema_older"
        await store.migrate()
        assert await store.schema() == SchemaState(LATEST, MAX_COMPAT)
    finally:
        await store.close()


async def reopened(url: str, raw: Raw, change: str) -> None:
    await raw.execute(change)
    store = make_store(url, ManualClock())
    try:
        await store.open()
        engine = Engine(store)
        submitted = await engine.submit(new())
        assert (await engine.show(submitted.id)).status == "PENDING"
    finally:
        await store.close()


def added(number: int, compat: int) -> str:
    return f"insert into schema_migration values ({number}, 'later', {compat}, 'now')"


async def test_newer_compatible_schema_is_accepted(
    store: AnyStore, raw: Raw, database_url: str
) -> None:
    await reopened(database_url, raw, added(99, MAX_COMPAT))


async def test_newer_incompatible_schema_is_refused(
    store: AnyStore, raw: Raw, database_url: str
) -> None:
    with pytest.raises(Incompatible) as caught:
        await reopened(database_url, raw, added(99, MAX_COMPAT + 1))
    assert caught.value.code == "schema_newer"
    assert "upgrade" in caught.value.message


async def test_older_schema_is_refused(store: AnyStore, raw: Raw, database_url: str) -> None:
    older = f"delete from schema_migration where number >= {REQUIRED_SCHEMA}"
    with pytest.raises(Incompatible) as caught:
        await reopened(database_url, raw, older)
    assert caught.value.code == "schema_older"
    assert "orchestrate db migrate" in caught.value.message


async def test_missing_column_is_schema_older(store: AnyStore, raw: Raw) -> None:
    await raw.execute("alter table task_body drop column description")
    task = new(description="text")
    for tasks in ([task], [task, task]):
        with pytest.raises(Incompatible) as caught:
            await Engine(store).submit_many(tasks)
        assert caught.value.code == "schema_older"
        assert "description" in caught.value.message
        assert "orchestrate db migrate" in caught.value.message


async def test_compat_lowered_by_a_later_migration_still_counts(
    store: AnyStore, raw: Raw, database_url: str
) -> None:
    await raw.execute(added(98, MAX_COMPAT + 1))
    with pytest.raises(Incompatible):
        await reopened(database_url, raw, added(99, 1))


async def test_store_description_names_the_database_and_its_durability(store: AnyStore) -> None:
    reported: dict[str, Any] = await store.describe()
    assert reported["database"].startswith(("SQLite 3", "PostgreSQL "))
    if "journal" in reported:
        assert (reported["journal"], reported["synchronous"]) == ("wal", "FULL")
    else:
        assert {"role", "name", "fsync", "synchronous_commit"} <= reported.keys()


async def test_close_leaves_no_connection(postgres_url: str) -> None:
    async with opened(postgres_url, ManualClock()) as store:
        engine = Engine(store)
        reads = [engine.list() for _ in range(8)]
        await asyncio.gather(*reads, *(engine.submit(new()) for _ in range(8)))
    left = "select count(*) from pg_stat_activity where application_name = 'tenuto'"
    assert await Raw(postgres_url).value(left + " and datname = current_database()") == 0


TWO_TASKS = """
insert into task (id, workspace, lane, status, unmet, watched, rank, priority, max_attempts,
  created_at, updated_at)
select made.id, workspace.id, 1, status, unmet, false, 0, 5, 3, now(), now()
from workspace, (values ('{needed}'::uuid, 'PENDING', 0), ('{waiting}'::uuid, 'WAITING', 1))
  as made(id, status, unmet)
"""
ONE_WAITS = """
insert into task_dependency (task, needs, workspace, met)
select '{waiting}', '{needed}', id, false from workspace
"""


async def test_database_owner_without_row_access_migrates_all_rows(
    postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = postgres.create_database()
    raw, name = Raw(url), urlsplit(url).path[1:]
    every = schema.migrations()
    await migrated(url)  # makes the roles
    await raw.execute(f"create role {name} login noinherit")
    await raw.execute(f"grant tenuto_system, tenuto_runtime to {name}")
    await raw.execute("drop schema public cascade")
    await raw.execute(f"create schema public authorization {name}")
    owned = url.replace(f"//{USER}@", f"//{name}@")
    tasks = {"needed": Clock().new_id(), "waiting": Clock().new_id()}
    monkeypatch.setattr(schema, "migrations", lambda: every[:3])
    await migrated(owned)
    for created in (TWO_TASKS, ONE_WAITS):
        await raw.execute(created.format(**tasks))
    monkeypatch.setattr(schema, "migrations", lambda: every)
    await migrated(owned)
    assert await raw.value(f"select awaited from task where id = '{tasks['needed']}'") == 1
    postgres.drop_database(url)
    postgres._execute(f"drop role {name}")


async def migrated(url: str) -> None:
    store = PostgresStore(url, ManualClock())
    try:
        await store.migrate()
    finally:
        await store.close()
