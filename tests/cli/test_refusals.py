"""Options that cannot apply are refused: server options, modules, numbers, names."""

import json
import signal
import subprocess
from pathlib import Path

import pytest
from tests.cli.orchestrate import WAIT_S, Orchestrate, serving, token_of
from tests.waiting import eventually_sync

SOMEWHERE = "0198c0de-0000-7000-8000-00000000beef"
NOT_TEXT = b"\xff".decode(errors="surrogateescape")


def refuse(cli: Orchestrate, *words: str, **environment: str) -> str:
    """The sentence that a command line is refused with, as wrong usage."""
    answer = cli(*words, **environment)
    assert (answer.code, answer.out) == (2, ""), answer
    reported = answer.err.splitlines()[0]
    assert reported.startswith("error: "), answer
    assert reported.endswith("]"), answer
    assert "[internal]" not in reported, answer
    return reported


def test_workspace_option_without_a_server_is_refused(cli: Orchestrate) -> None:
    created = cli.ok("task", "create", "--name", "x")
    cancel = ("task", "cancel", "--status", "PENDING", "--yes")
    for words in ((*cancel, "--workspace", SOMEWHERE), ("--workspace", SOMEWHERE, *cancel)):
        assert "a workspace needs a server" in refuse(cli, *words)
    assert "unset TENUTO_WORKSPACE" in refuse(cli, *cancel, TENUTO_WORKSPACE=SOMEWHERE)
    assert "must not be empty" in refuse(cli, *cancel, "--workspace", "")
    assert "a token needs a server" in refuse(cli, *cancel, "--token", "tnt_x")
    assert cli("task", "list", TENUTO_TOKEN="tnt_x").code == 0
    assert cli.json("task", "show", created)["status"] == "PENDING"


@pytest.mark.parametrize("words", ["up", "serve", "coordinator", "db check", "secret rotate"])
@pytest.mark.parametrize("option", ["--url", "--token", "--workspace"])
def test_database_command_refuses_a_server(cli: Orchestrate, words: str, option: str) -> None:
    output = refuse(cli, *words.split(), option, "http://127.0.0.1:1")
    assert output.startswith(
        f"error: {option} is not allowed: this command works directly on the database"
    )
    assert not cli.data.exists()


def test_up_ignores_the_workspace_of_commands(cli: Orchestrate) -> None:
    cli.environment |= {"TENUTO_URL": "http://127.0.0.1:1", "TENUTO_WORKSPACE": SOMEWHERE}
    with serving(cli, "up") as url:
        cli.environment |= {"TENUTO_URL": url, "TENUTO_TOKEN": token_of(cli)}
        del cli.environment["TENUTO_WORKSPACE"]
        assert cli("run", "--follow", "--", "true").code == 0


def test_doctor_reports_that_commands_use_a_server(cli: Orchestrate) -> None:
    reported = json.loads(cli("doctor", "--json", TENUTO_URL="http://me:secret@there:1").out)
    [server] = [check for check in reported["checks"] if check["name"] == "server"]
    assert server["detail"].startswith("commands use the server http://me:***@there:1; ")
    assert str(cli.data) in server["detail"]


@pytest.mark.parametrize("host", ["", " ", NOT_TEXT])
@pytest.mark.parametrize("command", ["up", "serve"])
def test_host_must_be_a_name_or_omitted(cli: Orchestrate, command: str, host: str) -> None:
    assert "the setting host must be" in refuse(cli, command, "--host", host)
    assert not cli.data.exists()


def test_port_out_of_range_is_refused_before_the_start(cli: Orchestrate) -> None:
    assert "the setting port must be" in refuse(cli, "up", TENUTO_PORT="99999")
    assert not cli.data.exists()


MODULES = {
    "syntax.py": "import",
    "raising.py": "raise ValueError('two\\nlines')",
    "leaving.py": "import sys\nsys.exit(3)",
    "numbers.py": "handlers = {1: print}",
}


@pytest.mark.parametrize(
    "name", ["syntax", "raising", "leaving", "", ":x", "..ok", NOT_TEXT, "os:nothing", "raising.x"]
)
def test_module_that_cannot_be_loaded_is_reported(cli: Orchestrate, name: str) -> None:
    for file, text in MODULES.items():
        (cli.home / file).write_text(text)
    output = refuse(cli, "worker", "--app", name)
    assert output.startswith("error: cannot load ")
    assert output.endswith(" [invalid_value]")


