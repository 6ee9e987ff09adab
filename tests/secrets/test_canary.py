"""A canary secret: attempts report it everywhere, and it is stored nowhere."""

import asyncio
import json
import logging
from base64 import b64encode
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote
from uuid import UUID

import msgspec
import pytest
from tests.contract.conftest import Raw, opened
from tests.proof.crash.inside import SHORT, Inside
from tests.secrets.conftest import OLD, stored_bytes

from tenuto.clock import Clock
from tenuto.encryption_keys import KeyRing
from tenuto.engine.engine import Engine
from tenuto.model.agents.matching import AgentProfile
from tenuto.model.tasks.environment import Allowed
from tenuto.model.tasks.submission import NewTask
from tenuto.model.tenancy.redact import Redactor
from tenuto.settings import Settings
from tenuto.worker.runtime.command import CommandRuntime
from tenuto.worker.session import Supervisor
from tenuto.worker.worker import Worker

CANARY = 'canary 7f3a/"ü"+9'
NAMED = "named-canary-55e1"
INPUT = {"note": "plain", "secrets": {"token": CANARY}, "other": {"$secret": "stored"}}
SPELLINGS = [
    spelled
    for value in (CANARY, NAMED)
    for spelled in (
        value,
        json.dumps(value)[1:-1],
        msgspec.json.encode(value).decode()[1:-1],
        quote(value, safe=""),
        b64encode(value.encode()).decode(),
    )
]
REPORTED = " | ".join([*SPELLINGS, b64encode(f"user:{CANARY}".encode()).decode()])
ENDLESS = CANARY * 20_000
"""Wherever the worker cuts a line that is too long, a canary lies across the cut."""
SINKS = {
    "transcript",
    "task_output",
    "attempt",
    "event",
    "task",
    "checkpoint",
    "inbox_item",
    "show",
    "history",
}


class Received:
    """What the attempts found in their input."""

    def __init__(self) -> None:
        self.inputs: list[Any] = []
        self.children: list[UUID] = []


def handlers(received: Received) -> dict[str | None, Callable[[Any], Any]]:
    async def later(ctx: Any) -> Any:
        received.inputs.append(ctx.input)
        ctx.log(REPORTED)
        ctx.log(ENDLESS, "WARN")
        await ctx.progress(5, REPORTED)
        await ctx.save({"token": CANARY, NAMED: [REPORTED]})
        assert await ctx.step("one", lambda: NAMED) == NAMED
        child = NewTask(title=CANARY, task_type="nobody's", prompt=REPORTED, input={"a": [NAMED]})
        received.children.append(await ctx.spawn("two", child))
        return {"echo": REPORTED, CANARY: ctx.input}

    def now(ctx: Any) -> Any:
        received.inputs.append(ctx.input)
        ctx.log(REPORTED)
        assert ctx.step("one", lambda: CANARY) == CANARY
        # Longer than what is kept of a message, which is cut within the canary.
        raise ValueError("x" * 3_975 + CANARY + REPORTED)

    return {"later": later, "now": now}


COMMAND = r"""
printf %s "$TOKEN" > "$OUT/token"
cat > "$OUT/stdin"
printf %s "$TENUTO_INPUT" > "$OUT/input"
tr '\0' ' ' < /proc/$$/cmdline > "$OUT/argv"
tr '\0' ' ' < /proc/$PPID/cmdline >> "$OUT/argv"
cat "$OUT/token" "$OUT/stdin" "$OUT/told"; echo
cat "$OUT/told" >&2; echo >&2
cat "$OUT/endless"
cat "$OUT/report" >&3
echo "last words: $TOKEN" >&2
exit 3
"""


@asynccontextmanager
async def working(
    url: str, values: dict[str | None, Callable[[Any], Any]]
) -> AsyncIterator[Inside]:
    """A worker with keys, for handlers and for commands, until the block ends."""
    settings = Settings(**SHORT)
    supervisor, stop = Supervisor(), asyncio.Event()
    async with opened(url, Clock()) as store:
        engine = Engine(store, actor="test", key_ring=KeyRing(OLD))
        worker = Worker(engine, settings)
        await worker.host_functions("functions", values)
        commands = AgentProfile(
            id=engine.clock.new_id(),
            workspace=engine.workspace,
            name="commands",
            accept_commands=True,
            task_types=("command",),
        )
        await worker.host(commands, CommandRuntime(supervisor, None, Allowed(("TOKEN", "OUT"))))
        running = asyncio.create_task(worker.run(stop))
        try:
            yield Inside(engine, worker)
        finally:
            stop.set()
            await running
            await supervisor.close()


def prepare(folder: Path, report: dict[str, Any]) -> None:
    folder.mkdir(parents=True)
    (folder / "told").write_text(REPORTED)
    (folder / "endless").write_text(ENDLESS)
    (folder / "report").write_text(json.dumps(report) + "\n")


