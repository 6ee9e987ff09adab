"""A real server in this process, on a free port, over each database."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx2
import msgspec
import pytest

from tenuto import app
from tenuto.api.edge.connection_limits import Deadlines
from tenuto.api.server import serve
from tenuto.api.service import Service
from tenuto.engine.engine import DEFAULT_WORKSPACE
from tenuto.model.tenancy.access import SCOPES, Role
from tenuto.settings import Settings
from tenuto.tls import verify_option

V1 = "/api/v1"
Caller = Callable[..., Any]


class Api:
    """A running server, and clients for it."""

    def __init__(self, service: Service, url: str, stack: AsyncExitStack) -> None:
        self.service = service
        self.url = url
        self._stack = stack

    async def client(self, token: str | None = None) -> httpx2.AsyncClient:
        """A client that bears the token."""
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        client = httpx2.AsyncClient(
            base_url=self.url, headers=headers, timeout=30, verify=verify_option(self.url)
        )
        return await self._stack.enter_async_context(client)

    async def workspace(self, name: str) -> UUID:
        return await self.service.identity.create_workspace(name, None)

    async def token(
        self,
        role: Role = Role.OWNER,
        workspace: UUID = DEFAULT_WORKSPACE,
        scopes: tuple[str, ...] = SCOPES,
        **more: Any,
    ) -> str:
        created = await self.service.identity.create_token(workspace, "test", role, scopes, **more)
        return created.token

    async def acting(
        self, role: Role = Role.OWNER, workspace: UUID = DEFAULT_WORKSPACE, **more: Any
    ) -> httpx2.AsyncClient:
        """A client of somebody with that role there."""
        return await self.client(await self.token(role, workspace, **more))


@asynccontextmanager
async def running(settings: Settings, deadlines: Deadlines | None = None) -> AsyncIterator[Api]:
    """A server on these settings, until the block ends."""
    store = app.create_store(settings.database_url())
    await store.migrate()
    await store.close()
    stop = asyncio.Event()
    reported: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    async with app.open_service(settings) as service, AsyncExitStack() as stack:
        task = asyncio.create_task(serve(service, stop, reported.set_result, deadlines=deadlines))
        task.add_done_callback(lambda _: reported.done() or reported.cancel())
        await asyncio.wait([reported])
        if task.done():
            await task
        try:
            yield Api(service, await reported, stack)
            await stack.aclose()
        finally:
            stop.set()
            await task


@pytest.fixture
def settings(database_url: str, tmp_path: Path) -> Settings:
    return Settings(database=database_url, data=str(tmp_path), port=0, poll_s=0.2)


@pytest.fixture
async def api(settings: Settings) -> AsyncIterator[Api]:
    async with running(settings) as api:
        yield api


@pytest.fixture
async def owner(api: Api, tmp_path: Path) -> httpx2.AsyncClient:
    """The client of whoever started the server."""
    token = (tmp_path / "token").read_text().strip()
    return await api.client(token)


def problem(answer: httpx2.Response) -> tuple[int, str]:
    """Status and code of a refusal, which has the right form."""
    assert answer.headers["content-type"].startswith("application/problem+json"), answer.text
    body = answer.json()
    assert body["status"] == answer.status_code
    assert body["detail"]
    return answer.status_code, body["code"]


def replaced(settings: Settings, **changes: Any) -> Settings:
    return msgspec.structs.replace(settings, **changes)
