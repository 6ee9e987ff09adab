"""A server over each database, an engine behind it, and the same engine without it."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.api.conftest import Api, running

from tenuto import app
from tenuto.client.remote.engine import RemoteEngine, connect_to_server
from tenuto.engine.engine import Engine
from tenuto.settings import Settings


@pytest.fixture
def settings(database_url: str, tmp_path: Path) -> Settings:
    return Settings(database=database_url, data=str(tmp_path), port=0, poll_s=0.2)


@pytest.fixture
async def api(settings: Settings) -> AsyncIterator[Api]:
    async with running(settings) as api:
        yield api


@pytest.fixture
def token(api: Api, tmp_path: Path) -> str:
    """The token of whoever started the server."""
    return (tmp_path / "token").read_text().strip()


@pytest.fixture
async def far(api: Api, token: str) -> AsyncIterator[RemoteEngine]:
    async with connect_to_server(api.url, token) as engine:
        yield engine


@pytest.fixture
async def near(api: Api, settings: Settings) -> AsyncIterator[Engine]:
    async with app.connect(settings, actor="near") as engine:
        yield engine
