"""Definitions: reusable descriptions of tasks and groups, and the control tasks of a flow.

The definition of a task is a `NewTask` with a key. Definitions refer to each other by key.
"""

import re
from typing import Any, Literal

import msgspec

from tenuto.model import bounds
from tenuto.model.errors import Invalid
from tenuto.model.flows.expressions.parser import compile_expression
from tenuto.model.tenancy.secrets import referenced_name

Join = Literal["all_succeeded", "all_done", "any_failed", "first_succeeded"]
Order = Literal["sequential", "parallel"]
Kind = Literal["agent", "foreach", "goto", "condition", "approval"]

MAX_CHILDREN = 10_000
MAX_ITEMS = 10_000
MAX_NESTING = 64
DEFAULT_STEPS = 100
"""Jumps that a flow may make, unless its start sets another number."""
MAX_STEPS = 100_000
REFERENCE_KEY = "$from"
_KEY = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._:/-]{{0,{bounds.MAX_NAME - 1}}}")


class Foreach(msgspec.Struct, frozen=True, kw_only=True, tag="foreach", tag_field="kind"):
    """Runs a template once per item. `items` is a list, or a reference to a result with a list."""

    items: Any
    template: str
    order: Order = "sequential"
    join: Join = "all_succeeded"


class Goto(msgspec.Struct, frozen=True, kw_only=True, tag="goto", tag_field="kind"):
    """Runs the target next, with a prompt appended to its own."""

    target: str
    prompt: str | None = None


class Condition(msgspec.Struct, frozen=True, kw_only=True, tag="condition", tag_field="kind"):
    """Chooses what runs next by an expression over `result`, `task` and `input`."""

    expression: str
    on_true: str | None = None
    on_false: str | None = None


class Approval(msgspec.Struct, frozen=True, kw_only=True, tag="approval", tag_field="kind"):
    """Waits for a person to approve or reject."""

    message: str | None = None
    timeout_s: int | None = None
    on_timeout: Literal["reject", "approve"] = "reject"
    on_reject: Literal["fail", "skip"] = "fail"

    def hold(self) -> str:
        """Returns the hold of the approval task: `approval`, then what a timeout or reject does."""
        parts = ["approval"]
        if self.on_timeout == "approve":
            parts.append("approve")
        if self.on_reject == "skip":
            parts.append("skip")
        return ":".join(parts)


Control = Foreach | Goto | Condition | Approval


class GroupSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The definition of a group: its children by key, in order."""

    title: str
    key: str
    order: Order = "sequential"
    children: tuple[str, ...] = ()
    next: str | None = None
    join: Join = "all_succeeded"
    prompt: str | None = None
    metadata: dict[str, Any] | None = None


class ResultReference(msgspec.Struct, frozen=True):
    """`{"$from": KEY, "path": "a.b.0"}`: a predecessor's result, or a part of it."""

    key: str
    path: str | None = None


def check_key(field: str, key: str) -> None:
    """Raises `Invalid` unless the key is valid for a definition."""
    if not _KEY.fullmatch(key):
        bounds.check_text(field, key, len(key))  # raises the error code for unstorable text
        raise Invalid(
            f"{field} must begin with a letter or digit and have at most {bounds.MAX_NAME}"
            " letters, digits, '.', '_', ':', '/' or '-'",
            field=field,
        )


def check_group(spec: GroupSpec) -> None:
    """Raises `Invalid` unless the group can be stored. `check_plan` checks what it refers to."""
    check_key("key", spec.key)
    bounds.check_text("title", spec.title, bounds.MAX_TITLE, empty=False)
    bounds.check_text("prompt", spec.prompt or "", bounds.MAX_TEXT)
    bounds.to_json_text("metadata", spec.metadata)
    if len(spec.children) > MAX_CHILDREN:
        raise Invalid(
            f"a group has at most {MAX_CHILDREN:,} children", "too_large", field="children"
        )
    for child in spec.children:
        check_key("children", child)
    if spec.next is not None:
        check_key("next", spec.next)


