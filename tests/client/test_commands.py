"""Every command group against a server: one document with `--json`, and exit codes."""

import json
import os
import pty
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from tests.cli.orchestrate import WAIT_S, Orchestrate, Remote, serving, started, token_of


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Orchestrate, str]]:
    """A server as its own machine's command line sees it, and its address."""
    local = Orchestrate(tmp_path_factory.mktemp("server"))
    with serving(local) as url:
        yield local, url


@pytest.fixture
def local(served: tuple[Orchestrate, str]) -> Orchestrate:
    return served[0]


@pytest.fixture
def cli(served: tuple[Orchestrate, str], tmp_path: Path) -> Remote:
    return Remote(tmp_path, served[1], token_of(served[0]))


@pytest.fixture
def worker(cli: Remote) -> Iterator[None]:
    """A worker that knows the server only."""
    with started(cli, "worker", "--slots", "2"):
        yield


def test_task_commands_print_the_same_direct_and_remote(cli: Remote, local: Orchestrate) -> None:
    created = cli.ok("task", "create", "--name", "x", "--tag", "same", "--input", "[1]")
    for words in (
        ("task", "show", created),
        ("task", "show", created[:30]),
        ("task", "list", "--tag", "same"),
        ("task", "status", created),
        ("task", "logs", created),
        ("task", "attempts", created),
        ("task", "explain", created),
        ("explain", created),
        ("worker", "list"),
        ("agent", "list"),
        ("task", "cancel", "--tag", "same", "--dry-run"),
        ("task", "cancel", "--tag", "same", "--min-priority", "5", "--dry-run"),
        ("task", "cancel", "--tag", "same", "--min-priority", "6", "--dry-run"),
        ("dlq", "list"),
    ):
        assert cli.json(*words) == local.json(*words)
    assert cli.ok("task", "pause", created) == f"{created} PAUSED"
    assert cli.ok("task", "resume", created) == f"{created} PENDING"
    assert (
        cli.ok("task", "update", created, "--priority", "9", "--name", "y")
        == f"{created} priority 9"
    )
    assert cli.json("task", "update", created, "--metadata", '{"a": 1}')["metadata"] == {"a": 1}
    assert cli("task", "update", created).code == 2
    assert cli("task", "update", created, "--metadata", "[]").code == 2
    assert cli.json("task", "cancel", "--tag", "same")["done"] == [created]
    assert cli.ok("task", "retry", created) == f"{created} PENDING"
    assert cli("task", "delete", created, "--yes").code == 1
    cli.ok("task", "cancel", created, "--reason", "over")
    again = cli.ok("task", "rerun", created)
    assert cli.json("task", "show", again)["rerunOf"] == created
    cli.ok("task", "cancel", again)
    assert cli.ok("task", "archive", again).endswith("archived")
    assert cli.json("task", "delete", created, "--yes") == {"ok": True, "id": created}
    assert cli.json("task", "show", created)["inputContext"] is None


def test_refused_commands_print_the_same_direct_and_remote(cli: Remote, local: Orchestrate) -> None:
    anonymous = "0198c0de-0000-7000-8000-000000000000"
    for words in (
        ("task", "show", anonymous),
        ("task", "cancel", anonymous),
        ("task", "show", "zz"),
        ("task", "list", "--status", "NONE"),
        ("task", "create", "--name", ""),
        ("task", "create", "--name", "x", "--priority", "11"),
        ("agent", "show", "nobody"),
        ("secret", "delete", "nothing"),
        ("run", "--agent", "nobody", "x"),
    ):
        far, near = cli("--json", *words), local("--json", *words)
        assert (far.code, far.out, far.err) == (near.code, near.out, near.err)


