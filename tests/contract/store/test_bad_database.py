"""Unusable databases: addresses, servers, files and disks, each with its own error."""

import asyncio
import os
import pwd
import sqlite3
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.contract.conftest import (
    ManualClock,
    Raw,
    claim_all,
    failure,
    new,
    opened,
    refusal,
    running,
)
from tests.services.postgres import PostgresServer
from tests.waiting import eventually

from tenuto.app import connect
from tenuto.engine.engine import Engine
from tenuto.model.errors import TenutoError, Unavailable
from tenuto.settings import Settings
from tenuto.store.sqlite.store import SqliteStore


async def error_of(url: str) -> tuple[str, str]:
    """The code and the sentence with which an address is refused."""
    with pytest.raises(TenutoError) as caught:
        async with connect(Settings(database=url)) as engine:
            await engine.submit(new())
    assert len(caught.value.message.splitlines()) == 1
    return caught.value.code, caught.value.message


@pytest.mark.parametrize(
    "url",
    [
        "mysql://localhost/x",
        "redis://localhost",
        "tenuto.db",
        "/tmp/tenuto.db",
        "sqlite:",
        "sqlite://",
        "sqlite:///",
        "sqlite:t.db",
        "://",
        "a\x00b",
    ],
)
async def test_address_of_an_unknown_kind_is_refused(url: str) -> None:
    code, message = await error_of(url)
    assert code == "database_invalid"
    assert "sqlite:///path" in message


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://tenuto@127.0.0.1:1/tenuto",
        "postgresql://tenuto@no-such-host.invalid/tenuto",
        "postgresql://tenuto@/tenuto?host=/nowhere/at/all",
    ],
)
async def test_unreachable_postgres_is_unavailable(url: str) -> None:
    assert (await error_of(url))[0] == "database_unreachable"


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://tenuto@127.0.0.1:port/tenuto",
        "postgresql://tenuto@127.0.0.1:99999/tenuto",
        "postgresql://tenuto@[half/tenuto",
        "postgresql://tenuto@127.0.0.1:1/tenuto?sslmode=maybe",
    ],
)
async def test_invalid_postgres_address_is_refused(url: str) -> None:
    assert (await error_of(url))[0] in ("database_invalid", "database_unreachable")


async def test_unknown_postgres_setting_is_refused(postgres_url: str) -> None:
    assert (await error_of(f"{postgres_url}&bogus=1"))[0] == "database_invalid"


async def test_wrong_password_is_reported(postgres: PostgresServer, postgres_url: str) -> None:
    right = urlsplit(postgres.tcp_url(urlsplit(postgres_url).path[1:]))
    wrong = right._replace(netloc=right.netloc.replace(str(right.password), "hunter2hunter2"))
    code, message = await error_of(wrong.geturl())
    assert code == "database_unreachable"
    assert "hunter2" not in message


async def test_missing_database_and_role_are_reported(postgres: PostgresServer) -> None:
    url = postgres.url("postgres")
    for wrong in (postgres.url("no_such_database"), url.replace("tenuto@", "nobody@")):
        assert (await error_of(wrong))[0] == "database_unreachable"


async def test_postgres_without_the_schema_is_reported(postgres_url: str) -> None:
    code, message = await error_of(postgres_url)
    assert code == "schema_older"
    assert "orchestrate db migrate" in message


async def test_read_only_postgres_is_unavailable(postgres_url: str) -> None:
    async with opened(postgres_url, ManualClock()) as store:
        await running(Engine(store))
        task = await Engine(store).submit(new())
    raw = Raw(postgres_url)
    name = urlsplit(postgres_url).path[1:]
    await raw.execute(f"alter database {name} set default_transaction_read_only = on")
    code, message = await error_of(postgres_url)
    assert code == "database_switching"
    assert message == "the database is being switched over; try again in a few seconds"
    async with connect(Settings(database=postgres_url)) as engine:
        assert (await engine.show(task.id)).status == "PENDING"
        assert await refusal(claim_all(engine, 1)) == "database_switching"


async def insisted(call: Callable[[], Awaitable[Any]]) -> Any:
    """The answer of a call that is made again as long as the database is away."""

    async def attempt() -> list[Any]:
        try:
            return [await call()]
        except Unavailable:
            return []

    return (await eventually(attempt))[0]


@pytest.mark.parametrize("mode", ["terminated", "restarted"])
async def test_lost_connection_is_restored(
    postgres: PostgresServer, postgres_url: str, mode: str
) -> None:
    async with opened(postgres_url, ManualClock()) as store:
        engine = Engine(store)
        fence = await running(engine)
        await engine.list()
        if mode == "restarted":
            postgres.restart("fast")
        else:
            await Raw(postgres_url).execute(
                "select pg_terminate_backend(pid) from pg_stat_activity"
                " where datname = current_database() and pid <> pg_backend_pid()"
            )
        await insisted(lambda: engine.complete(fence, 1))
        assert (await insisted(lambda: engine.show(fence.task))).status == "COMPLETED"
        submitted = await insisted(lambda: engine.submit(new()))
        assert (await insisted(lambda: engine.show(submitted.id))).status == "PENDING"
        assert await engine.maintenance.audit() == []


async def test_read_is_repeated_after_idle_connections_were_closed(
    postgres: PostgresServer, postgres_url: str
) -> None:
    async with opened(postgres_url, ManualClock()) as store:
        engine = Engine(store)
        submitted = await engine.submit(new())
        await asyncio.gather(*(engine.show(submitted.id) for _ in range(4)))
        postgres.restart("fast")  # nobody hears of it meanwhile: the loop stands still
        assert (await engine.show(submitted.id)).status == "PENDING"


