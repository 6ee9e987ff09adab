"""The first owner's token: there is one, however many servers start at once."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

from tests.api.conftest import V1, Api, replaced, running

from tenuto import app
from tenuto.settings import Settings

SERVERS = 4


async def test_servers_that_start_at_once_make_one_token(
    settings: Settings, tmp_path: Path
) -> None:
    store = app.open_store(settings.url())
    await store.migrate()
    await store.close()
    folders = [tmp_path / str(number) for number in range(SERVERS)]
    async with AsyncExitStack() as stack:

        async def start(folder: Path) -> Api:
            own = replaced(settings, data=str(folder))
            return await stack.enter_async_context(running(own))

        first, *_ = await asyncio.gather(*(start(folder) for folder in folders))
        [file] = [folder / "token" for folder in folders if (folder / "token").exists()]
        client = await first.client(file.read_text().strip())
        [known] = (await client.get(f"{V1}/tokens")).json()
    assert (known["name"], known["role"], known["createdBy"]) == ("bootstrap", "OWNER", "bootstrap")
