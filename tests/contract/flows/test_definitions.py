"""Definitions on each database: stored by key and version, applied as one, started once."""

import asyncio
from typing import Any
from uuid import UUID

import pytest
from tests.contract.conftest import Another, ManualClock, Raw, refusal
from tests.manifest.examples import FLOW, S2

from tenuto.engine.engine import Engine
from tenuto.engine.flows.definitions import ApplyResult
from tenuto.manifest.manifest import Manifest, read_manifest
from tenuto.model.errors import Invalid, NotFound
from tenuto.model.flows.definition import Goto, GroupSpec
from tenuto.model.tasks.submission import NewTask


def actions_of(applied: ApplyResult) -> dict[str, str]:
    return {change.key: change.action for change in applied.definitions}


def a_task(key: str = "a", **fields: Any) -> NewTask:
    return NewTask(title=key.upper(), key=key, **fields)


async def test_definition_is_stored_shown_changed_and_deleted(
    engine: Engine, clock: ManualClock
) -> None:
    definitions = engine.definitions
    created = await definitions.put(a_task(priority=7, metadata={"tools": ["git"]}))
    assert (created.key, created.kind, created.version, created.title) == ("a", "task", 1, "A")
    assert created.spec == {"id": "a", "name": "A", "priority": 7, "tools": ["git"]}
    clock.advance(5)
    assert await definitions.put(a_task(priority=7, metadata={"tools": ["git"]})) == created
    changed = await definitions.put(a_task(priority=8))
    assert (changed.version, changed.id, changed.created_at) == (2, created.id, created.created_at)
    assert changed.updated_at == clock.now()
    assert await definitions.get("a") == changed
    group = await definitions.put(GroupSpec(title="now a group", key="a", children=("b",)))
    assert (group.kind, group.version) == ("group", 3)
    await definitions.delete("a")
    for call in (definitions.get("a"), definitions.delete("a"), definitions.export(["a"])):
        assert await refusal(call) == "not_found"


async def test_definition_is_read_by_version(engine: Engine) -> None:
    definitions = engine.definitions
    await definitions.put(a_task(), 0)
    assert await refusal(definitions.put(a_task(priority=1), 0)) == "version_conflict"
    assert await refusal(definitions.put(a_task(priority=1), 2)) == "version_conflict"
    assert (await definitions.put(a_task(priority=1), 1)).version == 2
    assert await refusal(definitions.delete("a", 1)) == "version_conflict"
    await definitions.delete("a", 2)
    assert await refusal(definitions.put(a_task("b"), 1)) == "version_conflict"


@pytest.mark.parametrize(
    ("spec", "code"),
    [
        (NewTask(title="t"), "invalid_value"),
        (a_task("a b"), "invalid_value"),
        (a_task("apply"), "invalid_value"),
        (a_task(priority=11), "invalid_value"),
        (a_task(id=UUID(int=1)), "invalid_value"),
        (a_task(idempotency_key="k"), "invalid_value"),
        (a_task(group="g"), "invalid_value"),
        (a_task(task_type="GotoTask"), "invalid_value"),
        (a_task(input={"secrets": {"a": "b"}}), "secret_in_definition"),
        (a_task(input={"x": float("nan")}), "invalid_json"),
        (a_task(metadata={"x": "\x00"}), "text_invalid"),
        (a_task(input={"$from": 1}), "reference_invalid"),
        (a_task(next="a"), "dependency_cycle"),
        (GroupSpec(title="g", key="g", children=("x y",)), "invalid_value"),
    ],
)
async def test_invalid_definition_is_refused(
    engine: Engine, raw: Raw, spec: Any, code: str
) -> None:
    assert await refusal(engine.definitions.put(spec)) == code
    assert await raw.count("definition") == 0


async def test_definition_with_secret_references_is_stored(engine: Engine) -> None:
    spec = a_task(input={"p": {"$secret": "db"}}, env={"K": {"$secret": "key"}})
    await engine.definitions.put(spec)
    assert (await engine.definitions.load_reachable(["a"]))["a"] == spec


async def test_cycle_with_stored_definitions_is_refused(engine: Engine) -> None:
    await engine.definitions.put(a_task("a", next="b"))
    await engine.definitions.put(a_task("b", next="c"))
    assert await refusal(engine.definitions.put(a_task("c", next="a"))) == "dependency_cycle"
    await engine.definitions.put(a_task("c", control=Goto(target="a")))


