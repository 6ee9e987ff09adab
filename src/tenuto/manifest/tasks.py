"""What files say about tasks and groups, as the model's own structures."""

from collections.abc import Mapping
from typing import Any
from uuid import UUID

import msgspec

from tenuto.manifest.decoding import MappingFields, ShapeDecoder, fields_of
from tenuto.manifest.shapes import ChildRef, GroupShape, RetryShape, TaskShape
from tenuto.manifest.yaml_nodes import Node
from tenuto.model import bounds
from tenuto.model.errors import Invalid
from tenuto.model.flows.definition import (
    Approval,
    Condition,
    Control,
    Foreach,
    Goto,
    GroupSpec,
    check_control,
    check_group,
    references,
)
from tenuto.model.flows.plan import Spec
from tenuto.model.limits.budgets import Budget
from tenuto.model.tasks.commands import Escalation
from tenuto.model.tasks.retry import RetryPolicy
from tenuto.model.tasks.submission import NewTask, check
from tenuto.model.tenancy.secrets import KEY as SECRETS

SAME = (
    "description prompt system_prompt model max_turns conversation task_type agent_type runtime"
    " command cwd env priority tags task_tags capabilities container region queue_ttl_s lease_s"
    " source depends_on on_dependency_failure metadata"
).split()
"""Fields that are called the same in files and in the model."""
SECOND = {
    "key": ("id", "key"),
    "title": ("name", "title"),
    "target_agent": ("target_agent", "agent_id"),
    "estimate_minutes": (
        "resolve_time_estimate",
        "estimate_minutes",
        "estimated_duration_minutes",
    ),
    "complexity": ("complexity_level", "complexity"),
    "timeout_s": ("timeout_s", "timeout_seconds"),
    "input": ("input", "input_context"),
    "next": ("next_task", "next"),
    "group": ("group_id", "group"),
}
"""Fields of the model with several names in files; the first one is written."""
NAMES: Mapping[str, tuple[str, ...]] = {name: (name,) for name in SAME} | SECOND
CONTROLS: Mapping[type, Mapping[str, str]] = {
    Foreach: {
        "items": "foreach_items",
        "template": "foreach_template_task_id",
        "order": "foreach_order",
        "join": "foreach_join",
    },
    Goto: {"target": "goto_target_task_id", "prompt": "goto_prompt"},
    Condition: {
        "expression": "condition",
        "on_true": "true_next_task_id",
        "on_false": "false_next_task_id",
    },
}
"""The fields of what controls a flow, and how files name them."""
NEVER = ("id", "parent", "idempotency_key", "trace_id", "run_at", "blocks", "group", "concurrency")
"""Fields of a task that a definition has not: they belong to one run."""
KINDS = frozenset({"agenttask", "foreachtask", "gototask", "conditiontask"})
"""Task types that say what a task is for, not which agents take it."""
RESERVED = frozenset({"apply"})
"""Words that stand in the place of a key in the API."""
TOOLS = "tools"
WANTED = "requiredCapabilities"
_PLAIN = NewTask(title="-")


def check_spec(spec: Spec) -> None:
    """Raise `Invalid` unless the definition can be stored; what it refers to is another matter."""
    if spec.key is None:
        raise Invalid("key is missing", field="key")
    if spec.key in RESERVED:
        raise Invalid(f"key must not be {spec.key!r}, a word of the API's", field="key")
    if isinstance(spec, GroupSpec):
        check_group(spec)
        return
    for name in NEVER:
        if getattr(spec, name) != getattr(_PLAIN, name):
            raise Invalid(f"{name} belongs to one run, not to a definition", field=name)
    if spec.task_type.lower() in KINDS:
        raise Invalid(f"task_type must not be {spec.task_type!r}", field="task_type")
    check(spec)
    for name in ("input", "metadata"):
        bounds.json_text(name, getattr(spec, name))
    if isinstance(spec.input, dict) and SECRETS in spec.input:
        raise Invalid(
            'input has secrets, but a definition is stored as written; use {"$secret": NAME}',
            "secret_in_definition",
            field="input",
        )
    references(spec.input)


