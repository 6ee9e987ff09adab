"""Events and triggers on both databases: each event starts a target once; loops are bounded."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import UUID, uuid4

import msgspec
import pytest
from tests.contract.conftest import Another, ManualClock, Raw, new, refusal
from tests.contract.flows.helpers import Wrong, group, task, worked
from tests.contract.schedules.helpers import cron, defined, faults, fire, flows, trail, trigger

from tenuto.coordinator.coordinator import Coordinator
from tenuto.encryption_keys import KeyRing
from tenuto.engine.engine import Engine
from tenuto.engine.schedules import event_matching, triggers
from tenuto.engine.schedules.event_matching import TriggerRunner
from tenuto.engine.schedules.triggers import DesiredTrigger, TriggerChange, Triggers
from tenuto.engine.tasks.claim import ClaimedTask
from tenuto.model.agents.matching import AgentProfile
from tenuto.model.errors import Unavailable
from tenuto.model.schedules.event_names import (
    MAX_DEPTH,
    build_source,
    event_names,
    matching_name,
    trigger_depth,
)


async def on(
    engine: Engine, event: str, name: str = "t", target: str = "job", **fields: Any
) -> UUID:
    return (await engine.triggers.create(name, event, target, **fields)).id


async def back(raw: Raw) -> None:
    """Put the cursor of triggers back to the beginning, so that all events come again."""
    await raw.execute("update cursor set xid = 0, position = 0 where name = 'triggers'")


async def inputs(raw: Raw) -> list[Any]:
    rows = await flows(raw, "input")
    return [None if text is None else msgspec.json.decode(text) for (text,) in rows]


async def names(raw: Raw) -> list[str]:
    """The names of the events that flows were started with, in order."""
    return [values["name"] for values in await inputs(raw) if values is not None]


async def test_trigger_is_created_shown_changed_and_deleted(
    engine: Engine, clock: ManualClock, raw: Raw
) -> None:
    await defined(engine)
    rules = engine.triggers
    created = await rules.create("t", "deploy.*", "job", "event.data.env == 'live'")
    assert (created.event, created.filter, created.status) == (
        "deploy.*",
        "event.data.env == 'live'",
        "ACTIVE",
    )
    assert (created.version, created.fired, created.created_by) == (1, 0, "tester")
    assert await rules.get("t") == await rules.get(str(created.id)) == created
    assert (await rules.page()).triggers == (await rules.page(name="t")).triggers == [created]
    clock.advance(5)
    assert (await rules.pause("t")).status == "PAUSED"
    assert await refusal(rules.pause("t")) == "out_of_turn"
    assert (await rules.resume("t")).status == "ACTIVE"
    change = TriggerChange(filter=None, event="build.done")
    assert await refusal(rules.update("t", change, 1)) == "version_conflict"
    changed = await rules.update("t", change, 3)
    assert (changed.filter, changed.event, changed.target) == (None, "build.done", "job")
    assert await refusal(rules.create("t", "x", "job")) == "name_taken"
    await rules.delete("t")
    assert await refusal(rules.get("t")) == "not_found"
    assert await refusal(rules.delete(created.id)) == "not_found"
    assert await trail(raw, created.id) == ["created", "paused", "resumed", "changed", "deleted"]


@pytest.mark.parametrize(
    ("name", "event", "target", "filter_", "code"),
    [
        ("a b", "x", "job", None, "invalid_value"),
        ("t", "x*y", "job", None, "invalid_value"),
        ("t", "", "job", None, "invalid_value"),
        ("t", "x" * 101, "job", None, "invalid_value"),
        ("t", "x", "nothing", None, "target_unknown"),
        ("t", "x", "job", "event.", "expression_invalid"),
        ("t", "x", "job", "result.ok", "expression_invalid"),
    ],
)
async def test_invalid_trigger_is_refused(
    engine: Engine, name: str, event: str, target: str, filter_: str | None, code: str
) -> None:
    await defined(engine)
    assert await refusal(engine.triggers.create(name, event, target, filter_)) == code
    assert (await engine.triggers.page()).triggers == []


async def test_event_starts_a_flow_with_the_event_as_input(
    engine: Engine, raw: Raw, agent: AgentProfile
) -> None:
    await defined(engine)
    created = await on(engine, "order.created")
    reported = await engine.publish("order.created", {"id": 7})
    await engine.publish("order.changed", {"id": 8})
    assert await trigger(engine) > 0
    [values] = await inputs(raw)
    assert (values["name"], values["data"], values["actor"]) == (
        "order.created",
        {"id": 7},
        "tester",
    )
    assert (values["subject"], values["task"], values["flow"]) == (str(reported.id), None, None)
    assert values["at"] == reported.at.isoformat()
    [(source, key)] = await flows(raw, "source, fire_key")
    assert source == build_source(str(created), 1)
    assert key == f"trigger:{created}:{values['id']}"
    view = await engine.triggers.get(created)
    assert (view.fired, view.last_error) == (1, None)
    assert await worked(engine, agent, lambda work: work.input) == ["job"]
    assert await trail(raw, created) == ["created", "fired"]


async def test_repeated_event_starts_no_second_flow(engine: Engine, raw: Raw) -> None:
    await defined(engine)
    created = await on(engine, "x")
    for _ in range(5):
        await engine.publish("x")
    assert await trigger(engine) > 0
    for _ in range(3):
        await back(raw)
        await trigger(engine)
    assert len(await flows(raw)) == 5
    assert (await engine.triggers.get(created)).fired == 5
    assert await trail(raw, created) == ["created", *["fired"] * 5]


async def test_concurrent_coordinators_start_an_event_once(
    engine: Engine, raw: Raw, another: Another
) -> None:
    await defined(engine)
    created = await on(engine, "x")
    for _ in range(10):
        await engine.publish("x")
    async with another() as second, another() as third:
        await asyncio.gather(*(trigger(item) for item in (engine, second, third) * 2))
    await trigger(engine)
    assert len(await flows(raw)) == 10
    assert (await engine.triggers.get(created)).fired == 10


async def test_crashed_trigger_relay_continues_at_its_cursor(
    engine: Engine, raw: Raw, monkeypatch: pytest.MonkeyPatch
) -> None:
    await defined(engine)
    await on(engine, "x")
    for _ in range(4):
        await engine.publish("x")
    start, calls = TriggerRunner._prepare_and_start, 0

    async def dies(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise Unavailable("the connection is gone")
        await start(*args)

    monkeypatch.setattr(TriggerRunner, "_prepare_and_start", dies)
    with pytest.raises(Unavailable):
        await trigger(engine)
    assert len(await flows(raw)) == 2
    await trigger(engine)
    assert len(await flows(raw)) == 4


@pytest.mark.parametrize(
    ("pattern", "hits"),
    [
        ("*", ["a.b", "a.c", "ab"]),
        ("a*", ["a.b", "a.c", "ab"]),
        ("a.*", ["a.b", "a.c"]),
        ("a.b*", ["a.b"]),
        ("a", []),
    ],
)
async def test_event_prefix_matches_all_names_that_begin_with_it(
    engine: Engine, raw: Raw, pattern: str, hits: list[str]
) -> None:
    await defined(engine)
    await on(engine, pattern)
    for name in ("a.b", "a.c", "ab"):
        await engine.publish(name)
    # Only what there is now: a flow has events of its own.
    await TriggerRunner(engine.system).trigger_once()
    assert [name for name in await names(raw) if name in ("a.b", "a.c", "ab")] == hits


async def test_changes_of_tasks_flows_and_groups_have_event_names(
    engine: Engine, raw: Raw, agent: AgentProfile
) -> None:
    def handler(work: ClaimedTask) -> Any:
        if work.key == "bad":
            raise Wrong("no")

    await defined(engine, task("job"), group("g", "ok"), task("ok"), task("bad"))
    for event in (
        "task.completed",
        "task.failed",
        "group.completed",
        "flow.completed",
        "flow.failed",
        "all.succeeded",
        "any.failed",
    ):
        await on(engine, event, event, filter="!event.actor.startsWith('trigger:')")
    await on(engine, "all.finished", "all", filter="event.key in ['g', 'bad']")
    good = await engine.flows.start("g")
    bad = await engine.flows.start("bad")
    await worked(engine, agent, handler)
    await TriggerRunner(engine.system).trigger_once(1000)
    matches = [(item["name"], item["flow"], item["key"]) for item in await inputs(raw) if item]
    assert sorted(matches) == sorted(
        [
            ("task.completed", str(good), "ok"),
            ("group.completed", str(good), "g"),
            ("flow.completed", str(good), "g"),
            ("all.succeeded", str(good), "g"),
            ("all.finished", str(good), "g"),
            ("task.failed", str(bad), "bad"),
            ("flow.failed", str(bad), "bad"),
            ("any.failed", str(bad), "bad"),
            ("all.finished", str(bad), "bad"),
        ]
    )


def test_audit_events_map_to_event_names() -> None:
    assert event_names("submitted", None, "PENDING") == (
        "task.submitted",
        "task.pending",
        "task.status_changed",
    )
    assert event_names("claimed", "PENDING", "RUNNING") == ("task.running", "task.status_changed")
    assert event_names("cancel_requested", "RUNNING", "RUNNING") == ("task.cancel_requested",)
    assert event_names("flow_cancelled") == ("flow.cancelled", "all.finished")
    assert event_names("schedule_fired") == ("schedule.fired",)
    assert event_names("event", message="x.y") == ("x.y",)
    assert event_names("trigger_failed") == event_names("event") == event_names("unheard") == ()
    assert matching_name("task.*", ("flow.completed",)) is None
    assert (
        matching_name("all.*", ("flow.completed", "all.finished", "all.succeeded"))
        == "all.finished"
    )
    assert [trigger_depth(item) for item in (None, "api", build_source(str(uuid4()), 3))] == [
        0,
        0,
        3,
    ]


async def test_trigger_filter_selects_events(engine: Engine, raw: Raw) -> None:
    await defined(engine)
    await on(engine, "x", filter="event.data.n > 2 && event.name == 'x' && event.task == null")
    for n in range(5):
        await engine.publish("x", {"n": n})
    await trigger(engine)
    assert [values["data"]["n"] for values in await inputs(raw)] == [3, 4]


async def test_failing_trigger_filter_stops_no_other_trigger(engine: Engine, raw: Raw) -> None:
    await defined(engine)
    bad = await on(engine, "x", "bad", filter="event.data.missing > 1")
    good = await on(engine, "x", "good")
    for _ in range(3):
        await engine.publish("x", {"n": 1})
    await trigger(engine)
    view = await engine.triggers.get(bad)
    assert view.fired == 0
    assert "missing" in str(view.last_error)
    assert (await engine.triggers.get(good)).fired == 3
    assert await faults(raw) == [("trigger_failed", view.last_error)]  # once for the same reason
    await engine.publish("x", {"missing": 2})
    await trigger(engine)
    healed = await engine.triggers.get(bad)
    assert (healed.fired, healed.last_error) == (1, None)


async def test_missing_trigger_target_stops_no_other_trigger(engine: Engine, raw: Raw) -> None:
    await defined(engine, task("job"), task("gone"))
    bad = await on(engine, "x", "bad", "gone")
    await on(engine, "x", "good")
    await engine.definitions.delete("gone")
    await engine.publish("x")
    await trigger(engine)
    assert await flows(raw) == [("job", "RUNNING")]
    assert (await engine.triggers.get(bad)).last_error is not None
    assert [kind for kind, _ in await faults(raw)] == ["trigger_failed"]


async def test_internal_error_in_a_trigger_stops_no_other_trigger(
    engine: Engine, raw: Raw, monkeypatch: pytest.MonkeyPatch
) -> None:
    await defined(engine)
    created = await on(engine, "x")
    await engine.publish("x")

    def broken(*args: Any) -> Any:
        raise RuntimeError("a bug")

    with monkeypatch.context() as patched:
        patched.setattr(event_matching, "_flow_input", broken)
        await trigger(engine)
    assert "a bug" in str((await engine.triggers.get(created)).last_error)
    await engine.publish("x")
    await trigger(engine)
    assert len(await flows(raw)) == 1


async def test_events_before_and_during_a_pause_start_nothing(
    engine: Engine, clock: ManualClock, raw: Raw
) -> None:
    await defined(engine)
    await engine.publish("x", 1)
    clock.advance(1)
    await on(engine, "x")
    await engine.triggers.pause("t")
    clock.advance(1)
    await engine.publish("x", 2)
    clock.advance(1)
    await engine.triggers.resume("t")
    await trigger(engine)
    assert await flows(raw) == []
    await engine.publish("x", 3)
    await trigger(engine)
    assert [values["data"] for values in await inputs(raw)] == [3]


async def test_events_without_a_trigger_are_not_read(engine: Engine, raw: Raw) -> None:
    await defined(engine)
    await engine.publish("x", 1)
    assert await TriggerRunner(engine.system).trigger_once() == 0
    last = await raw.value("select max(position) from event")
    assert await raw.value("select position from cursor where name = 'triggers'") == last
    assert await TriggerRunner(engine.system).trigger_once() == 0


@pytest.mark.parametrize("event", ["flow.completed", "task.completed"])
async def test_trigger_loop_is_bounded(
    engine: Engine, raw: Raw, agent: AgentProfile, event: str
) -> None:
    await defined(engine)
    created = await on(engine, event)
    await engine.flows.start("job")
    for _ in range(MAX_DEPTH + 5):
        await worked(engine, agent)
        await trigger(engine)
    rows = await flows(raw, "source, status")
    assert [trigger_depth(source) for source, _ in rows] == list(range(MAX_DEPTH + 1))
    assert {status for _, status in rows} == {"COMPLETED"}
    view = await engine.triggers.get(created)
    assert view.fired == MAX_DEPTH
    assert [kind for kind, _ in await faults(raw)] == ["trigger_failed"]
    await engine.flows.start("job")  # another beginning is another chain
    await worked(engine, agent)
    await trigger(engine)
    assert (await engine.triggers.get(created)).fired == MAX_DEPTH + 1


async def test_branching_trigger_loop_is_bounded(
    engine: Engine, raw: Raw, agent: AgentProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_matching, "MAX_CAUSED_FLOWS", 20)
    await defined(engine)
    await on(engine, "*")
    await engine.publish("x")
    for _ in range(MAX_DEPTH):
        await worked(engine, agent)
        await trigger(engine)
    assert len(await flows(raw)) == 20
    assert {kind for kind, _ in await faults(raw)} == {"trigger_failed"}


async def test_events_of_a_subtask_count_for_the_loop_bound_of_its_flow(
    engine: Engine, raw: Raw, agent: AgentProfile
) -> None:
    await defined(engine)
    await on(engine, "x")
    await engine.publish("x")
    await trigger(engine)
    [work] = await engine.claim(agent, "host:1:worker", 1)
    child = await engine.spawn(work.fence, "child", new("child"))
    await engine.publish("x", None, work.fence.task)
    await engine.publish("x", None, child)
    await engine.publish("x")
    await trigger(engine)
    depths = [trigger_depth(source) for (source,) in await flows(raw, "source")]
    assert depths == [1, 2, 2, 1]
    assert [values["task"] for values in await inputs(raw)] == [
        None,
        str(work.fence.task),
        str(child),
        None,
    ]
    assert await refusal(engine.publish("x", None, uuid4())) == "not_found"


async def test_triggers_of_workspaces_are_separate(engine: Engine, raw: Raw) -> None:
    await defined(engine)
    created = await on(engine, "*")
    other = Engine(engine.store, workspace=await raw.workspace(2), actor="other")
    await defined(other)
    hers = await on(other, "hers")
    for call in _calls(engine.triggers):
        assert await refusal(call(hers)) == "not_found"
    others = (await other.submit(new())).id
    assert await refusal(engine.publish("x", None, others)) == "not_found"
    await other.publish("hers", 1)
    await other.publish("mine", 2)
    await TriggerRunner(engine.system).trigger_once()
    rows = {(str(row[0]), row[1]) for row in await flows(raw, "workspace, source")}
    assert rows == {(str(other.workspace), build_source(str(hers), 1))}
    await engine.publish("hers", 3)
    await TriggerRunner(engine.system).trigger_once()
    assert (await other.triggers.get(hers)).fired == 1
    values = [item["data"] for item in await inputs(raw) if item and item["name"] == "hers"]
    assert values == [1, 3]
    assert [item.id for item in (await engine.triggers.page()).triggers] == [created]


def _calls(of: Triggers) -> list[Callable[[UUID], Awaitable[Any]]]:
    change = TriggerChange(event="y")
    return [of.get, of.pause, of.resume, of.delete, lambda item: of.update(item, change)]


async def test_trigger_on_schedule_events_starts(
    engine: Engine, clock: ManualClock, raw: Raw
) -> None:
    await defined(engine)
    created = await engine.schedules.create("s", "job", cron())
    await on(engine, "schedule.fired")
    clock.advance(3600)
    await fire(engine)
    await trigger(engine)
    [_, values] = await inputs(raw)
    assert (values["name"], values["subject"]) == ("schedule.fired", str(created.id))


async def test_coordinator_runs_triggers(engine: Engine, raw: Raw) -> None:
    await defined(engine)
    await on(engine, "x")
    await engine.publish("x")
    await Coordinator(engine, name="one").cycle_once()
    assert await flows(raw) == [("job", "RUNNING")]


async def test_apply_updates_triggers_by_name(engine: Engine, raw: Raw) -> None:
    async def put(*all_: DesiredTrigger, dry: bool = False) -> dict[str, str]:
        return await engine.core.store.transact(lambda: engine.triggers.put(all_, dry_run=dry))

    first = DesiredTrigger(name="t", event="x", target="job")
    assert await put(first, dry=True) == {"t": "created"}
    assert await raw.count("trigger_rule") == 0
    assert [await put(first), await put(first)] == [{"t": "created"}, {"t": "unchanged"}]
    second = DesiredTrigger(name="t", event="y", target="job", filter="event.name == 'y'")
    assert await put(second) == {"t": "updated"}
    assert (await engine.triggers.get("t")).event == "y"
    bad = DesiredTrigger(name="b", event="y", target="job", filter="(")
    assert await refusal(put(second, bad)) == "expression_invalid"


@pytest.mark.parametrize(
    ("name", "data", "code"),
    [
        ("", None, "invalid_value"),
        ("a b", None, "invalid_value"),
        ("x" * 101, None, "invalid_value"),
        ("task.completed", None, "invalid_value"),
        ("any.failed", None, "invalid_value"),
        ("x", "y" * 65_536, "too_large"),
        ("x", {"a": "\x00"}, "text_invalid"),
        ("x", {"secrets": 1}, "invalid_value"),
    ],
)
async def test_invalid_event_is_refused(
    engine: Engine, raw: Raw, name: str, data: Any, code: str
) -> None:
    assert await refusal(engine.publish(name, data)) == code
    assert await raw.count("event") == 0


async def test_secrets_are_redacted_in_events(engine: Engine, raw: Raw) -> None:
    keyed = Engine(engine.store, actor="tester", key_ring=KeyRing({"k": bytes(range(32))}))
    values = {"secrets": {"key": "hush-hush-1"}}
    submitted = await keyed.submit(new(input=values))
    reported = await keyed.publish(
        "x",
        {"secrets": {"own": "hush-hush-2"}, "said": "hush-hush-1 and hush-hush-2"},
        submitted.id,
    )
    assert reported.data == {"secrets": {"own": "***"}, "said": "*** and ***"}
    stored = await raw.value("select data from event where kind = 'event'")
    assert msgspec.json.decode(stored) == reported.data


async def test_events_without_a_task_are_deleted_past_their_age(
    engine: Engine, clock: ManualClock, raw: Raw
) -> None:
    await engine.submit(new())
    await engine.publish("x")
    clock.advance(days=300)
    await engine.publish("y")
    clock.advance(days=66)
    assert await engine.maintenance.prune_once() > 0
    rows = await raw.fetch("select kind, message from event order by position")
    assert rows == [("submitted", None), ("event", "y")]


async def test_triggers_of_a_workspace_are_limited(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triggers, "MAX_TRIGGERS", 2)
    await defined(engine)
    await on(engine, "x", "a")
    await on(engine, "x", "b")
    assert await refusal(engine.triggers.create("c", "x", "job")) == "too_large"


async def test_flood_of_events_does_not_block_other_duties(
    engine: Engine, raw: Raw, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_matching, "MAX_MATCHES", 5)
    await defined(engine)
    for name in "abc":
        await on(engine, "deploy", name)
    for number in range(7):
        await engine.publish("deploy", {"n": number})
    coordinator = Coordinator(engine)
    begun = []
    for _ in range(5):
        await coordinator.cycle_once()
        begun.append(await raw.count("flow"))
    assert begun[:2] == [6, 12], "all that one event calls for, and no more than needed"
    assert begun[-1] == 21
    matches = [(values["data"]["n"], values["id"]) for values in await inputs(raw)]
    assert sorted({n for n, _ in matches}) == list(range(7))
    assert {matches.count(item) for item in matches} == {3}
