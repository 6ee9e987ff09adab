"""Dependencies between tasks, on both databases."""

import asyncio
from collections.abc import Sequence
from typing import Any
from uuid import UUID, uuid4

import pytest
from tests.contract.conftest import (
    Another,
    claim_all,
    failure,
    new,
    refusal,
    row_of,
    running,
    status,
)
from tests.contract.flows.helpers import worked
from tests.contract.store.test_prune_races import in_line

from tenuto.engine.engine import Engine
from tenuto.engine.tasks.dependencies import SubmitDependencies
from tenuto.engine.tasks.edit import TaskChanges
from tenuto.model.agents.matching import AgentProfile
from tenuto.model.errors import Invalid
from tenuto.model.tasks.task import Status
from tenuto.store.protocol import Script, Statement


async def submit(engine: Engine, *needs: UUID, **options: Any) -> UUID:
    return (await engine.submit(new(depends_on=[str(need) for need in needs], **options))).id


async def finish(engine: Engine, task: UUID, *, fails: bool = False) -> None:
    for work in await claim_all(engine):
        if work.fence.task != task:
            await engine.release(work.fence)
        elif fails:
            await engine.fail(work.fence, failure("syntax"))
        else:
            await engine.complete(work.fence, {"made": str(task)})


async def test_task_waits_for_its_dependencies(engine: Engine) -> None:
    first, second = await submit(engine), await submit(engine)
    last = await submit(engine, first, second)
    assert await status(engine, last) == "WAITING"
    assert (await engine.explain(last)).gates
    await finish(engine, first)
    assert await status(engine, last) == "WAITING"
    await finish(engine, second)
    assert await status(engine, last) == "PENDING"


async def test_task_does_not_wait_for_a_finished_dependency(engine: Engine) -> None:
    first = await submit(engine)
    await finish(engine, first)
    assert await status(engine, await submit(engine, first)) == "PENDING"


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    ("policy", "ends"), [("fail", "FAILED"), ("skip", "SKIPPED"), ("run", "PENDING")]
)
async def test_failed_dependency_fails_or_skips_or_releases_its_dependent(
    engine: Engine, policy: Any, ends: str, late: bool
) -> None:
    first = await submit(engine)
    if late:
        await finish(engine, first, fails=True)
    last = await submit(engine, first, on_dependency_failure=policy)
    after = await submit(engine, last)
    if not late:
        await finish(engine, first, fails=True)
    assert await status(engine, last) == ends
    assert await status(engine, after) == ("WAITING" if ends == "PENDING" else ends)


async def test_task_submitted_after_its_dependency_failed_is_reopened_with_it(
    engine: Engine,
) -> None:
    first = await submit(engine)
    await finish(engine, first, fails=True)
    last = await submit(engine, first)
    assert await status(engine, last) == "FAILED"
    await engine.retry(first, cascade=True)
    assert await status(engine, last) == "WAITING"
    await finish(engine, first)
    assert await status(engine, last) == "PENDING"


async def test_bulk_tasks_depend_on_each_other_by_key(engine: Engine, agent: AgentProfile) -> None:
    seen: list[Any] = []
    await engine.submit_many(
        [
            new("c", key="c", depends_on=["a", "b"], input={"from": {"$from": "a", "path": "key"}}),
            new("a", key="a"),
            new("b", key="b", depends_on=["a"]),
        ]
    )

    def handler(work: Any) -> Any:
        seen.append(work.input)
        return {"key": work.key}

    assert await worked(engine, agent, handler) == ["a", "b", "c"]
    assert seen[-1] == {"from": "a"}


