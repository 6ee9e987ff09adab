"""Bad input, unusable databases, interrupts: one sentence, a code and the right exit code."""

import inspect
import json
import os
import signal
import sqlite3
import subprocess
from pathlib import Path

import pytest
from tests.cli.orchestrate import PROGRAM, WAIT_S, Orchestrate
from tests.waiting import eventually_sync

from tenuto import app
from tenuto.cli.main import main
from tenuto.store import schema

LONGEST_WORD = 120_000  # Linux takes at most 128 KiB in one word of a command line


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--name", ""], "invalid_value"),
        (["--name", "  "], "invalid_value"),
        (["--name", "x" * LONGEST_WORD], "too_large"),
        (["--name", b"\xff".decode(errors="surrogateescape")], "text_invalid"),
        (["--name", "x", "--priority", "0"], "invalid_value"),
        (["--name", "x", "--priority", "11"], "invalid_value"),
        (["--name", "x", "--priority", "9" * 40], "invalid_value"),
        (["--name", "x", "--priority", "high"], "invalid_value"),
        (["--name", "x", "--max-attempts", "0"], "invalid_value"),
        (["--name", "x", "--max-attempts", "1000000"], "invalid_value"),
        (["--name", "x", "--timeout", "0"], "invalid_value"),
        (["--name", "x", "--timeout", "-5"], "invalid_value"),
        (["--name", "x", "--timeout", "9" * 400], "invalid_value"),
        (["--name", "x", "--estimate", "0"], "invalid_value"),
        (["--name", "x", "--run-at", "soon"], "invalid_value"),
        (["--name", "x", "--run-at", "+999999999d"], "invalid_value"),
        (["--name", "x", "--input", "{"], "invalid_json"),
        (["--name", "x", "--input", "@missing.json"], "invalid_value"),
        (["--name", "x", "--input", "@."], "invalid_value"),
        (["--name", "x", "--prompt-file", "binary"], "text_invalid"),
        (["--name", "x", "--prompt", "a", "--prompt-file", "binary"], "invalid_value"),
        (["--name", "x", "--tag", ""], "invalid_value"),
        (["--name", "x", "--tag", "y" * 101], "too_large"),
        (["--name", "x", *["--tag", "y"] * 51], "too_large"),
        (["--name", "x", "--type", ""], "invalid_value"),
        (["--name", "x", "--container", "later"], "invalid_value"),
        (["--prompt", "x"], "invalid_value"),
    ],
)
def test_bad_input_is_wrong_usage(cli: Orchestrate, words: list[str], code: str) -> None:
    (cli.home / "binary").write_bytes(b"\x80\x81")
    answer = cli("task", "create", *words)
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.startswith("error: ")
    assert answer.err.splitlines()[0].endswith(f" [{code}]")
    assert len(answer.err) < 1000


@pytest.mark.parametrize(
    ("content", "code"),
    [
        ("[" * 100_000 + "]" * 100_000, "too_deep"),
        ("[" * 70 + "]" * 70, "too_deep"),
        (json.dumps({"a": "nul \x00 inside"}), "text_invalid"),
        ('{"half": "\\ud800"}', "invalid_json"),
        ("1e999", "invalid_json"),
        (str(2**64), "invalid_json"),
        ('"' + "x" * (1 << 20) + '"', "too_large"),
        ('"' + "x" * (5 << 20) + '"', "too_large"),
        ("", "invalid_json"),
    ],
)
def test_bad_json_from_a_file_is_wrong_usage(cli: Orchestrate, content: str, code: str) -> None:
    (cli.home / "in.json").write_text(content)
    answer = cli("task", "create", "--name", "x", "--input", "@in.json")
    assert answer.err.splitlines()[0].endswith(f" [{code}]")
    assert (answer.code, answer.out) == (2, "")
    piped = cli("task", "create", "--name", "x", "--input", "@-", stdin=content)
    assert piped == answer


def test_title_of_a_megabyte_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--data", str(tmp_path), "task", "create", "--name", "x" * (1 << 20)]
    assert main(words) == 2
    output = capsys.readouterr().err
    assert output == (
        "error: title is 1,048,576 characters long; at most 255 are allowed [too_large]\n"
    )


