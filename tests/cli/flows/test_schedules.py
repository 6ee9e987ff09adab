"""`schedule`, `trigger` and `event`, on a database and behind a server."""

import json
from collections.abc import Iterator
from pathlib import Path

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


def test_schedule_is_created_shown_paused_and_deleted(cli: Orchestrate) -> None:
    cli.ok("apply", "-f", "-", stdin="id: report\nprompt: Report.")
    words = ("schedule", "create", "--name", "nightly", "--target", "report", "--cron", "0 2 * * *")
    more = ("--timezone", "Europe/Berlin", "--overlap", "queue", "--catch-up", "all")
    created = cli.json(*words, *more, "--catch-up-limit", "7", "--input", '{"n": 1}')
    assert (created["name"], created["status"], created["input"]) == ("nightly", "ACTIVE", {"n": 1})
    times = created["schedule"]
    assert (times["overlap"], times["catchUp"], times["catchUpLimit"]) == ("queue", "all", 7)
    again = cli(*words)
    assert (again.code, "name_taken" in again.err) == (1, True)
    listed = cli.ok("schedule", "list").splitlines()
    assert listed[0].split() == ["NAME", "STATUS", "NEXT", "FIRED", "MISSED", "TARGET", "TIMES"]
    assert listed[1].startswith("nightly")
    assert listed[1].endswith("0 2 * * *")
    assert "Europe/Berlin" in cli.ok("schedule", "show", "nightly")
    assert len(cli.ok("schedule", "next", "nightly", "-n", "3").splitlines()) == 3
    assert cli.json("schedule", "pause", "nightly")["status"] == "PAUSED"
    assert cli("schedule", "pause", created["id"]).code == 1
    assert cli.json("schedule", "resume", "nightly")["status"] == "ACTIVE"
    once = ("--target", "report", "--at", "2098-01-31T09:00", "--until", "2098-01-31T12:00")
    fixed = cli.json("schedule", "create", "--name", "once", *once, "--timezone", "Asia/Tokyo")
    assert fixed["nextAt"] == "2098-01-31T00:00:00Z"
    now = cli.json("schedule", "create", "--name", "now", "--target", "report", "--immediate")
    assert (now["status"], now["fired"]) == ("ENDED", 1)
    assert cli.ok("schedule", "delete", "nightly") == "deleted nightly"
    assert cli("schedule", "show", "nightly").code == 1


def test_trigger_is_created_shown_paused_and_deleted(cli: Orchestrate) -> None:
    cli.ok("apply", "-f", "-", stdin="id: tests\nprompt: Test.")
    words = ("trigger", "create", "--name", "live", "--event", "deploy.*", "--target", "tests")
    created = cli.json(*words, "--filter", "event.data.env == 'live'")
    assert (created["event"], created["filter"]) == ("deploy.*", "event.data.env == 'live'")
    bad = cli(
        "trigger", "create", "--name", "x", "--event", "a", "--target", "tests", "--filter", "("
    )
    assert (bad.code, "expression_invalid" in bad.err) == (2, True)
    assert cli.ok("trigger", "list").splitlines()[1].split()[:4] == [
        "live",
        "ACTIVE",
        "0",
        "deploy.*",
    ]
    assert "event.data.env" in cli.ok("trigger", "show", "live")
    assert cli.json("trigger", "pause", "live")["status"] == "PAUSED"
    assert cli.json("trigger", "resume", created["id"])["status"] == "ACTIVE"
    reported = cli.json("event", "publish", "deploy.done", "--data", '{"env": "live"}')
    assert (reported["name"], reported["data"]) == ("deploy.done", {"env": "live"})
    assert len(cli.ok("event", "publish", "deploy.done")) == 36
    assert cli("event", "publish", "task.done").code == 2
    task = cli.json("task", "create", "--name", "a", "--prompt", "p")["id"]
    by = cli("--json", "event", "publish", "deploy.done", TENUTO_TASK_ID=task)
    assert json.loads(by.out)["taskId"] == task
    assert cli.ok("trigger", "delete", "live") == "deleted live"
    assert cli("trigger", "show", "live").code == 1


def test_files_define_schedules_and_triggers(cli: Orchestrate) -> None:
    text = (
        "tasks: [{id: a, prompt: p}]\n"
        "schedules: [{name: s, target: a, schedule: {type: cron, expression: '@daily'}}]\n"
        "triggers: [{name: t, event: x, target: a}]\n"
    )
    done = cli.ok("apply", "-f", "-", stdin=text)
    assert done.splitlines()[1:] == [
        "+ schedule s created",
        "+ trigger t created",
        "3 created, 0 updated, 0 unchanged",
    ]
    assert [schedule["name"] for schedule in cli.json("schedule", "list")["schedules"]] == ["s"]


def test_next_times_of_a_new_schedule_need_no_database(tmp_path: Path) -> None:
    cli = Orchestrate(tmp_path)
    nowhere = {"TENUTO_URL": "http://127.0.0.1:1", "TENUTO_TOKEN": "x"}
    line = ("schedule", "next", "--cron", "30 2 * * *", "--timezone", "Europe/Berlin")
    result = cli(*line, "-n", "2", **nowhere)
    assert (result.code, len(result.out.splitlines())) == (0, 2)
    assert "T02:30:00+0" in result.out
    output = cli("--json", "schedule", "next", "--iso", "R3/2098-01-01T00:00Z/P1D", **nowhere)
    assert json.loads(output.out)["times"] == [f"2098-01-0{day}T00:00:00Z" for day in (1, 2, 3)]
    assert not (tmp_path / "data").exists()
    for words in (
        (),
        ("--cron", "@daily", "--iso", "R/2098-01-01/P1D"),
        ("--cron", "61 * * * *"),
        ("--at", "soon"),
        ("nightly", "--cron", "@daily"),
    ):
        assert cli("schedule", "next", *words).code == 2, words
