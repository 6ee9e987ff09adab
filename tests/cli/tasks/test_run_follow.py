"""`orchestrate up` as a process, and commands that are followed to their end."""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli.orchestrate import WAIT_S, Orchestrate
from tests.waiting import eventually_sync


@pytest.fixture
def up(cli: Orchestrate) -> Iterator[Orchestrate]:
    """A command line beside a running `orchestrate up` with a live worker."""
    log = cli.home / "up.log"
    with log.open("wb") as out:
        process = cli.start(
            "up", "--data", str(cli.data), "--allow-env", "WHO", stdout=out, stderr=out
        )
    try:
        eventually_sync(
            lambda: process.poll() is not None or cli.json("worker", "list")["workers"],
            timeout=WAIT_S,
            every=0.1,
        )
        assert process.poll() is None, log.read_text()
        yield cli
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0, log.read_text()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert "Traceback" not in log.read_text()


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_run_follows_a_command_until_it_finished(up: Orchestrate) -> None:
    answer = up("run", "--follow", "--", "sh", "-c", "echo hi; echo oops >&2")
    assert answer.code == 0, answer
    assert "hi\n" in answer.out
    assert "COMPLETED in " in answer.err.splitlines()[-1]
    view = up.json("run", "--follow", "--", "echo", "hi")
    assert view["status"] == "COMPLETED"
    logs = up.ok("task", "logs", view["id"])
    assert logs.splitlines()[-1].endswith("COMPLETED")
    assert any(line.endswith(" hi") for line in logs.splitlines())


def test_run_of_a_failing_command_exits_1(up: Orchestrate) -> None:
    answer = up("run", "--follow", "--max-attempts", "1", "--", "sh", "-c", "echo why; exit 3")
    assert answer.code == 1
    assert "why\n" in answer.out
    assert answer.err.splitlines()[-1].startswith("DEAD in ")
    [dead] = up.json("dlq", "list")["tasks"]
    [attempt] = up.json("task", "attempts", dead["id"])["attempts"]
    assert (attempt["outcome"], attempt["exitCode"]) == ("FAILED", 3)


def test_run_passes_folder_and_variables(up: Orchestrate, tmp_path: Path) -> None:
    answer = up("run", "--follow", "--env", "WHO=you", "--", "sh", "-c", 'echo "$WHO"; pwd')
    assert answer.out.splitlines() == ["you", str(tmp_path)]


def test_refused_variable_is_reported_with_a_remedy(up: Orchestrate) -> None:
    answer = up("run", "--follow", "--env", "DEPTH=2", "--", "true")
    assert (answer.code, "start it with --allow-env DEPTH" in answer.err + answer.out) == (1, True)
    answer = up("run", "--follow", "--cwd", "/etc", "--", "true")
    assert (answer.code, "start it with --allow-folder /etc" in answer.err + answer.out) == (
        1,
        True,
    )
    answer = up("run", "--env", "BASH_ENV=/tmp/x", "--", "true")
    assert answer.code == 2
    assert "tasks may never set BASH_ENV" in answer.err


def test_cancel_kills_a_running_command(up: Orchestrate, tmp_path: Path) -> None:
    created = up.ok("run", "--", "sh", "-c", "echo $$ > pid; exec sleep 1000")
    marker = tmp_path / "pid"
    eventually_sync(lambda: marker.exists() and marker.read_text().endswith("\n"), WAIT_S)
    pid = int(marker.read_text())
    assert alive(pid)
    up.ok("task", "cancel", created, "--reason", "enough")
    answer = up("task", "status", "--follow", created)
    assert answer.code == 1
    assert "CANCELLED" in answer.out
    assert not alive(pid)
    [attempt] = up.json("task", "attempts", created)["attempts"]
    assert attempt["outcome"] == "CANCELLED"
    assert attempt["receipt"]["remaining"] in (0, [])


def test_doctor_and_coordinator_see_what_runs(up: Orchestrate) -> None:
    eventually_sync(lambda: up.json("coordinator", "status")["active"], WAIT_S, every=0.1)
    eventually_sync(lambda: up.json("coordinator", "status")["lastCycle"], WAIT_S, every=0.1)
    status = up.json("coordinator", "status")
    assert status["cycles"] > 1
    assert status["since"] < status["until"]
    assert status["lastCycle"]["seconds"] > 0
    assert "cycle time:" in up.ok("coordinator", "status")
    output = up.ok("doctor")
    assert "leader: " in output
    assert "1 alive with " in output
    assert up.ok("worker", "list").splitlines()[1].split()[1] == "RUNNING"
