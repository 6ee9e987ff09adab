"""Converts definitions to plain values with YAML field names, and to YAML text."""

import re
from collections.abc import Iterable
from typing import Any, Literal

import msgspec
import yaml

from tenuto.manifest.decoding import struct_fields
from tenuto.manifest.shapes import FIELD_NAMES
from tenuto.manifest.tasks import CONTROL_FIELDS, TOOLS
from tenuto.manifest.yaml_nodes import FLOAT, INT, SPECIAL_FLOAT
from tenuto.model.flows.definition import Approval, Control, GroupSpec
from tenuto.model.flows.plan import Spec
from tenuto.model.printable import is_hidden
from tenuto.model.tasks.retry import RetryPolicy
from tenuto.model.tasks.submission import NewTask

WIDTH = 100
_NESTED_FIELDS = ("retry", "approval", "escalation", "budget", "next", "next_task", "children")
"""Fields whose inner names are defined by Tenuto; the names inside all others are user data."""
_FIRST_FIELDS = ("key", "title", "prompt", "input")
_DEFAULT_TASK = NewTask(title="")
_DEFAULT_GROUP = GroupSpec(title="", key="-")


def kind_of(spec: Spec) -> Literal["task", "group"]:
    """Returns the kind of a definition."""
    return "group" if isinstance(spec, GroupSpec) else "task"


def to_plain(spec: Spec) -> dict[str, Any]:
    """Returns a definition as plain values with YAML field names, without default values."""
    fields = _group_to_plain(spec) if isinstance(spec, GroupSpec) else _task_to_plain(spec)
    return {name: value for name, value in fields.items() if value is not None}


def _group_to_plain(spec: GroupSpec) -> dict[str, Any]:
    """Returns the fields of a group with YAML names."""
    fields: dict[str, Any] = {"id": spec.key, "name": spec.title, "type": spec.order.capitalize()}
    if spec.children:
        fields["children"] = list(spec.children)
    for name in ("next", "join", "prompt", "metadata"):
        if (value := getattr(spec, name)) != getattr(_DEFAULT_GROUP, name):
            fields[name] = value
    return fields


def _task_to_plain(spec: NewTask) -> dict[str, Any]:
    """Returns the fields of a task with YAML names."""
    fields: dict[str, Any] = {}
    for field in (*_FIRST_FIELDS, *(name for name in FIELD_NAMES if name not in _FIRST_FIELDS)):
        if (value := getattr(spec, field)) != getattr(_DEFAULT_TASK, field):
            fields[FIELD_NAMES[field][0]] = value
    fields.setdefault("name", spec.title)
    fields |= _metadata_to_plain(spec.metadata)
    if spec.max_attempts != _DEFAULT_TASK.max_attempts:
        fields["max_attempts"] = spec.max_attempts
    if spec.retry is not None:
        fields["retry"] = {n: getattr(spec.retry, n) for n in RetryPolicy.__struct_fields__}
    for name in ("escalation", "control"):
        if (value := getattr(spec, name)) is not None:
            fields |= (
                _control_to_plain(value)
                if name == "control"
                else {name: msgspec.to_builtins(value)}
            )
    if spec.budget is not None:
        limits = msgspec.structs.asdict(spec.budget)
        fields["budget"] = {name: value for name, value in limits.items() if value is not None}
    if spec.target_agent is not None:
        fields["target_agent"] = str(spec.target_agent)
    return fields


def _metadata_to_plain(metadata: dict[str, Any] | None) -> dict[str, Any]:
    """Returns `metadata`, and `tools` separately if it is a list of texts."""
    if metadata is None:
        return {}
    tools = metadata.get(TOOLS)
    if not isinstance(tools, list) or not all(isinstance(tool, str) for tool in tools):
        return {"metadata": metadata}
    rest = {name: value for name, value in metadata.items() if name != TOOLS}
    return {"metadata": rest or None, TOOLS: tools}


def _control_to_plain(control: Control) -> dict[str, Any]:
    """Returns the fields of a control with YAML names."""
    fields = {
        field.name: value
        for field in struct_fields(type(control))
        if (value := getattr(control, field.name)) is not None
        and (field.required or value != field.default)
    }
    if isinstance(control, Approval):
        return {"approval": fields}
    names = CONTROL_FIELDS[type(control)]
    return {names[field]: value for field, value in fields.items()}


def to_camel_names(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields with the camelCase names of the REST API."""
    return _rename_keys(fields, lambda name: re.sub(r"_([a-z])", lambda m: m[1].upper(), name))


def to_snake_names(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns fields with REST names under the snake_case names of YAML files."""
    return _rename_keys(fields, lambda name: re.sub(r"(?<=[a-z0-9])[A-Z]", _to_snake_part, name))


def _to_snake_part(match: re.Match[str]) -> str:
    """Returns the replacement of one capital letter: an underscore and the small letter."""
    return f"_{match[0].lower()}"


def _rename_keys(fields: dict[str, Any], rename: Any) -> dict[str, Any]:
    """Returns a mapping with renamed keys, also in nested fields of `_NESTED_FIELDS`."""
    return {
        rename(name): _rename_nested(value, rename) if rename(name) in _NESTED_FIELDS else value
        for name, value in fields.items()
    }


def _rename_nested(value: Any, rename: Any) -> Any:
    """Returns the value with renamed keys; below its top mappings only in `_NESTED_FIELDS`."""
    if isinstance(value, list):
        return [_rename_nested(item, rename) for item in value]
    return _rename_keys(value, rename) if isinstance(value, dict) else value


class _Dumper(yaml.SafeDumper):
    """Writes long text as blocks; quotes text that YAML 1.1 or 1.2 would read as another type."""

    def ignore_aliases(self, data: Any) -> bool:
        """Returns True: repeated values are written in full instead of as aliases."""
        del data
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> Any:
        """Indents the items of lists, unlike PyYAML's default."""
        del indentless
        return super().increase_indent(flow, indentless=False)


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    """Returns the node of a text: quoted with hidden characters, a block with several lines."""
    has_hidden = not text.isprintable() and _hidden_characters(text)
    style = '"' if has_hidden else "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)
for _pattern in (INT, FLOAT, SPECIAL_FLOAT):
    _whole = re.compile(rf"(?:{_pattern.pattern})$")
    _Dumper.add_implicit_resolver("tag:tenuto", _whole, list("-+.0123456789"))


def _hidden_characters(text: str) -> set[str]:
    """Returns the characters that are invisible, or line ends only for some YAML parsers."""
    return {char for char in set(text) - {"\n"} if is_hidden(char)}


def _escape(char: str) -> str:
    """Returns the YAML escape of a character."""
    return f"\\u{ord(char):04x}" if ord(char) < 0x10000 else f"\\U{ord(char):08x}"


def to_yaml(value: Any) -> str:
    """Returns plain values as YAML text; invisible characters are escaped."""
    text: str = yaml.dump(
        value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=WIDTH, indent=2
    )
    # Text with such a character is in double quotes, so it can be replaced by an escape.
    hidden = {ord(char): _escape(char) for char in _hidden_characters(text)}
    return text.translate(hidden)


def dump(specs: Iterable[Spec]) -> str:
    """Returns a YAML document that loads back to equal definitions; empty text for none."""
    tasks: list[dict[str, Any]] = []
    groups: list[dict[str, Any]] = []
    for spec in specs:
        (groups if isinstance(spec, GroupSpec) else tasks).append(to_plain(spec))
    lists = {"tasks": tasks, "groups": groups}
    filled = {name: definitions for name, definitions in lists.items() if definitions}
    return to_yaml(filled) if filled else ""
