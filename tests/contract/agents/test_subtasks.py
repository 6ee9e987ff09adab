"""Subtasks: spawned by attempts, waited for without a slot, and cancelled with their parent."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from tests.contract.conftest import (
    LEASE_S,
    WORKER,
    Another,
    ManualClock,
    Raw,
    claim_all,
    claim_one,
    failure,
    new,
    profile,
    refusal,
    row_of,
    running,
    status,
)

from tenuto.engine.agents.subtask_tree import SpawnLimits
from tenuto.engine.agents.subtasks import Child
from tenuto.engine.engine import Engine
from tenuto.engine.tasks.claim import ClaimedTask
from tenuto.model.errors import TooMany
from tenuto.model.tasks.submission import Filter
from tenuto.model.tasks.task import Fence

KILLED = {"state": "killed"}


async def spawned(engine: Engine, fence: Fence, *keys: str, **options: Any) -> list[UUID]:
    return [await engine.spawn(fence, key, new(key, **options)) for key in keys]


async def claimed_by_task(engine: Engine) -> dict[UUID, ClaimedTask]:
    """Everything that can be claimed, claimed."""
    return {work.fence.task: work for work in await claim_all(engine)}


async def parked(engine: Engine, *keys: str) -> tuple[Fence, list[Fence]]:
    """A task that waits for its children, and the fences of these, which run."""
    fence = await running(engine)
    children = await spawned(engine, fence, *keys)
    held = await claimed_by_task(engine)
    assert (await engine.wait(fence, children)).parked
    assert await status(engine, fence.task) == "WAITING"
    return fence, [held[child].fence for child in children]


async def resumed(engine: Engine, task: UUID) -> Fence:
    """The fence of a task's next attempt, which can be claimed at once."""
    work = await claim_one(engine)
    assert work.fence.task == task
    return work.fence


async def kinds(engine: Engine, task: UUID) -> list[str]:
    return [line.event or "" for line in await engine.events(task)]


async def test_last_finished_subtask_wakes_its_parent(engine: Engine) -> None:
    fence, [first, second] = await parked(engine, "a", "b")
    task = await row_of(engine, fence.task)
    assert (task.hold, task.tries, task.agent) == ("children", 0, None)
    await engine.complete(first, {"n": 1})
    assert await status(engine, fence.task) == "WAITING"
    await engine.complete(second, {"n": 2})
    assert await status(engine, fence.task) == "PENDING"
    again = await resumed(engine, fence.task)
    same = await spawned(engine, again, "a", "b")
    assert same == [first.task, second.task]
    waited = await engine.wait(again, ["b", first.task])
    assert not waited.parked
    assert waited.children == [
        Child(second.task, "b", "COMPLETED", {"n": 2}),
        Child(first.task, "a", "COMPLETED", {"n": 1}),
    ]
    await engine.complete(again, "done")
    assert [attempt.outcome for attempt in await engine.attempts(fence.task)] == [
        "PARKED",
        "COMPLETED",
    ]
    assert await kinds(engine, fence.task) == [
        "submitted",
        "claimed",
        "parked",
        "ready",
        "claimed",
        "completed",
    ]


async def test_failed_subtask_wakes_its_parent_without_failing_it(engine: Engine) -> None:
    fence, [first, second, third] = await parked(engine, "a", "b", "c")
    await engine.fail(first, failure("syntax", "no good"))
    await engine.cancel(second.task)
    await engine.confirm_cancel(second, KILLED)
    assert await status(engine, fence.task) == "WAITING"
    await engine.complete(third)
    again = await resumed(engine, fence.task)
    waited = await engine.wait(again)
    reports = [(item.key, item.status, item.error) for item in waited.children]
    assert reports == [
        ("a", "FAILED", "no good"),
        ("b", "CANCELLED", None),
        ("c", "COMPLETED", None),
    ]


async def test_wait_for_finished_subtasks_returns_at_once(engine: Engine) -> None:
    fence = await running(engine)
    assert await engine.wait(fence) == await engine.wait(fence, [])
    assert not (await engine.wait(fence)).parked
    [child] = await spawned(engine, fence, "a")
    await engine.complete((await claimed_by_task(engine))[child].fence, 7)
    assert (await engine.wait(fence)).children == [Child(child, "a", "COMPLETED", 7)]
    assert await status(engine, fence.task) == "RUNNING"


