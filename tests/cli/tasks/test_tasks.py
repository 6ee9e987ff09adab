"""Tasks from the command line: create, list, control, one by one and by filter."""

import json
import re
from pathlib import Path

import pytest
from tests.cli.conftest import Die, Here
from tests.cli.orchestrate import Orchestrate
from tests.contract.conftest import ManualClock, new, opened

from tenuto.cli.tasks import tree as children
from tenuto.engine.engine import Engine

ID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}")
MISSING_ID = "00000000-0000-7000-8000-00000000dead"


def test_task_is_created_with_every_option(cli: Orchestrate, tmp_path: Path) -> None:
    (tmp_path / "ask.md").write_text("Read the log.\nSum it up.\n")
    (tmp_path / "in.json").write_text('{"rows": [1, 2]}')
    parent = cli.ok("task", "create", "--name", "parent")
    options = (
        "--name Report --prompt-file ask.md --system-prompt Short --description why --priority 8"
        " --tag a --tag b --task-tag python --capability git --type report --agent-type writer"
        " --model m1 --timeout 1h30m --queue-ttl 2d --estimate 15 --run-at +10m --input @in.json"
        f" --max-attempts 7 --idempotency-key k1 --parent {parent}"
    )
    created = cli.ok("task", "create", *options.split())
    assert ID.fullmatch(created)
    view = cli.json("task", "show", created)
    expected = {
        "title": "Report",
        "prompt": "Read the log.\nSum it up.\n",
        "systemPrompt": "Short",
        "description": "why",
        "priority": 8,
        "tags": ["a", "b"],
        "taskTags": ["python"],
        "capabilities": ["git"],
        "taskType": "report",
        "agentType": "writer",
        "model": "m1",
        "timeoutS": 5400,
        "queueTtlS": 172_800,
        "estimateMinutes": 15,
        "inputContext": {"rows": [1, 2]},
        "maxAttempts": 7,
        "idempotencyKey": "k1",
        "parentId": parent,
        "status": "WAITING",
        "waitingFor": "schedule",
    }
    assert {name: view[name] for name in expected} == expected
    assert view["createdBy"].startswith("cli:")


def test_repeated_create_returns_the_same_task(cli: Orchestrate) -> None:
    words = ("task", "create", "--name", "once", "--idempotency-key", "k")
    first, second = cli.json(*words), cli.json(*words)
    assert (first["created"], second["created"]) == (True, False)
    assert first["id"] == second["id"]
    other = cli("task", "create", "--name", "twice", "--idempotency-key", "k")
    assert other.code == 1
    assert other.err.endswith("[idempotency_conflict]\n")


def test_time_without_a_zone_is_local_time(cli: Orchestrate) -> None:
    created = cli.ok("task", "create", "--name", "x", "--run-at", "2999-01-02T03:04:05")
    zoned = cli.ok("task", "create", "--name", "x", "--run-at", "2999-01-02T03:04:05+02:00")
    assert cli.json("task", "show", zoned)["runAt"] == "2999-01-02T01:04:05Z"
    assert cli.json("task", "show", created)["status"] == "WAITING"


def test_command_task_gets_the_current_folder(cli: Orchestrate, tmp_path: Path) -> None:
    created = cli.ok(
        "run", "--env", "A=b=c", "--tag", "t", "--", "grep", "--json", "a b", "--follow"
    )
    view = cli.json("task", "show", created)
    assert view["command"] == ["grep", "--json", "a b", "--follow"]
    assert view["title"] == "grep --json 'a b' --follow"
    assert (view["runtime"], view["cwd"], view["tags"]) == ("command", str(tmp_path), ["t"])
    long = cli.ok("run", "--name", "short", "--cwd", "sub", "--", "echo", "x" * 500)
    named = cli.json("task", "show", long)
    assert (named["title"], named["cwd"]) == ("short", str(tmp_path / "sub"))
    unnamed = cli.json("task", "show", cli.ok("run", "--", "echo", "x" * 500))
    assert len(unnamed["title"]) == 80


@pytest.mark.parametrize("words", [("--agent", "nobody"), ("--timeout", "soon")])
def test_json_after_the_dashes_belongs_to_the_command(here: Here, words: tuple[str, ...]) -> None:
    answer = here("run", *words, "--", "grep", "--json")
    assert (answer.code > 0, answer.out) == (True, "")
    assert answer.err.startswith("error: ")


