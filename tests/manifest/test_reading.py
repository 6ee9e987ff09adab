"""Files: every field name, merging of definitions, and errors with locations."""

from typing import Any
from uuid import UUID

import pytest
from tests.manifest.examples import FLOW, S2, S2_FLAT

from tenuto.manifest.documents import MAX_FILES, Schedule, Trigger, decode_files, parse_spec
from tenuto.manifest.export import to_snake_names
from tenuto.manifest.manifest import Manifest, read_manifest
from tenuto.manifest.yaml_nodes import MAX_BYTES
from tenuto.model.errors import Invalid
from tenuto.model.flows.definition import Approval, Condition, Foreach, Goto, GroupSpec
from tenuto.model.flows.plan import Spec
from tenuto.model.tasks.commands import Escalation
from tenuto.model.tasks.retry import RetryPolicy
from tenuto.model.tasks.submission import NewTask


def refusal_lines(text: str, stored: dict[str, Spec] | None = None) -> list[str]:
    """The lines of a refusal."""
    with pytest.raises(Invalid) as caught:
        read_manifest({"flow.yaml": text}, stored)
    return caught.value.message.splitlines()


def task(text: str, **more: Any) -> NewTask:
    """The one task of a file."""
    [result] = read_manifest({"f": text}, **more).tasks.values()
    return result


@pytest.mark.parametrize("text", [S2, S2_FLAT], ids=["indented", "copied"])
def test_example_loads_as_written(text: str) -> None:
    result = read_manifest({"s2.yaml": text})
    assert result.tasks == {
        "task-200": NewTask(
            key="task-200",
            title="Transform raw data",
            prompt="Clean and normalize raw input data.",
            container="data-worker:v1.0",
            estimate_minutes=20,
            task_tags=["DATA_INGESTION"],
            complexity="Low",
            metadata={"tools": ["python:3.11", "pip:latest"]},
            escalation=Escalation("Validation failed", "Please inspect input data and retry."),
        )
    }
    group = GroupSpec(title="group-preprocessing", key="group-preprocessing")
    assert result.groups == {
        group.key: GroupSpec(title=group.title, key=group.key, children=("task-200",))
    }
    assert (result.starts, result.schedules) == (("task-200",), ())
    assert result.warnings[-1] == (
        "s2.yaml:11:11: group_id: there is no group 'group-preprocessing';"
        " it is created as an empty sequential group"
    )
    assert len(result.warnings) == (1 if text == S2 else 3)


def test_flow_of_every_kind_loads() -> None:
    result = read_manifest({"flow.yaml": FLOW})
    assert list(result.tasks) == (
        "fetch each summarise good-enough again sign-off clean-a clean-b report".split()
    )
    assert result.tasks["each"].control == Foreach(
        items={"$from": "fetch", "path": "pages"},
        template="summarise",
        order="parallel",
        join="all_done",
    )
    assert result.tasks["good-enough"].control == Condition(
        expression="result.score > 0.5", on_true="sign-off", on_false="again"
    )
    assert result.tasks["again"].control == Goto(target="fetch", prompt="Look further.")
    assert result.tasks["sign-off"].control == Approval(
        message="Publish it?", timeout_s=3600, on_reject="skip"
    )
    summarise = result.tasks["summarise"]
    assert (summarise.max_attempts, summarise.retry) == (5, RetryPolicy(base_s=2.0, multiplier=1.0))
    assert (summarise.title, result.tasks["fetch"].next) == ("summarise", "each")
    assert result.groups["nightly"] == GroupSpec(
        title="Every night", key="nightly", children=("clean", "fetch"), next="report"
    )
    assert (result.groups["clean"].order, result.groups["clean"].join) == ("parallel", "all_done")
    assert result.warnings == ()


