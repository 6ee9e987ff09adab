"""Agents, their mailboxes and workers by the command line, on a database of its own."""

import asyncio
import json

import pytest
from tests.cli.conftest import Here
from tests.cli.orchestrate import Orchestrate
from tests.waiting import eventually

from tenuto import app
from tenuto.engine.tasks.report import WorkerInfo
from tenuto.settings import Settings


def test_agent_is_explained_and_gets_a_message(cli: Orchestrate) -> None:
    cli.ok("db", "migrate")
    created = cli.json(
        "agent", "create", "--name", "dev", "--choose-rule", "all", "--task-tag", "a"
    )
    assert (created["chooseRules"], created["managed"]) == (["superset"], True)
    assert cli("agent", "create", "--name", "x", "--choose-rule", "some").code == 2
    cli.ok("task", "create", "--name", "t", "--prompt", "p", "--task-tag", "a")
    cli.ok("task", "create", "--name", "t", "--prompt", "p", "--capability", "git")
    text = cli.ok("agent", "explain", "dev")
    assert "1 pending  task_type=default, task_tags=a: can claim it" in text
    assert "needs capabilities git" in text
    result = cli.json("agent", "explain", "dev")
    assert [lane["pending"] for lane in result["lanes"]] == [1, 1]
    cli.ok("agent", "message", "dev", "hello", "--message-id", "m")
    cli.ok("agent", "message", "dev", "hello", "--message-id", "m")
    cli.ok("agent", "message", "dev", '{"x": 1}', "--kind", "config", "--coalesce")
    assert cli("agent", "message", "dev", "{x").code == 2
    reported = cli.json("agent", "messages", "dev")["messages"]
    assert [(item["kind"], item["body"]) for item in reported] == [
        ("note", "hello"),
        ("config", {"x": 1}),
    ]
    assert "hello" in cli.ok("agent", "messages", "dev", "--all")
    assert cli.json("agent", "health", "dev")["history"] == []
    assert cli.json("agent", "terminate", "dev")["status"] == "TERMINATED"
    assert "was terminated" in cli.ok("agent", "explain", "dev")


def test_drain_of_a_missing_worker_is_not_found(cli: Orchestrate) -> None:
    cli.ok("db", "migrate")
    assert cli("worker", "drain", "nobody").code == 1
    assert cli("worker", "drain", "--host", "nowhere").code == 1
    assert cli("worker", "drain").code == 2
    assert cli("worker", "drain", "w", "--host", "h").code == 2


async def test_drain_with_wait_returns_after_the_worker_stopped(
    cli: Orchestrate, here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tenuto.cli.agents.drain.POLL_S", 0.05)
    caller = ("host:1:w", "host", 1, ["local"], 2)
    words = ("worker", "drain", "--host", "host", "--wait", "--json")
    async with app.connect(Settings(data=str(cli.data))) as engine:
        await engine.record_worker(WorkerInfo(*caller, "DRAINING"))
        waiting = asyncio.create_task(asyncio.to_thread(here, *words))

        async def asked() -> bool:
            return await engine.record_worker(WorkerInfo(*caller, "DRAINING"))

        await eventually(asked, every=0.05)
        await engine.record_worker(WorkerInfo(*caller, "STOPPED"))
        answer = await waiting
    assert answer.code == 0
    assert [worker["status"] for worker in json.loads(answer.out)["workers"]] == ["STOPPED"]
