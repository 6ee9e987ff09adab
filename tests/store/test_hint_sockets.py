"""The folder of hint sockets: private, and refused otherwise."""

import os
import socket
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.contract.store.test_bad_database import without_privileges
from tests.waiting import eventually

from tenuto.broker.local import LocalWakeups, _socket_folder
from tenuto.clock import Clock
from tenuto.model.errors import Unavailable

LONG = "a-rather-long-name-of-a-file-" * 3


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A database whose path is too long for sockets beside it, and a folder for temporary files."""
    with tempfile.TemporaryDirectory(prefix="tenuto-test-") as common:
        Path(common).chmod(0o1777)
        monkeypatch.setattr(tempfile, "tempdir", common)
        yield f"{common}/{LONG}.db"


def wide(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)


def readable(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o750)


def link(folder: Path) -> None:
    target = folder.with_name("target")
    target.mkdir(0o700)
    folder.symlink_to(target)


def dangling(folder: Path) -> None:
    folder.symlink_to(folder.with_name("nowhere"))


def file(folder: Path) -> None:
    folder.touch(0o600)


def of_another_user(folder: Path) -> None:
    with without_privileges():
        folder.mkdir(0o700)


# Only root can be somebody else; for others a mode stands for it.
PLANTED = [wide, readable, link, dangling, file, of_another_user if os.geteuid() == 0 else wide]


@pytest.mark.parametrize("plant", PLANTED)
async def test_prepared_folder_of_another_user_is_refused(
    elsewhere: str, plant: Callable[[Path], None]
) -> None:
    folder = _socket_folder(elsewhere)
    assert folder.parent == Path(tempfile.gettempdir())
    plant(folder)
    with pytest.raises(Unavailable, match="remove it") as caught:
        await LocalWakeups(elsewhere, "w", Clock()).open()
    assert caught.value.code == "folder_unsafe"
    assert str(folder) in caught.value.message
    assert not folder.is_dir() or not list(folder.iterdir())


async def test_symbolic_link_removes_no_files(elsewhere: str) -> None:
    folder = _socket_folder(elsewhere)
    link(folder)
    stored = folder.with_name("target") / "letter"
    stored.write_text("dear reader")
    LocalWakeups(elsewhere, "w", Clock()).notify(["lane:1"])
    assert stored.exists()


async def test_hint_socket_of_another_user_gets_nothing(elsewhere: str) -> None:
    folder = _socket_folder(elsewhere)
    wide(folder)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as spy:
        spy.bind(str(folder / "spy"))
        spy.setblocking(False)
        LocalWakeups(elsewhere, "w", Clock()).notify(["lane:1"])
        with pytest.raises(BlockingIOError):
            spy.recv(100)


@pytest.mark.parametrize("umask", [0o000, 0o022])
async def test_hint_folder_and_its_sockets_are_private(elsewhere: str, umask: int) -> None:
    received: list[str] = []
    listener = LocalWakeups(elsewhere, "listener", Clock())
    before = os.umask(umask)
    try:
        await listener.open()
    finally:
        os.umask(before)
    listener.subscribe(received.append)
    folder = _socket_folder(elsewhere)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()] == [0o600]
    speaker = LocalWakeups(elsewhere, "speaker", Clock())
    speaker.notify(["lane:1"])
    await eventually(lambda: received == ["lane:1"])
    await speaker.close()
    await listener.close()


async def test_root_listens_in_the_folder_of_the_databases_owner(elsewhere: str) -> None:
    of_another_user(_socket_folder(elsewhere))
    with without_privileges(), open(elsewhere, "x"):  # noqa: ASYNC230, PTH123
        pass
    listener = LocalWakeups(elsewhere, "listener", Clock())
    await listener.open()
    await listener.close()