def test_handler_without_a_name_is_refused(cli: Orchestrate) -> None:
    (cli.home / "odd.py").write_text(MODULES["numbers.py"])
    assert "is not a dict of handlers by task type" in refuse(cli, "worker", "--app", "odd")


@pytest.mark.parametrize(
    "words",
    [
        ["worker", "--app", "json:tool", "--command", "true"],
        ["up", "--demo", "--port", "0"],
        ["up", "--demo", "--workers", "1"],
        ["up", "--demo", "--host", "127.0.0.1"],
        ["--data", "elsewhere", "up", "--demo"],
        ["up", "--demo", "--database", "sqlite:///t.db"],
        ["chaos", "--minutes", "nan"],
        ["top", "--every", "nan"],
        ["bench", "--json-file", "missing/figures.json", "submit"],
        ["bench", "--json-file", ".", "submit"],
        ["bench", "--database", "notdb", "submit"],
        ["bench", "--database", "sqlite:///notdb", "submit"],
        ["task", "create", "--name", "x", "--timeout", "1h30"],
        ["task", "create", "--name", "x", "--timeout", "30 1h"],
        ["agent", "list", "--status", "nope"],
        ["run", "--", ""],
        ["run", "--", "", "word"],
        ["apply", "-f", "x" * 3000],
        ["validate", "-f", "x" * 3000],
    ],
)
def test_option_that_cannot_apply_is_refused(cli: Orchestrate, words: list[str]) -> None:
    refuse(cli, *words)
    assert [path.name for path in cli.home.iterdir()] in ([], ["data"])


@pytest.mark.parametrize(
    "words",
    [
        "definition show",
        "definition delete",
        "export",
        "flow start",
        "group start",
        "run --group",
        "task create --name x --group",
        "schedule show",
        "trigger delete",
        "limit delete",
    ],
)
def test_name_that_cannot_be_stored_is_refused(cli: Orchestrate, words: str) -> None:
    after = ["--", "true"] if words.startswith("run") else []
    assert refuse(cli, *words.split(), NOT_TEXT, *after).endswith(" [text_invalid]")


def test_zero_duration_is_accepted(cli: Orchestrate) -> None:
    created = cli.ok("task", "create", "--name", "x", "--run-at", "+0s")
    assert cli.json("task", "show", created)["status"] == "PENDING"
    assert cli.json("task", "list", "--since", "0s")["tasks"] == []
    assert cli.json("agent", "list", "--status", "working") == {"agents": []}


def test_bench_reports_an_unreachable_server(cli: Orchestrate) -> None:
    answer = cli("bench", "--database", "postgresql://127.0.0.1:1/none", "submit")
    assert (answer.code, answer.out) == (3, "")
    assert answer.err.endswith(" [database_unreachable]\n")


def test_bench_prints_one_document(cli: Orchestrate) -> None:
    words = ("bench", "--json", "--tasks", "10", "--rounds", "1", "--json-file", "kept.json")
    answer = cli(*words, "submit")
    assert (answer.code, set(json.loads(answer.out))) == (0, {"sqlite"})
    assert answer.err.startswith("sqlite round 1/1: submit\n")
    assert json.loads((cli.home / "kept.json").read_text()) == json.loads(answer.out)


def test_demo_that_is_stopped_leaves_nothing(cli: Orchestrate, tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    cli.environment |= {"TMPDIR": str(tmp_path / "tmp"), "TENUTO_WORKSPACE": SOMEWHERE}
    demo = cli.start("up", "--demo", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    eventually_sync(lambda: [*(tmp_path / "tmp").glob("tenuto-demo-*/demo.db")], timeout=WAIT_S)
    demo.send_signal(signal.SIGTERM)
    assert demo.wait(WAIT_S) == 130
    assert [*(tmp_path / "tmp").iterdir()] == []


def test_misspelled_command_gets_a_suggestion(cli: Orchestrate) -> None:
    assert "No such command 'rnu'. Did you mean 'run'?" in refuse(cli, "rnu", "--", "true")
    assert "No such command 'lst'. Did you mean 'list'?" in refuse(cli, "task", "lst")
    assert "No such command 'xyzzy'. [" in refuse(cli, "xyzzy")


def test_missing_token_is_reported_with_a_remedy(cli: Orchestrate) -> None:
    with serving(cli) as url:
        for more in ((), ("--token", "tnt_bad")):
            answer = cli("task", "list", "--url", url, *more)
            assert answer.code == 1
            assert "`orchestrate login URL`, or give a token: --token, TENUTO_TOKEN" in answer.err
