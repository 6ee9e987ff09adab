"""What may run more than once: definitions of tasks and groups, and what controls a flow.

A task's definition is what a caller would submit, with a key. They refer to each other by key.
"""

import re
from typing import Any, Literal

import msgspec

from tenuto.model import bounds
from tenuto.model.errors import Invalid
from tenuto.model.flows.expressions.parser import compile_expression
from tenuto.model.tenancy.secrets import referred

Join = Literal["all_succeeded", "all_done", "any_failed", "first_succeeded"]
Order = Literal["sequential", "parallel"]
Kind = Literal["agent", "foreach", "goto", "condition", "approval"]

MAX_CHILDREN = 10_000
MAX_ITEMS = 10_000
MAX_NESTING = 64
STEPS = 100
"""How many jumps a flow may make, unless its start says otherwise."""
MAX_STEPS = 100_000
FROM = "$from"
_KEY = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._:/-]{{0,{bounds.MAX_NAME - 1}}}")


class Foreach(msgspec.Struct, frozen=True, kw_only=True, tag="foreach", tag_field="kind"):
    """Run a template once per item. `items` is a list, or where in a result to find it."""

    items: Any
    template: str
    order: Order = "sequential"
    join: Join = "all_succeeded"


class Goto(msgspec.Struct, frozen=True, kw_only=True, tag="goto", tag_field="kind"):
    """Run the target next, with a prompt appended to its own."""

    target: str
    prompt: str | None = None


class Condition(msgspec.Struct, frozen=True, kw_only=True, tag="condition", tag_field="kind"):
    """Go one way or the other by an expression over `result`, `task` and `input`."""

    expression: str
    on_true: str | None = None
    on_false: str | None = None


class Approval(msgspec.Struct, frozen=True, kw_only=True, tag="approval", tag_field="kind"):
    """Wait for a person's yes or no."""

    message: str | None = None
    timeout_s: int | None = None
    on_timeout: Literal["reject", "approve"] = "reject"
    on_reject: Literal["fail", "skip"] = "fail"

    def hold(self) -> str:
        """What its task waits for, with what the end of its time, and a no, mean."""
        said = ["approval"]
        if self.on_timeout == "approve":
            said.append("approve")
        if self.on_reject == "skip":
            said.append("skip")
        return ":".join(said)


Control = Foreach | Goto | Condition | Approval


class GroupSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A group to be: children by key, in order."""

    title: str
    key: str
    order: Order = "sequential"
    children: tuple[str, ...] = ()
    next: str | None = None
    join: Join = "all_succeeded"
    prompt: str | None = None
    metadata: dict[str, Any] | None = None


class ResultReference(msgspec.Struct, frozen=True):
    """`{"$from": KEY, "path": "a.b.0"}`: a part of what a predecessor made."""

    key: str
    path: str | None = None


def check_key(field: str, key: str) -> None:
    """Raise `Invalid` unless a definition may have the key."""
    if not _KEY.fullmatch(key):
        bounds.text(field, key, len(key))  # what no database could keep has a code of its own
        raise Invalid(
            f"{field} must begin with a letter or digit and have at most {bounds.MAX_NAME}"
            " letters, digits, '.', '_', ':', '/' or '-'",
            field=field,
        )


def check_group(spec: GroupSpec) -> None:
    """Raise `Invalid` unless the group can be stored; what it refers to is the plan's matter."""
    check_key("key", spec.key)
    bounds.text("title", spec.title, bounds.MAX_TITLE, empty=False)
    bounds.text("prompt", spec.prompt or "", bounds.MAX_TEXT)
    bounds.json_text("metadata", spec.metadata)
    if len(spec.children) > MAX_CHILDREN:
        raise Invalid(
            f"a group has at most {MAX_CHILDREN:,} children", "too_large", field="children"
        )
    for child in spec.children:
        check_key("children", child)
    if spec.next is not None:
        check_key("next", spec.next)


