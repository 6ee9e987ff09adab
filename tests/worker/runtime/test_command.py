"""Commands as attempts: their environment, their reports, and their end."""

import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from tests.proof.crash.inside import Inside, working
from tests.waiting import eventually

from tenuto.model.tasks.task import TIMEOUT_SLACK_S
from tenuto.worker import attempt
from tenuto.worker.supervisor import list_processes

# Ignores SIGTERM, and has a child in a session of its own that does too, with a child.
NASTY = (
    "trap '' TERM; setsid sh -c 'trap \"\" TERM; sleep 100 & echo child $! $$; wait' & "
    "echo up $$; wait"
)


def alive(pids: list[int]) -> list[int]:
    living = {process.pid for process in list_processes() if not process.dead}
    return [pid for pid in pids if pid in living]


async def nasty_pids(inside: Inside, task: Any) -> list[int]:
    """The processes of a nasty command, once they are all there."""
    await inside.logged(task, "up")
    await inside.logged(task, "child")
    words = " ".join(await inside.transcript(task)).split()
    pids = [int(word) for word in words if word.isdigit()]
    assert len(alive(pids)) == 3
    return pids


def report(**output: Any) -> str:
    """The shell command that says this over the report pipe."""
    return f"echo '{json.dumps(output)}' >&3; "


async def test_command_output_is_its_result(database_url: str) -> None:
    async with working(database_url) as inside:
        task = await inside.shell(report(output={"answer": 42}))
        assert (await inside.ended(task)).output == {"answer": 42}
        task = await inside.shell("true")
        assert (await inside.ended(task)).output == {"exitCode": 0}


