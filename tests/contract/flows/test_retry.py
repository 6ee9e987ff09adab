"""Retry of parts of flows, on both databases."""

from collections.abc import Callable
from typing import Any
from uuid import UUID

from tests.contract.conftest import claim_all, failure, new, refusal, status
from tests.contract.flows.helpers import Wrong, flow_status, group, start, statuses, task, worked

from tenuto.engine.engine import Engine
from tenuto.engine.tasks.claim import ClaimedTask
from tenuto.model.agents.matching import AgentProfile
from tenuto.model.flows.definition import Condition
from tenuto.model.tasks.submission import Filter


def failing(*keys: str) -> Callable[[ClaimedTask], Any]:
    """A handler that fails each of the keys once."""
    left = list(keys)

    def handler(work: ClaimedTask) -> Any:
        if work.key in left:
            left.remove(work.key)
            raise Wrong("not yet")
        return {"key": work.key}

    return handler


async def failed(engine: Engine) -> UUID:
    page = await engine.list(Filter(status=("FAILED",)))
    [one] = [item for item in page.tasks if item.error_class != "dependency_failed"]
    return one.id


async def test_sequence_continues_where_it_failed(engine: Engine, agent: AgentProfile) -> None:
    handler = failing("b")
    flow = await start(
        engine,
        "all",
        group("all", "g", "last", next="end"),
        group("g", "a", "b", "c"),
        *(task(key) for key in ("a", "b", "c", "last", "end")),
    )
    assert await worked(engine, agent, handler) == ["a", "b"]
    assert await flow_status(engine, flow) == "FAILED"
    await engine.retry(await failed(engine), cascade=True)
    assert await flow_status(engine, flow) == "RUNNING"
    assert await worked(engine, agent, handler) == ["b", "c", "last", "end"]
    assert await flow_status(engine, flow) == "COMPLETED"
    result = await statuses(engine, flow)
    assert result["end"] == ["COMPLETED"]
    assert result["g"] == result["all"] == ["COMPLETED"]


async def test_child_before_a_retried_one_has_its_turn_first(
    engine: Engine, agent: AgentProfile
) -> None:
    keys = ("a", "b", "c", "d")
    flow = await start(engine, "g", group("g", *keys), *(task(key) for key in keys))
    late = {item.key: item.id for item in (await engine.list(Filter(status=("WAITING",)))).tasks}
    [first] = await claim_all(engine, 1)
    await engine.cancel(late["c"])
    await engine.confirm_cancel(first.fence, {})
    await engine.retry(first.fence.task)
    assert await worked(engine, agent) == ["a"]
    assert await flow_status(engine, flow) == "FAILED"
    await engine.retry(late["c"], cascade=True)
    assert await worked(engine, agent) == ["b", "c", "d"]
    assert await flow_status(engine, flow) == "COMPLETED"


async def test_group_joins_once_after_a_retried_child(engine: Engine, agent: AgentProfile) -> None:
    handler = failing("a", "b")
    flow = await start(
        engine,
        "g",
        group("g", "a", "b", "c", order="parallel", next="end"),
        *(task(key) for key in ("a", "b", "c", "end")),
    )
    await worked(engine, agent, handler)
    assert await flow_status(engine, flow) == "FAILED"
    assert await engine.flows.revive(flow) == 2
    assert sorted(await worked(engine, agent, handler)) == ["a", "b", "end"]
    assert (await statuses(engine, flow))["end"] == ["COMPLETED"]
    assert await flow_status(engine, flow) == "COMPLETED"


async def test_child_retried_while_its_group_runs_counts_once(
    engine: Engine, agent: AgentProfile
) -> None:
    handler = failing("a")
    flow = await start(
        engine,
        "g",
        group("g", "a", "b", order="parallel", next="end"),
        *(task(key) for key in ("a", "b", "end")),
    )
    assert await worked(engine, agent, handler, maximum=1) == ["a"]
    await engine.retry(await failed(engine))
    assert sorted(await worked(engine, agent, handler)) == ["a", "b", "end"]
    assert await flow_status(engine, flow) == "COMPLETED"


