"""Flows on both stores: order, joins, branches, loops, items and approvals."""

from typing import Any

import pytest
from tests.contract.conftest import ManualClock, failure, refusal
from tests.contract.flows.helpers import Wrong, flow_status, group, start, statuses, task, worked

from tenuto.engine.engine import Engine
from tenuto.engine.tasks.claim import ClaimedTask
from tenuto.model.agents.matching import AgentProfile
from tenuto.model.flows.definition import Approval, Condition, Foreach, Goto
from tenuto.model.tasks.submission import NewTask


async def test_chain_runs_in_order(engine: Engine, agent: AgentProfile) -> None:
    flow = await start(engine, "a", task("a", next="b"), task("b", next="c"), task("c"))
    assert await worked(engine, agent) == ["a", "b", "c"]
    assert await flow_status(engine, flow) == "COMPLETED"


async def test_start_with_a_used_key_starts_no_flow(engine: Engine, agent: AgentProfile) -> None:
    await engine.definitions.put(task("a"))
    first = await engine.flows.start("a", fire_key="noon")
    assert await engine.flows.start("a", fire_key="noon") == first
    assert await worked(engine, agent) == ["a"]


async def test_sequential_group_runs_in_order_and_parallel_group_at_once(
    engine: Engine, agent: AgentProfile
) -> None:
    flow = await start(
        engine,
        "all",
        group("all", "first", "rest", next="end"),
        group("rest", "x", "y", "z", order="parallel"),
        *(task(key) for key in ("first", "x", "y", "z", "end")),
    )
    order = await worked(engine, agent)
    assert order[0] == "first"
    assert set(order[1:4]) == {"x", "y", "z"}
    assert order[4:] == ["end"]
    assert await flow_status(engine, flow) == "COMPLETED"
    assert set((await statuses(engine, flow))["rest"]) == {"COMPLETED"}


async def test_rest_of_a_sequence_is_skipped_after_a_failure(
    engine: Engine, agent: AgentProfile
) -> None:
    def handler(work: ClaimedTask) -> Any:
        if work.key == "b":
            raise Wrong("no")

    flow = await start(
        engine,
        "g",
        group("g", "a", "b", "c", "more", next="end"),
        group("more", "d"),
        *(task(key) for key in ("a", "b", "c", "d", "end")),
    )
    assert await worked(engine, agent, handler) == ["a", "b"]
    result = await statuses(engine, flow)
    assert result == {
        "g": ["FAILED"],
        "a": ["COMPLETED"],
        "b": ["FAILED"],
        "c": ["SKIPPED"],
        "more": ["SKIPPED"],
    }
    assert await flow_status(engine, flow) == "FAILED"


@pytest.mark.parametrize(
    ("join", "fails", "ends"),
    [
        ("all_succeeded", {"b"}, "FAILED"),
        ("all_succeeded", set(), "COMPLETED"),
        ("all_done", {"a", "b", "c"}, "COMPLETED"),
        ("any_failed", {"b"}, "COMPLETED"),
        ("any_failed", set(), "SKIPPED"),
        ("first_succeeded", {"a"}, "COMPLETED"),
        ("first_succeeded", {"a", "b", "c"}, "FAILED"),
    ],
)
async def test_join_policy_decides_the_outcome_of_a_group(
    engine: Engine, agent: AgentProfile, join: Any, fails: set[str], ends: str
) -> None:
    def handler(work: ClaimedTask) -> Any:
        if work.key in fails:
            raise Wrong("no")

    flow = await start(
        engine,
        "g",
        group("g", "a", "b", "c", order="parallel", join=join, next="end"),
        *(task(key) for key in ("a", "b", "c", "end")),
    )
    order = await worked(engine, agent, handler)
    assert (await statuses(engine, flow))["g"] == [ends]
    assert ("end" in order) == (ends == "COMPLETED")


@pytest.mark.parametrize("answer", [True, False])
async def test_condition_chooses_the_next_task(
    engine: Engine, agent: AgentProfile, answer: bool
) -> None:
    flow = await start(
        engine,
        "ask",
        task("ask", next="if"),
        task("if", control=Condition(expression="result.ok", on_true="yes", on_false="no")),
        task("yes"),
        task("no"),
    )
    order = await worked(engine, agent, lambda work: {"ok": answer})
    assert order == ["ask", "yes" if answer else "no"]
    assert await flow_status(engine, flow) == "COMPLETED"


