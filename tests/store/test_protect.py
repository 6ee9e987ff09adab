"""`tenuto_protect` gives a new table the tenancy policy of all others."""

from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID

import asyncpg
import pytest
from tests.contract.conftest import ManualClock, Raw, opened
from tests.contract.store.test_schema import dump_postgres

OWN, OTHER = UUID(int=1), UUID(int=2)
GRANTS = """
select table_name::text, grantee::text, privilege_type::text
from information_schema.table_privileges
where grantee in ('tenuto_runtime', 'tenuto_system') order by 1, 2, 3
"""
SECURED = """
select relname::text, relrowsecurity, relforcerowsecurity from pg_class
where relnamespace = 'public'::regnamespace and relkind = 'r' order by 1
"""


@pytest.fixture
async def owner(postgres_url: str) -> AsyncIterator[Any]:
    """The login that migrated the database."""
    async with opened(postgres_url, ManualClock()):
        connection = await asyncpg.connect(postgres_url)
        try:
            yield connection
        finally:
            await connection.close()


async def as_role(owner: Any, role: str, workspace: UUID | None, sql: str) -> list[Any]:
    """Runs one statement in a role and returns its first column; then undoes it."""
    transaction = owner.transaction()
    await transaction.start()
    try:
        await owner.execute(f"set local role {role}")
        await owner.execute(f"set local app.workspace = '{workspace or ''}'")
        return [row[0] for row in await owner.fetch(sql)]
    finally:
        await transaction.rollback()


async def make(owner: Any, name: str) -> None:
    await owner.execute(f'create table "{name}" (id bigint, workspace uuid not null)')
    await owner.execute(f"insert into \"{name}\" values (1, '{OWN}'), (2, '{OTHER}')")


async def test_table_without_the_call_is_readable_by_every_tenant(owner: Any) -> None:
    await make(owner, "bare")
    ids = "select id from bare order by id"
    with pytest.raises(asyncpg.InsufficientPrivilegeError):
        await as_role(owner, "tenuto_runtime", OWN, ids)
    await owner.execute("grant select on bare to tenuto_runtime")
    assert await as_role(owner, "tenuto_runtime", OWN, ids) == [1, 2]


@pytest.mark.parametrize("name", ["kept", 'Odd "name"'])
async def test_a_protected_table_shows_a_tenant_its_own_rows(owner: Any, name: str) -> None:
    table = name.replace('"', '""')
    await make(owner, table)
    await owner.execute("select tenuto_protect($1)", name)
    ids = f'select id from "{table}" order by id'
    for workspace, seen in ((OWN, [1]), (OTHER, [2]), (None, [])):
        assert await as_role(owner, "tenuto_runtime", workspace, ids) == seen
    assert await as_role(owner, "tenuto_system", None, ids) == [1, 2]
    emptied = f'delete from "{table}" returning id'
    assert await as_role(owner, "tenuto_runtime", OWN, emptied) == [1]
    moved = f"update \"{table}\" set workspace = '{OTHER}'"
    with pytest.raises(asyncpg.InsufficientPrivilegeError):
        await as_role(owner, "tenuto_runtime", OWN, moved)


async def test_a_protected_table_without_workspace_is_the_systems(owner: Any) -> None:
    await owner.execute("create table duty (id bigint)")
    await owner.execute("insert into duty values (1)")
    await owner.execute("select tenuto_protect('duty')")
    assert await as_role(owner, "tenuto_system", None, "select id from duty") == [1]
    with pytest.raises(asyncpg.InsufficientPrivilegeError):
        await as_role(owner, "tenuto_runtime", OWN, "select id from duty")


async def test_repeating_the_call_changes_no_table(owner: Any, postgres_url: str) -> None:
    raw = Raw(postgres_url)

    async def state() -> tuple[Any, ...]:
        return await dump_postgres(raw), await raw.fetch(GRANTS), await raw.fetch(SECURED)

    before = await state()
    for table in await raw.counts():
        if table != "schema_migration":
            await owner.execute("select tenuto_protect($1)", table)
    assert await state() == before


async def test_a_tables_name_means_that_of_the_installation(owner: Any) -> None:
    """Not one that comes first in the caller's search path."""
    await make(owner, "kept")
    await owner.execute("create schema other")
    await owner.execute("create table other.kept (id bigint)")
    await owner.execute("set search_path = other, public")
    await owner.execute("select tenuto_protect('kept')")
    for schema, is_secured in (("public", True), ("other", False)):
        forced = f"select relforcerowsecurity from pg_class where oid = '{schema}.kept'::regclass"
        assert await owner.fetchval(forced) is is_secured, schema


async def test_only_the_owner_of_a_table_protects_it(owner: Any) -> None:
    await make(owner, "kept")
    for role in ("tenuto_runtime", "tenuto_system"):
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await as_role(owner, role, OWN, "select tenuto_protect('kept')")