async def test_wait_counts_only_the_named_subtasks(engine: Engine) -> None:
    fence = await running(engine)
    first, second = await spawned(engine, fence, "a", "b")
    held = await claimed_by_task(engine)
    assert (await engine.wait(fence, ["b"])).parked
    await engine.complete(held[first].fence)
    assert await status(engine, fence.task) == "WAITING"
    await engine.complete(held[second].fence)
    assert await status(engine, fence.task) == "PENDING"


async def test_wait_for_another_tasks_subtask_is_refused(engine: Engine) -> None:
    other_fence = await running(engine)
    [child] = await spawned(engine, other_fence, "a")
    await claimed_by_task(engine)
    fence = await running(engine)
    for name in (child, other_fence.task, fence.task, "a", "nobody", ""):
        assert await refusal(engine.wait(fence, [name])) == "not_found"
    assert await status(engine, fence.task) == "RUNNING"


async def test_repeated_wait_gets_the_same_response(engine: Engine, raw: Raw) -> None:
    fence, [child] = await parked(engine, "a")
    before = await raw.counts()
    assert (await engine.wait(fence, ["a"])).parked
    assert await raw.counts() == before
    await engine.complete(child)
    assert (await engine.wait(fence, ["a"])).parked
    again = await resumed(engine, fence.task)
    assert await refusal(engine.wait(fence, ["a"])) == "lease_lost"
    assert not (await engine.wait(again, ["a"])).parked


async def test_attempt_without_the_lease_cannot_wait(engine: Engine, clock: ManualClock) -> None:
    fence = await running(engine)
    await spawned(engine, fence, "a")
    clock.advance(LEASE_S + 1)
    await engine.maintenance.expire_once("reaper")
    assert await refusal(engine.wait(fence, ["a"])) == "lease_lost"
    assert await status(engine, fence.task) == "RETRY_WAIT"


async def test_attempt_with_a_stop_request_cannot_wait(engine: Engine) -> None:
    fence = await running(engine)
    await spawned(engine, fence, "a")
    await engine.pause(fence.task)
    assert await refusal(engine.wait(fence)) == "pause_requested"
    await engine.cancel(fence.task)
    assert await refusal(engine.wait(fence)) == "cancel_requested"
    assert await refusal(engine.spawn(fence, "b", new())) == "cancel_requested"


async def test_timeout_ends_the_wait_once(engine: Engine, clock: ManualClock) -> None:
    fence = await running(engine)
    children = await spawned(engine, fence, "quick", "slow")
    held = await claimed_by_task(engine)
    await engine.complete(held[children[0]].fence, 1)
    assert (await engine.wait(fence, children, 60, "first")).parked
    clock.advance(59)
    assert await engine.maintenance.promote_once("promoter") == 0
    clock.advance(2)
    assert await engine.maintenance.promote_once("promoter") == 1
    again = await resumed(engine, fence.task)
    waited = await engine.wait(again, children, 60, "first")
    assert [(item.status, item.output) for item in waited.children] == [
        ("COMPLETED", 1),
        ("RUNNING", None),
    ]
    # The next wait has its own time; the child's end comes before it.
    assert (await engine.wait(again, children, 60, "second")).parked
    await engine.complete(held[children[1]].fence, 2)
    last = await resumed(engine, fence.task)
    assert [item.output for item in (await engine.wait(last)).children] == [1, 2]


async def test_subtask_finished_late_does_not_change_a_resumed_parent(
    engine: Engine, clock: ManualClock
) -> None:
    fence = await running(engine)
    [child] = await spawned(engine, fence, "slow")
    held = await claimed_by_task(engine)
    assert (await engine.wait(fence, [child], 5)).parked
    clock.advance(6)
    await engine.maintenance.promote_once("promoter")
    before = await row_of(engine, fence.task)
    await engine.complete(held[child].fence)
    assert await row_of(engine, fence.task) == before
    again = await resumed(engine, fence.task)
    await engine.complete(again)