def check_control(control: Control) -> None:
    """Raises `Invalid` unless the settings are valid. `check_plan` checks the keys in them."""
    match control:
        case Foreach():
            check_key("template", control.template)
            _check_items(control.items)
        case Goto():
            check_key("target", control.target)
            bounds.check_text("prompt", control.prompt or "", bounds.MAX_TEXT)
        case Condition():
            _check_condition(control)
        case Approval():
            bounds.check_text("message", control.message or "", bounds.MAX_TEXT)
            if control.timeout_s is not None:
                bounds.check_number("timeout_s", control.timeout_s, 1, bounds.MAX_SECONDS)


def _check_items(items: Any) -> None:
    """Raises `Invalid` unless the items are a short enough list or a reference to a result."""
    if parse_reference(items) is not None:
        return
    if not isinstance(items, list):
        raise Invalid(
            f'items must be a list, or {{"{REFERENCE_KEY}": KEY}} for a predecessor\'s result',
            field="items",
        )
    if len(items) > MAX_ITEMS:
        raise Invalid(
            f"{len(items):,} items; a foreach takes at most {MAX_ITEMS:,}",
            "too_large",
            field="items",
        )
    bounds.to_json_text("items", items)


def _check_condition(control: Condition) -> None:
    """Raises `Invalid` unless the expression compiles and its targets are valid keys."""
    compile_expression(control.expression, CONDITION_NAMES)
    for field in ("on_true", "on_false"):
        if (target := getattr(control, field)) is not None:
            check_key(field, target)


CONDITION_NAMES = frozenset({"result", "task", "input"})


def parse_reference(value: Any) -> ResultReference | None:
    """Returns the reference if the value is one, else `None`; raises `Invalid` for a broken one."""
    if not isinstance(value, dict) or REFERENCE_KEY not in value:
        return None
    key, path = value[REFERENCE_KEY], value.get("path")
    if not isinstance(key, str) or not set(value) <= {REFERENCE_KEY, "path"}:
        raise Invalid(
            f'a reference must be {{"{REFERENCE_KEY}": KEY, "path": "a.b"}}', "reference_invalid"
        )
    if path is not None and not isinstance(path, str):
        raise Invalid("the path of a reference must be text", "reference_invalid")
    check_key(REFERENCE_KEY, key)
    return ResultReference(key, path)


def referenced_keys(value: Any) -> set[str]:
    """Returns the keys of all references in a JSON value; raises `Invalid` for a broken one."""
    keys: set[str] = set()
    pending = [value]
    while pending:
        current = pending.pop()
        if (reference := parse_reference(current)) is not None:
            keys.add(reference.key)
        elif isinstance(current, dict):
            pending += current.values()
        elif isinstance(current, list):
            pending += current
    return keys


def check_no_references(subject: str, value: Any) -> None:
    """Raises `Invalid`, which names the subject, if JSON refers to a result or a secret.

    Results and events are untrusted data. A reference inside of them would be resolved when they
    become part of an input, and could expose a secret.
    """
    pending = [value]
    while pending:
        current = pending.pop()
        if isinstance(current, dict):
            if REFERENCE_KEY in current or referenced_name(current) is not None:
                text = f"{subject} must not contain a reference to a result or a secret"
                raise Invalid(text, "reference_invalid")
            pending += current.values()
        elif isinstance(current, list):
            pending += current


def get_at_path(value: Any, path: str | None) -> Any:
    """Returns the part of JSON at a path such as `a.b.0`, all if `None`; `Invalid` if missing."""
    if not path:
        return value
    for segment in path.split("."):
        if isinstance(value, dict) and segment in value:
            value = value[segment]
        elif isinstance(value, list) and segment.isdecimal() and int(segment) < len(value):
            value = value[int(segment)]
        else:
            raise Invalid(f"the value has no {segment!r} (path {path!r})", "path_missing")
    return value


def resolve_references(value: Any, results: dict[str, Any]) -> Any:
    """Returns the value with references replaced by their results; raises `Invalid` if missing."""
    if (reference := parse_reference(value)) is not None:
        if reference.key not in results:
            raise Invalid(f"{reference.key!r} has no result in this flow", "result_missing")
        return get_at_path(results[reference.key], reference.path)
    if isinstance(value, dict):
        return {key: resolve_references(item, results) for key, item in value.items()}
    if isinstance(value, list):
        return [resolve_references(item, results) for item in value]
    return value
