"""Fixtures that bring the services tests need; a service that does not start is an error."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.services.postgres import PostgresServer


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
def database_url(request: pytest.FixtureRequest) -> str:
    """The address of an empty database, of each kind in turn."""
    return str(request.getfixturevalue(f"{request.param}_url"))