async def test_pages_of_definitions_follow_each_other(engine: Engine) -> None:
    for n in range(5):
        await engine.definitions.put(a_task(f"t{n}"))
    first = await engine.definitions.page(2)
    second = await engine.definitions.page(2, first.next_cursor)
    last = await engine.definitions.page(2, second.next_cursor)
    pages = [first, second, last]
    assert [[definition.key for definition in page.definitions] for page in pages] == [
        ["t4", "t3"],
        ["t2", "t1"],
        ["t0"],
    ]
    assert last.next_cursor is None
    assert await refusal(engine.definitions.page(0)) == "invalid_value"


async def test_example_is_applied_once(engine: Engine, raw: Raw) -> None:
    definitions = engine.definitions
    dry = await definitions.apply_files({"s2.yaml": S2}, dry_run=True)
    assert actions_of(dry) == {"task-200": "created", "group-preprocessing": "created"}
    assert [item.key for item in dry.started] == ["task-200"]
    assert await raw.count("flow") == 0
    assert await raw.count("definition") == 0
    done = await definitions.apply_files({"s2.yaml": S2})
    assert (done.definitions, done.warnings) == (dry.definitions, dry.warnings)
    [started] = done.started
    assert (started.key, started.flow_id is None) == ("task-200", False)
    before = await definitions.page()
    again = await definitions.apply_files({"s2.yaml": S2})
    assert actions_of(again) == {"task-200": "unchanged"}
    assert (again.started, again.warnings) == ([], [])
    assert await raw.count("flow") == 1
    assert await definitions.page() == before


async def test_changed_definition_is_reported_by_field_and_gets_a_new_version(
    engine: Engine,
) -> None:
    definitions = engine.definitions
    await definitions.apply_files({"f": S2})
    text = S2.replace("estimate: 20", "estimate: 90").replace("Low", "Hard")
    done = await definitions.apply_files({"f": text})
    [change] = done.definitions
    assert (change.action, change.version) == ("updated", 2)
    assert [(field.field, field.before, field.after) for field in change.fields] == [
        ("resolve_time_estimate", 20, 90),
        ("complexity_level", "Low", "Hard"),
    ]
    assert len((await engine.list()).tasks) == 2


async def test_flow_starts_an_applied_definition(engine: Engine) -> None:
    done = await engine.definitions.apply_files({"f": S2})
    [started] = done.started
    assert started.flow_id is not None
    [task] = (await engine.list()).tasks
    assert task.title == "Transform raw data"


async def test_apply_writes_all_or_nothing(engine: Engine, raw: Raw) -> None:
    text = "tasks: [{id: a}, {id: b, next: nobody}, {id: c, priority: 0}]"
    with pytest.raises(Invalid) as caught:
        await engine.definitions.apply_files({"flow.yaml": text})
    assert caught.value.message.startswith("flow.yaml:1:59: tasks[2].priority")
    assert await raw.count("definition") == 0


RULES = """
tasks: [{id: a, schedule: {type: cron, expression: '@daily'}}]
schedules: [{name: hourly, target: a, schedule: {type: cron, expression: '@hourly'}, input: [1]}]
triggers: [{name: t, event: deploy.*, target: a, filter: event.data.live}]
"""


async def test_apply_stores_schedules_and_triggers_with_their_targets(
    engine: Engine, raw: Raw
) -> None:
    async def applied(text: str, *, dry_run: bool = False) -> dict[str, str]:
        done = await engine.definitions.apply_files({"f": text}, dry_run=dry_run)
        return {f"{rule.kind} {rule.name}": rule.action for rule in done.rules}

    names = {"schedule a", "schedule hourly", "trigger t"}
    assert await applied(RULES, dry_run=True) == dict.fromkeys(names, "created")
    assert await raw.count("schedule") == await raw.count("trigger_rule") == 0
    assert await applied(RULES) == dict.fromkeys(names, "created")
    assert await applied(RULES) == dict.fromkeys(names, "unchanged")
    assert (await engine.schedules.get("hourly")).input == [1]
    assert (await engine.schedules.get("a")).created_by == "tester"
    changed = RULES.replace("@hourly", "@weekly").replace("deploy.*", "build.*")
    now = {"schedule a": "unchanged", "schedule hourly": "updated", "trigger t": "updated"}
    assert await applied(changed) == now
    assert (await engine.triggers.get("t")).event == "build.*"
    broken = RULES.replace("event.data.live", "event.") + "---\nid: b\n"
    assert await refusal(applied(broken)) == "expression_invalid"
    assert (await engine.definitions.page()).definitions[0].key == "a"