def check_control(control: Control) -> None:
    """Raise `Invalid` unless the control can be stored and, where that can be seen, done."""
    match control:
        case Foreach():
            check_key("template", control.template)
            _check_items(control.items)
        case Goto():
            check_key("target", control.target)
            bounds.text("prompt", control.prompt or "", bounds.MAX_TEXT)
        case Condition():
            _check_condition(control)
        case Approval():
            bounds.text("message", control.message or "", bounds.MAX_TEXT)
            if control.timeout_s is not None:
                bounds.number("timeout_s", control.timeout_s, 1, bounds.MAX_SECONDS)


def _check_items(items: Any) -> None:
    if reference(items) is not None:
        return
    if not isinstance(items, list):
        raise Invalid(
            f'items must be a list, or {{"{FROM}": KEY}} for a predecessor\'s result', field="items"
        )
    if len(items) > MAX_ITEMS:
        raise Invalid(
            f"{len(items):,} items; a foreach takes at most {MAX_ITEMS:,}",
            "too_large",
            field="items",
        )
    bounds.json_text("items", items)


def _check_condition(control: Condition) -> None:
    compile_expression(control.expression, CONDITION_NAMES)
    for field in ("on_true", "on_false"):
        if (target := getattr(control, field)) is not None:
            check_key(field, target)


CONDITION_NAMES = frozenset({"result", "task", "input"})


def reference(value: Any) -> ResultReference | None:
    """The reference that a value is, if it is one; raises `Invalid` for a broken one."""
    if not isinstance(value, dict) or FROM not in value:
        return None
    key, path = value[FROM], value.get("path")
    if not isinstance(key, str) or not set(value) <= {FROM, "path"}:
        raise Invalid(f'a reference is {{"{FROM}": KEY, "path": "a.b"}}', "reference_invalid")
    if path is not None and not isinstance(path, str):
        raise Invalid("the path of a reference must be text", "reference_invalid")
    check_key(FROM, key)
    return ResultReference(key, path)


def references(value: Any) -> set[str]:
    """The keys that a JSON value refers to, anywhere in it."""
    found: set[str] = set()
    todo = [value]
    while todo:
        here = todo.pop()
        if (known := reference(here)) is not None:
            found.add(known.key)
        elif isinstance(here, dict):
            todo += here.values()
        elif isinstance(here, list):
            todo += here
    return found


def check_data(what: str, value: Any) -> None:
    """Raise `Invalid` unless a JSON value refers to nothing.

    Results and events are data, whoever made them: put into an input, a reference among them would
    be followed, and a secret handed out that nobody meant to give.
    """
    todo = [value]
    while todo:
        here = todo.pop()
        if isinstance(here, dict):
            if FROM in here or referred(here) is not None:
                text = (
                    f"{what} holds a reference to a result or a secret, which is not followed there"
                )
                raise Invalid(text, "reference_invalid")
            todo += here.values()
        elif isinstance(here, list):
            todo += here


def at_path(value: Any, path: str | None) -> Any:
    """The part of a JSON value that a path such as `a.b.0` leads to; `Invalid` where it ends."""
    if not path:
        return value
    for step in path.split("."):
        if isinstance(value, dict) and step in value:
            value = value[step]
        elif isinstance(value, list) and step.isdecimal() and int(step) < len(value):
            value = value[int(step)]
        else:
            raise Invalid(f"there is no {step!r} on the way of the path {path!r}", "path_missing")
    return value


def resolved(value: Any, results: dict[str, Any]) -> Any:
    """The value with each reference replaced by what it refers to."""
    if (known := reference(value)) is not None:
        if known.key not in results:
            raise Invalid(f"{known.key!r} has no result in this flow", "result_missing")
        return at_path(results[known.key], known.path)
    if isinstance(value, dict):
        return {key: resolved(each, results) for key, each in value.items()}
    if isinstance(value, list):
        return [resolved(each, results) for each in value]
    return value
