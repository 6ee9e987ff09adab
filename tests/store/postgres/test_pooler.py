"""The store behind a pooler in transaction mode: right roles, no leaks, no losses."""

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

import asyncpg
import msgspec
import pytest
from tests.contract.conftest import new, profile
from tests.deploy.tree import DEPLOY
from tests.services.pooler import Pooler
from tests.services.postgres import PostgresServer
from tests.waiting import eventually

from tenuto import app
from tenuto.broker.postgres import PostgresWakeups
from tenuto.engine.engine import Engine
from tenuto.model.errors import Incompatible, Invalid, Unavailable
from tenuto.settings import Settings
from tenuto.store.postgres import pooler as pooler_module
from tenuto.store.postgres.connector import Connector
from tenuto.store.postgres.pooler import check_pooler
from tenuto.store.postgres.roles import SYSTEM, TENANT
from tenuto.store.postgres.store import PostgresStore

RUN, SYS = "tenuto_app_run", "tenuto_app_sys"
ALL = 60


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """A server of its own with the two logins: roles belong to the whole server."""
    with PostgresServer(fast=True) as created:
        script = str(DEPLOY / "postgres" / "pooler.sql")
        environment = {"PATH": os.defpath, "POSTGRES_RUNTIME_PASSWORD": "password"}
        command = [str(created._binaries / "psql"), "-X", "-q", "-v", "ON_ERROR_STOP=1"]
        subprocess.run(
            [*command, "-d", created.url("postgres"), "-f", script], env=environment, check=True
        )
        yield created


@pytest.fixture
async def direct(server: PostgresServer) -> AsyncIterator[str]:
    """The owner's address of a migrated database."""
    url = server.create_database()
    store = app.create_store(url)
    await store.migrate()
    await store.close()
    yield url
    server.drop_database(url)


def settings(pooler: Pooler, direct: str = "", *, run: str = RUN) -> Settings:
    return Settings(
        pooler="transaction",
        database=pooler.url(SYS),
        database_runtime=pooler.url(run),
        database_direct=direct,
    )


@asynccontextmanager
async def opened(chosen: Settings) -> AsyncIterator[PostgresStore]:
    store = app.create_configured_store(chosen)
    assert isinstance(store, PostgresStore)
    try:
        await store.open()
        yield store
    finally:
        await store.close()


async def work(engine: Engine) -> None:
    """Submit tasks one by one and together, and end each of them."""
    agent = await engine.register_agent(profile())
    await asyncio.gather(*(engine.submit(new()) for _ in range(ALL)))
    done = 0
    while claimed := await engine.claim(agent, "w", 10):
        for item in claimed:
            await engine.complete(item.fence, {"n": 1})
            done += 1
    assert done == ALL


async def test_tasks_run_through_a_pooler(direct: str) -> None:
    async with Pooler(direct, size=2) as pooler, opened(settings(pooler)) as store:
        engine = Engine(store)
        await work(engine)
        assert {task.status for task in (await engine.list()).tasks} == {"COMPLETED"}
        assert await engine.maintenance.audit() == []
        await engine.maintenance.prune_once()
        system, tenant = await store.identity(), await engine.core.store.identity()  # type: ignore[attr-defined]
        assert (system.login, system.role) == (SYS, SYSTEM)
        assert (tenant.login, tenant.role, tenant.workspace) == (RUN, TENANT, "")
        assert system.power == tenant.power == ""


async def test_workspace_sees_nothing_of_others_through_a_pooler(direct: str) -> None:
    async with Pooler(direct, size=1) as pooler, opened(settings(pooler)) as store:
        ours = Engine(store)
        theirs = Engine(store, workspace=UUID(int=7))
        task = await ours.submit(new())
        for _ in range(5):
            assert [item.id for item in (await ours.list()).tasks] == [task.id]
            assert (await theirs.list()).tasks == []
        alone = await asyncpg.connect(pooler.url(RUN))
        assert await alone.fetchval("select count(*) from task") == 0
        assert await alone.fetchval("select count(*) from workspace") == 0
        await alone.close()


async def test_session_settings_last_for_one_transaction(direct: str) -> None:
    async with Pooler(direct, size=1) as pooler, opened(settings(pooler)) as store:
        await Engine(store).submit(new())
        await Engine(store).list()
        for login in (SYS, RUN):
            alone = await asyncpg.connect(pooler.url(login))
            left = await alone.fetchrow(
                "select current_setting('statement_timeout') as timeout,"
                " current_setting('enable_seqscan') as scans,"
                " current_setting('transaction_read_only') as reads,"
                " current_setting('app.workspace', true) as workspace"
            )
            assert (left["timeout"], left["scans"], left["reads"]) == ("0", "on", "off")
            assert left["workspace"] in (None, "")
            await alone.close()


@pytest.mark.parametrize("size", [1, 2, 4])
async def test_pooler_that_loses_prepared_statements_is_refused(direct: str, size: int) -> None:
    async with Pooler(direct, tracks=False, size=size) as pooler:
        with pytest.raises(Incompatible, match=r"PgBouncer 1\.21 or newer") as caught:
            async with opened(settings(pooler)):
                pass
        assert caught.value.code == "pooler_unsuitable"


async def test_pooler_of_the_workspaces_is_checked(direct: str) -> None:
    async with Pooler(direct) as pooler, Pooler(direct, tracks=False) as lossy:
        mixed = msgspec.structs.replace(settings(pooler), database_runtime=lossy.url(RUN))
        with pytest.raises(Incompatible, match=r"PgBouncer 1\.21 or newer"):
            async with opened(mixed):
                pass


async def test_pooler_with_one_connection_is_enough(direct: str) -> None:
    async with Pooler(direct, size=1) as pooler, opened(settings(pooler)) as store:
        await work(Engine(store))