async def test_file_refers_to_stored_definitions(engine: Engine) -> None:
    definitions = engine.definitions
    await definitions.apply_files({"f": FLOW})
    done = await definitions.apply_files({"f": "id: more\nnext_task: fetch\ngroup_id: clean"})
    assert actions_of(done) == {"more": "created", "clean": "updated"}
    assert (await definitions.get("clean")).spec["children"] == ["clean-a", "clean-b", "more"]
    again = await definitions.apply_files({"f": "id: clean-b\ndepends_on: [clean-a]"})
    assert actions_of(again) == {"clean-b": "updated"}
    twice = definitions.apply_files({"f": "groups: [{id: mine, children: [clean-a]}]"})
    assert await refusal(twice) == "child_in_two_groups"
    circle = definitions.apply_files({"f": "id: report\nnext_task: nightly"})
    assert await refusal(circle) == "dependency_cycle"


async def test_export_equals_the_applied_files(engine: Engine) -> None:
    await engine.definitions.apply_files({"f": FLOW})
    text = await engine.definitions.export()
    assert read_manifest({"f": text}).specs == read_manifest({"f": FLOW}).specs
    done = await engine.definitions.apply_files({"f": text})
    assert set(actions_of(done).values()) == {"unchanged"}
    assert "again" not in await engine.definitions.export(["fetch", "report"])


async def test_manifest_is_applied_without_files(engine: Engine) -> None:
    manifest = Manifest({"a": a_task()}, {"g": GroupSpec(title="g", key="g", children=("a",))})
    assert actions_of(await engine.definitions.apply(manifest)) == {"a": "created", "g": "created"}
    assert actions_of(await engine.definitions.apply(manifest)) == {
        "a": "unchanged",
        "g": "unchanged",
    }
    bad = Manifest({"a": a_task(priority=0)})
    assert await refusal(engine.definitions.apply(bad)) == "invalid_value"


async def test_concurrent_applies_agree(engine: Engine, another: Another) -> None:
    async with another() as other:
        texts = [f"id: same\npriority: {n}\n---\nid: own{n}\ngroup_id: g" for n in (1, 2, 3, 4)]
        engines = [engine, other, engine, other]
        await asyncio.gather(
            *(
                caller.definitions.apply_files({"f": text})
                for caller, text in zip(engines, texts, strict=True)
            )
        )
    group = (await engine.definitions.load_reachable(["g"]))["g"]
    assert isinstance(group, GroupSpec)
    assert sorted(group.children) == ["own1", "own2", "own3", "own4"]
    assert (await engine.definitions.get("same")).version == 4


async def test_definitions_of_a_workspace_are_limited(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tenuto.engine.flows.definitions.MAX_DEFINITIONS", 2)
    await engine.definitions.put(a_task("a"))
    await engine.definitions.put(a_task("b"))
    assert await refusal(engine.definitions.put(a_task("c"))) == "too_large"
    await engine.definitions.put(a_task("b", priority=9))


async def test_definition_belongs_to_its_workspace(engine: Engine, raw: Raw) -> None:
    await engine.definitions.put(a_task())
    there = Engine(engine.store, workspace=await raw.workspace(7))
    assert (await there.definitions.page()).definitions == []
    with pytest.raises(NotFound):
        await there.definitions.get("a")
    assert (await there.definitions.put(a_task(priority=1))).version == 1
    assert (await engine.definitions.get("a")).spec.get("priority") is None


async def test_thousands_of_definitions_are_applied_within_seconds(engine: Engine) -> None:
    many = "".join(f"- {{id: t{n}, next: t{n + 1}}}\n" for n in range(3000))
    text = f"tasks:\n{many}- id: t3000\n"
    done = await engine.definitions.apply_files({"f": text})
    assert len(done.definitions) == 3001
    again = await engine.definitions.apply_files({"f": text})
    assert set(actions_of(again).values()) == {"unchanged"}