async def test_retry_without_cascade_leaves_the_flow_finished(
    engine: Engine, agent: AgentProfile
) -> None:
    handler = failing("a")
    flow = await start(engine, "a", task("a", next="b"), task("b"))
    await worked(engine, agent, handler)
    await engine.retry(await failed(engine))
    assert await worked(engine, agent, handler) == ["a"]
    assert await flow_status(engine, flow) == "FAILED"


async def test_retried_condition_is_evaluated_again(engine: Engine, agent: AgentProfile) -> None:
    results = iter([{"other": 1}, {"ok": True}])
    flow = await start(
        engine,
        "ask",
        task("ask", next="if"),
        task("if", control=Condition(expression="result.ok", on_true="yes")),
        task("yes"),
    )
    await worked(engine, agent, lambda work: next(results, None))
    assert await flow_status(engine, flow) == "FAILED"
    await engine.retry(await failed(engine), cascade=True)
    assert await flow_status(engine, flow) == "FAILED"  # the same result gives the same answer


async def test_dependents_of_a_failed_task_are_reopened_with_it(engine: Engine) -> None:
    first = (await engine.submit(new())).id
    near = (await engine.submit(new(depends_on=[str(first)]))).id
    far = (await engine.submit(new(depends_on=[str(near)], on_dependency_failure="skip"))).id
    [work] = await claim_all(engine)
    await engine.fail(work.fence, failure("syntax"))
    assert [await status(engine, item) for item in (near, far)] == ["FAILED", "SKIPPED"]
    await engine.retry(first, cascade=True)
    assert [await status(engine, item) for item in (near, far)] == ["WAITING", "WAITING"]
    for _ in range(3):
        for work in await claim_all(engine):
            await engine.complete(work.fence)
    assert [await status(engine, item) for item in (first, near, far)] == ["COMPLETED"] * 3


async def test_retry_of_a_task_that_did_not_fail_is_refused(
    engine: Engine, agent: AgentProfile
) -> None:
    await start(engine, "a", task("a"))
    [only] = (await engine.list()).tasks
    assert await refusal(engine.retry(only.id, cascade=True)) == "out_of_turn"


async def test_cancelled_child_still_counts_after_a_retry_of_another(
    engine: Engine, agent: AgentProfile
) -> None:
    flow = await start(engine, "g", group("g", "a", "b", order="parallel"), task("a"), task("b"))
    claimed = {work.key: work for work in await claim_all(engine)}
    await engine.cancel(claimed["b"].fence.task)
    await engine.confirm_cancel(claimed["b"].fence, {"state": "killed"})
    await engine.fail(claimed["a"].fence, failure(retryable=False))
    await engine.retry(claimed["a"].fence.task, cascade=True)
    assert await worked(engine, agent) == ["a"]
    assert (await statuses(engine, flow))["g"] == ["FAILED"]
    assert await flow_status(engine, flow) == "FAILED"


async def test_reopened_skipped_task_takes_no_failure_of_another_along(
    engine: Engine, agent: AgentProfile
) -> None:
    """One failed for good; another is retried, with one that was skipped because of it."""
    flow = await start(
        engine,
        "g",
        group("g", "a", "b", "c", "slow", order="parallel"),
        task("a"),
        task("b"),
        task("c", depends_on=["b"], on_dependency_failure="skip"),
        task("slow"),
    )
    claimed = {work.key: work for work in await claim_all(engine)}
    for key in "ab":
        await engine.fail(claimed[key].fence, failure(retryable=False))
    assert (await statuses(engine, flow))["c"] == ["SKIPPED"]
    await engine.retry(claimed["b"].fence.task, cascade=True)
    assert await worked(engine, agent) == ["b", "c"]
    await engine.complete(claimed["slow"].fence)
    assert await flow_status(engine, flow) == "FAILED"