async def test_condition_on_a_missing_value_fails_its_task(
    engine: Engine, agent: AgentProfile
) -> None:
    flow = await start(
        engine,
        "ask",
        task("ask", next="if"),
        task("if", control=Condition(expression="result.ok", on_true="yes")),
        task("yes"),
    )
    assert await worked(engine, agent, lambda work: {"other": 1}) == ["ask"]
    assert (await statuses(engine, flow))["if"] == ["FAILED"]
    assert await flow_status(engine, flow) == "FAILED"


async def test_loop_ends_by_its_condition(engine: Engine, agent: AgentProfile) -> None:
    rounds = iter(range(1, 100))

    def handler(work: ClaimedTask) -> Any:
        return {"round": next(rounds)} if work.key == "work" else None

    flow = await start(
        engine,
        "work",
        task("work", prompt="Do.", next="enough"),
        task(
            "enough",
            control=Condition(expression="result.round >= 3", on_true="end", on_false="again"),
        ),
        task("again", control=Goto(target="work", prompt="Once more.")),
        task("end"),
    )
    assert await worked(engine, agent, handler) == ["work", "work", "work", "end"]
    result = await statuses(engine, flow)
    assert result["again"] == ["COMPLETED", "COMPLETED"]
    assert await flow_status(engine, flow) == "COMPLETED"


async def test_loop_ends_by_its_budget(engine: Engine, agent: AgentProfile) -> None:
    flow = await start(
        engine,
        "work",
        task("work", next="again"),
        task("again", control=Goto(target="work")),
        steps=4,
    )
    assert await worked(engine, agent) == ["work"] * 5
    assert await flow_status(engine, flow) == "FAILED"


async def test_goto_prompt_is_appended_once(engine: Engine, agent: AgentProfile) -> None:
    seen: list[str | None] = []

    def handler(work: ClaimedTask) -> Any:
        seen.append(work.prompt)

    await start(
        engine,
        "g",
        group("g", "work", prompt="Be brief."),
        task("work", prompt="Do.", next="again"),
        task("again", control=Goto(target="work", prompt="Once more.")),
        steps=2,
    )
    await worked(engine, agent, handler)
    again = "Be brief.\n\nDo.\n\nOnce more."
    assert seen == ["Be brief.\n\nDo.", again, again]


@pytest.mark.parametrize("order", ["sequential", "parallel"])
async def test_foreach_runs_its_template_per_item(
    engine: Engine, agent: AgentProfile, order: Any
) -> None:
    seen: list[Any] = []

    def handler(work: ClaimedTask) -> Any:
        if work.key == "list":
            return {"names": ["a", "b", "c"]}
        if work.key == "one":
            seen.append((work.input, work.prompt))
        return None

    flow = await start(
        engine,
        "list",
        task("list", next="each"),
        task(
            "each",
            next="end",
            control=Foreach(items={"$from": "list", "path": "names"}, template="one", order=order),
        ),
        task("one", prompt="Look at {{item}}."),
        task("end"),
    )
    assert await worked(engine, agent, handler) == ["list", "one", "one", "one", "end"]
    assert sorted(seen, key=str) == [
        ({"item": name, "index": index}, f"Look at {name}.") for index, name in enumerate("abc")
    ]
    assert await flow_status(engine, flow) == "COMPLETED"


async def test_large_foreach_is_expanded_in_parts(engine: Engine, agent: AgentProfile) -> None:
    flow = await start(
        engine,
        "each",
        task("each", control=Foreach(items=list(range(1200)), template="one", order="parallel")),
        task("one"),
    )
    order = await worked(engine, agent)
    assert order == ["one"] * 1200
    assert await flow_status(engine, flow) == "COMPLETED"


