"""`orchestrate flow`, `group` and `inbox`, on a database and against a server."""

import json
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from tests.cli.orchestrate import WAIT_S, Orchestrate, Remote, serving, token_of
from tests.waiting import eventually_sync

FLOW = """\
tasks:
  - {id: fetch, name: Fetch it, command: [sh, -c, "echo '{\\"output\\": {\\"n\\": 3}}' >&3"],
     next_task: check}
  - {id: check, condition: result.n > 2, true_next_task_id: each, false_next_task_id: broken}
  - {id: each, foreach_items: [a, b], foreach_template_task_id: one, foreach_order: parallel}
  - {id: one, name: "Item {{item}}", command: ["true"]}
  - {id: broken, command: ["false"], max_attempts: 1}
  - {id: sign, approval: {message: "Ship it?"}}
  - {id: after, command: [sh, -c, "echo previous $TENUTO_PREVIOUS"]}
  - {id: before, command: [sh, -c, "echo '{\\"output\\": {\\"n\\": 3}}' >&3"], next_task: after}
groups:
  - {id: nightly, name: Every night, children: [fetch]}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Orchestrate, str, str]]:
    """A machine with a server and a worker, with the server's address and token."""
    local = Orchestrate(tmp_path_factory.mktemp("server"))
    with serving(local, "up") as url:
        (local.home / "flow.yaml").write_text(FLOW)
        local.ok("apply", "-f", "flow.yaml")
        yield local, url, token_of(local)


@pytest.fixture(params=["embedded", "remote"])
def cli(
    request: pytest.FixtureRequest, server: tuple[Orchestrate, str, str], tmp_path: Path
) -> Orchestrate:
    """The command line beside the server's database, or far from it."""
    local, url, token = server
    return local if request.param == "embedded" else Remote(tmp_path, url, token)


def test_flow_is_started_followed_and_drawn(cli: Orchestrate) -> None:
    output = cli("flow", "start", "nightly", "--follow")
    assert output.code == 0, output
    flow = output.err.split()[1]
    assert "COMPLETED  fetch" in output.err
    tree = [
        f"nightly  Every night  COMPLETED  {flow}",
        "└─ ✓ nightly (sequential)  COMPLETED",
        "   ├─ ✓ fetch  Fetch it  COMPLETED",
        "   ├─ ✓ check (condition)  COMPLETED",
        "   ├─ ✓ true: each (foreach)  COMPLETED",
        "   └─ ✓ each  items (parallel)  COMPLETED",
        "      ├─ ✓ one  Item a  COMPLETED",
        "      └─ ✓ one #2  Item b  COMPLETED",
    ]
    assert output.out.splitlines() == tree
    assert cli.ok("flow", "show", flow, "--graph").splitlines() == tree
    assert cli.ok("group", "show", "nightly", "--graph").splitlines()[1:] == tree[1:]
    graph = cli.json("flow", "show", flow, "--graph")
    assert {edge["kind"] for edge in graph["edges"]} == {"next", "true", "item"}
    assert cli.ok("group", "show", "nightly", "--mermaid").startswith("flowchart TD")
    assert cli.json("flow", "show", flow, "--mermaid")["mermaid"].startswith("flowchart TD")
    shown = cli.ok("flow", "show", flow)
    assert "COMPLETED 5" in shown
    assert flow in cli.ok("flow", "list", "--key", "nightly")
    listed = cli.json("flow", "list", "--status", "completed", "--limit", "1")
    assert listed["flows"][0]["id"] == flow
    tasks = cli.json("flow", "tasks", flow)["tasks"]
    assert sorted(task["key"] for task in tasks) == ["check", "each", "fetch", "one", "one"]
    assert "Item b" in cli.ok("flow", "tasks", flow)


def test_failed_flow_sets_the_exit_code_and_is_retried(cli: Orchestrate) -> None:
    output = cli("--json", "flow", "start", "broken", "--follow")
    assert output.code == 1
    flow = json.loads(output.out)["id"]
    drawn = cli.ok("flow", "show", flow, "--graph")
    assert "✗ broken  DEAD: exit code 1" in drawn
    assert "broken (DEAD): exit code 1" in cli.ok("flow", "show", flow)
    again = cli("flow", "rerun", flow, "--from-failed", "--follow")
    assert (again.code, again.err.split()[1]) == (1, flow)
    fresh = cli.ok("flow", "rerun", flow)
    assert fresh != flow
    assert cli.json("flow", "show", fresh)["rerunOf"] == flow
    wrong = cli("flow", "rerun", flow, "--from-failed", "--steps", "3")
    assert wrong.code == 2


def test_inbox_item_is_answered(cli: Orchestrate) -> None:
    flow = cli.ok("flow", "start", "sign")
    drawn = cli.ok("flow", "show", flow, "--graph")
    assert "· sign (approval)  WAITING" in drawn
    [item] = [
        entry for entry in cli.json("inbox", "list")["items"] if entry["body"].get("flow") == flow
    ]
    assert "Ship it?" in cli.ok("inbox", "list")
    assert "OPEN" in cli.ok("inbox", "show", item["id"])
    done = cli.json("inbox", "approve", item["id"], "--comment", "go on")
    assert (done["status"], done["decision"]["comment"]) == ("APPROVED", "go on")
    assert "go on" in cli.ok("inbox", "show", item["id"])
    late = cli("--json", "inbox", "reject", item["id"])
    assert (late.code, json.loads(late.out)["error"]["code"]) == (1, "out_of_turn")
    wrong = cli("--json", "inbox", "answer", item["id"], "seen")
    assert (wrong.code, json.loads(wrong.out)["error"]["code"]) == (1, "out_of_turn")
    assert item["id"] in cli.ok("inbox", "list", "--status", "all")
    assert cli.json("flow", "show", flow)["status"] == "COMPLETED"