AGENT = UUID("0198c0de-0000-7000-8000-000000000000")


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("key: a", "key", "a"),
        ("id: a\ntitle: T", "title", "T"),
        ("id: a\nname: T\ntitle: T", "title", "T"),
        ("id: a\nestimate_minutes: 5", "estimate_minutes", 5),
        ("id: a\nestimated_duration_minutes: 5", "estimate_minutes", 5),
        ("id: a\ncomplexity: ExtremHard", "complexity", "ExtremHard"),
        ("id: a\nattempts: 4", "max_attempts", 4),
        ("id: a\nmax_retries: 4", "max_attempts", 5),
        ("id: a\nmax_attempts: 4", "max_attempts", 4),
        ("id: a\nretry: {max_retries: 0}", "max_attempts", 1),
        ("id: a\nretry: {attempts: 3, backoff: exponential, max_retries: 5}", "max_attempts", 3),
        ("id: a\nretry: {attempts: 3}", "retry", None),
        ("id: a\nretry: {backoff: exponential}", "retry", RetryPolicy()),
        ("id: a\nretry_backoff_seconds: 9", "retry", RetryPolicy(base_s=9.0)),
        ("id: a\ntimeout_seconds: 9", "timeout_s", 9),
        ("id: a\ninput_context: {a: 1}", "input", {"a": 1}),
        ("id: a\ninput: false", "input", False),
        (f"id: a\nagent_id: {AGENT}", "target_agent", AGENT),
        ("id: a\nmetadata: {requiredCapabilities: [x]}", "capabilities", ["x"]),
        ("id: a\nmetadata: {x: 1}\ntools: [t]", "metadata", {"x": 1, "tools": ["t"]}),
        ("id: a\ntask_type: AgentTask", "task_type", "default"),
        ("id: a\ntask_type: build", "task_type", "build"),
        ("id: a\nenv: {A: b, C: {$secret: d}}", "env", {"A": "b", "C": {"$secret": "d"}}),
        ("id: a\ninput: {password: {$secret: db}}", "input", {"password": {"$secret": "db"}}),
        ("id: a\nprompt:\ntags:", "prompt", None),
        ("id: a\napproval: {}", "control", Approval()),
        ("tasks:\n- id: a\ngroups:\nschedules: []", "key", "a"),
    ],
)
def test_every_field_name_is_parsed(text: str, field: str, value: Any) -> None:
    assert getattr(task(text), field) == value


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "tasks:\n  - id: a\n    priority: 12",
            "3:15: tasks[0].priority: must be between 1 and 10, not 12",
        ),
        ("id: a\npriority: high", "2:11: priority: must be a whole number, not text"),
        ("id: 12", "1:5: id: must be text, not a number; put it in quotes"),
        ("id: a b", "1:5: id: must begin with a letter or digit"),
        ("id: apply", "1:5: id: must not be 'apply', which is reserved by the REST API"),
        ("name: x", "1:1: id is missing"),
        ("id: a\npromt: x", "2:1: unknown field 'promt'; did you mean 'prompt'?"),
        ("id: a\nzzz: x", "2:1: unknown field 'zzz'"),
        (
            "id: a\nretry: {atempts: 1}",
            "2:9: retry: unknown field 'atempts'; did you mean 'attempts'?",
        ),
        ("id: a\nrun_at: 2030-01-01", "2:1: unknown field 'run_at'"),
        (
            "id: a\ncomplexity_level: Easy",
            "2:19: complexity_level: must be one of Low, Middle, Hard",
        ),
        (
            "groups: [{id: g, type: sideways}]",
            "1:24: groups[0].type: must be one of Sequential, Parallel, not 'sideways'",
        ),
        (
            "id: a\ntask_tags: [x, 1]",
            "2:16: task_tags[1]: must be text, not a number; put it in quotes",
        ),
        ("id: a\nname: x\ntitle: y", "3:8: title: differs from 'name'; give only one of them"),
        (
            "id: a\nmetadata: {tools: [x]}\ntools: [y]",
            "3:8: tools: differs from metadata.tools; give only one of them",
        ),
        ("id: a\nescalation: {reason: x}", "2:13: escalation: prompt is missing"),
        ("id: a\nbudget: {}", "2:9: budget: needs tokens or costUsd"),
        ("id: a\nbudget: {tokens: many}", "2:18: budget.tokens: must be a whole number, not text"),
        (
            "id: a\nescalation: {reason: '', prompt: x}",
            "2:22: escalation.reason: must not be empty",
        ),
        ("id: a\nagent_id: me", "2:11: agent_id: must be the id (UUID) of an agent"),
        (
            "id: a\ninput: {secrets: {k: v}}",
            "2:8: input: contains secrets, but a definition is stored as written",
        ),
        ("id: a\ninput: [.nan]", "2:8: input: holds a number that is not finite"),
        ("id: a\ninput: {x: {$from: [1]}}", "a reference must be"),
        ("id: a\ncommand: []", "2:10: command: must not be empty"),
        ("id: a\ncondition: result.", "2:12: condition: the expression"),
        ("id: a\ntrue_next_task_id: b", "2:20: condition is missing"),
        ("id: a\ngoto_prompt: b", "2:14: goto_target_task_id is missing"),
        (
            "id: a\nforeach_items: 5\nforeach_template_task_id: a",
            "2:16: foreach_items: must be a list",
        ),
        ("id: a\nforeach_items: [1]", "2:16: foreach_template_task_id is missing"),
        (
            "id: a\ngoto_target_task_id: a\napproval: {}",
            "a task can have goto_target_task_id or approval, not both",
        ),
        ("- id: a", "1:1: a document must be a mapping"),
        ("tasks: {id: a}", "1:8: tasks: must be a list, not a mapping"),
        ("tasks: [x]", "1:9: tasks[0]: must be a mapping, not text"),
        ("tasks: []\nagents: []", "2:1: agents: not supported in YAML yet"),
        ("containers: [{image: x}]", "1:1: containers: not supported in YAML yet"),
        ("tools: [{name: x}]", "1:1: tools: not supported in YAML yet"),
        ("webhooks: []", "1:1: webhooks: not supported in YAML yet"),
        ("tasks: [{id: a}]\ntask: []", "2:1: unknown field 'task'; did you mean 'tasks'?"),
        (
            "tasks: [{id: a}, {id: a}]",
            "1:23: tasks[1].id: 'a' is defined twice, first at flow.yaml:1:9",
        ),
        ("id: a\nschedule: {type: cron, expression: 99 * * * *}", "2:36: schedule.expression:"),
        ("id: a\nschedule: {type: sometimes}", "2:18: schedule.type: must be one of"),
        (
            "schedules: [{name: s, target: x, schedule: {type: cron, expression: '@daily'}}]",
            "1:44: 's' refers to 'x', which is not defined",
        ),
        ("triggers: [{name: t, target: nobody}]", "1:12: triggers[0]: event is missing"),
    ],
)
def test_error_has_its_location(text: str, expected: str) -> None:
    [line] = refusal_lines(text)
    assert line.startswith("flow.yaml:")
    assert expected in line