def test_command_task_is_run_and_followed(cli: Remote, worker: None) -> None:
    answer = cli("run", "--follow", "--", "sh", "-c", "echo one; sleep 0.3; echo two")
    assert (answer.code, answer.out) == (0, "one\ntwo\n")
    failed = cli("--json", "run", "--follow", "--max-attempts", "1", "--", "sh", "-c", "exit 3")
    assert failed.code == 1
    assert json.loads(failed.out)["status"] == "DEAD"
    dead = json.loads(failed.out)["id"]
    assert dead in [task["id"] for task in cli.json("dlq", "list")["tasks"]]
    assert cli.json("dlq", "show", dead)["id"] == dead
    assert cli.ok("dlq", "requeue", dead).startswith(dead)
    cli("task", "status", dead, "--follow")
    logs = cli.ok("task", "logs", dead, "--follow")
    assert "exit code 3" in logs
    assert cli("dlq", "purge", "--yes").code == 0
    [existing] = [
        item for item in cli.json("worker", "list")["workers"] if item["status"] == "RUNNING"
    ]
    assert existing["slots"] == 2
    assert cli.json("agent", "show", "local")["acceptCommands"]
    assert cli.json("agent", "tasks", "local")["tasks"]


def test_agent_commands_work_through_a_server(cli: Remote) -> None:
    created = cli.json(
        *("agent", "create", "--name", "dev", "--task-tags", "a,b", "--skills", "x"),
        *("--capabilities", "git", "--max-concurrent", "2", "--runtime", "http"),
    )
    assert (created["taskTags"], created["maxConcurrentTasks"]) == (["a", "b"], 2)
    assert cli.json("agent", "update", "dev", "--max-concurrent", "3")["taskTags"] == ["a", "b"]
    assert "dev" in cli.ok("agent", "list")
    assert cli.json("agent", "health", "dev")["healthy"]
    token = cli.ok("agent", "token", "dev")
    assert token.startswith("tnt_")
    assert cli("task", "list", TENUTO_TOKEN=token).code == 1
    assert cli.json("agent", "terminate", "dev", "--now")["status"] == "TERMINATED"
    assert cli("agent", "health", "dev").code == 1
    assert cli.json("agent", "delete", "dev") == {"ok": True}


def test_secrets_are_not_in_the_arguments(cli: Remote) -> None:
    assert cli.json("secret", "set", "k", "--value-file", _file(cli, "v4lue\n"))["name"] == "k"
    assert cli("secret", "set", "k", stdin="other-value\n").code == 0
    [existing] = cli.json("secret", "list")["secrets"]
    assert existing["name"] == "k"
    assert "value" not in existing
    assert cli("secret", "set", "k", "v4lue").code == 2
    assert cli.ok("secret", "delete", "k") == "deleted k"


def _file(cli: Remote, text: str) -> str:
    path = cli.home / "value.txt"
    path.write_text(text)
    return str(path)


def test_command_task_runs_in_the_folder_of_its_worker(cli: Remote) -> None:
    for words, folder in (((), None), (("--cwd", "sub"), "sub"), (("--cwd", "/srv"), "/srv")):
        task = cli.ok("run", *words, "--", "true")
        assert cli.json("task", "show", task)["cwd"] == folder


def test_members_tokens_and_workspaces_are_managed(cli: Remote) -> None:
    file = _file(cli, "correct horse battery\n")
    ann = cli.json("user", "create", "ann", "--role", "admin", "--password-file", file)
    assert (ann["name"], ann["role"]) == ("ann", "ADMIN")
    assert cli("user", "create", "ann", "--password-file", file).code == 1
    assert cli.json("user", "update", "ann", "--role", "VIEWER")["role"] == "VIEWER"
    assert "ann" in cli.ok("user", "list")
    assert cli.json("user", "delete", "ann") == {"ok": True}
    token = cli.ok(
        "token", "create", "ci", "--role", "VIEWER", "--scope", "read", "--expires", "+1h"
    )
    assert cli("task", "list", TENUTO_TOKEN=token).code == 0
    refused = cli("task", "create", "--name", "x", TENUTO_TOKEN=token)
    assert (refused.code, refused.err.endswith("[forbidden]\n")) == (1, True)
    assert cli.json("token", "revoke", "ci") == {"ok": True, "below": 0}
    assert cli("token", "revoke", "ci").code == 1
    assert "bootstrap" in cli.ok("token", "list")
    other = cli.json("workspace", "create", "other")
    assert other["workspace"]["name"] == "other"
    assert cli("task", "list", TENUTO_TOKEN=other["token"]).code == 0
    own = cli.json("workspace", "show")
    assert cli.json("workspace", "quota", "--pending", "5000")["quota"]["pending"] == 5000
    assert cli.json("workspace", "quota", "--running", "5")["quota"]["running"] == 5
    cli.ok("workspace", "quota")
    assert own["id"] in cli.ok("workspace", "list")
    wrong = cli("task", "list", "--workspace", other["workspace"]["id"])
    assert (wrong.code, wrong.err.endswith("[forbidden]\n")) == (1, True)
    assert cli("task", "list", "--workspace", "nonsense").code == 2


