"""The way of a task through the program, traced on a SQLite database with a real worker.

Two walks of one plain task are recorded, in a process that has run such tasks before:

- the submit: from the client's call until it returns, with the task stored;
- the run: from the hint that wakes the worker, by claim and handler, until the result is stored.

A walk contains all code that runs because of this task, on every thread. It does not contain work
for all tasks together (heartbeats, polls), what follows the stored result (the next claim), and
files that every function may use: the clock, limits, errors, tracing, metrics and crash points.

A file that is added to a walk is one more file to read for everybody who follows a task. Add it to
the list here and to the picture in ARCHITECTURE.md only if it replaces another one.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import eventually
from tests.walk import Walk

from tenuto import AsyncClient, app
from tenuto.settings import Settings
from tenuto.worker.worker import Worker

MAX_FILES = 15
MAX_SUBMIT_CALLS = 150
MAX_RUN_CALLS = 250
SUBMIT_FILES = [
    "broker/local.py",
    "broker/memory.py",
    "client/client.py",
    "client/tasks.py",
    "engine/agents/lanes.py",
    "engine/engine.py",
    "engine/rows.py",
    "engine/tasks/submit.py",
    "engine/views.py",
    "folder_stamp.py",
    "model/tasks/submission.py",
    "model/tasks/task.py",
    "store/batching.py",
    "store/sqlite/connection.py",
    "store/sqlite/store.py",
]
RUN_FILES = [
    "engine/agents/lanes.py",
    "engine/core.py",
    "engine/engine.py",
    "engine/tasks/claim.py",
    "engine/tasks/finish.py",
    "folder_stamp.py",
    "model/tasks/task.py",
    "store/batching.py",
    "store/sqlite/connection.py",
    "store/sqlite/store.py",
    "worker/attempt.py",
    "worker/context.py",
    "worker/leases.py",
    "worker/runtime/function.py",
    "worker/worker.py",
]
_ARCHITECTURE = Path(__file__).parents[1] / "ARCHITECTURE.md"
_TASK: dict[str, Any] = {"task_type": "greet", "input": {"name": "Ada"}, "metadata": {"a": 1}}
_WARM_UP_TASKS = 12


def _before_submit() -> None:
    """Starts the record of a submit."""


def _after_submit() -> None:
    """Ends the record of a submit."""


async def _greet(context: Any) -> dict[str, str]:
    return {"greeting": f"Hello {context.input['name']}"}


def _is_idle(worker: Worker) -> bool:
    """True if the worker runs no attempt and no claim."""
    return not (worker._running or worker._claim_scheduled or worker._claims)


async def _record_submit(url: str) -> Walk:
    """Returns the walk of one submit by a client on a database."""
    with Walk(_before_submit, _after_submit) as walk:
        async with AsyncClient(url) as client:
            for _ in range(_WARM_UP_TASKS):
                await client.tasks.create("warm up", **_TASK)
            walk.arm()
            _before_submit()
            await client.tasks.create("traced", **_TASK)
            _after_submit()
    return walk


async def _record_run(url: str) -> Walk:
    """Returns the walk of one run by a worker that waits for hints."""
    settings = Settings(database=url, poll_s=60, heartbeat_s=60, lease_s=180)
    with Walk(Worker._on_hint, Worker._on_attempt_ended) as walk:
        async with app.connect(settings, listen=True) as engine, AsyncClient(url) as client:
            worker = Worker(engine, settings, connect=lambda: app.connect(settings))
            await worker.host_functions("greeter", {"greet": _greet})
            stop = asyncio.Event()
            working = asyncio.create_task(worker.run(stop))
            for _ in range(_WARM_UP_TASKS):
                task = await client.tasks.create("warm up", **_TASK)
                await client.tasks.wait(task.id, timeout=10)
            await eventually(lambda: _is_idle(worker))  # no claim for the last task runs on
            walk.arm()
            task = await client.tasks.create("traced", **_TASK)
            await eventually(lambda: walk.is_over)
            assert (await client.tasks.get(task.id)).output == {"greeting": "Hello Ada"}
            stop.set()
            await working
    return walk


@pytest.mark.parametrize(
    ("record", "files", "max_calls"),
    [
        (_record_submit, SUBMIT_FILES, MAX_SUBMIT_CALLS),
        (_record_run, RUN_FILES, MAX_RUN_CALLS),
    ],
)
async def test_a_walk_passes_few_files(
    sqlite_url: str, record: Callable[[str], Awaitable[Walk]], files: list[str], max_calls: int
) -> None:
    walk = await record(sqlite_url)
    assert walk.files == files, walk.report()
    assert walk.calls <= max_calls, walk.report()


@pytest.mark.parametrize("files", [SUBMIT_FILES, RUN_FILES])
def test_the_picture_names_each_file(files: list[str]) -> None:
    assert len(files) <= MAX_FILES
    text = _ARCHITECTURE.read_text(encoding="utf-8")
    [section] = re.findall(r"^## The way of a task\n(.*?)^## ", text, re.MULTILINE | re.DOTALL)
    assert [file for file in files if f"(src/tenuto/{file})" not in section] == []
