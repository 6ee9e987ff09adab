"""Connections with a wrong role are refused, whatever changed it on the way."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from uuid import UUID

import asyncpg
import pytest
from tests.contract.conftest import new
from tests.services.pooler import Pooler
from tests.services.postgres import PostgresServer

from tenuto import app
from tenuto.engine.engine import Engine
from tenuto.model.errors import Incompatible
from tenuto.store.postgres.roles import SYSTEM, TENANT, Identity, role_error
from tenuto.store.postgres.store import PostgresStore

RIGHT = Identity(
    login="app",
    role=TENANT,
    workspace="",
    bypasses=False,
    secured=True,
    sees_others=False,
    power="",
)
WORKSPACE = UUID(int=7)


def test_workspace_connection_that_sees_nothing_is_accepted() -> None:
    assert role_error(RIGHT, TENANT) is None


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"role": "app"}, "login app acts as app instead of tenuto_runtime"),
        ({"workspace": str(WORKSPACE)}, f"is bound to {WORKSPACE}"),
        ({"bypasses": True}, "row-level security does not bind tenuto_runtime"),
        ({"secured": False}, "row-level security does not bind tenuto_runtime"),
        ({"sees_others": True}, "row-level security does not bind tenuto_runtime"),
    ],
)
def test_wrong_workspace_connection_is_refused_with_the_reason(
    changed: dict[str, object], reason: str
) -> None:
    result = Identity(
        **({name: getattr(RIGHT, name) for name in Identity.__struct_fields__} | changed)
    )
    assert reason in str(role_error(result, TENANT))


def test_workspace_connection_without_its_workspace_is_refused() -> None:
    assert "is bound to (none)" in str(role_error(RIGHT, TENANT, str(WORKSPACE)))


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[PostgresStore]:
    store = app.create_store(url)
    assert isinstance(store, PostgresStore)
    try:
        yield store
    finally:
        await store.close()


@pytest.fixture
async def migrated(postgres_url: str) -> str:
    async with opened(postgres_url) as store:
        await store.migrate()
        await store.open()
        await Engine(store).submit(new())
    return postgres_url


async def test_connections_report_their_role_and_workspace(migrated: str) -> None:
    async with opened(migrated) as store:
        system = await store.identity()
        tenant = await store.for_workspace(WORKSPACE).identity()
    assert (system.role, system.login) == (SYSTEM, "tenuto")
    assert (tenant.role, tenant.workspace) == (TENANT, str(WORKSPACE))
    assert not tenant.sees_others
    assert tenant.power == "is a superuser"


async def test_pooler_that_refuses_parameters_is_reported(migrated: str) -> None:
    async with Pooler(migrated) as pooler, opened(pooler.url()) as store:
        with pytest.raises(Exception, match="unsupported startup parameter"):
            await store.open()


@pytest.mark.parametrize("many", [False, True])
async def test_pooler_that_drops_the_role_is_refused(migrated: str, many: bool) -> None:
    async with Pooler(migrated, ignores=True) as pooler:
        store = app.create_store(pooler.url(), many_tenants=many)
        with pytest.raises(Incompatible, match="acts as tenuto instead of tenuto_system") as caught:
            await store.open()
        assert caught.value.code == "wrong_role"
        assert "pooler=transaction" in caught.value.message
        await store.close()


async def test_workspace_reads_nothing_through_a_pooler_that_drops_the_role(migrated: str) -> None:
    """Not even where nobody opened the store, which would have refused."""
    async with Pooler(migrated, ignores=True) as pooler, opened(pooler.url()) as store:
        engine = Engine(store, workspace=WORKSPACE)
        for call in (engine.list(), engine.submit(new()), engine.query.workers(WORKSPACE)):
            with pytest.raises(Incompatible, match="instead of tenuto_runtime"):
                await call


async def test_disabled_policies_are_detected(migrated: str) -> None:
    connection = await asyncpg.connect(migrated)
    await connection.execute("alter table task disable row level security")
    await connection.close()
    async with opened(migrated) as store:
        await store.open()
        with pytest.raises(Incompatible, match="row-level security does not bind tenuto_runtime"):
            await Engine(store).list()


async def test_role_that_bypasses_the_policies_is_detected() -> None:
    with PostgresServer(fast=True) as server:
        url = server.url("postgres")
        async with opened(url) as store:
            await store.migrate()
        connection = await asyncpg.connect(url)
        await connection.execute("alter role tenuto_runtime bypassrls")
        await connection.close()
        many = app.create_store(url, many_tenants=True)
        with pytest.raises(Incompatible, match="row-level security does not bind tenuto_runtime"):
            await many.open()
        await many.close()