@pytest.mark.parametrize(
    "words",
    [
        ["task", "list", "--status", "NOPE"],
        ["task", "list", "--limit", "0"],
        ["task", "list", "--limit", "1001"],
        ["task", "list", "--min-priority", "99999999999999999999"],
        ["task", "list", "--cursor", "x"],
        ["task", "list", "--since", "999999999d"],
        ["task", "list", "--type", b"\xff".decode(errors="surrogateescape")],
        ["task", "list", "--text", b"\xff".decode(errors="surrogateescape")],
        ["task", "list", "--tag", b"\xff".decode(errors="surrogateescape")],
        ["task", "nonsense"],
        ["--nonsense"],
        ["worker", "--slots", "0"],
        ["worker", "--command", "'"],
        ["worker", "--agent", ""],
        ["worker", "--task-tag", b"\xff".decode(errors="surrogateescape")],
        ["worker", "--app", "no.such.module:worker"],
        ["up", "--workers", "-1"],
    ],
)
def test_error_is_printed_in_the_requested_format(cli: Orchestrate, words: list[str]) -> None:
    answer = cli(*words)
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.startswith("error: ")
    problem = cli(*words, "--json")
    assert (problem.code, problem.err) == (2, "")
    assert set(json.loads(problem.out)["error"]) == {"code", "message"}


def test_invalid_task_id_is_not_found(cli: Orchestrate) -> None:
    answer = cli("task", "show", "\x1b[31mred")
    assert answer == (1, "", "error: '\\x1b[31mred' is not a task id [not_found]\n")


@pytest.mark.parametrize(
    ("url", "exit_code", "code"),
    [
        ("sqlite:///{folder}", 3, "database_unreachable"),
        ("sqlite:///{folder}/text", 3, "database_unreachable"),
        ("sqlite:///{folder}/text/t.db", 3, "database_unreachable"),
        ("sqlite:///proc/nowhere/t.db", 3, "database_unreachable"),
        ("postgresql://nobody@127.0.0.1:1/none", 3, "database_unreachable"),
        ("mysql://localhost", 2, "database_invalid"),
        ("sqlite://", 2, "database_invalid"),
    ],
)
@pytest.mark.parametrize("words", [["task", "list"], ["db", "migrate"], ["db", "check"]])
def test_unusable_database_is_reported(
    cli: Orchestrate, words: list[str], url: str, exit_code: int, code: str
) -> None:
    folder = cli.home / "folder"
    folder.mkdir()
    (folder / "text").write_text("not a database, but long enough to be looked at" * 40)
    address = url.format(folder=folder).replace("sqlite:///proc", "sqlite:////proc")
    answer = cli("--database", address, *words)
    assert (answer.code, answer.out) == (exit_code, "")
    assert answer.err.endswith(f" [{code}]\n")
    assert answer.err.count("\n") == 1


def test_newer_database_is_refused(cli: Orchestrate) -> None:
    cli.ok("task", "create", "--name", "x")
    with sqlite3.connect(cli.data / "tenuto.db") as raw:
        raw.execute("insert into schema_migration values (99, 'future', 99, '')")
    raw.close()
    for words in (["task", "list"], ["db", "check"], ["db", "migrate"], ["run", "--", "true"]):
        answer = cli(*words)
        assert (answer.code, answer.out) == (3, "")
        assert answer.err == (
            "error: the database has schema 99, which needs a newer program than this one;"
            " upgrade tenuto [schema_newer]\n"
        )
    assert cli("doctor").code == 3


def test_check_reports_tasks_that_disagree_with_their_audit_trail(cli: Orchestrate) -> None:
    created = cli.ok("task", "create", "--name", "x")
    newest = schema.migrations()[-1].number
    fine = {"ok": True, "schema": newest, "compat": 4, "restamped": False, "mismatches": []}
    assert cli.json("db", "check") == fine
    with sqlite3.connect(cli.data / "tenuto.db") as raw:
        raw.execute("delete from event")
    raw.close()
    answer = cli("db", "check")
    assert (answer.code, created in answer.out) == (1, True)
    assert json.loads(cli("db", "check", "--json").out)["ok"] is False