def test_prompt_gives_its_first_line_as_title(cli: Orchestrate) -> None:
    view = cli.json("task", "show", cli.json("run", "Fix it.\nAll of it.")["id"])
    assert (view["title"], view["prompt"]) == ("Fix it.…", "Fix it.\nAll of it.")
    assert view["command"] is None


@pytest.mark.parametrize(
    "words",
    [
        ("run",),
        ("run", "--"),
        ("run", "two", "words"),
        ("run", "prompt", "--", "command"),
        ("run", "--env", "X=1", "prompt"),
        ("run", "--env", "=1", "--", "true"),
        ("run", "--env", "X", "--", "true"),
    ],
)
def test_run_without_prompt_and_command_is_refused(
    cli: Orchestrate, words: tuple[str, ...]
) -> None:
    assert cli(*words).code == 2


def test_unknown_agent_is_refused(cli: Orchestrate) -> None:
    answer = cli("run", "--agent", "nobody", "prompt")
    assert answer.code == 1
    assert answer.err == "error: no agent 'nobody'; existing agents: none [not_found]\n"


def test_task_list_is_filtered_and_paged(cli: Orchestrate) -> None:
    for number in range(1, 6):
        tag = "odd" if number % 2 else "even"
        name = f"task {number}"
        cli.ok("task", "create", "--name", name, "--priority", str(number), "--tag", tag)

    def titles(*words: str) -> list[str]:
        return [task["title"][-1] for task in cli.json("task", "list", *words)["tasks"]]

    assert titles() == ["5", "4", "3", "2", "1"]
    assert titles("--tag", "odd", "--min-priority", "3") == ["5", "3"]
    assert titles("--status", "pending", "--text", "TASK 4") == ["4"]
    assert titles("--status", "DEAD,COMPLETED") == titles("--type", "other") == []
    assert titles("--since", "1h") == titles("--since", "2020-01-01") == titles()
    assert titles("--since", "2999-01-01") == []
    page = cli.json("task", "list", "--limit", "2")
    assert titles("--limit", "2", "--cursor", page["nextCursor"]) == ["3", "2"]
    lines = cli.ok("task", "list", "--limit", "2").splitlines()
    assert lines[0].split() == "ID STATUS PRI TRIES PROGRESS AGE AGENT TITLE".split()
    assert [line.split()[1] for line in lines[1:]] == ["PENDING", "PENDING"]
    assert len({line.index("task") for line in lines[1:]}) == 1


def test_task_is_paused_resumed_cancelled_and_retried(cli: Orchestrate) -> None:
    created = cli.ok("task", "create", "--name", "x")
    assert cli.ok("task", "pause", created) == f"{created} PAUSED"
    assert cli.ok("task", "resume", "--id", created) == f"{created} PENDING"
    assert cli.json("task", "cancel", created, "--reason", "wrong")["status"] == "CANCELLED"
    again = cli("task", "cancel", created)
    assert again.code == 1
    assert again.err == f"error: cannot cancel task {created}: it is CANCELLED [out_of_turn]\n"
    assert cli.ok("task", "retry", created) == f"{created} PENDING"
    assert cli.ok("task", "update", created, "--priority", "9") == f"{created} priority 9"
    output = cli.ok("task", "logs", created)
    kinds = "submitted paused resumed cancelled retried priority_changed".split()
    assert [line.split()[2] for line in output.splitlines()] == kinds
    assert "cancelled PENDING -> CANCELLED: wrong" in output


def test_finished_task_is_rerun_and_archived(cli: Orchestrate) -> None:
    created = cli.ok("task", "create", "--name", "x", "--tag", "t", "--input", "[1]")
    refused = cli("task", "archive", created)
    assert (refused.code, refused.out) == (1, "")
    cli.ok("task", "cancel", created)
    assert cli.ok("task", "archive", created) == f"{created} CANCELLED, archived"
    again = cli.json("task", "show", cli.ok("task", "rerun", created))
    assert (again["rerunOf"], again["inputContext"], again["tags"]) == (created, [1], ["t"])
    assert again["status"] == "PENDING"


