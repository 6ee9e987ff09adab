"""File modes: created files are private whatever the umask; doctor reports readable ones."""

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli.orchestrate import Orchestrate, Remote, serving, started, token_of
from tests.waiting import eventually_sync

from tenuto.encryption_keys import add_key

MADE = {"tenuto.db", "tenuto.db-wal", "tenuto.db-shm", "tenuto.db-lock", "tenuto.db-wake"}
KEYS = {"keys.json", "keys.json.lock"}


@pytest.fixture(params=[0o000, 0o022, 0o027], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    """A umask for the test and all that it starts."""
    before = os.umask(request.param)
    yield
    os.umask(before)


@pytest.fixture
def cli() -> Iterator[Orchestrate]:
    """A command line at a path so short that all its files are below it."""
    with tempfile.TemporaryDirectory(prefix="tenuto-test-") as home:
        yield Orchestrate(Path(home))


def check_private(folder: Path) -> set[str]:
    """The folder, and all that is in it, is for its owner alone; answers the names in it."""
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for path in folder.rglob("*"):
        result = path.lstat()
        usual = 0o700 if stat.S_ISDIR(result.st_mode) else 0o600
        assert stat.S_IMODE(result.st_mode) == usual, path
    return {path.name for path in folder.iterdir()}


@pytest.mark.usefixtures("umask")
@pytest.mark.parametrize("words", [("up", "--workers", "1"), ("serve",)], ids=" ".join)
def test_files_of_a_server_are_private(cli: Orchestrate, words: tuple[str, ...]) -> None:
    cli.data = cli.home / "not" / "yet"
    cli.environment["TENUTO_DATA"] = str(cli.data)
    with serving(cli, *words):
        cli.ok("secret", "set", "name", "--value-file", "-", stdin="a secret value")
        assert check_private(cli.data) == MADE | KEYS | {"token"}
        check_private(cli.home / "not")
    check_private(cli.data)
    assert {path.name for path in cli.home.iterdir()} == {"not", f"{words[0]}.log"}


@pytest.mark.usefixtures("umask")
@pytest.mark.parametrize("words", [("worker", "--command", "true"), ("coordinator",)])
def test_files_of_a_command_are_private(cli: Orchestrate, words: tuple[str, ...]) -> None:
    with started(cli, *words) as log:
        eventually_sync(lambda: "INFO" in log.read_text(), timeout=30)
        names = check_private(cli.data)
    assert MADE - {"tenuto.db-wake"} <= names <= MADE | KEYS, "a coordinator may hear no hints"


@pytest.mark.usefixtures("umask")
def test_key_file_is_private(tmp_path: Path) -> None:
    add_key(tmp_path / "new" / "folder")
    assert check_private(tmp_path / "new" / "folder") == KEYS
    check_private(tmp_path / "new")


@pytest.mark.usefixtures("umask")
def test_login_file_is_private_and_reported_otherwise(cli: Orchestrate) -> None:
    with serving(cli) as url:
        remote = Remote(cli.home, url, token_of(cli))
        del remote.environment["TENUTO_URL"]
        token = remote.environment.pop("TENUTO_TOKEN")
        remote.ok("login", url, "--token", token)
        check_private(cli.home / ".config")
        file = cli.home / ".config" / "tenuto" / "config.toml"
        assert remote("task", "list").err == ""
        file.chmod(0o644)
        output = remote("--json", "task", "list")
        assert output.code == 0
        assert output.err.count("warning:") == 1
        assert f"{file} has mode 0644" in output.err
        assert f"chmod 600 {file}" in output.err
        assert remote("--database", "sqlite:///near.db", "task", "list").err == ""


def test_doctor_reports_files_that_others_can_read(cli: Orchestrate) -> None:
    cli.ok("task", "list")

    def modes() -> list[str]:
        checks = cli.json("doctor")["checks"]
        return [check["detail"] for check in checks if check["name"] == "modes"]

    assert modes() == []
    cli.data.chmod(0o755)
    (cli.data / "tenuto.db").chmod(0o644)
    [reported] = modes()
    assert f"{cli.data} has mode 0755" in reported
    assert f"chmod go= {cli.data} {cli.data}/tenuto.db" in reported