OUTAGES = {
    "no memory": "53200",
    "no more temporary files": "53400",
    "waited too long for a lock": "55P03",
    "dropped": "57P04",
    "a session too long idle": "57P05",
    "a transaction too long": "25P04",
    "a disk that does not read": "58030",
    "a table that is being restored": "42P01",
}
"""What PostgreSQL says of itself, by its codes."""


@pytest.mark.parametrize("subject", OUTAGES)
async def test_shutdown_errors_of_the_server_are_outages(postgres_url: str, subject: str) -> None:
    raw = Raw(postgres_url)
    async with opened(postgres_url, ManualClock()) as store:
        engine = Engine(store)
        fence = await running(engine)
        await raw.execute(
            "create function away() returns trigger language plpgsql as $$ begin"
            f" raise exception 'away' using errcode = '{OUTAGES[subject]}'; end $$"
        )
        await raw.execute(
            "create trigger away before update on task for each statement execute function away()"
        )
        for call in (engine.complete(fence, 1), engine.fail(fence, failure())):
            assert await refusal(call) == "database_unreachable"
        await raw.execute("drop trigger away on task")
        await engine.complete(fence, 1)
        assert (await engine.show(fence.task)).status == "COMPLETED"


async def test_sqlite_path_that_is_a_directory_is_refused(tmp_path: Path) -> None:
    code, message = await error_of(f"sqlite:///{tmp_path}")
    assert code == "database_unreachable"
    assert "directory" in message


async def test_sqlite_path_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert (await error_of(f"sqlite:///{tmp_path}/file/t.db"))[0] == "database_unreachable"


@pytest.mark.parametrize(
    "content", [b"not a database\n" * 100, b"SQLite format 3\x00" + b"\xff" * 5000]
)
async def test_sqlite_file_that_is_not_a_database_is_refused(
    tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "t.db"
    path.write_bytes(content)
    assert (await error_of(f"sqlite:///{path}"))[0] == "database_unreachable"
    assert path.read_bytes() == content


async def test_sqlite_database_of_another_program_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "photos.db"
    connection = sqlite3.connect(path)
    connection.execute("create table photo (id integer)")
    connection.close()
    before = path.read_bytes()
    assert (await error_of(f"sqlite:///{path}"))[0] == "database_invalid"
    assert path.read_bytes() == before


@pytest.fixture
def common_folder() -> Iterator[Path]:
    """A folder that every account may walk into."""
    with tempfile.TemporaryDirectory(prefix="tenuto-test-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@contextmanager
def without_privileges() -> Iterator[None]:
    """Root may read and write everything; as somebody else, file modes count."""
    if os.geteuid() != 0:
        yield
        return
    anonymous = pwd.getpwnam("nobody").pw_uid
    os.seteuid(anonymous)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize(("mode", "folder_mode"), [(0o000, 0o755), (0o444, 0o755), (0o444, 0o777)])
async def test_read_only_sqlite_file_is_refused(
    common_folder: Path, mode: int, folder_mode: int
) -> None:
    path = common_folder / "t.db"
    async with opened(f"sqlite:///{path}", ManualClock()):
        pass
    before = path.read_bytes()
    os.chmod(path, mode)  # noqa: PTH101  as below, without a thread of its own
    os.chmod(common_folder, folder_mode)  # noqa: PTH101
    with without_privileges():
        code, _ = await error_of(f"sqlite:///{path}")
    assert code == "database_unreachable"
    os.chmod(path, 0o600)  # noqa: PTH101  ours again, to look
    assert path.read_bytes() == before


async def test_read_only_folder_of_sqlite_is_refused(common_folder: Path) -> None:
    os.chmod(common_folder, 0o555)  # noqa: PTH101  its owner may not write either
    with without_privileges():
        code, _ = await error_of(f"sqlite:///{common_folder}/below/t.db")
    assert code == "database_unreachable"
    assert os.listdir(common_folder) == []  # noqa: PTH208


async def test_full_disk_refuses_writes_until_there_is_space(sqlite_url: str) -> None:
    raw = Raw(sqlite_url)
    async with opened(sqlite_url, ManualClock()) as store:
        engine = Engine(store)
        fence = await running(engine)
        await engine.submit_many([new()] * 200)
        assert isinstance(store, SqliteStore)
        assert store._connection is not None
        room = store._connection.raw
        used = room.execute("pragma page_count").fetchone()[0]
        room.execute(f"pragma max_page_count = {used + 3}")
        accepted = 201
        full = ""
        while not full:
            try:
                await engine.submit(new(input="x" * 2000))
            except Unavailable as error:
                full = error.code
            else:
                accepted += 1
        assert full == "storage_full"
        before = await raw.counts()
        assert (before["task"], before["task_body"]) == (accepted, accepted)
        big = "x" * 100_000
        for call in (
            engine.submit_many([new(input=big)] * 5),
            engine.submit(new(input=big, idempotency_key="k")),
            engine.checkpoint(fence, big),
            engine.complete(fence, big),
            engine.spawn(fence, "k", new(input=big)),
            claim_all(engine),
        ):
            assert await refusal(call) == "storage_full"
        assert await raw.counts() == before
        assert (await engine.show(fence.task)).status == "RUNNING"
        room.execute("pragma max_page_count = 1073741823")
        await engine.complete(fence, big)
        assert (await engine.submit(new(input=big, idempotency_key="k"))).created
        assert await engine.maintenance.audit() == []