def test_task_is_found_by_part_of_its_id(cli: Orchestrate) -> None:
    created = cli.ok("task", "create", "--name", "x")
    assert cli.json("task", "status", "--id", created[:20])["id"] == created
    cli.ok("task", "create", "--name", "y")
    many = cli("task", "show", created[:4])
    assert (many.code, many.err.count("more than one task")) == (1, 1)
    assert cli("task", "show", created, "--id", created).code == 0
    assert cli("task", "show", created, "--id", MISSING_ID).code == 2
    assert cli("task", "show").code == 2


@pytest.mark.parametrize(
    "command", "show status logs attempts explain cancel retry pause resume rerun archive".split()
)
def test_missing_task_is_reported(cli: Orchestrate, command: str) -> None:
    answer = cli("task", command, MISSING_ID)
    assert (answer.code, answer.out) == (1, "")
    assert answer.err == f"error: no task {MISSING_ID} [not_found]\n"
    problem = cli("--json", "task", command, MISSING_ID)
    assert json.loads(problem.out) == {
        "error": {"code": "not_found", "message": f"no task {MISSING_ID}"}
    }
    assert (problem.code, problem.err) == (1, "")


def test_explain_prints_why_a_task_waits(cli: Orchestrate) -> None:
    created = cli.ok("task", "create", "--name", "x", "--run-at", "+1h")
    result = cli.json("task", "explain", created)
    assert [gate["gate"] for gate in result["gates"]] == ["schedule", "agent"]
    output = cli.ok("explain", created)
    assert output.startswith("WAITING: ")
    assert "schedule: starts later (until 2" in output


def test_attempts_and_logs_show_the_history(cli: Orchestrate, die: Die) -> None:
    dead = die(error="it broke")
    [attempt] = cli.json("task", "attempts", dead)["attempts"]
    assert (attempt["outcome"], attempt["exitCode"]) == ("FAILED", 7)
    row = cli.ok("task", "attempts", dead).splitlines()[1]
    assert row.split()[:3] == ["1", "FAILED", "tester"]
    assert row.endswith("it broke")
    texts = [line["text"] for line in cli.json("task", "logs", dead)["logs"]]
    assert {"hello", "last words"} <= set(texts)
    assert "hello" not in cli.ok("task", "logs", dead, "--level", "error")
    last = cli.json("task", "logs", dead, "--limit", "1")["logs"]
    assert last[0]["event"] == "dead"
    followed = cli("task", "logs", dead, "--follow")
    assert (followed.code, "last words" in followed.out) == (0, True)
    unknown = cli("task", "logs", dead, "--level", "loud")
    assert (unknown.code, "[invalid_filter]" in unknown.err) == (2, True)


def test_follow_of_a_finished_task_prints_its_outcome(cli: Orchestrate, die: Die) -> None:
    dead = die(error="it broke")
    answer = cli("task", "status", "--follow", dead)
    assert answer.code == 1
    assert "status:     DEAD" in answer.out
    assert json.loads(cli("task", "status", dead, "--follow", "--json").out)["status"] == "DEAD"
    assert cli("task", "status", dead).code == 0


def test_bulk_action_changes_tasks_by_filter(cli: Orchestrate) -> None:
    odd = [cli.ok("task", "create", "--name", str(n), "--tag", "odd") for n in (1, 3)]
    even = cli.ok("task", "create", "--name", "2", "--tag", "even")
    would = cli.json("task", "cancel", "--tag", "odd", "--dry-run")
    assert would == {"done": odd[::-1], "refused": {}, "dryRun": True}
    assert cli("task", "cancel", "--tag", "odd", "--since", "1h", "--limit", "1").err == (
        "cancelled 1 task\nstopped at the limit of 1 task; there may be more\n"
    )
    assert cli.ok("task", "pause", "--status", "PENDING", "--tag", "odd") == odd[0]
    assert cli.ok("task", "resume", "--tag", "odd", "--yes") == odd[0]
    assert cli.json("task", "show", even)["status"] == "PENDING"
    assert cli.ok("task", "retry", "--text", "3") == odd[1]
    assert cli.json("task", "archive", "--type", "default")["done"] == []
    both = cli("task", "cancel", even, "--tag", "odd")
    assert (both.code, "either a task id or a filter" in both.err) == (2, True)