def test_all_errors_are_reported_together_in_order() -> None:
    text = "id: a\npriority: 11\ntimeout_s: 0\nlease_s: 0\nfoo: 1\nprompt: [1]"
    lines = refusal_lines(text)
    assert [line.split(":")[1] for line in lines] == ["2", "3", "4", "5", "6"]
    with pytest.raises(Invalid) as caught:
        read_manifest({"b.yaml": "id: x y", "a.yaml": "id: b\npriority: 0"})
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == ["a.yaml", "b.yaml"]
    assert caught.value.code == "invalid_value"
    assert caught.value.details == {"file": "a.yaml", "line": 2, "column": 11, "field": "priority"}
    many = refusal_lines("tasks:\n" + "".join(f"- {{id: a{n}, priority: 0}}\n" for n in range(150)))
    assert (len(many), many[-1]) == (101, "... and 50 more")


def test_definitions_are_merged_across_documents_and_files() -> None:
    result = read_manifest(
        {"a": "id: x\n---\nid: y\nprevious_task: x", "b": "id: z\nprevious: {child_id: y}"}
    )
    assert [item.next for item in result.tasks.values()] == ["y", "z", None]
    assert refusal_lines("tasks: [{id: x, next: y}, {id: y}, {id: z, previous_task: x}]") == [
        "flow.yaml:1:59: tasks[2].previous_task: 'x' has next 'y' already, not 'z'"
    ]
    assert "which is not defined" in refusal_lines("id: z\nprevious_task: x")[0]
    assert (
        "is stored without next"
        in refusal_lines("id: z\nprevious_task: x", {"x": NewTask(title="x", key="x")})[0]
    )
    linked = NewTask(title="x", key="x", next="z")
    assert read_manifest({"f": "id: z\nprevious_task: x"}, {"x": linked}).specs.keys() == {"z"}