def test_rejected_flow_finishes(cli: Orchestrate) -> None:
    flow = cli.ok("flow", "start", "sign")
    [item] = [
        entry for entry in cli.json("inbox", "list")["items"] if entry["body"].get("flow") == flow
    ]
    assert "REJECTED" in cli.ok("inbox", "reject", item["id"])
    assert cli("flow", "show", flow, "--follow").code == 1


def test_group_is_created_paused_and_cancelled(cli: Orchestrate) -> None:
    key = f"g-{uuid4()}"
    assert cli.ok("group", "create", key, "--child", "sign", "--name", "Waits") == key
    taken = cli("--json", "group", "create", key)
    assert (taken.code, json.loads(taken.out)["error"]["code"]) == (1, "name_taken")
    flow = cli.ok("group", "start", key)
    assert "RUNNING" in cli.ok("group", "show", key)
    assert cli.json("group", "pause", key)["status"] == "PAUSED"
    assert cli.json("group", "resume", key)["status"] == "RUNNING"
    listed = cli.json("group", "list", "--flow", flow)["groups"]
    assert [item["key"] for item in listed] == [key]
    assert key in cli.ok("group", "list", "--key", key)
    assert "CANCELLED" in cli.ok("group", "cancel", key, "--reason", "enough")
    other = f"h-{uuid4()}"
    started = cli.json("group", "create", other, "--type", "parallel", "--child", "sign", "--start")
    assert started["flow"]["status"] == "RUNNING"
    assert cli.json("flow", "pause", other)["status"] == "PAUSED"
    assert cli.json("flow", "resume", other)["status"] == "RUNNING"
    assert cli.json("flow", "cancel", other)["status"] == "CANCELLED"
    assert cli("group", "show", other, "--follow").code == 1


def test_group_that_cannot_start_is_stored(cli: Orchestrate) -> None:
    key = f"g-{uuid4()}"
    output = cli("group", "create", key, "--child", "nobody", "--start")
    assert output.code == 2
    assert "target_unknown" in output.err
    assert f"`orchestrate group start {key}` starts it" in output.err
    assert cli.json("definition", "show", key)["kind"] == "group"


def test_task_command_sets_dependencies(cli: Orchestrate) -> None:
    first = cli.ok("task", "create", "--name", "first", "--type", "nobody's", "--key", "first")
    second = cli.ok("task", "create", "--name", "second", "--depends-on", first)
    shown = cli.ok("task", "show", second)
    assert f"depends on:  {first}" in shown
    assert "waiting for: dependencies" in shown
    third = cli.ok("run", "--blocks", second, "--depends-on", first, "--", "true")
    assert len(cli.json("task", "show", second)["dependsOn"]) == 2
    assert cli.json("task", "show", third)["dependsOn"] == [first]
    words = ("--depends-on", first, "--on-dependency-failure", "skip")
    fourth = cli.ok("task", "create", "--name", "fourth", *words)
    cli.ok("task", "cancel", first)
    assert cli.json("task", "show", second)["status"] == "FAILED"
    assert cli.json("task", "show", fourth)["status"] == "SKIPPED"


def test_task_command_sets_a_next_definition(cli: Orchestrate) -> None:
    done = cli.json("run", "--follow", "--next", "after", "--", "true")
    flow = done["flowId"]
    eventually_sync(lambda: cli.json("flow", "show", flow)["status"] == "COMPLETED", timeout=WAIT_S)
    keys = [task["key"] for task in cli.json("flow", "tasks", flow)["tasks"]]
    assert keys[0] == "after"


def test_command_task_gets_earlier_results(cli: Orchestrate) -> None:
    reported = json.loads(cli.ok("--json", "flow", "start", "before", "--follow"))
    task = cli.json("flow", "tasks", reported["id"])["tasks"][0]
    assert 'previous {"n":3}' in cli.ok("task", "logs", task["id"])


@pytest.mark.parametrize(
    ("words", "code", "reason"),
    [
        (("flow", "show", "nobody"), 1, "not_found"),
        (("flow", "start", "nobody"), 2, "target_unknown"),
        (("flow", "start", "nightly", "--input", "{"), 2, "invalid_json"),
        (("flow", "start", "nightly", "--steps", "0"), 2, "invalid_value"),
        (("flow", "list", "--status", "gone"), 2, "invalid_filter"),
        (("group", "show", "nobody"), 1, "not_found"),
        (("group", "start", "fetch"), 1, "not_found"),
        (("group", "create", "bad key"), 2, "invalid_value"),
        (("group", "create", "k", "--input", "1"), 2, "invalid_value"),
        (("inbox", "show", "x"), 2, "invalid_value"),
        (("task", "create", "--name", "x", "--depends-on", "ffff"), 1, "not_found"),
        (("task", "create", "--name", "x", "--next", "nobody"), 2, "target_unknown"),
        (("task", "create", "--name", "x", "--group", "nobody"), 1, "not_found"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_invalid_flow_arguments_are_reported(
    cli: Orchestrate, words: tuple[str, ...], code: int, reason: str
) -> None:
    output = cli("--json", *words)
    assert (output.code, json.loads(output.out)["error"]["code"]) == (code, reason)