NOT_TEXT = b"\xff".decode(errors="surrogateescape")


@pytest.mark.parametrize(
    "words",
    ["definition show", "flow start", "schedule show", "limit delete", "task show"],
)
def test_argument_that_cannot_be_sent_is_refused(cli: Remote, words: str) -> None:
    answer = cli(*words.split(), NOT_TEXT)
    assert (answer.code, answer.out, answer.err.endswith("[text_invalid]\n")) == (2, "", True)


@pytest.mark.parametrize("url", [f"http://{NOT_TEXT}", "http://ü..x", "http://x/\x01", "nope"])
def test_address_without_a_server_is_reported(cli: Remote, url: str) -> None:
    for words in (("task", "list", "--url", url), ("login", url, "--token", "t")):
        answer = cli(*words)
        assert (answer.code, answer.out) == (2, "")
        assert answer.err.startswith(("error: url holds ", "error: 'http://", "error: 'nope' "))


def test_webhook_commands_work_through_a_server(cli: Remote) -> None:
    refused = cli("webhook", "create", "http://127.0.0.1/x", "--event", "task.dead")
    assert (refused.code, refused.err.endswith("[url_forbidden]\n")) == (2, True)
    assert cli.json("webhook", "list") == {"webhooks": []}
    anonymous = "0198c0de-0000-7000-8000-000000000000"
    for words in (
        ("show", anonymous),
        ("update", anonymous, "--disable"),
        ("delete", anonymous),
        ("deliveries", anonymous),
        ("redeliver", anonymous),
        ("rotate-secret", anonymous),
    ):
        answer = cli("--json", "webhook", *words)
        assert (answer.code, json.loads(answer.out)["error"]["code"]) == (1, "not_found"), words


def test_coordinator_commands_work_through_a_server(cli: Remote) -> None:
    assert cli.json("coordinator", "status")["active"] is False
    nothing = {"ok": True, "expired": 0, "promoted": 0, "flowed": 0}
    assert cli.json("coordinator", "recover") == nothing
    own = cli.json("workspace", "list")["workspaces"][0]["id"]
    assert cli.json("coordinator", "recover", "--workspace", own) == nothing
    assert cli("coordinator", "recover", "--workspace", "x").code == 2
    assert cli("coordinator", "recover", "--workspace", str(uuid4())).code == 1
    assert "logs" in cli.json("coordinator", "logs", "--level", "ERROR")
    assert "logs" in cli.json("coordinator", "logs", "--workspace", own)


def test_command_that_needs_a_server_reports_it(local: Orchestrate) -> None:
    for words in (("token", "list"), ("user", "list"), ("workspace", "list"), ("webhook", "list")):
        answer = local("--json", *words)
        assert answer.code == 2
        assert "needs a server" in json.loads(answer.out)["error"]["message"]


def test_unreachable_server_is_reported_by_commands(cli: Remote) -> None:
    answer = cli("--json", "task", "list", TENUTO_URL="http://127.0.0.1:1")
    assert (answer.code, json.loads(answer.out)["error"]["code"]) == (3, "server_unreachable")
    assert cli("task", "list", TENUTO_TOKEN="tnt_wrong").code == 1
    assert cli("task", "list", "--url", "nonsense").code == 2