def test_task_is_added_to_the_group_that_it_names() -> None:
    listed = "groups: [{id: g, children: [b, a]}]\ntasks: [{id: a, group_id: g}, {id: b}]"
    assert read_manifest({"f": listed}).groups["g"].children == ("b", "a")
    added = "groups: [{id: g, children: [b]}]\ntasks: [{id: a, group: g}, {id: b}]"
    assert read_manifest({"f": added}).groups["g"].children == ("b", "a")
    stored: dict[str, Spec] = {
        "g": GroupSpec(title="G", key="g", children=("b",)),
        "b": NewTask(title="b", key="b"),
    }
    assert read_manifest({"f": "id: a\ngroup_id: g"}, stored).groups == {
        "g": GroupSpec(title="G", key="g", children=("b", "a"))
    }
    assert read_manifest({"f": "id: b\ngroup_id: g"}, stored).groups == {}
    assert refusal_lines("tasks: [{id: a, group_id: b}, {id: b}]") == [
        "flow.yaml:1:27: tasks[0].group_id: 'b' is a task, not a group"
    ]


@pytest.mark.parametrize(
    ("text", "code", "line"),
    [
        ("tasks:\n- {id: a, next: b}\n- {id: b, next: a}", "dependency_cycle", 2),
        ("id: a\nnext_task: a", "dependency_cycle", 1),
        ("groups:\n- {id: g, children: [g]}", "dependency_cycle", 2),
        ("groups:\n- {id: g, children: [h]}\n- {id: h, children: [g]}", "dependency_cycle", 2),
        ("id: a\nnext_task: b", "target_unknown", 2),
        ("id: a\ncondition: 'true'\ntrue_next_task_id: b", "target_unknown", 3),
        ("groups:\n- id: g\n  children:\n  - a\n  - b\ntasks: [{id: a}]", "target_unknown", 5),
        (
            "groups: [{id: g, children: [a]}, {id: h, children: [a]}]\ntasks:\n- id: a",
            "child_in_two_groups",
            3,
        ),
        ("groups: [{id: g, children: [a, a]}]\ntasks:\n- id: a", "child_in_two_groups", 3),
        ("tasks:\n- {id: a}\n- {id: b, depends_on: [a]}", "dependency_unknown", 3),
        ("tasks:\n- {id: a}\n- {id: b, input: {$from: a}}", "reference_invalid", 3),
        (
            "groups:\n- {id: g, children: [{child_id: a, kind: Group}]}\ntasks: [{id: a}]",
            "yaml_invalid",
            2,
        ),
        (
            "groups: ["
            + ", ".join(f"{{id: g{n}, children: [g{n + 1}]}}" for n in range(70))
            + ", {id: g70}]",
            "nesting_too_deep",
            1,
        ),
    ],
)
def test_manifest_that_cannot_run_is_refused_whole(text: str, code: str, line: int) -> None:
    with pytest.raises(Invalid) as caught:
        read_manifest({"flow.yaml": text})
    assert caught.value.code == code, caught.value
    assert caught.value.message.startswith(f"flow.yaml:{line}:")


def test_goto_back_is_not_a_cycle() -> None:
    read_manifest({"f": "tasks: [{id: a, next: b}, {id: b, goto_target_task_id: a}]"})