async def test_subtask_of_an_earlier_wait_does_not_wake(engine: Engine, clock: ManualClock) -> None:
    fence = await running(engine)
    children = await spawned(engine, fence, "quick", "slow")
    held = await claimed_by_task(engine)
    assert (await engine.wait(fence, children, 5, "both")).parked
    clock.advance(6)
    await engine.maintenance.promote_once("promoter")
    again = await resumed(engine, fence.task)
    assert (await engine.wait(again, ["quick"], None, "one")).parked
    await engine.complete(held[children[0]].fence)
    await resumed(engine, fence.task)


async def test_results_of_subtasks_reach_a_paused_parent_after_resume(engine: Engine) -> None:
    fence, [child] = await parked(engine, "a")
    await engine.pause(fence.task)
    await engine.complete(child)
    assert (await row_of(engine, fence.task)).hold is None
    await engine.resume(fence.task)
    await resumed(engine, fence.task)


async def test_cancelled_waiting_task_can_be_retried(engine: Engine) -> None:
    fence, [child] = await parked(engine, "a")
    await engine.cancel(fence.task)
    assert await status(engine, fence.task) == "CANCELLED"
    await engine.confirm_cancel(child, KILLED)
    await engine.retry(fence.task)
    again = await resumed(engine, fence.task)
    assert [item.status for item in (await engine.wait(again)).children] == ["CANCELLED"]


async def test_productive_wait_counts_no_try(engine: Engine) -> None:
    fence = await running(engine, max_attempts=2)
    for number in range(60):
        await spawned(engine, fence, f"part {number}")
        [work] = await claim_all(engine)
        assert (await engine.wait(fence)).parked
        await engine.complete(work.fence)
        fence = await resumed(engine, fence.task)
    task = await row_of(engine, fence.task)
    assert (task.attempt, task.tries, task.free_ends) == (61, 1, 0)


async def test_repeated_wait_without_results_counts_tries(
    engine: Engine, clock: ManualClock
) -> None:
    fence = await running(engine, max_attempts=2)
    [child] = await spawned(engine, fence, "never")
    assert await claim_one(engine)
    for number in range(100):
        assert (await engine.wait(fence, [child], 1, f"wait {number}")).parked
        clock.advance(2)
        await engine.maintenance.promote_once("promoter")
        if await status(engine, fence.task) != "PENDING":
            break
        fence = await resumed(engine, fence.task)
    task = await row_of(engine, fence.task)
    assert (task.status, task.attempt) == ("DEAD", 22)


async def test_subtasks_can_depend_on_each_other(engine: Engine) -> None:
    fence = await running(engine)
    [first] = await spawned(engine, fence, "first")
    [then] = await spawned(engine, fence, "then", depends_on=[str(first)])
    assert (await engine.wait(fence)).parked
    assert await status(engine, then) == "WAITING"
    await engine.complete((await claimed_by_task(engine))[first].fence)
    await engine.complete((await claimed_by_task(engine))[then].fence)
    await resumed(engine, fence.task)


async def test_cycle_of_waits_is_refused(engine: Engine) -> None:
    fence = await running(engine)
    await spawned(engine, fence, "after me", depends_on=[str(fence.task)])
    assert await refusal(engine.wait(fence)) == "dependency_cycle"
    await engine.complete(fence)
    assert len(await claim_all(engine)) == 1


async def test_spawn_with_a_next_task_or_a_reserved_key_is_refused(engine: Engine) -> None:
    fence = await running(engine)
    assert await refusal(engine.spawn(fence, "x", new(next="y"))) == "invalid_value"
    assert await refusal(engine.spawn(fence, "$wait x", new())) == "invalid_value"
    assert await refusal(engine.record_step(fence, "$wait x", 1)) == "invalid_value"


async def test_subtask_depth_is_bounded(engine: Engine, raw: Raw) -> None:
    engine.core.spawn_limits = SpawnLimits(max_depth=3)
    fence = await running(engine)
    for _ in range(3):
        await spawned(engine, fence, "deeper")
        fence = (await claim_one(engine)).fence
    before = await raw.counts()
    assert await refusal(engine.spawn(fence, "deeper", new())) == "tree_too_deep"
    assert await raw.counts() == before