def test_login_is_stored_per_server(cli: Remote) -> None:
    environment = cli.environment
    url, token = environment.pop("TENUTO_URL"), environment.pop("TENUTO_TOKEN")
    assert cli.json("task", "list")["tasks"] == [], "the embedded database"
    assert cli("login", url, "--token", "tnt_wrong").code == 1
    file = cli.home / ".config" / "tenuto" / "config.toml"
    assert not file.exists()
    assert cli.json("login", url, "--token", token)["role"] == "OWNER"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    created = cli.ok("task", "create", "--name", "over there")
    assert cli.json("task", "show", created)["createdBy"] == "token:bootstrap"
    assert cli.json("--data", "here", "task", "list")["tasks"] == []
    assert cli.json("task", "list", "--database", "sqlite:///t.db")["tasks"] == []
    untrusted = cli("--json", "task", "list", "--url", "http://127.0.0.1:1")
    assert untrusted.code == 3
    assert token not in untrusted.out + untrusted.err
    cli.ok("logout")
    assert not file.exists()
    password = _file(cli, "correct horse battery\n")
    cli("user", "create", "bob", "--password-file", password, TENUTO_URL=url, TENUTO_TOKEN=token)
    wrong = cli("login", url, "--name", "bob", "--password-file", "-", stdin="wrong password")
    assert (wrong.code, wrong.err) == (1, "error: name or password is wrong [login_refused]\n")
    cli.ok("login", url, "--name", "bob", "--password-file", password)
    assert cli.json("task", "list")["tasks"]
    existing = ("login", url, "--name", "bob", "--password-file", password, "--workspace")
    assert cli.json(*existing, "default")["workspaceId"] == cli.json("workspace", "show")["id"]
    assert cli(*existing, "elsewhere").err == "error: name or password is wrong [login_refused]\n"
    (cli.home / "new.txt").write_text("a better password\n")
    files = ("--password-file", password, "--new-password-file", "new.txt")
    assert cli.ok("user", "password", *files) == "changed; log in again"
    assert "[unauthenticated]" in cli("task", "list").err
    cli.ok("login", url, "--name", "bob", "--password-file", "new.txt")
    session = re.search(r'token = "(\S+)"', file.read_text())
    assert session
    assert cli.json("logout") == {"ok": True}
    assert cli("task", "list", TENUTO_URL=url, TENUTO_TOKEN=session[1]).code == 1
    assert cli.ok("logout") == "not logged in"
    assert cli("login").code == 2
    assert cli("login", url, "--name", "bob").code == 2


def test_top_shows_the_system_through_a_server(cli: Remote) -> None:
    created = cli.ok("task", "create", "--name", "x")
    seen = cli.json("top")
    assert seen["tasks"]["PENDING"] >= 1
    assert seen["running"] == []
    assert "PENDING" in cli.ok("top")
    screen, terminal = pty.openpty()
    process = cli.start("top", stdin=terminal, stdout=terminal, stderr=terminal)
    os.close(terminal)
    shown = b""
    while b"q: quit" not in shown:
        shown += os.read(screen, 65536)
    os.write(screen, b"q")
    _drain(screen)
    assert process.wait(WAIT_S) == 0
    assert b"PENDING" in shown
    cli.ok("task", "cancel", created)


def _drain(screen: int) -> None:
    """Read until the other side is gone."""
    try:
        while os.read(screen, 65536):
            pass
    except OSError:
        pass
    finally:
        os.close(screen)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_suggests_names_through_a_server(cli: Remote, shell: str) -> None:
    assert "_ORCHESTRATE_COMPLETE" in cli.ok("completion", shell)
    answer = cli(_ORCHESTRATE_COMPLETE="bash_complete", COMP_WORDS="orchestrate wo", COMP_CWORD="1")
    assert "plain,worker" in answer.out.split()


def test_every_command_group_prints_one_json_document(cli: Remote) -> None:
    for words in (
        ("agent", "list"),
        ("worker", "list"),
        ("workspace", "list"),
        ("user", "list"),
        ("token", "list"),
        ("webhook", "list"),
        ("secret", "list"),
        ("coordinator", "status"),
        ("top",),
    ):
        answer = cli("--json", *words)
        document: Any = json.loads(answer.out)
        assert isinstance(document, dict)
        assert (answer.code, answer.err) == (0, "")