@pytest.mark.parametrize(
    ("new_tasks", "code"),
    [
        ([new(key="a", depends_on=["a"])], "dependency_cycle"),
        ([new(key="a", depends_on=["b"]), new(key="b", depends_on=["a"])], "dependency_cycle"),
        ([new(depends_on=["nobody"])], "dependency_unknown"),
        ([new(depends_on=[str(uuid4())])], "dependency_unknown"),
        ([new(key="a"), new(key="a", depends_on=["a"])], "invalid_value"),
        ([new(key="a"), new(depends_on=["a"], input={"$from": "b"})], "reference_invalid"),
        ([new(input={"$from": "b"})], "reference_invalid"),
    ],
)
async def test_bulk_with_an_invalid_dependency_is_refused_whole(
    engine: Engine, new_tasks: Any, code: str
) -> None:
    assert await refusal(engine.submit_many(new_tasks)) == code
    assert sum((await engine.counts()).values()) == 0


async def test_task_blocks_existing_tasks(engine: Engine) -> None:
    blocked = await submit(engine)
    first = (await engine.submit(new(blocks=[str(blocked)]))).id
    assert await status(engine, blocked) == "WAITING"
    await finish(engine, first)
    assert await status(engine, blocked) == "PENDING"


async def test_dependency_named_by_both_tasks_is_stored_once(
    engine: Engine, agent: AgentProfile
) -> None:
    first, last = new("a", key="a", blocks=["b", "b"]), new("b", key="b", depends_on=["a"])
    await engine.submit_many([first, last])
    assert await worked(engine, agent) == ["a", "b"]


@pytest.mark.parametrize("by_id", [True, False])
async def test_repeated_submit_adds_no_dependency(
    engine: Engine, agent: AgentProfile, by_id: bool
) -> None:
    blocked = await submit(engine, title="b")
    existing = {"id": uuid4()} if by_id else {"idempotency_key": "k"}
    first = new("a", blocks=[str(blocked)], **existing)
    submitted = await engine.submit(first)
    again = await engine.submit(first)
    assert await worked(engine, agent) == ["a", "b"]
    late = await engine.submit(first)
    assert {submitted.id} == {again.id, late.id}
    assert [item.created for item in (submitted, again, late)] == [True, False, False]


async def test_repeated_spawn_adds_no_dependency(engine: Engine, agent: AgentProfile) -> None:
    fence = await running(engine)
    blocked = await submit(engine, title="b")
    child = new("a", blocks=[str(blocked)])
    assert await engine.spawn(fence, "k", child) == await engine.spawn(fence, "k", child)
    assert await worked(engine, agent) == ["a", "b"]


async def test_repeated_task_cannot_block_a_new_one_of_its_bulk(engine: Engine) -> None:
    """The new task would not wait, against its request."""
    new_tasks = [new("a", key="a", idempotency_key="k", blocks=["b"]), new("b", key="b")]
    await engine.submit_many(new_tasks)
    assert await refusal(engine.submit_many(new_tasks)) == "idempotency_conflict"
    assert sum((await engine.counts()).values()) == 2


async def test_second_half_of_a_cycle_is_refused(engine: Engine, another: Another) -> None:
    one, two = await submit(engine), await submit(engine)
    async with another() as other:
        answers = await asyncio.gather(
            engine.submit(new(depends_on=[str(one)], blocks=[str(two)])),
            other.submit(new(depends_on=[str(two)], blocks=[str(one)])),
            return_exceptions=True,
        )
    refused = [answer for answer in answers if isinstance(answer, Invalid)]
    assert [item.code for item in refused] == ["dependency_cycle"]


async def test_cycle_of_two_submits_that_share_no_task_is_refused(
    postgres_engine: Engine, postgres_url: str
) -> None:
    """The first has looked for a circle, and has not written yet."""
    engine = postgres_engine
    one, two = await submit(engine), await submit(engine)
    after_one, after_two = await submit(engine, one), await submit(engine, two)
    half = engine.submit(new(depends_on=[str(after_two)], blocks=[str(one)]))
    codes: list[str] = []

    async def other_half() -> None:
        closing = new(depends_on=[str(after_one)], blocks=[str(two)])
        codes.append(await refusal(engine.submit(closing)))

    row = f"select 1 from task where id = '{one}'"
    async with in_line(postgres_url, row, half, other_half()):
        assert codes == ["dependency_cycle"]