async def test_subtasks_of_a_task_are_bounded(engine: Engine, raw: Raw) -> None:
    engine.core.spawn_limits = SpawnLimits(max_children=3)
    fence = await running(engine)
    children = await spawned(engine, fence, "a", "b", "c")
    before = await raw.counts()
    assert await refusal(engine.spawn(fence, "d", new())) == "too_many_children"
    assert await raw.counts() == before
    assert await spawned(engine, fence, "c", "a") == [children[2], children[0]]


async def test_concurrent_spawns_keep_the_limit(engine: Engine, another: Another) -> None:
    async with another() as other:
        engine.core.spawn_limits = other.core.spawn_limits = SpawnLimits(max_children=5)
        fence = await running(engine)
        calls = [
            item.spawn(fence, f"child {number}", new())
            for number in range(8)
            for item in (engine, other)
        ]
        answers = await asyncio.gather(*calls, return_exceptions=True)
    created = {answer for answer in answers if isinstance(answer, UUID)}
    assert len(created) == 5
    assert len((await engine.list(Filter(parent=fence.task))).tasks) == 5


# Cancel.


async def tree(engine: Engine, depth: int, width: int) -> tuple[Fence, list[ClaimedTask]]:
    """A root with so many levels below it; whatever has children runs, the leaves are queued."""
    root = await running(engine)
    level, inner = [root], []
    for _ in range(depth):
        for fence in level:
            await spawned(engine, fence, *map(str, range(width)))
        claimed = await claim_all(engine)
        inner += claimed
        level = [work.fence for work in claimed]
    return root, inner


async def test_cancel_reaches_the_whole_tree(engine: Engine, raw: Raw) -> None:
    root, below = await tree(engine, 4, 5)
    assert len(below) == 5 + 25 + 125 + 625
    await engine.cancel(root.task, "enough")
    while await engine.flows.run_deferred_once():
        pass
    held = {root.task: root} | {work.fence.task: work.fence for work in below}
    asked = {task for task in held if (await row_of(engine, task)).cancel_requested_at is not None}
    assert asked == set(held)
    for fence in held.values():
        await engine.confirm_cancel(fence, KILLED)
    rows = await raw.fetch("select status, count(*) from task group by status")
    assert rows == [("CANCELLED", len(held))]
    events = Counter(
        dict(await raw.fetch("select kind, count(*) from event group by kind order by kind"))
    )
    assert events["cancel_requested"] == events["cancelled"] == len(held)