async def test_approval_waits_for_a_person(
    engine: Engine, agent: AgentProfile, clock: ManualClock
) -> None:
    seen: list[Any] = []

    def handler(work: ClaimedTask) -> Any:
        seen.append(work.previous)

    flow = await start(
        engine,
        "work",
        task("work", next="ok"),
        task("ok", next="ship", control=Approval(message="Ship it?", timeout_s=60)),
        task("ship"),
    )
    assert await worked(engine, agent) == ["work"]
    [item] = await engine.inbox.list()
    assert item.title == "Ship it?"
    await engine.inbox.answer(item.id, approve=True, comment="fine")
    assert await worked(engine, agent, handler) == ["ship"]
    assert seen[0]["decision"] == "approved"
    assert seen[0]["comment"] == "fine"
    assert await flow_status(engine, flow) == "COMPLETED"


async def test_task_submitted_with_a_next_task_is_a_flow(
    engine: Engine, agent: AgentProfile
) -> None:
    first = task("first", next="then", idempotency_key="once")
    await engine.definitions.put(task("then"))
    submitted = await engine.submit(first)
    again = await engine.submit(first)
    assert (submitted.id, submitted.created, again.created) == (again.id, True, False)
    await engine.definitions.put(task("then", description="changed meanwhile"))
    assert (await engine.submit(first)).id == submitted.id
    other = task("first", next="then", idempotency_key="once", description="another")
    assert await refusal(engine.submit(other)) == "idempotency_conflict"
    assert await worked(engine, agent) == ["first", "then"]


async def test_task_can_be_added_to_a_running_group(engine: Engine, agent: AgentProfile) -> None:
    flow = await start(engine, "g", group("g", "a", next="end"), task("a"), task("end"))
    await engine.submit(task("late", group="g"))
    assert await worked(engine, agent) == ["a", "late", "end"]
    assert await flow_status(engine, flow) == "COMPLETED"
    assert await refusal(engine.submit(task("later", group="g"))) == "not_found"


async def test_flow_is_cancelled_whole(engine: Engine, agent: AgentProfile) -> None:
    flow = await start(
        engine,
        "all",
        group("all", "a", "inner", next="end"),
        group("inner", "b", "c", order="parallel"),
        *(task(key) for key in ("a", "b", "c", "end")),
    )
    assert await worked(engine, agent, maximum=1) == ["a"]
    [held] = await engine.claim(agent, "host:1:worker", 1)
    await engine.flows.cancel(flow, "enough")
    assert await flow_status(engine, flow) == "CANCELLED"
    assert await refusal(engine.complete(held.fence)) == "cancel_requested"
    await engine.confirm_cancel(held.fence, {"state": "killed"})
    result = await statuses(engine, flow)
    assert result["b"] == result["c"] == result["inner"] == result["all"] == ["CANCELLED"]
    assert await worked(engine, agent) == []


async def test_flow_is_paused_and_resumed(engine: Engine, agent: AgentProfile) -> None:
    flow = await start(
        engine,
        "all",
        group("all", "a", "if", "b", next="end"),
        task("if", control=Condition(expression="true")),
        *(task(key) for key in ("a", "b", "end")),
    )
    [held] = await engine.claim(agent, "host:1:worker", 1)
    await engine.flows.pause(flow)
    assert await worked(engine, agent) == []
    await engine.confirm_pause(held.fence, {"state": "killed"})
    assert await flow_status(engine, flow) == "PAUSED"
    await engine.flows.resume(flow)
    assert await worked(engine, agent) == ["a", "b", "end"]
    assert await flow_status(engine, flow) == "COMPLETED"


async def test_group_is_paused_cancelled_and_resumed(engine: Engine, agent: AgentProfile) -> None:
    flow = await start(
        engine,
        "all",
        group("all", "one", "two", order="parallel", join="all_done"),
        group("one", "a"),
        group("two", "b"),
        *(task(key) for key in ("a", "b")),
    )
    one, two = [await engine.flows.find_open_group(key) for key in ("one", "two")]
    await engine.flows.pause_group(one)
    assert await worked(engine, agent) == ["b"]
    await engine.flows.resume_group(one)
    await engine.flows.cancel_group(one)
    assert await worked(engine, agent) == []
    assert await refusal(engine.flows.cancel_group(two)) == "out_of_turn"
    assert await flow_status(engine, flow) == "COMPLETED"


