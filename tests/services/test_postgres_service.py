import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import asyncpg
import pytest
from tests.services.postgres import ROOT, PostgresServer, alive
from tests.waiting import eventually_sync


@pytest.fixture(scope="module")
def durable() -> Iterator[PostgresServer]:
    with PostgresServer() as server:
        yield server


async def fetch(url: str, *statements: str) -> object:
    connection = await asyncpg.connect(url)
    try:
        for statement in statements[:-1]:
            await connection.execute(statement)
        return await connection.fetchval(statements[-1])
    finally:
        await connection.close()


def folder_of(url: str) -> Path:
    return Path(parse_qs(urlsplit(url).query)["host"][0])


async def test_server_is_new_enough_and_as_durable_as_requested(
    durable: PostgresServer, postgres: PostgresServer
) -> None:
    for server, switch in ((durable, "on"), (postgres, "off")):
        assert server.version >= 14
        url = server.url("postgres")
        for setting in ("fsync", "synchronous_commit", "full_page_writes"):
            assert await fetch(url, f"SHOW {setting}") == switch
        assert await fetch(url, "SHOW server_encoding") == "UTF8"


async def test_committed_rows_survive_a_crash(durable: PostgresServer) -> None:
    url = durable.create_database()
    await fetch(url, "CREATE TABLE t (n int)", "INSERT INTO t VALUES (7) RETURNING n")
    before = durable.pid
    durable.restart()
    assert durable.pid != before
    assert await fetch(url, "SELECT n FROM t") == 7


async def test_server_requires_its_password(postgres: PostgresServer) -> None:
    url = postgres.tcp_url("postgres")
    assert await fetch(url, "SELECT 1") == 1
    parts = urlsplit(url)
    untrusted = parts._replace(netloc=f"{parts.username}:wrong@{parts.hostname}:{parts.port}")
    with pytest.raises(asyncpg.InvalidPasswordError):
        await fetch(untrusted.geturl(), "SELECT 1")


async def test_databases_are_separate(postgres: PostgresServer, postgres_url: str) -> None:
    other = postgres.create_database()
    await fetch(other, "CREATE TABLE t (n int)", "SELECT 1")
    assert await fetch(other, "SELECT to_regclass('t')::text") == "t"
    assert await fetch(postgres_url, "SELECT to_regclass('t')::text") is None
    postgres.drop_database(other)
    with pytest.raises(asyncpg.InvalidCatalogNameError):
        await fetch(other, "SELECT 1")


def test_database_url_covers_both_kinds(database_url: str) -> None:
    assert urlsplit(database_url).scheme in {"sqlite", "postgresql"}


def test_failing_statement_is_an_error(postgres: PostgresServer) -> None:
    with pytest.raises(RuntimeError, match="no_such_template"):
        postgres.create_database(template="no_such_template")


def test_closed_server_leaves_nothing() -> None:
    with PostgresServer(fast=True) as server:
        pid, folder = server.pid, folder_of(server.url("postgres"))
        assert folder.exists()
    assert not alive(pid)
    assert not folder.exists()


def test_server_that_cannot_start_reports_the_reason_and_leaves_nothing() -> None:
    server = PostgresServer(fast=True)
    server._settings |= {"max_connections": "many"}
    with pytest.raises(RuntimeError, match=r'(?s)did not start.*"max_connections"'), server:
        pass
    assert not folder_of(server.url("postgres")).exists()


@pytest.mark.parametrize("mode", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_server_ends_with_the_process_that_created_it(mode: signal.Signals) -> None:
    program = """
import signal
from tests.services.postgres import PostgresServer
server = PostgresServer(fast=True)
server.start()
print(server.pid, server.url("postgres"), flush=True)
signal.pause()
"""
    with subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as owner:
        assert owner.stdout is not None
        pid, url = owner.stdout.readline().split()
        assert alive(int(pid))
        owner.send_signal(mode)
    eventually_sync(lambda: not alive(int(pid)))
    eventually_sync(lambda: not folder_of(url).exists())
