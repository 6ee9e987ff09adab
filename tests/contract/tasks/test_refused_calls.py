"""Refused calls: the error code names the reason, and nothing is stored."""

from collections.abc import Awaitable, Callable
from typing import Any
from uuid import UUID, uuid4

import pytest
from tests.contract.conftest import AGENT, Raw, claim_one, failure, new, profile, refusal, running
from tests.contract.flows.helpers import flow_status, group, start, task

from tenuto.engine.agents.registry import AgentRegistry
from tenuto.engine.agents.subtasks import Question
from tenuto.engine.engine import Engine
from tenuto.model.errors import Invalid
from tenuto.model.limits.budgets import Budget, Usage

Call = Callable[[Engine], Awaitable[Any]]


async def block_what_runs(engine: Engine) -> Any:
    return await engine.submit(new(blocks=[str((await running(engine)).task)]))


async def block_what_has_ended(engine: Engine) -> Any:
    fence = await running(engine)
    await engine.complete(fence)
    return await engine.submit(new(blocks=[str(fence.task)]))


async def block_a_missing_task(engine: Engine) -> Any:
    return await engine.submit(new(blocks=[str(uuid4())]))


async def submit_a_flow_in_a_bulk(engine: Engine) -> Any:
    return await engine.submit_many([task("a", next="b"), new()])


async def join_with_something_next(engine: Engine) -> Any:
    await start(engine, "g", group("g", "a"), task("a"))
    return await engine.submit(task("late", group="g", next="a"))


async def join_what_has_ended(engine: Engine) -> Any:
    await start(engine, "g", group("g", "a"), task("a"))
    run = await engine.flows.find_open_group("g")
    await engine.complete((await claim_one(engine)).fence)
    return await engine.submit(task("late", group=str(run)))


async def give_a_budget_to_an_approval(engine: Engine) -> Any:
    await engine.ask(await running(engine), "q", Question(kind="approval", title="?"))
    [item] = await engine.inbox.list()
    return await engine.inbox.answer(item.id, approve=True, budget=Budget(tokens=1))


async def report_progress_as_text(engine: Engine) -> Any:
    half: Any = "half"
    return await engine.progress(await running(engine), half)


async def report_progress_as_a_boolean(engine: Engine) -> Any:
    return await engine.progress(await running(engine), True)


async def name_a_step_by_a_number(engine: Engine) -> Any:
    number: Any = 7
    return await engine.progress(await running(engine), step=number)


async def forget_an_agent_at_work(engine: Engine) -> Any:
    await engine.register_agent(profile())
    await running(engine)
    return await AgentRegistry(engine.core, engine.workspace).delete(AGENT)


async def register_an_agent_of_others(engine: Engine) -> Any:
    return await engine.register_agent(profile(workspace=uuid4()))


async def ended(engine: Engine) -> tuple[UUID, UUID]:
    """A flow and the run of its group, both COMPLETED."""
    flow = await start(engine, "g", group("g", "a"), task("a"))
    run = await engine.flows.find_open_group("g")
    await engine.complete((await claim_one(engine)).fence)
    assert await flow_status(engine, flow) == "COMPLETED"
    return flow, run


async def cancel_an_ended_flow(engine: Engine) -> Any:
    return await engine.flows.cancel((await ended(engine))[0])


async def pause_an_ended_flow(engine: Engine) -> Any:
    return await engine.flows.pause((await ended(engine))[0])


async def revive_a_completed_flow(engine: Engine) -> Any:
    return await engine.flows.revive((await ended(engine))[0])


async def cancel_an_ended_group(engine: Engine) -> Any:
    return await engine.flows.cancel_group((await ended(engine))[1])


async def pause_an_ended_group(engine: Engine) -> Any:
    return await engine.flows.pause_group((await ended(engine))[1])


async def resume_what_is_not_paused(engine: Engine) -> Any:
    return await engine.flows.resume(await start(engine, "a", task("a")))


CALLS: dict[Call, str] = {
    cancel_an_ended_flow: "out_of_turn",
    pause_an_ended_flow: "out_of_turn",
    revive_a_completed_flow: "out_of_turn",
    cancel_an_ended_group: "out_of_turn",
    pause_an_ended_group: "out_of_turn",
    resume_what_is_not_paused: "out_of_turn",
    block_what_runs: "out_of_turn",
    block_what_has_ended: "out_of_turn",
    block_a_missing_task: "dependency_unknown",
    submit_a_flow_in_a_bulk: "invalid_value",
    join_with_something_next: "invalid_value",
    join_what_has_ended: "out_of_turn",
    give_a_budget_to_an_approval: "invalid_value",
    report_progress_as_text: "invalid_value",
    report_progress_as_a_boolean: "invalid_value",
    name_a_step_by_a_number: "invalid_value",
    forget_an_agent_at_work: "out_of_turn",
    register_an_agent_of_others: "not_found",
}


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
async def test_impossible_call_is_refused_without_a_trace(
    engine: Engine, raw: Raw, call: Call
) -> None:
    assert await refusal(call(engine)) == CALLS[call]
    assert await raw.count("task") <= 1
    items = await engine.inbox.list(None)
    assert {item.status for item in items} <= {"OPEN"}
    assert await raw.value("select count(*) from flow where status in ('CANCELLED', 'PAUSED')") == 0


async def test_escalation_is_answered_once(engine: Engine) -> None:
    await engine.fail(await running(engine), failure("syntax"))
    [item] = await engine.inbox.list()
    await engine.inbox.dismiss(item.id, "the first")
    assert await refusal(engine.inbox.dismiss(item.id, "the second")) == "out_of_turn"
    decision = (await engine.inbox.show(item.id)).decision
    assert decision is not None
    assert decision["comment"] == "the first"


async def test_inbox_item_raises_a_budget_once(engine: Engine) -> None:
    fence = await running(engine, budget=Budget(tokens=10))
    await engine.used(fence, Usage(input_tokens=11))
    await engine.confirm_pause(fence, {"state": "killed"})
    [item] = await engine.inbox.list()
    await engine.inbox.answer(item.id, approve=True)
    assert await refusal(engine.inbox.answer(item.id, approve=True)) == "out_of_turn"
    assert (await engine.show(fence.task)).budget == {"tokens": 22, "costUsd": None}


async def test_task_is_found_by_four_letters_of_its_id_and_by_no_pattern(engine: Engine) -> None:
    task = str((await engine.submit(new())).id)
    assert str(await engine.find(f" {task[:4].upper()} ")) == task
    for text in (task[:3], "%%%%", "____", f"{task[:4]}%", ""):
        assert await refusal(engine.find(text)) == "not_found"


@pytest.mark.parametrize("field", ["depends_on", "blocks"])
async def test_unknown_name_is_named_in_the_error(engine: Engine, field: str) -> None:
    waits: dict[str, Any] = {field: ["nobody"]}
    with pytest.raises(Invalid, match="'nobody' is neither") as refused:
        await engine.submit_many([new(key="a"), new(**waits)])
    assert refused.value.code == "dependency_unknown"
