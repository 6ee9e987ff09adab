"""Settings: invalid ones are refused by name before anything starts."""

import asyncio
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from tenuto.bench import scale
from tenuto.bench.measures import Bench
from tenuto.client.target import Login, Target, config_path, read_login, resolve_target, write_login
from tenuto.model.errors import Invalid
from tenuto.settings import Settings, environment_without_settings, load
from tenuto.worker.process_pool import WorkerPool

WORKSPACE = "0198c0de-0000-7000-8000-000000000000"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user with nothing set."""
    for name in ("URL", "TOKEN", "WORKSPACE", "DATA", "DATABASE", "PORT"):
        monkeypatch.delenv(f"TENUTO_{name}", raising=False)
    for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(name: str) -> "pytest.RaisesExc[Invalid]":
    return pytest.raises(Invalid, match=rf"^the setting {name} ")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", "99999"),
        ("port", "-5"),
        ("rate_per_s", "-1"),
        ("rate_per_s", "nan"),
        ("rate_per_s", "inf"),
        ("body_kb", "-1"),
        ("body_kb", "0"),
        ("heartbeat_s", "inf"),
        ("heartbeat_s", "nan"),
        ("heartbeat_s", "0"),
        ("grace_s", "-1"),
        ("drain_s", "inf"),
        ("host", " "),
        ("host", "a..b"),
        ("host", "x" * 100),
        ("host", b"\xff".decode(errors="surrogateescape")),
        ("data", "~nobody-of-this-name/x"),
        ("pooler", "session"),
        ("database_runtime", "postgresql://h/db"),
        ("database_direct", "postgresql://h/db"),
    ],
)
def test_value_out_of_range_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(f"TENUTO_{name.upper()}", value)
    with refused(name):
        load()
    monkeypatch.delenv(f"TENUTO_{name.upper()}")
    with refused(name):
        load({name: value})


def test_refusal_names_both_bounds() -> None:
    with pytest.raises(Invalid, match="above 0 and below 1,000,000,000, not inf"):
        load({"heartbeat_s": float("inf")})


@pytest.mark.parametrize("name", ["database", "data", "host"])
def test_path_with_a_nul_is_refused(home: Path, name: str) -> None:
    (home / "tenuto.toml").write_text(f'{name} = "a\\u0000b"\n')
    with refused(name):
        load()


def test_empty_host_is_refused(home: Path) -> None:
    with refused("host"):
        load({"host": ""})
    (home / "tenuto.toml").write_text('host = ""\n')
    with refused("host"):
        load()


def test_home_folder_of_an_unknown_user_is_refused(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "tenuto.toml").write_text('data = "~nobody-of-this-name"\n')
    with refused("data"):
        load()
    (home / "tenuto.toml").unlink()
    monkeypatch.setenv("XDG_DATA_HOME", "~nobody-of-this-name")
    with pytest.raises(Invalid, match=r"^XDG_DATA_HOME "):
        load()
    assert load({"database": "postgresql://host/db"}).database_url() == "postgresql://host/db"
    monkeypatch.setenv("XDG_CONFIG_HOME", "~nobody-of-this-name")
    with pytest.raises(Invalid, match=r"^XDG_CONFIG_HOME "):
        read_login()


def test_too_deeply_nested_settings_file_is_refused(home: Path) -> None:
    (home / "tenuto.toml").write_text("x = " + "[" * 100_000)
    with pytest.raises(Invalid, match=r"cannot read tenuto\.toml: it is nested too deep"):
        load()
    (home / "tenuto.toml").unlink()
    config_path().parent.mkdir(parents=True)
    config_path().write_text("x = " + "[" * 100_000)
    with pytest.raises(Invalid, match="it is nested too deep"):
        read_login()


def test_workspace_setting_requires_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    for where in ({}, {"database": "sqlite:///t.db"}, {"data": "folder"}):
        with pytest.raises(Invalid, match="omit the workspace"):
            resolve_target(workspace=WORKSPACE, **where)
        with pytest.raises(Invalid, match="omit the token"):
            resolve_target(token="t", **where)
    monkeypatch.setenv("TENUTO_WORKSPACE", WORKSPACE)
    with pytest.raises(Invalid, match="unset TENUTO_WORKSPACE"):
        resolve_target()
    monkeypatch.setenv("TENUTO_TOKEN", "t")
    monkeypatch.setenv("TENUTO_URL", "http://there")
    assert str(resolve_target().workspace) == WORKSPACE
    assert resolve_target(data="folder") == Target(
        settings=load({"data": "folder", "database": ""})
    )


@pytest.mark.parametrize("missing", ["database", "database_runtime"])
def test_pooler_requires_both_addresses(missing: str) -> None:
    values = dict.fromkeys(("database", "database_runtime"), "postgresql://h/db")
    load({"pooler": "transaction", **values})
    for wrong in ("", "sqlite:///t.db"):
        reported = rf"^with pooler=transaction the setting {missing} must be postgresql://"
        with pytest.raises(Invalid, match=reported):
            load({"pooler": "transaction", **values, missing: wrong})


def test_database_option_uses_only_options_for_its_connection(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENUTO_POOLER", "transaction")
    monkeypatch.setenv("TENUTO_DATABASE", "postgresql://pooler/db")
    monkeypatch.setenv("TENUTO_DATABASE_RUNTIME", "postgresql://run@pooler/db")
    (home / "tenuto.toml").write_text('database_direct = "postgresql://server/db"\n')
    configured = load()
    assert load({"port": 1}) == msgspec.structs.replace(configured, port=1)
    assert load({"database": "sqlite:///t.db"}) == Settings(database="sqlite:///t.db")
    assert load({"database": "", "data": "folder"}) == Settings(data="folder")
    flags = {"database": "postgresql://other/db", "pooler": "transaction"}
    flags["database_runtime"] = "postgresql://run@other/db"
    assert load(flags) == msgspec.convert(flags, Settings)


def test_empty_variable_is_ignored(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "tenuto.toml").write_text('database = "sqlite:///file.db"\nslots = 3\n')
    for name in ("DATABASE", "SLOTS"):
        monkeypatch.setenv(f"TENUTO_{name}", "")
    assert load() == Settings(database="sqlite:///file.db", slots=3)
    monkeypatch.setenv("TENUTO_SLOTS", "4")
    assert load().slots == 4
    assert load({"slots": 5}).slots == 5


def test_login_token_is_used_only_for_its_server(monkeypatch: pytest.MonkeyPatch) -> None:
    write_login(Login("http://own:1", "tnt_own", WORKSPACE))
    for chosen in (resolve_target(), resolve_target("http://own:1/")):
        assert (chosen.token, str(chosen.workspace)) == ("tnt_own", WORKSPACE)
    other = resolve_target("http://other:1")
    assert (other.token, other.workspace) == (None, None)
    monkeypatch.setenv("TENUTO_URL", "http://other:1")
    assert resolve_target().token is None
    monkeypatch.setenv("TENUTO_TOKEN", "tnt_said")
    assert resolve_target().token == resolve_target("http://own:1").token == "tnt_said"


def test_child_process_with_its_own_settings_inherits_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENUTO_POOLER", "transaction")
    monkeypatch.setenv("CRASH_AT", "worker.running")
    monkeypatch.setenv("PGPASSWORD", "secret")
    result = environment_without_settings()
    assert result["PGPASSWORD"] == "secret"
    assert [name for name in result if name.startswith(("TENUTO_", "CRASH_"))] == []


async def test_workers_of_up_use_its_database_settings(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENUTO_POOLER", "transaction")
    monkeypatch.setenv("TENUTO_DATABASE_RUNTIME", "postgresql://run@pooler/db")
    started: list[dict[str, str]] = []

    async def start(*_words: str, env: dict[str, str], **_options: object) -> None:
        started.append(env)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    chosen = load({"database": "sqlite:///t.db"})
    await WorkerPool(None, chosen, 1)._start()  # type: ignore[arg-type]
    for name, value in started[0].items():
        monkeypatch.setenv(name, value)
    assert load() == msgspec.structs.replace(chosen, data=str(chosen.data_folder()))
    (home / "tenuto.toml").write_text(
        'pooler = "transaction"\ndatabase_direct = "postgresql://server/db"\n'
    )
    assert load() == msgspec.structs.replace(chosen, data=str(chosen.data_folder()))


async def test_benchmark_worker_uses_the_measured_database(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TENUTO_POOLER", "transaction")
    monkeypatch.setenv("TENUTO_DATABASE_RUNTIME", "postgresql://run@pooler/db")
    started: list[dict[str, str]] = []

    async def start(*_words: str, env: dict[str, str], **_options: object) -> None:
        started.append(env)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    await Bench(None, "sqlite:///t.db", 1).start_worker()  # type: ignore[arg-type]
    with suppress(AttributeError):  # there is no process to be told to end
        async with scale._running_coordinators("sqlite:///t.db"):
            pass
    for env in started:
        ours = {name for name in env if name.startswith("TENUTO_")}
        assert ours == {"TENUTO_DATABASE", "TENUTO_PARENT_PIPE"}
        assert env["TENUTO_DATABASE"] == "sqlite:///t.db"
    assert len(started) > 1
