"""Following a task: every line is shown, outages are waited for, and waits are explained."""

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Self
from uuid import UUID

import msgspec
import pytest

from tenuto import app
from tenuto.cli.base import GlobalOptions
from tenuto.cli.tasks import follow
from tenuto.cli.tasks.run import _follow_submitted
from tenuto.client.follow import OUTAGE_S, PAGE_SIZE
from tenuto.engine.engine import Engine
from tenuto.model.agents.matching import AgentProfile
from tenuto.model.errors import Unavailable
from tenuto.model.tasks import commands
from tenuto.model.tasks.commands import Failure
from tenuto.model.tasks.submission import NewTask
from tenuto.model.tasks.task import Fence
from tenuto.model.tasks.transcript import Line
from tenuto.settings import Settings


class Notebook:
    """A screen that keeps what it is shown."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.notes: list[str] = []
        self.percents: list[int | None] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        pass

    def show_output(self, text: str) -> None:
        self.said.append(text)

    def show_note(self, text: str) -> None:
        self.notes.append(text)

    def show_progress(self, view: Any) -> None:
        self.percents.append(view.progress_percent)


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[Engine]:
    async with app.connect(Settings(data=str(tmp_path))) as engine:
        yield engine


async def submitted(engine: Engine) -> UUID:
    return (await engine.submit(NewTask(title="x"))).id


async def claimed(engine: Engine) -> Fence:
    profile = AgentProfile(
        id=engine.clock.new_id(), workspace=engine.workspace, name="a", runtimes=("test",)
    )
    [work] = await engine.claim(await engine.register_agent(profile), "host:1:test")
    return work.fence


async def test_follow_shows_every_line_once_and_in_order(engine: Engine) -> None:
    task = await submitted(engine)
    fence = await claimed(engine)
    count = 2 * PAGE_SIZE + 1
    for start in range(0, count, 500):
        stop = min(start + 500, count)
        await engine.append(fence, [Line(n, "INFO", str(n)) for n in range(start, stop)])
    shown = Notebook()
    steps = iter(range(3))

    async def work(_: float) -> None:
        match next(steps):
            case 0:
                await engine.progress(fence, 40, "half")
            case 1:
                await engine.append(fence, [Line(count, "INFO", "late")])
            case 2:
                await engine.append(fence, [Line(count + 1, "INFO", "last")])
                await engine.complete(fence, {"ok": True})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.clock, "sleep", work)
        view = await follow.follow_task(engine, task, shown, output=True)
    assert view.status == "COMPLETED"
    assert shown.said == [*map(str, range(count)), "late", "last"]
    assert [note.split()[0] for note in shown.notes] == ["submitted", "claimed", "completed"]
    assert 40 in shown.percents
    assert follow.format_outcome(view).startswith("COMPLETED in ")
    again = msgspec.structs.replace(view, status="DEAD", attempt=3, last_error="no")
    assert re.fullmatch(r"DEAD in \S+ at attempt 3: no", follow.format_outcome(again))


async def test_follow_shows_lines_written_between_two_reads(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = await submitted(engine)
    fence = await claimed(engine)
    transcript, looks = engine.transcript, iter(range(1))

    async def late(*args: Any) -> Any:
        result = await transcript(*args)
        if next(looks, None) is not None:
            await engine.append(fence, [Line(0, "INFO", "last words")])
            await engine.complete(fence)
        return result

    async def pass_time(_: float) -> None:
        pass

    monkeypatch.setattr(engine, "transcript", late)
    monkeypatch.setattr(engine.clock, "sleep", pass_time)
    shown = Notebook()
    assert (await follow.follow_task(engine, task, shown, output=True)).status == "COMPLETED"
    assert shown.said == ["last words"]


async def test_follow_waits_for_an_outage_within_a_limit(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = await submitted(engine)
    await engine.cancel(task)
    answer, faults = engine.show, iter(range(3))
    now = 0.0

    async def flaky(expected: UUID) -> Any:
        if next(faults, None) is not None:
            raise Unavailable("restarting")
        return await answer(expected)

    async def pass_time(_: float) -> None:
        nonlocal now
        now += OUTAGE_S / 4

    monkeypatch.setattr(engine, "show", flaky)
    monkeypatch.setattr(engine.clock, "sleep", pass_time)
    monkeypatch.setattr(engine.clock, "elapsed", lambda: now)
    view = await follow.follow_task(engine, task, Notebook(), output=True)
    assert view.status == "CANCELLED"
    faults = iter(range(10))
    with pytest.raises(Unavailable):
        await follow.follow_task(engine, task, Notebook(), output=True)


@pytest.mark.parametrize("ends", ["COMPLETED", "CANCELLED", "SKIPPED", "FAILED", "DEAD"])
async def test_follow_exits_0_only_for_a_completed_task(
    engine: Engine, ends: str, capsys: pytest.CaptureFixture[str]
) -> None:
    task = (await engine.submit(NewTask(title="x", max_attempts=1))).id
    if ends == "CANCELLED":
        await engine.cancel(task)
    elif ends == "SKIPPED":
        await engine.core.apply_command(task, commands.Skip())
    elif ends == "COMPLETED":
        await engine.complete(await claimed(engine))
    else:
        failure = Failure(message="no", retryable=ends == "DEAD")
        await engine.fail(await claimed(engine), failure)
    assert await _follow_submitted(GlobalOptions(), engine, str(task)) == (
        0 if ends == "COMPLETED" else 1
    )
    assert capsys.readouterr().err.splitlines()[-1].split()[0] == ends


async def test_follow_explains_a_wait_once(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    task = await submitted(engine)
    looks = iter(range(50))

    async def pass_time(_: float) -> None:
        if next(looks, None) is None:
            await engine.cancel(task)

    monkeypatch.setattr(engine.clock, "sleep", pass_time)
    shown = Notebook()
    await follow.follow_task(engine, task, shown, output=True)
    assert [note for note in shown.notes if note.startswith("not running")] == [
        "not running: no agent exists"
    ]