def test_stored_definitions_are_checked_with_the_files() -> None:
    stored: dict[str, Spec] = {
        "b": NewTask(title="b", key="b", next="a"),
        "g": GroupSpec(title="g", key="g", children=("c", "gone")),
        "c": NewTask(title="c", key="c"),
    }
    assert read_manifest({"f": "id: a"}, stored).specs.keys() == {"a"}
    assert "cyclic definitions" in refusal_lines("id: a\nnext: b", stored)[0]
    assert "is a child of" in refusal_lines("groups: [{id: h, children: [c]}]", stored)[0]


def test_millions_of_items_are_refused_quickly() -> None:
    text = "id: a\nforeach_template_task_id: a\nforeach_items: [" + "x," * 4_000_000 + "]"
    assert "more than 200,000 values" in refusal_lines(text)[0]
    text = "tasks:\n- id: b\n- id: a\n  foreach_template_task_id: b\n  foreach_items: ["
    assert (
        "20,000 items; a foreach takes at most 10,000"
        in refusal_lines(text + "x," * 20_000 + "]")[0]
    )


def test_schedules_and_triggers_are_parsed() -> None:
    text = """\
tasks:
  - {id: a, schedule: {type: time-based, expression: "0 9 * * 1-5", timezone: Europe/Berlin}}
  - {id: b, schedule: {type: immediate}}
schedules:
  - {name: once, target: a, schedule: {type: datetime-event, at: 2030-01-01T09:00:00Z}, input: [1]}
triggers:
  - {name: t, event: task.dead, target: b, filter: "event.level == 'ERROR'"}
"""
    result = read_manifest({"f": text})
    assert result.starts == ("b",)
    assert result.schedules == (
        Schedule(
            "a",
            "a",
            {"type": "time-based", "expression": "0 9 * * 1-5", "timezone": "Europe/Berlin"},
        ),
        Schedule("once", "a", {"type": "datetime-event", "at": "2030-01-01T09:00:00Z"}, [1]),
    )
    assert result.triggers == (Trigger("t", "task.dead", "b", "event.level == 'ERROR'"),)
    twice = (
        "schedules:\n"
        + 2 * "- {name: a, target: t, schedule: {type: cron, expression: '@daily'}}\n"
    )
    assert "'a' is defined twice" in refusal_lines(f"tasks: [{{id: t}}]\n{twice}")[0]


def test_empty_file_gets_a_warning() -> None:
    result = read_manifest({"a": "", "b": "# nothing\n---\n---\n"})
    assert (result, result.warnings) == (
        Manifest(warnings=result.warnings),
        ("a: is empty", "b: is empty"),
    )


def test_number_and_size_of_files_are_bounded() -> None:
    for files in (
        {str(n): "" for n in range(MAX_FILES + 1)},
        {"a": "#" * MAX_BYTES, "b": "#"},
        {"x" * 501: ""},
    ):
        with pytest.raises(Invalid) as caught:
            read_manifest(files)
        assert caught.value.code == "too_large"


def test_file_that_is_not_text_is_named() -> None:
    assert decode_files({"a": b"x", "b": "y"}) == {"a": "x", "b": "y"}
    with pytest.raises(Invalid) as caught:
        decode_files({"a": b"\xff", "b": b"x", "c": b"\x00"})
    assert [line[:2] for line in caught.value.message.splitlines()] == ["a:", "c:"]


def test_plain_values_load_like_files() -> None:
    body = {"id": "a", "taskTags": ["x"], "maxRetries": 1, "approval": {"onReject": "skip"}}
    result = parse_spec("task", to_snake_names(body))
    assert result == NewTask(
        title="a", key="a", task_tags=["x"], max_attempts=2, control=Approval(on_reject="skip")
    )
    for bad in (
        {"id": "a", "priority": 11},
        {"id": "a", "group_id": "g"},
        {"id": "a", "schedule": {"type": "immediate"}},
        {"name": "a"},
        {"id": "a", "unknown": 1},
    ):
        with pytest.raises(Invalid) as caught:
            parse_spec("task", bad)
        assert caught.value.details["file"] == ""
    deep: Any = 1
    for _ in range(100):
        deep = [deep]
    with pytest.raises(Invalid, match="nested deeper"):
        parse_spec("task", {"id": "a", "input": deep})