def task_of(reader: ShapeDecoder, node: Node, where: str) -> tuple[MappingFields, NewTask | None]:
    """What was said of a task, and the task, unless it has no key; faults are noted."""
    given = reader.mapping(node, TaskShape, where)
    if given is None:
        return MappingFields(node, where), None
    fields = {
        name: found for name in NAMES if (found := field_value(reader, given, name)) is not None
    }
    fields.pop("group", None)
    _title(fields)
    _agent(reader, given, fields)
    _kind(fields)
    _extras(reader, given, fields)
    tries = _tries(given)
    if tries is not None:
        fields["max_attempts"] = tries
    if (policy := _retry(given)) is not None:
        fields["retry"] = policy
    if (said := given.get("escalation")) is not None:
        fields["escalation"] = Escalation(said.reason, said.prompt)
    if (said := given.get("budget")) is not None:
        fields["budget"] = Budget(tokens=said.tokens, cost_usd=said.cost_usd)
    if (next_ := fields.get("next")) is not None:
        fields["next"] = key_of(next_)
    control = _control(reader, given)
    if control is not None:
        fields["control"] = control
    if "key" not in fields:
        if not any(node.get(name) for name in SECOND["key"]):
            reader.faults.note(node.place, where, "id is missing")
        return given, None
    made = NewTask(**fields)
    _checked(reader, given, made)
    return given, made


def group_of(
    reader: ShapeDecoder, node: Node, where: str
) -> tuple[MappingFields, GroupSpec | None]:
    """The same for a group."""
    given = reader.mapping(node, GroupShape, where)
    if given is None:
        return MappingFields(node, where), None
    key, title = field_value(reader, given, "key"), field_value(reader, given, "title")
    if key is None:
        if not any(node.get(name) for name in SECOND["key"]):
            reader.faults.note(node.place, where, "id is missing")
        return given, None
    fields: dict[str, Any] = {"key": key, "title": title or key}
    for name in ("join", "prompt", "metadata"):
        if (found := given.get(name)) is not None:
            fields[name] = found
    if (order := given.get("type")) is not None:
        fields["order"] = order.lower()
    fields["children"] = tuple(key_of(child) for child in given.get("children") or ())
    if (follows := given.get("next")) is not None:
        fields["next"] = key_of(follows)
    made = GroupSpec(**fields)
    _checked(reader, given, made)
    return given, made


def field_value(reader: ShapeDecoder, given: MappingFields, field: str) -> Any:
    """The value of a field of the model, under whichever of its names; several must agree."""
    said = [name for name in NAMES[field] if name in given]
    if not said:
        return None
    value = given.get(said[0])
    for other in said[1:]:
        if given.get(other) != value:
            why = f"says something else than {said[0]!r}"
            reader.faults.note(given.at(other).place, given.way(other), why)
    return value


def name_of(given: MappingFields, field: str) -> str:
    """The name that a field of the model has in what was given."""
    for name in NAMES.get(field, (field,)):
        if name in given:
            return name
    return field


def key_of(said: "str | ChildRef") -> str:
    """The key that a reference has."""
    return said if isinstance(said, str) else said.child_id


def _title(fields: dict[str, Any]) -> None:
    """Something without a name is called by its key."""
    if "title" not in fields and "key" in fields:
        fields["title"] = fields["key"]


def _agent(reader: ShapeDecoder, given: MappingFields, fields: dict[str, Any]) -> None:
    """The agent's id, which files have as text."""
    if (said := fields.get("target_agent")) is None:
        return
    try:
        fields["target_agent"] = UUID(said)
    except ValueError:
        name = name_of(given, "target_agent")
        reader.faults.note(given.at(name).place, given.way(name), "must be the id of an agent")
        del fields["target_agent"]


def _kind(fields: dict[str, Any]) -> None:
    """A type such as `GotoTask` says what the task's own fields say as well."""
    if str(fields.get("task_type", "")).lower() in KINDS:
        del fields["task_type"]