def test_bulk_action_skips_forbidden_statuses_with_a_reason(
    cli: Orchestrate,
) -> None:
    created = cli.ok("task", "create", "--name", "x")
    answer = cli("task", "retry", "--status", "PENDING")
    assert (answer.code, answer.out) == (1, "")
    assert f"refused {created}: cannot retry task {created}: it is PENDING" in answer.err


def test_bulk_action_with_skipped_tasks_sets_the_exit_code(here: Here) -> None:
    ended, waiting = (here.ok("task", "create", "--name", name) for name in ("ended", "waiting"))
    here.ok("task", "cancel", ended)
    answer = here("task", "retry", "--status", "PENDING,CANCELLED")
    assert (answer.code, answer.out) == (1, f"{ended}\n")
    assert f"refused {waiting}: " in answer.err


def test_full_page_of_dead_letters_has_a_cursor_only_if_more_exist(here: Here, die: Die) -> None:
    def listed(limit: str) -> tuple[list[str], str | None]:
        page = json.loads(here.ok("--json", "dlq", "list", "--limit", limit))
        return [task["id"] for task in page["tasks"]], page["nextCursor"]

    first = die("one")
    assert listed("1") == ([first], None)
    second = die("two")
    assert listed("1") == ([second], second)
    assert listed("2") == ([second, first], None)


def test_dead_letters_are_listed_requeued_and_purged(cli: Orchestrate, die: Die) -> None:
    first, second, third = die("one"), die("two"), die("three")
    assert cli.ok("dlq", "show", first).startswith("id:")
    listed = cli.json("dlq", "list", "--limit", "2")
    assert [task["id"] for task in listed["tasks"]] == [third, second]
    rest = cli.json("dlq", "list", "--cursor", listed["nextCursor"])
    assert [task["id"] for task in rest["tasks"]] == [first]
    assert cli.ok("dlq", "requeue", first) == f"{first} PENDING"
    wrong = cli("dlq", "requeue", first)
    message = f'task {first} is PENDING, not DEAD; "orchestrate dlq list" shows dead tasks'
    assert (wrong.code, wrong.err) == (1, f"error: {message} [out_of_turn]\n")
    assert cli("dlq", "requeue").code == 2
    assert cli.json("dlq", "purge")["done"] == [third, second]
    assert cli.json("dlq", "list") == {"tasks": [], "nextCursor": None}
    assert cli.json("task", "show", third)["status"] == "DEAD"
    fourth = die("four")
    assert cli.json("dlq", "requeue", "--all")["done"] == [fourth]
    assert cli.json("dlq", "requeue", "--all")["done"] == []


def test_tree_shows_subtasks(cli: Orchestrate) -> None:
    root = cli.ok("task", "create", "--name", "root")
    first = cli.ok("task", "create", "--name", "first", "--parent", root)
    second = cli.ok("task", "create", "--name", "second", "--parent", root)
    inner = cli.ok("task", "create", "--name", "inner", "--parent", first)
    shown = cli.ok("task", "tree", root).splitlines()
    assert shown[0] == f"root  PENDING  {root}"
    assert f"│  └─ inner  PENDING  {inner}" in shown
    assert f"└─ second  PENDING  {second}" in shown
    tree = cli.json("task", "tree", first)
    below = [{"id": inner, "title": "inner", "status": "PENDING", "children": []}]
    assert tree["root"]["children"] == below
    assert tree["truncated"] is False
    cli.ok("task", "cancel", root, "--yes")
    statuses = {line.split()[-2] for line in cli.ok("task", "tree", root).splitlines()}
    assert statuses == {"CANCELLED"}
    assert cli("task", "tree", MISSING_ID).code == cli("task", "show", MISSING_ID).code != 0


async def test_tree_marks_its_truncation_only_if_truncated(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(sqlite_url, ManualClock()) as store:
        engine = Engine(store)
        root = (await engine.submit(new())).id
        created = [(await engine.submit(new(parent=root))).id for _ in range(2)]
        for maximum, shown, left in ((3, created, False), (2, [], True)):
            monkeypatch.setattr(children, "MAX_TASKS", maximum)
            tree = await children.read_tree(engine, root)
            assert ([item.id for item in tree.root.children], tree.truncated) == (shown, left)
