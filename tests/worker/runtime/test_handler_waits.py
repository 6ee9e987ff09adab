"""Handlers that wait: they release their slot and run again from the start."""

import asyncio
import logging
from collections import Counter
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from tests.proof.crash.inside import RETRY, TERMINAL, Handlers, Inside, working
from tests.proof.crash.system import WAIT_S, system
from tests.waiting import eventually

from tenuto.model.agents.matching import AgentProfile
from tenuto.model.tasks.submission import NewTask
from tenuto.worker.handler_waits import Parked


def child(n: int, task_type: str = "square") -> NewTask:
    return NewTask(title=f"square {n}", task_type=task_type, input=n, retry=RETRY)


async def square(ctx: Any) -> int:
    return int(ctx.input) ** 2


async def gather_later(ctx: Any) -> Any:
    created = [await ctx.spawn(f"part {n}", child(n)) for n in range(5)]
    return [item.output for item in await ctx.wait(created)]


def gather_now(ctx: Any) -> Any:
    for n in range(5):
        ctx.spawn(f"part {n}", child(n))
    return [item.output for item in ctx.wait_all()]


@pytest.mark.parametrize("parent", [gather_later, gather_now])
async def test_parent_and_its_subtasks_run_with_one_slot(database_url: str, parent: Any) -> None:
    handlers: Handlers = {"parent": parent, "square": square}
    async with working(database_url, handlers, slots=1) as inside:
        task = await inside.submit(task_type="parent")
        assert (await inside.ended(task)).output == [0, 1, 4, 9, 16]
        outcomes = await inside.outcomes(task)
        assert outcomes[0] == "PARKED"
        assert outcomes[-1] == "COMPLETED"
        assert (await inside.engine.show(task)).tries == 1


async def test_tree_of_subtasks_runs_with_one_slot(database_url: str) -> None:
    async def total(ctx: Any) -> int:
        depth = ctx.input
        if depth == 0:
            return 1
        new = NewTask(title=f"level {depth}", task_type="total", input=depth - 1)
        for n in range(3):
            await ctx.spawn(str(n), new)
        return 1 + sum(int(item.output) for item in await ctx.wait_all())

    async with working(database_url, {"total": total}, slots=1) as inside:
        task = await inside.submit(task_type="total", input=2)
        assert (await inside.ended(task, 60)).output == 1 + 3 + 9


async def test_steps_run_once_over_many_waits(database_url: str) -> None:
    done: Counter[str] = Counter()

    async def chain(ctx: Any) -> Any:
        created = []
        for n in range(30):
            await ctx.step(f"step {n}", lambda n=n: done.update([f"step {n}"]))
            await ctx.spawn(f"part {n}", child(n))
            [end] = await ctx.wait([f"part {n}"])
            created.append(end.output)
        return created

    async with working(database_url, {"chain": chain, "square": square}) as inside:
        task = await inside.submit(task_type="chain", max_attempts=1)
        assert (await inside.ended(task, 60)).output == [n * n for n in range(30)]
    assert set(done.values()) == {1}
    assert len(done) == 30


async def test_failed_subtask_is_reported_to_its_parent(database_url: str) -> None:
    async def fails(ctx: Any) -> None:
        raise ValueError(f"no {ctx.input}")

    async def parent(ctx: Any) -> Any:
        new = NewTask(title="child", task_type="fails", input=3, max_attempts=1)
        [end] = await ctx.wait([await ctx.spawn("child", new)])
        return [end.key, end.status, end.error]

    async with working(database_url, {"parent": parent, "fails": fails}) as inside:
        task = await inside.submit(task_type="parent")
        assert (await inside.ended(task)).output == ["child", "DEAD", "ValueError: no 3"]


async def test_log_lines_before_a_wait_are_stored(sqlite_url: str) -> None:
    async def parent(ctx: Any) -> None:
        ctx.log(f"attempt {ctx.attempt} waits")
        await ctx.wait([await ctx.spawn("part", child(2))])

    handlers: Handlers = {"parent": parent, "square": square}
    async with working(sqlite_url, handlers, slots=1) as inside:
        task = await inside.submit(task_type="parent")
        await inside.ended(task)
        assert await inside.transcript(task) == ["attempt 1 waits", "attempt 2 waits"]


