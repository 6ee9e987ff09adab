"""Exits raised on the event loop: only Ctrl-C and the program itself end the program."""

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.proof.crash.inside import SHORT
from tests.waiting import eventually

from tenuto import app
from tenuto.model.tasks.submission import NewTask
from tenuto.settings import Settings
from tenuto.worker.worker import Worker

EXITS = [SystemExit(3), KeyboardInterrupt()]


@pytest.fixture(autouse=True, params=["uvloop", "asyncio"])
def loop_kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test on the loop of either library."""
    if request.param == "asyncio":
        monkeypatch.setitem(sys.modules, "uvloop", None)


@pytest.fixture
def listening() -> Iterator[None]:
    """Signals are listened to, as in a worker."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


async def leave(mode: BaseException) -> None:
    raise mode


async def below(mode: BaseException) -> None:
    """Wait for a task that leaves."""
    await asyncio.create_task(leave(mode))


async def in_a_group(mode: BaseException) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(leave(mode))
        group.create_task(asyncio.Event().wait())


async def worked(database: str, handlers: dict[str | None, Any]) -> dict[str | None, Any]:
    """Returns the outcome of a task of each type, all in one worker at once."""
    settings = Settings(database=database, **SHORT)
    stop = app.stop_on_signals()
    async with app.connect(settings) as engine:
        worker = Worker(engine, settings, connect=lambda: app.connect(settings))
        await worker.host_functions("agent", handlers)
        working = asyncio.create_task(worker.run(stop))
        ids = {
            handler: (
                await engine.submit(NewTask(title="t", task_type=str(handler), max_attempts=1))
            ).id
            for handler in handlers
        }

        async def ended() -> dict[str | None, Any] | None:
            views = {task_type: await engine.show(task) for task_type, task in ids.items()}
            if any(view.finished_at is None for view in views.values()):
                return None
            return {task_type: (view.status, view.attempt) for task_type, view in views.items()}

        result: dict[str | None, Any] = await eventually(ended)
        os.kill(os.getpid(), signal.SIGINT)
        await working
    return result


@pytest.mark.usefixtures("listening")
@pytest.mark.parametrize("mode", EXITS, ids=repr)
@pytest.mark.parametrize("waits", [below, in_a_group])
def test_exit_raised_below_a_handler_fails_only_its_attempt(
    tmp_path: Path, mode: BaseException, waits: Any
) -> None:
    left = asyncio.Event()

    async def leaves(_ctx: Any) -> None:
        try:
            await waits(mode)
        finally:
            left.set()

    async def stays(_ctx: Any) -> str:
        await left.wait()
        return "stayed"

    database = f"sqlite:///{tmp_path}/t.db"
    result = app.run(worked(database, {"leaves": leaves, "stays": stays}))
    assert result == {"leaves": ("DEAD", 1), "stays": ("COMPLETED", 1)}


def test_exit_of_the_program_ends_the_program() -> None:
    with pytest.raises(SystemExit) as caught:
        app.run(leave(SystemExit(5)))
    assert caught.value.code == 5


@pytest.mark.parametrize("last_word", [None, "kept"])
def test_ctrl_c_ends_a_program_without_a_signal_handler(last_word: str | None) -> None:
    async def main() -> str | None:
        await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if last_word is None:
                raise
        return last_word

    if last_word is None:
        with pytest.raises(KeyboardInterrupt):
            app.run(main())
    else:
        assert app.run(main()) == last_word


def test_second_ctrl_c_ends_the_program_at_once() -> None:
    async def main() -> None:
        await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.Event().wait()
        finally:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()

    with pytest.raises(KeyboardInterrupt):
        app.run(main())