def _extras(reader: ShapeDecoder, given: MappingFields, fields: dict[str, Any]) -> None:
    """What is kept in the metadata, and what is taken from there."""
    metadata = fields.get("metadata")
    if (tools := given.get(TOOLS)) is not None:
        if metadata is not None and metadata.get(TOOLS, tools) != tools:
            why = "says something else than metadata.tools"
            reader.faults.note(given.at(TOOLS).place, given.way(TOOLS), why)
        fields["metadata"] = {**(metadata or {}), TOOLS: tools}
    wanted = (metadata or {}).get(WANTED)
    if isinstance(wanted, list):
        named = fields.get("capabilities") or []
        more = [each for each in wanted if isinstance(each, str) and each not in named]
        if more:
            fields["capabilities"] = [*named, *more]


def _tries(given: MappingFields) -> int | None:
    """How often a task is tried; where several numbers are given, the smallest holds."""
    retry: RetryShape = given.get("retry") or RetryShape()
    said = [given.get("max_attempts"), given.get("attempts"), retry.attempts]
    said += [None if n is None else n + 1 for n in (given.get("max_retries"), retry.max_retries)]
    return min((n for n in said if n is not None), default=None)


def _retry(given: MappingFields) -> RetryPolicy | None:
    """When to try again, if anything is said about it."""
    retry: RetryShape = given.get("retry") or RetryShape()
    said = {
        name: value
        for name in RetryPolicy.__struct_fields__
        if (value := getattr(retry, name)) is not None
    }
    if retry.backoff is not None:
        said.setdefault("multiplier", 1.0 if retry.backoff == "fixed" else RetryPolicy().multiplier)
    if (base := given.get("retry_backoff_seconds")) is not None:
        said.setdefault("base_s", base)
    return RetryPolicy(**said) if said else None


def _control(reader: ShapeDecoder, given: MappingFields) -> Control | None:
    """What a task does to its flow: at most one thing."""
    found: dict[str, Control | None] = {}
    for kind, names in CONTROLS.items():
        said = {field: given.get(name) for field, name in names.items() if name in given}
        if said:
            found[names[next(iter(said))]] = _made(reader, given, kind, said)
    if (approval := given.get("approval")) is not None:
        fields = msgspec.structs.asdict(approval)
        said = {name: value for name, value in fields.items() if value is not None}
        found["approval"] = _made(reader, given, Approval, said)
    for name in list(found)[1:]:
        why = f"a task has {next(iter(found))} or {name}, not both"
        reader.faults.note(given.at(name).place, given.way(name), why)
    return next(iter(found.values()), None)


def _made(
    reader: ShapeDecoder, given: MappingFields, kind: Any, said: dict[str, Any]
) -> Control | None:
    """A control of that kind; nothing where it has faults, which are noted."""
    names = CONTROLS.get(kind, {})
    first = names[next(iter(said))] if names else "approval"
    needed = [each.name for each in fields_of(kind) if each.required]
    missing = [names[field] for field in needed if field not in said]
    for name in missing:
        reader.faults.note(given.at(first).place, given.where, f"{name} is missing")
    if missing:
        return None
    control: Control = kind(**said)
    try:
        check_control(control)
    except Invalid as error:
        name = names.get(str(error.details.get("field", "")), first)
        reader.faults.refused(given.at(name).place, given.way(name), error)
        return None
    return control


def _checked(reader: ShapeDecoder, given: MappingFields, made: Spec) -> None:
    """Note everything that the model says about a definition.

    It stops at the first fault, so it is asked again without the field that had it.
    """
    while True:
        try:
            check_spec(made)
        except Invalid as error:
            field, _, inner = str(error.details.get("field", "")).partition(".")
            name = name_of(given, field)
            node, where = given.at(name), given.way(name) if name in given else given.where
            if (part := node.get(inner)) is not None:
                node, where = part, f"{where}.{inner}"
            reader.faults.refused(node.place, where, error)
            plain = _without(made, field)
            if plain is None:
                return
            made = plain
        else:
            return


def _without(made: Spec, field: str) -> Spec | None:
    """The same with a field's default; nothing where that is no way out."""
    for each in fields_of(type(made)):
        if each.name == field != "key" and not each.required:
            default = each.default if each.default is not msgspec.NODEFAULT else None
            if each.default_factory is not msgspec.NODEFAULT:
                default = each.default_factory()
            if getattr(made, field) != default:
                return msgspec.structs.replace(made, **{field: default})
    return None