async def test_command_environment_has_its_task_and_nothing_of_the_worker(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKER_SECRET", "canary-7f3a")
    monkeypatch.setenv("TENUTO_DATABASE", "postgresql://user:canary-7f3a@host/db")
    async with working(database_url, task_env="OTHER, MI*") as inside:
        task = await inside.submit(command=["env"], input={"a": 1}, env={"MINE": "yes"})
        assert (await inside.ended(task)).status == "COMPLETED"
        seen = dict(line.split("=", 1) for line in await inside.transcript(task) if "=" in line)
    assert "canary-7f3a" not in str(seen)
    assert (seen["MINE"], seen["TENUTO_ATTEMPT"]) == ("yes", "1")
    assert json.loads(seen["TENUTO_INPUT"]) == {"a": 1}
    assert seen["TENUTO_TASK_ID"] == seen["TENUTO_IDEMPOTENCY_KEY"] == str(task)
    assert {"WORKER_SECRET", "TENUTO_DATABASE", "VIRTUAL_ENV"}.isdisjoint(seen)


async def test_standard_input_is_the_prompt_or_else_the_input(database_url: str) -> None:
    async with working(database_url) as inside:
        prompt = await inside.shell("cat", prompt="do\nthis", input={"a": 1})
        value = await inside.shell("cat", input={"a": 1})
        nothing = await inside.shell("cat")
        for task in (prompt, value, nothing):
            await inside.ended(task)
        assert await inside.transcript(prompt) == ["do", "this"]
        assert json.loads("".join(await inside.transcript(value))) == {"a": 1}
        assert await inside.transcript(nothing) == []


async def test_transcript_level_shows_the_stream_of_a_line(database_url: str) -> None:
    async with working(database_url) as inside:
        task = await inside.shell("echo out; echo err >&2; " + report(log="said"))
        await inside.ended(task)
        lines = await inside.engine.query.transcript(task, inside.engine.workspace)
        matches = {line.text: line.level for line in lines}
        assert matches == {"out": "INFO", "err": "WARN", "said": "INFO"}


async def test_transcript_is_capped(database_url: str) -> None:
    async with working(database_url, transcript_kb=1) as inside:
        task = await inside.shell("i=0; while [ $i -lt 200 ]; do echo line $i; i=$((i+1)); done")
        assert (await inside.ended(task)).status == "COMPLETED"
        *stored, last = await inside.transcript(task)
        assert last == "(transcript is full: 1 KB kept)"
        assert sum(len(line) + 1 for line in stored) <= 1024
        assert stored == [f"line {number}" for number in range(len(stored))]


@pytest.mark.parametrize(
    "script",
    [
        "head -c 10000000 /dev/zero | tr '\\0' x",
        "head -c 10000000 /dev/zero | tr '\\0' '\\n'",
        "head -c 10000000 /dev/urandom",
        "head -c 10000000 /dev/urandom >&2",
    ],
    ids=["one line", "empty lines", "binary", "binary errors"],
)
async def test_ten_megabytes_of_output_do_no_harm(database_url: str, script: str) -> None:
    async with working(database_url) as inside:
        task = await inside.shell(script)
        assert (await inside.ended(task)).status == "COMPLETED"
        lines = await inside.transcript(task)
        assert sum(len(line) for line in lines) <= 1024 * 1024 + 100
        assert lines[-1] == "(transcript is full: 1,024 KB kept)"
        assert await inside.outcomes(task) == ["COMPLETED"]


async def test_binary_output_is_stored_as_text(database_url: str) -> None:
    async with working(database_url) as inside:
        task = await inside.shell(r"printf 'a\000b\377c\r\n\033[31mred'")
        assert (await inside.ended(task)).status == "COMPLETED"
        assert await inside.transcript(task) == ["a\ufffdb\ufffdc", "\033[31mred"]


async def test_long_line_is_cut_between_characters(sqlite_url: str) -> None:
    code = "import sys; sys.stdout.buffer.write(('\\u20ac' * 200_000).encode())"
    async with working(sqlite_url) as inside:
        task = await inside.submit(command=[sys.executable, "-c", code])
        assert (await inside.ended(task)).status == "COMPLETED"
        assert "".join(await inside.transcript(task)) == "\u20ac" * 200_000


REPORTS: list[tuple[Any, str, str]] = [
    ({"message": "bad", "class": "syntax"}, "FAILED", "syntax"),
    ({"message": "bad", "class": "connection"}, "DEAD", "connection"),
    ({"message": "bad", "retryable": False}, "FAILED", "error"),
    ({"message": "bad", "class": "no such class"}, "DEAD", "error"),
    ({"message": "bad", "class": ["syntax"]}, "DEAD", "error"),
    ({"message": "bad", "retryable": "no"}, "DEAD", "error"),
    ("bad", "DEAD", "error"),
    (["bad"], "DEAD", "error"),
    ({"message": {"bad": 1}}, "DEAD", "error"),
    (True, "DEAD", "error"),
]


async def test_error_reported_by_the_command_decides_its_class(database_url: str) -> None:
    async with working(database_url, slots=20) as inside:
        tasks = [await inside.shell(report(error=error), max_attempts=2) for error, *_ in REPORTS]
        for task, (error, status, error_class) in zip(tasks, REPORTS, strict=True):
            view = await inside.ended(task)
            assert (view.status, view.error_class) == (status, error_class), error
            tries = 1 if status == "FAILED" else 2
            assert await inside.outcomes(task) == ["FAILED"] * tries, error
            last = await inside.last(task)
            assert last.exit_code == 0
            assert error is True or "bad" in (last.message or ""), error


async def test_failure_has_the_exit_code_and_the_last_lines(database_url: str) -> None:
    async with working(database_url) as inside:
        task = await inside.shell("echo first; echo 'disk on fire' >&2; exit 3", max_attempts=1)
        view = await inside.ended(task)
        assert (view.status, view.last_error) == ("DEAD", "exit code 3: disk on fire")
        assert (await inside.last(task)).exit_code == 3
        task = await inside.shell("kill -9 $$", max_attempts=1)
        assert (await inside.ended(task)).last_error == "killed by signal 9"


async def test_later_report_keeps_earlier_fields(sqlite_url: str) -> None:
    async with working(sqlite_url) as inside:
        task = await inside.shell(report(output=1) + report(progress=90))
        failed = await inside.shell(report(error="bad") + report(log="on"), max_attempts=1)
        assert (await inside.ended(task)).output == 1
        assert (await inside.ended(failed)).last_error == "bad"


# What is no report must not end the attempt, nor keep the next report from being heard.
NONSENSE: list[Any] = [
    "not json",
    "[1, 2]",
    "{",
    "null",
    '"text"',
    '{"progress": "forty"}',
    '{"progress": 1.5}',
    '{"progress": true}',
    '{"progress": -1}',
    '{"progress": 1000000000000000000000}',
    '{"progress": [1]}',
    '{"step": 5}',
    '{"step": ["x"]}',
    '{"step": {"a": 1}}',
    '{"step": "\\u0000"}',
    '{"log": {"a": 1}}',
    '{"log": "\\u0000"}',
    '{"checkpoint": "\\u0000"}',
    '{"checkpoint": "\\ud800"}',
    "[" * 200_000,
    '{"checkpoint": ' + "[" * 100 + "]" * 100 + "}",
    "\udcff\udcfe",
]


async def test_invalid_report_is_only_logged(database_url: str, tmp_path: Path) -> None:
    async with working(database_url, slots=len(NONSENSE)) as inside:
        tasks = []
        for number, line in enumerate(NONSENSE):
            reported = tmp_path / str(number)
            reported.write_bytes(line.encode("utf-8", "surrogateescape") + b"\n")
            script = f"cat '{reported}' >&3; " + report(output="heard")
            tasks.append(await inside.shell(script, max_attempts=1))
        for task in tasks:
            await inside.ended(task)
        views = [await inside.engine.show(task) for task in tasks]
        deaf = [line[:40] for line, v in zip(NONSENSE, views, strict=True) if v.output != "heard"]
        assert deaf == []
        assert {view.attempt for view in views} == {1}


REFUSED: list[dict[str, Any]] = [
    {"progress": 101},
    {"step": 7},
    {"usage": {"inputTokens": -1}},
    {"usage": 1},
]


@pytest.mark.parametrize("refused", REFUSED, ids=str)
async def test_refused_report_key_keeps_the_others(
    database_url: str, refused: dict[str, Any]
) -> None:
    others = {"progress": 50, "step": "half", "checkpoint": 1, "log": "said"}
    async with working(database_url) as inside:
        task = await inside.shell(report(**others | refused, output=5))
        failed = await inside.shell(report(**refused, error="bad"), max_attempts=1)
        view = await inside.ended(task)
        assert (view.output, view.checkpoint) == (5, 1)
        assert view.progress_percent == (None if "progress" in refused else 50)
        assert view.current_step == (None if "step" in refused else "half")
        lines = await inside.transcript(task)
        assert (len(lines), "said" in lines) == (2, True)
        assert (await inside.ended(failed)).last_error == "bad"


async def test_endless_report_is_dropped(sqlite_url: str) -> None:
    async with working(sqlite_url) as inside:
        before = resident()
        task = await inside.shell("head -c 40000000 /dev/zero >&3; echo >&3; " + report(output=1))
        peak = before

        async def ended() -> bool:
            nonlocal peak
            peak = max(peak, resident())
            return (await inside.engine.show(task)).status == "COMPLETED"

        await eventually(ended, 60)
        assert (await inside.engine.show(task)).output == 1
        assert peak - before < 20_000_000
        assert "report" in (await inside.transcript(task))[0]


def resident() -> int:
    """Bytes of memory that this process holds."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


async def test_command_that_cannot_start_fails_at_once(database_url: str) -> None:
    async with working(database_url, task_folders="/no") as inside:
        for command, cwd, reported in (
            (["no-such-program-7f3a"], None, "no-such-program-7f3a"),
            (["/etc/passwd"], None, "/etc/passwd"),
            (["/etc"], None, "/etc"),
            (["true"], "/no/such/folder", "/no/such/folder"),
        ):
            task = await inside.submit(command=command, cwd=cwd)
            view = await inside.ended(task)
            assert (view.status, view.error_class) == ("FAILED", "invalid_input"), command
            assert reported in (view.last_error or "")
            assert await inside.outcomes(task) == ["NOT_STARTED"]


async def test_cancel_kills_a_command_that_ignores_sigterm_and_stores_the_receipt(
    database_url: str,
) -> None:
    async with working(database_url) as inside:
        task = await inside.shell(NASTY)
        pids = await nasty_pids(inside, task)
        await inside.engine.cancel(task, "enough")
        await inside.until(task, "CANCELLED")
        assert alive(pids) == []
        attempt = await inside.last(task)
        [event] = [e for e in await inside.engine.events(task) if e.event == "cancelled"]
    receipt = attempt.receipt
    assert receipt is not None
    assert (attempt.outcome, attempt.unconfirmed) == ("CANCELLED", False)
    assert (receipt["state"], receipt["how"], receipt["remaining"]) == ("killed", "SIGKILL", 0)
    assert {item["pid"] for item in receipt["killed"]} >= set(pids)
    assert event.data["receipt"] == receipt


@pytest.mark.parametrize("second", ["drain", "pause", "cancel"])
async def test_second_stop_request_does_not_shorten_the_grace(
    database_url: str, second: str
) -> None:
    """The outcome is told when the tree is gone, whatever else is asked for meanwhile."""
    async with working(database_url, grace_s=2, drain_s=0) as inside:
        task = await inside.shell(NASTY)
        pids = await nasty_pids(inside, task)
        await (inside.engine.pause if second == "cancel" else inside.engine.cancel)(task)
        held = next(lease for lease in inside.worker._leases.all() if lease.fence.task == task)
        assert held is not None
        await eventually(lambda: held.reason is not None)
        if second == "drain":
            held.stop("drain")
        elif second == "cancel":
            await inside.engine.cancel(task)
        else:
            held.stop("timeout")
        view = await inside.until(task, "CANCELLED", "PAUSED", "PENDING", "RETRY_WAIT")
        assert alive(pids) == []
        assert view.status == "CANCELLED"
        receipt = (await inside.last(task)).receipt
        assert receipt is not None
        assert receipt["how"] == "SIGKILL"


@contextmanager
def holding(pipe: str, *, writing: bool) -> Iterator[None]:
    """Keeps a pipe open for writing, as a process outside the command's tree may."""
    fd, over = os.open(pipe, os.O_WRONLY), threading.Event()

    def write() -> None:
        with suppress(BrokenPipeError):
            while writing and not over.wait(0.01):
                os.write(fd, b"foreign\n")

    writer = threading.Thread(target=write)
    writer.start()
    try:
        yield
    finally:
        over.set()
        writer.join()
        os.close(fd)


@pytest.mark.parametrize("writing", [False, True])
@pytest.mark.parametrize("end", ["COMPLETED", "CANCELLED"])
async def test_process_that_keeps_the_output_open_is_not_waited_for(
    database_url: str, tmp_path: Path, end: str, writing: bool
) -> None:
    done = tmp_path / "done"
    loop = f"until [ -e '{done}' ]; do sleep 0.05; done; echo last; " + report(output="heard")
    async with working(database_url, grace_s=20) as inside:
        task = await inside.shell("echo pid $$; " + loop)
        await inside.logged(task, "pid")
        pid = (await inside.transcript(task))[0].split()[1]
        with holding(f"/proc/{pid}/fd/1", writing=writing):
            await inside.engine.cancel(task) if end == "CANCELLED" else done.touch()
            view = await inside.until(task, end)
        lines = await inside.transcript(task)
        assert any("another process keeps" in line for line in lines)
        assert (view.output, "last" in lines) == (
            ("heard", True) if end == "COMPLETED" else (None, False)
        )


async def test_cancel_of_a_command_that_just_exited_is_confirmed(
    database_url: str, tmp_path: Path
) -> None:
    done = tmp_path / "done"
    async with working(database_url, heartbeat_s=60) as inside:
        task = await inside.shell(f"echo up; until [ -e '{done}' ]; do sleep 0.05; done")
        await inside.logged(task, "up")
        held = next(lease for lease in inside.worker._leases.all() if lease.fence.task == task)
        assert held is not None
        held.stop = lambda _reason: done.touch()  # the attempt hears of it after its session ended
        await inside.engine.cancel(task)
        view = await inside.ended(task, 10)
        assert view.status == "CANCELLED"
        assert not (await inside.last(task)).unconfirmed


async def test_pause_ends_the_session_and_resume_continues_from_the_checkpoint(
    database_url: str,
) -> None:
    script = (
        'if [ -n "$TENUTO_CHECKPOINT" ]; then echo "went on from $TENUTO_CHECKPOINT"; exit 0; fi; '
        'trap \'echo "{\\"checkpoint\\": {\\"at\\": 7}}" >&3; exit 1\' TERM; '
        "echo up; while true; do sleep 0.05; done"
    )
    async with working(database_url, grace_s=5) as inside:
        task = await inside.shell(script)
        await inside.logged(task, "up")
        await inside.engine.pause(task)
        view = await inside.until(task, "PAUSED")
        assert (view.tries, view.checkpoint) == (0, {"at": 7})
        receipt = (await inside.last(task)).receipt
        assert receipt is not None
        assert receipt["state"] == "killed"
        await inside.engine.resume(task)
        view = await inside.ended(task)
        assert (view.status, view.tries) == ("COMPLETED", 1)
        assert 'went on from {"at":7}' in await inside.transcript(task)
        assert await inside.outcomes(task) == ["PAUSED", "COMPLETED"]


async def test_timed_out_command_is_killed_and_gets_more_time(
    database_url: str,
) -> None:
    async with working(database_url) as inside:
        task = await inside.shell(NASTY, timeout_s=1, max_attempts=2)
        pids = await nasty_pids(inside, task)
        view = await inside.until(task, "RETRY_WAIT", "PENDING", "RUNNING", limit=10)
        await eventually(lambda: not alive(pids))

        async def first() -> list[str | None]:
            return (await inside.outcomes(task))[:1] == ["TIMED_OUT"]  # type: ignore[return-value]

        await eventually(first)
        view = await inside.engine.show(task)
        assert view.timeout_s == 2
        view = await inside.ended(task)
        assert (view.status, view.error_class, view.timeout_s) == ("DEAD", "timeout", 4)
        attempts = await inside.engine.attempts(task)
        assert [item.outcome for item in attempts] == ["TIMED_OUT", "TIMED_OUT"]
        assert attempts[0].receipt is not None
        assert attempts[0].receipt["how"] == "SIGKILL"
        assert "timeout of 1 s" in (attempts[0].message or "")


async def test_agents_command_can_be_python(database_url: str) -> None:
    async with working(database_url) as inside:
        code = "import os, json; os.write(3, json.dumps({'output': [1, None, 'é']}).encode())"
        task = await inside.submit(command=[sys.executable, "-c", code])
        assert (await inside.ended(task)).output == [1, None, "é"]


async def test_grace_after_a_timeout_is_bounded(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert attempt.TIMEOUT_GRACE_S < TIMEOUT_SLACK_S  # else the next attempt runs beside it
    monkeypatch.setattr(attempt, "TIMEOUT_GRACE_S", 0.2)
    async with working(sqlite_url, grace_s=600) as inside:
        task = await inside.shell(NASTY, timeout_s=1, max_attempts=1)
        assert (await inside.ended(task)).error_class == "timeout"
        receipt = (await inside.last(task)).receipt
        assert receipt is not None
        assert (receipt["state"], receipt["how"]) == ("killed", "SIGKILL")