async def test_cancel_of_a_large_tree_continues_in_the_next_transaction(
    engine: Engine, raw: Raw, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tenuto.engine.agents.subtask_tree.MAX_CASCADE_ROWS", 4)
    root = await running(engine)
    children = await spawned(engine, root, *map(str, range(10)))
    held = await claimed_by_task(engine)
    for child in children[:3]:
        await spawned(engine, held[child].fence, *map(str, range(5)))
    await engine.cancel(root.task)
    assert await raw.count("flow_work") > 0
    for _ in range(30):
        await engine.flows.run_deferred_once()
    assert await raw.count("flow_work") == 0
    rows = await raw.fetch(
        "select count(*) from task where status = 'CANCELLED' or cancel_requested_at is not null"
    )
    assert rows == [(1 + 10 + 15,)]
    events = await raw.fetch(
        "select task from event where kind in ('cancelled', 'cancel_requested') group by task"
        " having count(*) > 1"
    )
    assert events == []


async def test_retried_task_keeps_its_unfinished_subtasks(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task was cancelled, but not yet all of its subtasks."""
    monkeypatch.setattr("tenuto.engine.agents.subtask_tree.MAX_CASCADE_ROWS", 2)
    fence = await running(engine)
    children = await spawned(engine, fence, *map(str, range(5)))
    await engine.cancel(fence.task)
    await engine.confirm_cancel(fence, KILLED)
    await engine.retry(fence.task)
    while await engine.flows.run_deferred_once():
        pass
    ends = [await status(engine, child) for child in children]
    assert Counter(ends) == {"CANCELLED": 2, "PENDING": 3}


async def test_other_outcomes_do_not_reach_subtasks(engine: Engine) -> None:
    fence = await running(engine)
    [child] = await spawned(engine, fence, "a")
    await engine.fail(fence, failure("syntax"))
    assert await status(engine, child) == "PENDING"
    await engine.cancel(child)
    assert await status(engine, fence.task) == "FAILED"


async def test_cancelled_waiting_task_cancels_its_subtasks(engine: Engine) -> None:
    fence, [child] = await parked(engine, "a")
    await engine.cancel(fence.task)
    assert await status(engine, fence.task) == "CANCELLED"
    assert (await row_of(engine, child.task)).cancel_requested_at is not None
    assert await refusal(engine.complete(child)) == "cancel_requested"
    await engine.confirm_cancel(child, KILLED)
    assert await status(engine, fence.task) == "CANCELLED"


async def test_concurrent_spawn_and_cancel_leave_no_open_subtask(
    engine: Engine, another: Another, raw: Raw
) -> None:
    async with another() as other:
        for number in range(20):
            fence = await running(engine)
            calls: Sequence[Any] = [
                other.spawn(fence, "child", new("child")),
                engine.cancel(fence.task),
            ]
            await asyncio.gather(*(calls[::-1] if number % 2 else calls), return_exceptions=True)
            await engine.confirm_cancel(fence, KILLED)
    live = await raw.fetch("select status from task where status <> 'CANCELLED'")
    assert live == []


# Both at the same instant: the wait and the ends of those it waits for.


async def test_concurrent_wait_and_completion_lose_no_wake_up(
    engine: Engine, another: Another
) -> None:
    async with another() as other:
        for number in range(200):
            fence = await running(engine)
            children = await spawned(engine, fence, "a", "b")
            held = {
                work.fence.task: work.fence
                for work in await engine.claim(profile(), WORKER, 2, LEASE_S)
            }
            calls = [
                engine.wait(fence, children),
                other.complete(held[children[0]], 1),
                engine.complete(held[children[1]], 2),
            ]
            order = [calls[(number + shift) % 3] for shift in range(3)]
            answers = await asyncio.gather(*(order[::-1] if number % 2 else order))
            [waited] = [answer for answer in answers if answer is not None]
            if waited.parked:
                fence = await resumed(engine, fence.task)
                waited = await engine.wait(fence, children)
            assert [item.output for item in waited.children] == [1, 2]
            await engine.complete(fence)


async def test_concurrent_cancel_and_completions_of_subtasks_agree(
    engine: Engine, another: Another
) -> None:
    """One locks from above, the others from below: whoever comes second is refused or heard."""
    async with another() as other:
        for number in range(12):
            fence, children = await parked(engine, "a", "b", "c")
            calls: list[Any] = [
                engine.cancel(fence.task),
                *(other.complete(child) for child in children),
            ]
            answers = await asyncio.gather(
                *(calls[::-1] if number % 2 else calls), return_exceptions=True
            )
            refused = [answer for answer in answers if isinstance(answer, BaseException)]
            assert {getattr(item, "code", item) for item in refused} <= {"cancel_requested"}
            for child in children:
                if await status(engine, child.task) == "RUNNING":
                    await engine.confirm_cancel(child, KILLED)
            assert await status(engine, fence.task) == "CANCELLED"


async def test_subtasks_count_against_the_pending_quota(
    engine: Engine, raw: Raw, another: Another
) -> None:
    await engine.submit_many([new("parent", priority=9)] * 2)
    first, second = [(await claim_one(engine)).fence for _ in range(2)]
    await engine.submit(new("later", run_at=engine.clock.now() + timedelta(hours=1)))
    await raw.execute("""update workspace set quota = '{"pending": 4}'""")
    async with another() as other:
        created = await asyncio.gather(
            *(
                caller.spawn(fence, f"{number}", new("child"))
                for number in range(4)
                for caller, fence in ((engine, first), (other, second))
            ),
            return_exceptions=True,
        )
    refused = [item for item in created if isinstance(item, TooMany)]
    assert {item.code for item in refused} == {"quota_exceeded"}
    assert (len(created), len(refused)) == (8, 5)
    assert await raw.value("select count(*) from task where status in ('PENDING', 'WAITING')") == 4
    # What a child was refused is made when there is room, under the same key.
    await raw.execute("update workspace set quota = null")
    for number in range(4):
        await engine.spawn(first, f"{number}", new("child"))
    assert await raw.value("select count(*) from task_step where child is not null") >= 4
