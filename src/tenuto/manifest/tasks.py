"""Converts tasks and groups of files into the model's `NewTask` and `GroupSpec`."""

from collections.abc import Mapping
from typing import Any
from uuid import UUID

import msgspec

from tenuto.manifest.decoding import MappingFields, ShapeDecoder, struct_fields
from tenuto.manifest.shapes import FIELD_NAMES, ChildRef, GroupShape, RetryShape, TaskShape
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
    referenced_keys,
)
from tenuto.model.flows.plan import Spec
from tenuto.model.limits.budgets import Budget
from tenuto.model.tasks.commands import Escalation
from tenuto.model.tasks.retry import RetryPolicy
from tenuto.model.tasks.submission import FIELDS, NewTask, check
from tenuto.model.tenancy.secrets import KEY as SECRETS

CONTROL_FIELDS: Mapping[type, Mapping[str, str]] = {
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
"""The fields of the control kinds (foreach, goto, condition) and their names in files."""
RUN_ONLY_FIELDS = tuple(name for name, field in FIELDS.items() if not field.definition)
"""Fields of a task that a definition must not have, because they belong to one run."""
KIND_TASK_TYPES = frozenset({"agenttask", "foreachtask", "gototask", "conditiontask"})
"""Task types that only repeat the control kind; agents are not matched by them."""
RESERVED_KEYS = frozenset({"apply"})
"""Names that REST paths use where a definition key would be."""
TOOLS = "tools"
CAPABILITIES_METADATA = "requiredCapabilities"
_DEFAULT_TASK = NewTask(title="-")


def check_spec(spec: Spec) -> None:
    """Raises `Invalid` unless the definition can be stored; does not check its references."""
    if spec.key is None:
        raise Invalid("key is missing", field="key")
    if spec.key in RESERVED_KEYS:
        raise Invalid(
            f"key must not be {spec.key!r}, which is reserved by the REST API", field="key"
        )
    if isinstance(spec, GroupSpec):
        check_group(spec)
        return
    for name in RUN_ONLY_FIELDS:
        if getattr(spec, name) != getattr(_DEFAULT_TASK, name):
            raise Invalid(
                f"{name} is not allowed in a definition; it belongs to one run", field=name
            )
    if spec.task_type.lower() in KIND_TASK_TYPES:
        raise Invalid(
            f"task_type {spec.task_type!r} is reserved; choose another one", field="task_type"
        )
    check(spec)
    for name in ("input", "metadata"):
        bounds.to_json_text(name, getattr(spec, name))
    if isinstance(spec.input, dict) and SECRETS in spec.input:
        raise Invalid(
            'input contains secrets, but a definition is stored as written; use {"$secret": NAME}',
            "secret_in_definition",
            field="input",
        )
    referenced_keys(spec.input)


def parse_task(
    decoder: ShapeDecoder, node: Node, path: str
) -> tuple[MappingFields, NewTask | None]:
    """Returns the valid fields of a task, and the task, or `None` if it has no key.

    Validation errors are added to the decoder.
    """
    fields = decoder.decode_mapping(node, TaskShape, path)
    if fields is None:
        return MappingFields(node, path), None
    values = {
        name: value
        for name in FIELD_NAMES
        if (value := field_value(decoder, fields, name)) is not None
    }
    values.pop("group", None)
    _default_title(values)
    _parse_target_agent(decoder, fields, values)
    _drop_kind_task_type(values)
    _merge_metadata(decoder, fields, values)
    max_attempts = _parse_max_attempts(fields)
    if max_attempts is not None:
        values["max_attempts"] = max_attempts
    if (policy := _parse_retry(fields)) is not None:
        values["retry"] = policy
    if (section := fields.get("escalation")) is not None:
        values["escalation"] = Escalation(section.reason, section.prompt)
    if (section := fields.get("budget")) is not None:
        values["budget"] = Budget(tokens=section.tokens, cost_usd=section.cost_usd)
    if (next_ := values.get("next")) is not None:
        values["next"] = reference_key(next_)
    control = _parse_control(decoder, fields)
    if control is not None:
        values["control"] = control
    if "key" not in values:
        if not any(node.get(name) for name in FIELD_NAMES["key"]):
            decoder.errors.add(node.location, path, "id is missing")
        return fields, None
    spec = NewTask(**values)
    _add_model_errors(decoder, fields, spec)
    return fields, spec


def parse_group(
    decoder: ShapeDecoder, node: Node, path: str
) -> tuple[MappingFields, GroupSpec | None]:
    """Returns the valid fields of a group, and the group, or `None` if it has no key.

    Validation errors are added to the decoder.
    """
    fields = decoder.decode_mapping(node, GroupShape, path)
    if fields is None:
        return MappingFields(node, path), None
    key, title = field_value(decoder, fields, "key"), field_value(decoder, fields, "title")
    if key is None:
        if not any(node.get(name) for name in FIELD_NAMES["key"]):
            decoder.errors.add(node.location, path, "id is missing")
        return fields, None
    values: dict[str, Any] = {"key": key, "title": title or key}
    for name in ("join", "prompt", "metadata"):
        if (value := fields.get(name)) is not None:
            values[name] = value
    if (order := fields.get("type")) is not None:
        values["order"] = order.lower()
    values["children"] = tuple(reference_key(child) for child in fields.get("children") or ())
    if (next_ := fields.get("next")) is not None:
        values["next"] = reference_key(next_)
    spec = GroupSpec(**values)
    _add_model_errors(decoder, fields, spec)
    return fields, spec


def field_value(decoder: ShapeDecoder, fields: MappingFields, field: str) -> Any:
    """Returns the value of a model field under any of its names, or `None`.

    Adds an error if two names have different values.
    """
    names = [name for name in FIELD_NAMES[field] if name in fields]
    if not names:
        return None
    value = fields.get(names[0])
    for other in names[1:]:
        if fields.get(other) != value:
            reason = f"differs from {names[0]!r}; give only one of them"
            decoder.errors.add(fields.field_node(other).location, fields.field_path(other), reason)
    return value


def field_name(fields: MappingFields, field: str) -> str:
    """Returns the YAML name under which a model field is given, or its model name."""
    for name in FIELD_NAMES.get(field, (field,)):
        if name in fields:
            return name
    return field


def reference_key(reference: "str | ChildRef") -> str:
    """Returns the key of a reference."""
    return reference if isinstance(reference, str) else reference.child_id


def _default_title(values: dict[str, Any]) -> None:
    """Sets the title in `values` to the key if there is none."""
    if "title" not in values and "key" in values:
        values["title"] = values["key"]


def _parse_target_agent(
    decoder: ShapeDecoder, fields: MappingFields, values: dict[str, Any]
) -> None:
    """Converts the agent's id in `values`; removes it and adds an error if it is not an id."""
    if (text := values.get("target_agent")) is None:
        return
    try:
        values["target_agent"] = UUID(text)
    except ValueError:
        name = field_name(fields, "target_agent")
        decoder.errors.add(
            fields.field_node(name).location,
            fields.field_path(name),
            "must be the id (UUID) of an agent",
        )
        del values["target_agent"]


def _drop_kind_task_type(values: dict[str, Any]) -> None:
    """Removes a task type such as `GotoTask` from `values`; the control fields decide."""
    if str(values.get("task_type", "")).lower() in KIND_TASK_TYPES:
        del values["task_type"]


def _merge_metadata(decoder: ShapeDecoder, fields: MappingFields, values: dict[str, Any]) -> None:
    """Adds `tools` to the metadata in `values`, and capabilities that the metadata requires."""
    metadata = values.get("metadata")
    if (tools := fields.get(TOOLS)) is not None:
        if metadata is not None and metadata.get(TOOLS, tools) != tools:
            reason = "differs from metadata.tools; give only one of them"
            decoder.errors.add(fields.field_node(TOOLS).location, fields.field_path(TOOLS), reason)
        values["metadata"] = {**(metadata or {}), TOOLS: tools}
    required = (metadata or {}).get(CAPABILITIES_METADATA)
    if isinstance(required, list):
        capabilities = values.get("capabilities") or []
        missing = [name for name in required if isinstance(name, str) and name not in capabilities]
        if missing:
            values["capabilities"] = [*capabilities, *missing]


def _parse_max_attempts(fields: MappingFields) -> int | None:
    """Returns the smallest given maximum number of tries, or `None` if none is given."""
    retry: RetryShape = fields.get("retry") or RetryShape()
    values = [fields.get("max_attempts"), fields.get("attempts"), retry.attempts]
    values += [None if n is None else n + 1 for n in (fields.get("max_retries"), retry.max_retries)]
    return min((n for n in values if n is not None), default=None)


def _parse_retry(fields: MappingFields) -> RetryPolicy | None:
    """Returns the policy by the fields about delays, or `None` if there are none."""
    retry: RetryShape = fields.get("retry") or RetryShape()
    values = {
        name: value
        for name in RetryPolicy.__struct_fields__
        if (value := getattr(retry, name)) is not None
    }
    if retry.backoff is not None:
        values.setdefault(
            "multiplier", 1.0 if retry.backoff == "fixed" else RetryPolicy().multiplier
        )
    if (base := fields.get("retry_backoff_seconds")) is not None:
        values.setdefault("base_s", base)
    return RetryPolicy(**values) if values else None


def _parse_control(decoder: ShapeDecoder, fields: MappingFields) -> Control | None:
    """Returns the task's control or `None`; adds an error if there are several."""
    controls: dict[str, Control | None] = {}
    for kind, names in CONTROL_FIELDS.items():
        values = {field: fields.get(name) for field, name in names.items() if name in fields}
        if values:
            controls[names[next(iter(values))]] = _build_control(decoder, fields, kind, values)
    if (approval := fields.get("approval")) is not None:
        options = msgspec.structs.asdict(approval)
        values = {name: value for name, value in options.items() if value is not None}
        controls["approval"] = _build_control(decoder, fields, Approval, values)
    for name in list(controls)[1:]:
        reason = f"a task can have {next(iter(controls))} or {name}, not both"
        decoder.errors.add(fields.field_node(name).location, fields.field_path(name), reason)
    return next(iter(controls.values()), None)


def _build_control(
    decoder: ShapeDecoder, fields: MappingFields, kind: Any, values: dict[str, Any]
) -> Control | None:
    """Returns a control of the kind; adds errors and returns `None` if it is invalid."""
    names = CONTROL_FIELDS.get(kind, {})
    first_name = names[next(iter(values))] if names else "approval"
    required = [field.name for field in struct_fields(kind) if field.required]
    missing = [names[field] for field in required if field not in values]
    for name in missing:
        decoder.errors.add(
            fields.field_node(first_name).location, fields.path, f"{name} is missing"
        )
    if missing:
        return None
    control: Control = kind(**values)
    try:
        check_control(control)
    except Invalid as error:
        name = names.get(str(error.details.get("field", "")), first_name)
        decoder.errors.add_invalid(fields.field_node(name).location, fields.field_path(name), error)
        return None
    return control


def _add_model_errors(decoder: ShapeDecoder, fields: MappingFields, spec: Spec) -> None:
    """Adds all errors that the model finds in a definition.

    The model's check stops at the first error, so it is repeated without the invalid field.
    """
    while True:
        try:
            check_spec(spec)
        except Invalid as error:
            field, _, inner_field = str(error.details.get("field", "")).partition(".")
            name = field_name(fields, field)
            node = fields.field_node(name)
            path = fields.field_path(name) if name in fields else fields.path
            if (inner_node := node.get(inner_field)) is not None:
                node, path = inner_node, f"{path}.{inner_field}"
            decoder.errors.add_invalid(node.location, path, error)
            reset = _reset_field(spec, field)
            if reset is None:
                return
            spec = reset
        else:
            return


def _reset_field(spec: Spec, field: str) -> Spec | None:
    """Returns the definition with a field reset; `None` if required or at its default."""
    for struct_field in struct_fields(type(spec)):
        if struct_field.name == field != "key" and not struct_field.required:
            default = (
                struct_field.default if struct_field.default is not msgspec.NODEFAULT else None
            )
            if struct_field.default_factory is not msgspec.NODEFAULT:
                default = struct_field.default_factory()
            if getattr(spec, field) != default:
                return msgspec.structs.replace(spec, **{field: default})
    return None