async def test_urgent_task_raises_the_rank_of_its_dependencies(engine: Engine) -> None:
    far = await submit(engine, priority=1)
    near = await submit(engine, far, priority=1)
    usual = await submit(engine, priority=5)
    await submit(engine, near, priority=10)
    assert (await row_of(engine, far)).rank < (await row_of(engine, usual)).rank
    assert (await row_of(engine, near)).rank < (await row_of(engine, usual)).rank
    assert (await row_of(engine, far)).priority == 1


@pytest.mark.parametrize("held", ["PAUSED", "RETRY_WAIT"])
async def test_urgency_reaches_dependencies_with_a_hold(engine: Engine, held: str) -> None:
    """The dependency continues with its new rank."""
    need = await submit(engine, priority=1)
    if held == "PAUSED":
        await engine.pause(need)
    else:
        await engine.fail((await claim_all(engine))[0].fence, failure())
    assert (await row_of(engine, need)).status == held
    usual = await submit(engine, priority=5)
    await submit(engine, need, priority=10)
    assert (await row_of(engine, need)).rank < (await row_of(engine, usual)).rank


@pytest.mark.parametrize("edited", [False, True])
async def test_new_urgency_raises_the_rank_of_dependencies(engine: Engine, edited: bool) -> None:
    first = await submit(engine, priority=1)
    last = await submit(engine, first, priority=1)
    usual = await submit(engine, priority=5)
    if edited:
        await engine.edit(last, TaskChanges(priority=10, title="urgent"))
    else:
        await engine.reprioritise(last, 10)
    assert (await row_of(engine, first)).rank < (await row_of(engine, usual)).rank


async def test_thousand_tasks_depend_on_one(engine: Engine) -> None:
    first = await submit(engine)
    await engine.submit_many([new(depends_on=[str(first)]) for _ in range(1200)])
    await finish(engine, first)
    counts = await engine.counts()
    assert 0 < counts["PENDING"] <= 500
    while await engine.flows.run_deferred_once():
        pass
    assert (await engine.counts())["PENDING"] == 1200


async def test_long_chain_of_dependents_fails_in_bounded_steps(engine: Engine) -> None:
    new_tasks = [new(key="t0")]
    new_tasks += [new(key=f"t{i}", depends_on=[f"t{i - 1}"]) for i in range(1, 1200)]
    submitted = await engine.submit_many(new_tasks)
    await finish(engine, submitted[0].id, fails=True)
    while await engine.flows.run_deferred_once():
        pass
    assert (await engine.counts())[Status.FAILED] == 1200


async def test_more_urgent_dependency_keeps_its_rank(engine: Engine) -> None:
    urgent, slow = await submit(engine, priority=10), await submit(engine, priority=1)
    before = (await row_of(engine, urgent)).rank
    last = await submit(engine, urgent, slow, priority=5)
    assert (await row_of(engine, urgent)).rank == before
    assert (await row_of(engine, slow)).rank == (await row_of(engine, last)).rank


async def test_dependency_finished_during_a_pause_is_not_waited_for_after_resume(
    engine: Engine,
) -> None:
    first = await submit(engine)
    last = await submit(engine, first)
    await engine.pause(last)
    await finish(engine, first)
    assert await status(engine, last) == "PAUSED"
    await engine.resume(last)
    assert await status(engine, last) == "PENDING"


async def test_dependency_that_finishes_during_the_submit_releases_the_new_task(
    postgres_engine: Engine, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The submit has looked at what it waits for, and has not written yet."""
    engine, real = postgres_engine, SubmitDependencies.lock_dependencies

    def slow(self: SubmitDependencies, ids: Sequence[UUID]) -> Script[None]:
        yield from real(self, ids)
        yield Statement("workspace_lock", {"workspace": engine.workspace})

    monkeypatch.setattr(SubmitDependencies, "lock_dependencies", slow)
    fence = await running(engine)
    late, ending = submit(engine, fence.task), engine.complete(fence)
    async with in_line(postgres_url, "select 1 from workspace", late, ending):
        assert (await engine.counts())["PENDING"] == 1