@pytest.mark.parametrize(
    ("control", "ends"),
    [
        (Approval(timeout_s=60), "FAILED"),
        (Approval(timeout_s=60, on_timeout="approve"), "COMPLETED"),
        (Approval(timeout_s=60, on_reject="skip"), "SKIPPED"),
    ],
)
async def test_approval_without_an_answer_times_out(
    engine: Engine, agent: AgentProfile, clock: ManualClock, control: Approval, ends: str
) -> None:
    flow = await start(engine, "ok", task("ok", next="then", control=control), task("then"))
    clock.advance(61)
    assert await engine.maintenance.promote_once("promoter") == 1
    assert (await statuses(engine, flow))["ok"] == [ends]
    assert await engine.inbox.list() == []
    assert (await worked(engine, agent) == ["then"]) == (ends == "COMPLETED")


async def test_late_activated_child_follows_its_dependency(
    engine: Engine, agent: AgentProfile
) -> None:
    def handler(work: ClaimedTask) -> Any:
        if work.key == "a0":
            raise Wrong("no")

    names = [f"a{index}" for index in range(600)]
    flow = await start(
        engine,
        "g",
        group("g", *names, "last", order="parallel"),
        *(task(name) for name in names),
        task("last", depends_on=["a0"]),
    )
    for work in await engine.claim(agent, "host:1:worker", 1):
        await engine.fail(work.fence, failure("syntax"))
    await worked(engine, agent, handler)
    assert (await statuses(engine, flow))["last"] == ["FAILED"]
    assert await flow_status(engine, flow) == "FAILED"


@pytest.mark.parametrize(
    ("policy", "ends"), [("fail", "FAILED"), ("skip", "SKIPPED"), ("run", "COMPLETED")]
)
@pytest.mark.parametrize("early", [True, False], ids=["before it is made", "after"])
async def test_dependency_that_failed_in_a_large_group_decides_its_dependents(
    engine: Engine, agent: AgentProfile, policy: Any, ends: str, early: bool
) -> None:
    """The group is made in pieces: its last children may be made after their needs have ended."""
    names = [f"a{index}" for index in range(600)]
    flow = await start(
        engine,
        "g",
        group("g", *names, "next", "last", order="parallel", join="all_done"),
        task("a0", priority=10),
        *(task(name) for name in names[1:]),
        task("next", depends_on=["a0"], on_dependency_failure=policy),
        task("last", depends_on=["next"], on_dependency_failure=policy),
    )
    if not early:
        while await engine.flows.run_deferred_once():
            pass
    [work] = await engine.claim(agent, "host:1:worker", 1)
    assert work.key == "a0"
    await engine.fail(work.fence, failure("syntax"))
    await worked(engine, agent)
    result = await statuses(engine, flow)
    assert (result["a0"], result["next"], result["last"]) == (["FAILED"], [ends], [ends])
    assert await flow_status(engine, flow) == "COMPLETED"


@pytest.mark.parametrize(
    ("by", "following", "ran"),
    [
        ("a", "b", "a b c x d"),
        ("a", "c", "a c b c x d"),
        ("a", "more", "a x b c x d"),
        ("a", "d", "a d b c x d"),
        ("c", "d", "a b c d x d"),
        ("c", "a", "a b c a x d"),
    ],
)
async def test_child_named_as_next_runs_for_it_and_again_in_its_own_turn(
    engine: Engine, agent: AgentProfile, by: str, following: str, ran: str
) -> None:
    flow = await start(
        engine,
        "g",
        group("g", "a", "b", "c", "more", "d"),
        group("more", "x"),
        *(task(key, next=following if key == by else None) for key in "abcdx"),
    )
    assert await worked(engine, agent) == ran.split()
    assert await flow_status(engine, flow) == "COMPLETED"


async def test_children_of_a_group_depend_on_each_other(
    engine: Engine, agent: AgentProfile
) -> None:
    flow = await start(
        engine,
        "g",
        group("g", "c", "b", "a", order="parallel"),
        task("a"),
        task("b", depends_on=["a"]),
        task("c", depends_on=["a", "b"]),
    )
    assert await worked(engine, agent) == ["a", "b", "c"]
    assert await flow_status(engine, flow) == "COMPLETED"