async def test_wait_has_a_timeout(database_url: str) -> None:
    let = asyncio.Event()

    async def slow(ctx: Any) -> str:
        await let.wait()
        return "slow"

    async def parent(ctx: Any) -> Any:
        created = await ctx.spawn("slow", NewTask(title="slow", task_type="slow"))
        seen = []
        for _ in range(3):
            [end] = await ctx.wait([created], timeout=0.2)
            seen.append(end.status)
        let.set()
        [end] = await ctx.wait([created])
        return [*seen, end.output]

    async with working(database_url, {"parent": parent, "slow": slow}) as inside:
        task = await inside.submit(task_type="parent")
        assert (await inside.ended(task)).output == ["RUNNING"] * 3 + ["slow"]


async def answered(inside: Inside, key: str, text: str | None = None) -> None:
    """Answer the question as soon as somebody asks it."""

    async def there() -> Any:
        return [entry for entry in await inside.engine.inbox.list() if entry.key == key]

    [item] = await eventually(there, WAIT_S, 0.02)
    if text is None:
        await inside.engine.inbox.answer(item.id, approve=True, comment="fine")
    else:
        await inside.engine.inbox.dismiss(item.id, text)


async def ask_later(ctx: Any) -> Any:
    ctx.log(f"attempt {ctx.attempt} asks")
    yes = await ctx.approve("go", "shall I?", body={"cost": 3})
    name = await ctx.ask("name", "what is it called?")
    silent = await ctx.approve("silent", "anyone?", timeout=0.1, default=True)
    anonymous = await ctx.ask("nobody", "anyone?", timeout=0.1, default="x")
    return [bool(yes), yes.comment, name, silent.approved, silent.by, anonymous]


def ask_now(ctx: Any) -> Any:
    ctx.log(f"attempt {ctx.attempt} asks")
    yes = ctx.approve("go", "shall I?", body={"cost": 3})
    name = ctx.ask("name", "what is it called?")
    silent = ctx.approve("silent", "anyone?", timeout=0.1, default=True)
    anonymous = ctx.ask("nobody", "anyone?", timeout=0.1, default="x")
    return [bool(yes), yes.comment, name, silent.approved, silent.by, anonymous]


@pytest.mark.parametrize("handler", [ask_later, ask_now])
async def test_question_to_a_person_occupies_no_slot(database_url: str, handler: Any) -> None:
    async with working(database_url, {"ask": handler, "square": square}, slots=1) as inside:
        task = await inside.submit(task_type="ask")
        await inside.until(task, "WAITING")
        other = await inside.submit(task_type="square", input=3)
        assert (await inside.ended(other)).output == 9
        await answered(inside, "go")
        await answered(inside, "name", "Ada")
        ended = await inside.ended(task)
        assert ended.output == [True, "fine", "Ada", True, "timeout", "x"]
        # What was said before a wait is kept, though the attempt is over with it.
        attempts = len(await inside.outcomes(task))
        lines = [f"attempt {n + 1} asks" for n in range(attempts)]
        assert await inside.transcript(task) == lines