async def command(inside: Inside, folder: Path, report: dict[str, Any]) -> UUID:
    """A command that tells what it got, and this report."""
    prepare(folder, report)
    env = {"TOKEN": {"$secret": "stored"}, "OUT": str(folder)}
    options: dict[str, Any] = {"task_type": "command", "input": INPUT, "env": env}
    return await inside.shell(COMMAND, max_attempts=1, **options)


async def run_all(inside: Inside, received: Received, folder: Path) -> list[UUID]:
    """Run a coroutine, a function and a command that tell their secrets; the ids, all ended."""
    await inside.engine.secrets.put("stored", NAMED)
    report = {
        "log": REPORTED,
        "progress": 5,
        "step": REPORTED,
        "checkpoint": [REPORTED],
        "output": REPORTED,
    }
    tasks = [
        await inside.submit(task_type="later", input=INPUT, max_attempts=1),
        await inside.submit(task_type="now", input=INPUT, max_attempts=1),
        await command(inside, folder / "plain", {}),
        await command(inside, folder / "report", report | {"error": {"message": REPORTED}}),
    ]
    statuses = [(await inside.ended(task)).status for task in tasks]
    assert statuses == ["COMPLETED", "DEAD", "DEAD", "DEAD"]
    assert received.inputs == [INPUT | {"other": NAMED}] * 2
    return [*tasks, *received.children]


def holds(text: str) -> bool:
    return any(spelled in text for spelled in SPELLINGS)


async def leaks(inside: Inside, raw: Raw, tasks: list[UUID]) -> set[str]:
    """Every place where a canary is found: tables, files, and what the engine shows."""
    engine = inside.engine
    result = set()
    for table in await raw.counts():
        rows = await raw.fetch(f"select * from {table}")
        if holds("\n".join(str(value) for row in rows for value in row)):
            result.add(table)
    stored = stored_bytes(raw)
    if any(spelled.encode() in stored for spelled in SPELLINGS):
        result.add("file")
    for task in tasks:
        if holds(msgspec.json.encode(await engine.show(task)).decode()):
            result.add("show")
        history = [await engine.logs(task, limit=100_000), await engine.events(task)]
        if holds(msgspec.json.encode([*history, await engine.attempts(task)]).decode()):
            result.add("history")
    if holds(msgspec.json.encode(await engine.secrets.list()).decode()):
        result.add("list")
    return result


async def test_canary_is_stored_and_shown_nowhere(
    database_url: str, raw: Raw, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    received = Received()
    async with working(database_url, handlers(received)) as inside:
        tasks = await run_all(inside, received, tmp_path / "out")
        assert await leaks(inside, raw, tasks) == set()
        view = await inside.engine.show(tasks[0])
        assert view.input == INPUT | {"secrets": {"token": "***"}}
        assert view.output["***"]["note"] == "plain"
        lines = await inside.transcript(tasks[2])
        assert "last words: ***" in lines
        assert all(set(line) == {"*"} for line in lines if line.startswith("***" * 9))
        failed = await inside.engine.show(tasks[1])
        assert (failed.last_error or "").startswith("ValueError: xxxx")
        assert CANARY[:8] not in (failed.last_error or "")
    assert not holds(caplog.text)
    folder = tmp_path / "out" / "plain"
    assert (folder / "token").read_text() == NAMED
    assert json.loads((folder / "stdin").read_text()) == INPUT | {"other": NAMED}
    assert json.loads((folder / "input").read_text()) == INPUT | {"other": NAMED}
    argv = (folder / "argv").read_text()
    assert "supervisor.py" in argv
    assert not holds(argv)


async def test_search_finds_a_canary_that_is_not_redacted(
    database_url: str, raw: Raw, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same search over an engine and a worker that let everything pass."""
    monkeypatch.setattr(Redactor, "redact_text", lambda _self, text: text)
    received = Received()
    async with working(database_url, handlers(received)) as inside:
        tasks = await run_all(inside, received, tmp_path / "out")
        result = await leaks(inside, raw, tasks)
    expected = SINKS | {"task_step", "task_body"} | ({"file"} if raw.path is not None else set())
    assert result == expected


async def test_search_finds_a_canary_that_is_not_encrypted(
    database_url: str, raw: Raw, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tenuto.model.tenancy.secrets.extract_secrets", lambda value: (value, {}))
    async with working(database_url, {}) as inside:
        task = await inside.submit(task_type="nobody's", input={"secrets": {"token": CANARY}})
        result = await leaks(inside, raw, [task])
    assert result - {"file"} == {"task_body", "show"}


async def test_search_finds_a_canary_cut_in_two(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "tenuto.worker.runtime.command._split_long_line", lambda rest, _redactor: (rest, b"")
    )
    async with working(sqlite_url, {}) as inside:
        await inside.engine.secrets.put("stored", NAMED)
        task = await command(inside, tmp_path / "out", {})
        await inside.ended(task)
        lines = [line for line in await inside.transcript(task) if line.startswith("***" * 9)]
    assert any(set(line) != {"*"} for line in lines)