async def test_child_of_a_sequence_gets_the_result_of_the_one_before(
    engine: Engine, agent: AgentProfile
) -> None:
    seen: dict[str | None, Any] = {}

    def handler(work: ClaimedTask) -> Any:
        seen[work.key] = work.previous
        return {"by": work.key}

    flow = await start(
        engine,
        "first",
        task("first", next="g"),
        group("g", "a", "if", "inner", "c", next="end"),
        group("inner", "b"),
        task("if", control=Condition(expression="result.by == 'a'")),
        *(task(key) for key in ("a", "b", "c", "end")),
    )
    assert await worked(engine, agent, handler) == ["first", "a", "b", "c", "end"]
    assert await flow_status(engine, flow) == "COMPLETED"
    assert {key: value and value["by"] for key, value in seen.items()} == {
        "first": None,
        "a": "first",
        "b": "a",
        "c": "b",
        "end": "c",
    }


async def test_submit_with_a_next_task_can_be_repeated(engine: Engine) -> None:
    await engine.definitions.put(task("then"))
    first = NewTask(title="first", next="then", idempotency_key="once")
    assert (await engine.submit(first)).id == (await engine.submit(first)).id
    by_id = NewTask(title="first", next="then", id=engine.clock.new_id())
    assert (await engine.submit(by_id)).id == (await engine.submit(by_id)).id == by_id.id
    other = NewTask(title="other", next="then", idempotency_key="once")
    assert await refusal(engine.submit(other)) == "idempotency_conflict"
    waits = NewTask(title="waits", next="then", depends_on=[str(by_id.id)])
    assert await refusal(engine.submit(waits)) == "invalid_value"


async def test_condition_with_a_prompt_passes_its_own_result_on(
    engine: Engine, agent: AgentProfile
) -> None:
    seen: dict[str | None, Any] = {}

    def handler(work: ClaimedTask) -> Any:
        seen[work.key] = work.previous
        return {"by": work.key}

    asks = Condition(expression="result.by == 'if'", on_true="b")
    flow = await start(
        engine, "a", task("a", next="if"), task("if", prompt="Is it?", control=asks), task("b")
    )
    assert await worked(engine, agent, handler) == ["a", "if", "b"]
    assert (seen["if"], seen["b"]) == ({"by": "a"}, {"by": "if"})
    assert await flow_status(engine, flow) == "COMPLETED"


async def test_next_of_a_group_that_has_its_own_turn_starts_once(
    engine: Engine, agent: AgentProfile
) -> None:
    flow = await start(
        engine,
        "all",
        group("all", "inner", "b"),
        group("inner", "a", next="b"),
        task("a"),
        task("b"),
    )
    assert await worked(engine, agent) == ["a", "b"]
    assert await flow_status(engine, flow) == "COMPLETED"


async def test_reference_to_a_repeated_result_gets_the_newest(
    engine: Engine, agent: AgentProfile
) -> None:
    rounds = iter(range(1, 100))
    seen: list[Any] = []

    def handler(work: ClaimedTask) -> Any:
        if work.key == "end":
            seen.append(work.input)
        return {"round": next(rounds)}

    await start(
        engine,
        "work",
        task("work", next="if"),
        task("if", control=Condition(expression="result.round == 3", on_true="end", on_false="go")),
        task("go", control=Goto(target="work")),
        task("end", input={"$from": "work", "path": "round"}),
    )
    await worked(engine, agent, handler)
    assert seen == [3]


async def test_foreach_item_without_a_referenced_field_fails_with_its_name(
    engine: Engine, agent: AgentProfile
) -> None:
    seen: list[Any] = []

    def handler(work: ClaimedTask) -> Any:
        seen.append(work.input)

    foreach = Foreach(items=[{"name": "x"}, {}], template="one", order="sequential")
    await start(
        engine, "each", task("each", control=foreach), task("one", input={"who": {"$item": "name"}})
    )
    assert await worked(engine, agent, handler) == ["one", "one"]
    assert seen[0] == {"who": "x"}
    assert (seen[1]["item"], "name" in seen[1]["error"]) == ({}, True)
