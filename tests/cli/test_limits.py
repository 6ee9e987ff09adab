"""`pause`, `resume` and `limit`, on a database and through a server."""

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from tests.cli.orchestrate import Orchestrate, Remote, serving, token_of


@pytest.fixture(params=["near", "far"])
def cli(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Orchestrate]:
    """A command line on a database of its own, and one behind a server on it."""
    local = Orchestrate(tmp_path)
    if request.param == "near":
        yield local
        return
    with serving(local) as url:
        yield Remote(tmp_path, url, token_of(local))


def test_task_type_is_paused_explained_listed_and_resumed(cli: Orchestrate) -> None:
    task = cli.ok("task", "create", "--name", "t", "--prompt", "p", "--type", "deploy")
    words = ("pause", "--type", "deploy", "--reason", "release freeze", "--until", "+2h")
    created = cli.json(*words)
    assert (created["kind"], created["subject"], created["reason"]) == (
        "type",
        "deploy",
        "release freeze",
    )
    assert created["until"] is not None
    output = cli.ok("explain", task)
    assert "type deploy was paused by" in output
    assert "release freeze" in output
    listed = cli.ok("pause").splitlines()
    assert listed[0].split() == ["KIND", "SUBJECT", "UNTIL", "BY", "SINCE", "REASON"]
    assert listed[1].endswith("release freeze")
    assert cli.ok("resume", "--type", "deploy") == "resumed type deploy"
    assert cli.json("pause") == {"gates": []}
    again = cli("resume", "--type", "deploy")
    assert (again.code, "not_found" in again.err) == (1, True)


def test_lanes_agents_and_the_workspace_are_paused(cli: Orchestrate) -> None:
    task = cli.ok("task", "create", "--name", "t", "--prompt", "p")
    lane = cli.json("explain", task)["lane"]
    assert f"lane: {lane}" in cli.ok("explain", task)
    assert cli.json("pause", "--lane", lane)["subject"] == lane
    cli.ok("agent", "create", "--name", "dev", "--model", "p/m", "--account", "team-a")
    assert cli.json("agent", "show", "dev")["account"] == "team-a"
    assert cli.json("pause", "--agent", "dev")["subject"] == "dev"
    assert cli.json("pause", "--workspace")["kind"] == "workspace"
    kinds = [gate["kind"] for gate in cli.json("pause")["gates"]]
    assert kinds == ["agent", "lane", "workspace"]
    assert len(cli.json("explain", task)["gates"]) >= 2
    assert cli.json("resume", "--workspace") == {"ok": True, "kind": "workspace", "subject": "all"}
    cli.ok("resume", "--agent", "dev")
    cli.ok("resume", "--lane", lane)
    assert cli.json("pause") == {"gates": []}


def test_workspace_option_before_the_command_selects_and_after_it_pauses(
    tmp_path: Path,
) -> None:
    local = Orchestrate(tmp_path)
    with serving(local) as url:
        far = Remote(tmp_path, url, token_of(local))
        others = far("--workspace", str(uuid4()), "pause", "--workspace")
        assert (others.code, "forbidden" in others.err) == (1, True)
        own = far.json("workspace", "list")["workspaces"][0]["id"]
        assert far.ok("--workspace", own, "pause", "--workspace").startswith("kind")
        assert [gate["kind"] for gate in far.json("pause")["gates"]] == ["workspace"]


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("pause", "--type", "a", "--agent", "b"), 2),
        (("pause", "--reason", "why"), 2),
        (("pause", "--type", "a", "--until", "yesterday"), 2),
        (("pause", "--lane", "abc"), 2),
        (("pause", "--agent", "nobody"), 1),
        (("resume",), 2),
        (("limit", "set", "x", "--provider", "p"), 2),
        (("limit", "set", "x", "--requests-per-minute", "5"), 2),
        (("limit", "set", "x", "--provider", "p", "--requests-per-minute", "0"), 2),
        (("limit", "delete", "x"), 1),
    ],
)
def test_invalid_pause_or_limit_is_reported(
    tmp_path: Path, words: tuple[str, ...], code: int
) -> None:
    answer = Orchestrate(tmp_path)(*words)
    assert (answer.code, answer.out) == (code, "")
    assert answer.err.startswith("error: ")


def test_rate_limit_is_set_listed_and_deleted(cli: Orchestrate) -> None:
    numbers = ("--requests-per-minute", "50", "--tokens-per-minute", "20000")
    words = ("limit", "set", "claude", "--provider", "anthropic", *numbers)
    created = cli.json(*words)
    assert (created["name"], created["provider"], created["model"]) == ("claude", "anthropic", None)
    assert (created["requestsPerMinute"], created["tokensLeft"]) == (50, 20000)
    cli.ok("limit", "set", "opus", "--model", "opus", "--account", "a", *numbers)
    listed = cli.ok("limit", "list").splitlines()
    assert listed[1].split() == "claude anthropic 50 of 50 20,000 of 20,000".split()
    assert [rate_limit["name"] for rate_limit in cli.json("limit", "list")["rateLimits"]] == [
        "claude",
        "opus",
    ]
    assert cli.ok("limit", "delete", "claude") == "deleted claude"
    assert len(cli.json("limit", "list")["rateLimits"]) == 1