class Silent:
    """A connection on which one method never returns."""

    def __init__(self, connection: asyncpg.Connection, method: str) -> None:
        self._connection = connection
        self._method = method

    def __getattr__(self, name: str) -> Any:
        return self._wait if name == self._method else getattr(self._connection, name)

    async def _wait(self, *_args: object, **_more: object) -> None:
        await asyncio.Event().wait()


@pytest.mark.parametrize("method", ["prepare", "execute"])
async def test_silent_pooler_does_not_count_as_one_that_tracks_statements(
    direct: str, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(pooler_module, "_CHECK_S", 0.3)
    async with Pooler(direct, tracks=False) as pooler:
        connector = Connector(pooler.url(SYS))
        connect = connector.connect

        async def hampered(settings: dict[str, str]) -> Any:
            return Silent(await connect(settings), method)

        monkeypatch.setattr(connector, "connect", hampered)
        with pytest.raises(Unavailable):
            await asyncio.wait_for(check_pooler(connector), 5)


@pytest.mark.parametrize("wrong", [SYS, "tenuto"])
async def test_wrong_login_for_workspaces_is_refused(direct: str, wrong: str) -> None:
    async with Pooler(direct) as pooler:
        with pytest.raises(Incompatible, match="instead of tenuto_runtime") as caught:
            async with opened(settings(pooler, run=wrong)):
                pass
        assert caught.value.code == "wrong_role"


@pytest.mark.parametrize("other", ["database_runtime", "database_direct"])
@pytest.mark.parametrize("kind", ["another", "a copy"])
async def test_addresses_of_two_databases_are_refused(
    server: PostgresServer, direct: str, other: str, kind: str
) -> None:
    """A copy has the same tables and the same rows."""
    if kind == "a copy":
        elsewhere = server.create_database(urlsplit(direct).path[1:])
    else:
        elsewhere = server.create_database()
        await app.create_store(elsewhere).migrate()
    async with Pooler(direct) as pooler, Pooler(elsewhere) as wrong:
        right = settings(pooler, direct)
        address = elsewhere if other == "database_direct" else wrong.url(RUN)
        with pytest.raises(Incompatible, match=f"{other} leads to") as caught:
            async with opened(msgspec.structs.replace(right, **{other: address})):
                pass
        assert caught.value.code == "wrong_database"
        async with opened(right) as store:
            await Engine(store).submit(new())
    server.drop_database(elsewhere)


def dump(server: PostgresServer, url: str) -> bytes:
    command = [str(server.program("pg_dump")), "--no-owner", url]
    return subprocess.run(command, capture_output=True, check=True).stdout


def restore(text: bytes, server: PostgresServer, name: str) -> None:
    command = [str(server.program("psql")), "-X", "-q", "-d", server.url(name)]
    subprocess.run(command, input=text, capture_output=True, check=True)


async def test_copy_on_another_server_is_another_database(
    server: PostgresServer, direct: str
) -> None:
    """Name, rows and times are those of the original."""
    with PostgresServer(fast=True) as second:
        # The groups belong to the server, so the first migration makes them there.
        await app.create_store(second.url("postgres")).migrate()
        name = urlsplit(direct).path[1:]
        second._execute(f"create database {name}")
        restore(dump(server, direct), second, name)
        async with Pooler(direct) as pooler:
            with pytest.raises(Incompatible, match="database_direct leads to"):
                async with opened(settings(pooler, second.url(name))):
                    pass


async def test_migrations_bypass_the_pooler(server: PostgresServer) -> None:
    url = server.create_database()
    async with Pooler(url) as pooler:
        for direct in ("", url):
            store = app.create_configured_store(settings(pooler, direct))
            if direct:
                assert len(await store.migrate()) > 1
            else:
                with pytest.raises(Invalid, match="set database_direct"):
                    await store.migrate()
            await store.close()
    server.drop_database(url)


async def test_hints_bypass_the_pooler(direct: str) -> None:
    async with Pooler(direct) as pooler:
        chosen = settings(pooler, direct)
        async with (
            app.open_store_and_hints(chosen, listen=True) as (_, here),
            app.open_store_and_hints(chosen, listen=True) as (_, there),
        ):
            received: list[str] = []
            here.subscribe(received.append)
            there.notify(["lane:1"])
            await eventually(lambda: "lane:1" in received)


async def test_given_up_server_is_given_up_by_all_connections(direct: str) -> None:
    async with (
        Pooler(direct) as pooler,
        app.open_store_and_hints(settings(pooler, direct), listen=True) as (store, wakeups),
    ):
        assert isinstance(store, PostgresStore)
        assert isinstance(wakeups, PostgresWakeups)
        engine = Engine(store, wakeups)
        await engine.submit(new())
        await engine.list()
        tenant = engine.core.store._connections  # type: ignore[attr-defined]
        pools = [store._connections.read, store._owner, tenant.write, tenant.read]
        idle = [connection for pool in pools for connection in pool._idle]
        listener = wakeups._connection
        assert len({id(pool) for pool in pools if pool._idle}) == len(pools)
        tenant.write.abandon_server()
        assert all(item.is_closed() for item in (*idle, listener))
        await eventually(lambda: wakeups._connection is not listener)
        await engine.submit(new())


async def test_hints_stay_in_the_process_without_a_direct_address(direct: str) -> None:
    async with (
        Pooler(direct) as pooler,
        app.open_store_and_hints(settings(pooler), listen=True) as (store, wakeups),
    ):
        received: list[str] = []
        wakeups.subscribe(received.append)
        wakeups.notify(["lane:1"])
        await eventually(lambda: received == ["lane:1"])
        await Engine(store, wakeups).submit(new())