async def test_parked_attempt_ends_even_if_its_handler_catches_the_signal(
    database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    cleaned: list[str] = []

    async def polite(ctx: Any) -> Any:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(ctx.approve("go", "?"))
        except Exception as error:  # noqa: BLE001  what handlers do
            return repr(error)
        finally:
            cleaned.append("polite")
        return "went on"

    async def deaf(ctx: Any) -> Any:
        try:
            await ctx.approve("go", "?")
        except Parked:
            cleaned.append("deaf")
            return "as if nothing had happened"
        return "went on"

    caplog.set_level(logging.WARNING, "tenuto.worker")
    # A beat may take its time on a busy machine: late ones are told of, too, and are not meant.
    handlers: Handlers = {"polite": polite, "deaf": deaf}
    async with working(database_url, handlers, heartbeat_s=20.0, lease_s=60) as inside:
        for kind in ("polite", "deaf"):
            task = await inside.submit(task_type=kind)
            await inside.until(task, "WAITING")
            await answered(inside, "go")
            assert (await inside.ended(task)).output == "went on"
            assert await inside.outcomes(task) == ["PARKED", "COMPLETED"]
    assert cleaned == ["polite", "polite", "deaf"]
    assert [record for record in caplog.records if record.name == "tenuto.worker"] == []


HANDLERS = """
from tenuto.model.tasks.submission import NewTask


async def parent(ctx):
    new = NewTask(title="child", task_type="child", max_attempts=9)
    made = [await ctx.spawn(str(n), new) for n in range(3)]
    return [each.output for each in await ctx.wait(made)]


def child(ctx):
    import threading
    if ctx.attempt == 1:
        threading.Event().wait()  # until its worker is killed
    return ctx.attempt


handlers = {"parent": parent, "child": child}
"""


async def test_wait_survives_its_worker(database_url: str, tmp_path: Path) -> None:
    async with system(database_url, tmp_path) as world:
        (tmp_path / "kin.py").write_text(HANDLERS)
        world.coordinator()
        first = world.worker("--agent", "kin", "--app", "kin:handlers")
        task = (await world.engine.submit(NewTask(title="parent", task_type="parent"))).id

        async def flying() -> bool:
            counts = await world.engine.counts()
            return counts.get("RUNNING") == 3 and counts.get("WAITING") == 1

        await eventually(flying, WAIT_S, 0.05)
        first.end()
        world.worker("--agent", "kin", "--app", "kin:handlers")
        await world.in_status([task], "COMPLETED")
        assert (await world.engine.show(task)).output == [2, 2, 2]
        attempts = await world.engine.attempts(task)
        assert [attempt.outcome for attempt in attempts] == ["PARKED", "COMPLETED"]


def runs(pid: str) -> bool:
    return Path("/proc", pid).exists()


async def test_cancel_kills_the_processes_of_all_subtasks(
    database_url: str, tmp_path: Path
) -> None:
    """The leaves are commands that a worker runs; what is above them runs by hand."""
    async with working(database_url) as inside:
        engine = inside.engine
        hand = AgentProfile(
            id=engine.clock.new_id(),
            workspace=engine.workspace,
            name="hand",
            agent_type="hand",
            runtimes=("function",),
        )
        hand = await engine.register_agent(hand)

        async def held() -> Any:
            return await engine.claim(hand, "host:1:hand", 10, 60)

        root = await inside.submit(agent_type="hand")
        [work] = await held()
        for n in range(2):
            await engine.spawn(work.fence, str(n), NewTask(title="inner", agent_type="hand"))
        inner = await held()
        leaves: list[UUID] = []
        for number, parent in enumerate(inner):
            for n in range(3):
                mark = tmp_path / f"{number}-{n}"
                argv = ["sh", "-c", f"echo $$ > {mark}; sleep 600 & wait"]
                leaves.append(
                    await engine.spawn(parent.fence, str(n), NewTask(title="leaf", command=argv))
                )
        marks = [tmp_path / f"{number}-{n}" for number in range(2) for n in range(3)]
        await eventually(lambda: all(m.is_file() and m.read_text() for m in marks), WAIT_S)
        await engine.cancel(root)
        for leaf in leaves:
            await inside.until(leaf, *TERMINAL)
        assert {(await engine.show(leaf)).status for leaf in leaves} == {"CANCELLED"}
        assert [pid for mark in marks if runs(pid := mark.read_text().strip())] == []
        for parked in [work, *inner]:
            await engine.confirm_cancel(parked.fence, {"state": "killed"})
        for task in [root, *leaves]:
            kinds = [line.event for line in await engine.events(task)]
            assert (kinds.count("cancel_requested"), kinds.count("cancelled")) == (1, 1)
