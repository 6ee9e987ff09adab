"""The first owner token: one is created however many servers start at once."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from tests.api.conftest import V1, Api, replaced, running

from tenuto import app
from tenuto.api.server import _bootstrap_owner_token
from tenuto.settings import Settings

SERVERS = 4


def names(folder: Path) -> set[str]:
    """The files of tokens in a folder."""
    return {path.name for path in folder.glob("token*")}


async def test_concurrent_first_starts_create_one_owner_token(
    settings: Settings, tmp_path: Path
) -> None:
    store = app.create_store(settings.database_url())
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
        [existing] = (await client.get(f"{V1}/tokens")).json()
    assert (existing["name"], existing["role"], existing["createdBy"]) == (
        "bootstrap",
        "OWNER",
        "bootstrap",
    )


async def test_owner_token_that_cannot_be_written_is_not_valid(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError("no space left")

    async with app.open_service(settings) as service:
        with monkeypatch.context() as broken:
            broken.setattr(Path, "write_text", full)
            with pytest.raises(OSError, match="no space left"):
                await _bootstrap_owner_token(service)
        assert names(tmp_path) == set()
    path = tmp_path / "token"
    async with running(settings) as api:
        client = await api.client(path.read_text().strip())
        assert (await client.get(f"{V1}/me")).json()["role"] == "OWNER"
    assert path.stat().st_mode & 0o777 == 0o600


async def test_valid_owner_token_of_a_crashed_server_is_published(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Died(Exception):
        """The process ends here."""

    def die(*args: object) -> None:
        raise Died

    async with app.open_service(settings) as service:
        with monkeypatch.context() as dying:
            dying.setattr(Path, "replace", die)
            with pytest.raises(Died):
                await _bootstrap_owner_token(service)
    path = tmp_path / "token"
    [stored] = names(tmp_path)
    holding = (tmp_path / stored).read_text()
    others = {"token.another": "tnt_another", "token.bytes": "\udcff", "token.empty": ""}
    for name, text in others.items():
        (tmp_path / name).write_text(text, errors="surrogateescape")
    for _ in range(2):
        async with running(settings):
            assert path.read_text() == holding
    assert names(tmp_path) == {"token", *others}
    assert path.stat().st_mode & 0o777 == 0o600
