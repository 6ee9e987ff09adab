"""Fixtures that bring the services tests need; a service that does not start is an error."""

import asyncio
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from tests.moved_time import MovedTime, movable
from tests.services.postgres import PostgresServer

from tenuto import app
from tenuto.engine.tenancy import passwords


def pytest_configure() -> None:
    """Let SIGINT arrive: a shell starts what runs in its background with SIGINT ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def cheap_passwords() -> None:
    """A tenth of a second for each password is for thieves, not for tests."""
    passwords.PASSWORD_COST = (1, 64, 1)


@pytest.fixture
def moved_time() -> Iterator[MovedTime]:
    """Deadlines and timers of this process come due when the test moves the time.

    A test names it first: what another fixture started must not see time run back.
    """
    with movable() as moved:
        yield moved


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A fast server of this pytest process alone, so a test may restart it.

    A test of what survives a crash makes its own, durable `PostgresServer()`.
    """
    with PostgresServer(fast=True) as server:
        yield server


@pytest.fixture
def postgres_url(postgres: PostgresServer) -> Iterator[str]:
    """The address of an empty database that only this test uses."""
    url = postgres.create_database()
    yield url
    postgres.drop_database(url)


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """The address of a database file that does not exist yet."""
    return f"sqlite:///{tmp_path}/t.db"


@pytest.fixture(params=["sqlite", "postgres"])
def empty_url(request: pytest.FixtureRequest) -> str:
    """The address of an empty database, of each kind in turn."""
    return str(request.getfixturevalue(f"{request.param}_url"))


@pytest.fixture(params=["sqlite", "postgres"])
def database_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of a database that has our schema and nothing in it, of each kind in turn."""
    if request.param == "sqlite":
        url = str(request.getfixturevalue("sqlite_url"))
        shutil.copy(request.getfixturevalue("sqlite_template"), url.removeprefix("sqlite:///"))
        yield url
        return
    postgres: PostgresServer = request.getfixturevalue("postgres")
    url = postgres.create_database(request.getfixturevalue("postgres_template"))
    yield url
    postgres.drop_database(url)


@pytest.fixture(scope="session")
def postgres_template(postgres: PostgresServer) -> str:
    """The name of a database with our schema: to copy one takes a fifth of making one."""
    url = postgres.create_database()
    _migrate(url)
    return urlsplit(url).path[1:]


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with our schema, to be copied."""
    path = tmp_path_factory.mktemp("template") / "t.db"
    _migrate(f"sqlite:///{path}")
    return path


def _migrate(url: str) -> None:
    async def migrate() -> None:
        store = app.create_store(url)
        await store.migrate()
        await store.close()

    asyncio.run(migrate())