def test_read_command_does_not_create_a_missing_database(cli: Orchestrate) -> None:
    assert "does not exist yet" in cli.ok("doctor")
    assert not cli.data.exists()


def test_options_override_the_environment_before_and_after_the_command(cli: Orchestrate) -> None:
    cli.ok("task", "create", "--name", "x", "--data", "other")
    for words in (
        ("--data", "other", "task", "list", "--json"),
        ("task", "--json", "--data", "other", "list"),
        ("--json", "--data", "data", "task", "list", "--data", "other"),
        ("--json", "task", "list", "--database", "sqlite:///other/tenuto.db"),
    ):
        answer = cli(*words, TENUTO_DATABASE="sqlite:///elsewhere.db")
        assert len(json.loads(answer.out)["tasks"]) == 1
    assert cli.json("task", "list")["tasks"] == []
    broken = cli("task", "list", TENUTO_SLOTS="many")
    assert (broken.code, broken.err.endswith("[invalid_value]\n")) == (2, True)


def test_internal_error_is_one_line_and_a_hint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode(*_: object) -> None:
        raise ZeroDivisionError("by \x1b zero")

    monkeypatch.setattr("tenuto.client.target.load", explode)
    assert main(["task", "list"]) == 1
    assert capsys.readouterr().err == (
        "error: internal error: ZeroDivisionError: by \\x1b zero [internal]\n"
        "set TENUTO_DEBUG=1 for the stack trace\n"
    )
    monkeypatch.setenv("TENUTO_DEBUG", "1")
    assert main(["task", "list", "--json"]) == 1
    output = capsys.readouterr()
    assert json.loads(output.out)["error"]["code"] == "internal"
    assert "Traceback" in output.err


def test_ctrl_c_while_a_module_is_loaded_ends_quietly(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise RuntimeError("Error calling __set_name__") from KeyboardInterrupt()

    monkeypatch.setattr("tenuto.client.target.load", interrupted)
    assert main(["task", "list"]) == 130
    assert capsys.readouterr().err == ""


def test_ctrl_c_before_the_start_ends_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        pass

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tenuto.app.gc.collect", interrupted)
    never = work()
    with pytest.raises(KeyboardInterrupt):
        app.run(never)
    assert inspect.getcoroutinestate(never) == inspect.CORO_CLOSED


@pytest.mark.parametrize("words", [["task", "status", "--follow"], ["task", "logs", "--follow"]])
def test_ctrl_c_ends_quietly(cli: Orchestrate, words: list[str]) -> None:
    created = cli.ok("task", "create", "--name", "x")
    errors = cli.home / "err"
    with errors.open("wb") as err, (cli.home / "out").open("wb") as out:
        process = cli.start(*words, created, stderr=err, stdout=out)
        eventually_sync(
            lambda: b"submitted" in errors.read_bytes() + (cli.home / "out").read_bytes(),
            timeout=WAIT_S,
        )
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 130
    assert "Traceback" not in errors.read_text()
    assert "KeyboardInterrupt" not in errors.read_text()


def test_ctrl_c_during_follow_leaves_the_task(cli: Orchestrate) -> None:
    errors = cli.home / "err"
    with errors.open("wb") as err:
        process = cli.start("run", "--follow", "prompt", stderr=err)
        eventually_sync(lambda: b"submitted" in errors.read_bytes(), timeout=WAIT_S)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=WAIT_S)
    assert process.returncode == 130
    assert "the task continues" in errors.read_text()
    assert cli.json("task", "list", "--status", "PENDING")["tasks"] != []


def test_closed_pipe_ends_quietly(cli: Orchestrate) -> None:
    cli.ok("task", "create", "--name", "x")
    reader, writer = os.pipe()
    os.close(reader)
    process = cli.start("task", "list", stdout=writer)
    os.close(writer)
    _, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, err) == (141, b"")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_files_do_no_harm(cli: Orchestrate, closed: str) -> None:
    cli.ok("task", "create", "--name", "x")
    line = f'"$0" task create --name y {closed}'
    done = subprocess.run(
        ["sh", "-c", line, PROGRAM],
        capture_output=True,
        cwd=cli.home,
        env=cli.environment,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert len(cli.json("task", "list")["tasks"]) == 2
