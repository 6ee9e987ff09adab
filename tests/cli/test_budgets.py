"""Concurrency keys and budgets from the command line."""

from tests.cli.orchestrate import Orchestrate


def test_tasks_with_one_concurrency_key_run_one_by_one(cli: Orchestrate) -> None:
    words = ("task", "create", "--name", "Deploy", "--concurrency-key", "deploy")
    first, second = cli.ok(*words), cli.ok(*words)
    assert cli.json("task", "show", first)["status"] == "PENDING"
    shown = cli.ok("task", "show", second)
    assert "waiting for: concurrency" in shown
    assert "concurrency: deploy (limit 1, queue)" in shown
    assert "1 of 1 in use, 0 before it in the queue" in cli.ok("explain", second)
    third = cli.ok(*words, "--concurrency-policy", "cancel_old", "--concurrency-limit", "1")
    assert cli.json("task", "show", second)["status"] == "CANCELLED"
    assert cli.json("task", "show", third)["status"] == "PENDING"
    alone = cli("task", "create", "--name", "t", "--concurrency-limit", "2")
    assert alone.code == 2
    assert "require --concurrency-key" in alone.err


def test_task_command_sets_a_budget(cli: Orchestrate) -> None:
    words = ("--budget-usd", "2.5", "--budget-tokens", "1000")
    task = cli.ok("task", "create", "--name", "Research", *words)
    assert cli.json("task", "show", task)["budget"] == {"tokens": 1000, "costUsd": 2.5}
    assert "1,000 tokens, $2.5000" in cli.ok("task", "show", task)
    assert cli("task", "create", "--name", "t", "--budget-tokens", "0").code == 2
