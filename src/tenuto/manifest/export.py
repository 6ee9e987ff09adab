"""Definitions as files have them: plain values under the names that people write, and YAML text."""

import re
from collections.abc import Iterable
from typing import Any, Literal

import msgspec
import yaml

from tenuto.manifest.decoding import fields_of
from tenuto.manifest.tasks import CONTROLS, NAMES, TOOLS
from tenuto.manifest.yaml_nodes import FLOAT, INT, ODD_FLOAT
from tenuto.model.flows.definition import Approval, Control, GroupSpec
from tenuto.model.flows.plan import Spec
from tenuto.model.printable import is_hidden
from tenuto.model.tasks.retry import RetryPolicy
from tenuto.model.tasks.submission import NewTask

WIDTH = 100
_NESTED = ("retry", "approval", "escalation", "budget", "next", "next_task", "children")
"""Fields whose own fields have names of ours; the names in all others are the caller's."""
_FIRST = ("key", "title", "prompt", "input")
_PLAIN = NewTask(title="")
_EMPTY_GROUP = GroupSpec(title="", key="-")


def kind_of(spec: Spec) -> Literal["task", "group"]:
    """Which of the two a definition is."""
    return "group" if isinstance(spec, GroupSpec) else "task"


def to_plain(spec: Spec) -> dict[str, Any]:
    """What a definition says, as plain values; what is as it would be anyway is left out."""
    found = _group(spec) if isinstance(spec, GroupSpec) else _task(spec)
    return {name: value for name, value in found.items() if value is not None}


def _group(spec: GroupSpec) -> dict[str, Any]:
    said: dict[str, Any] = {"id": spec.key, "name": spec.title, "type": spec.order.capitalize()}
    if spec.children:
        said["children"] = list(spec.children)
    for name in ("next", "join", "prompt", "metadata"):
        if (value := getattr(spec, name)) != getattr(_EMPTY_GROUP, name):
            said[name] = value
    return said


def _task(spec: NewTask) -> dict[str, Any]:
    said: dict[str, Any] = {}
    for field in (*_FIRST, *(name for name in NAMES if name not in _FIRST)):
        if (value := getattr(spec, field)) != getattr(_PLAIN, field):
            said[NAMES[field][0]] = value
    said.setdefault("name", spec.title)
    said |= _metadata(spec.metadata)
    if spec.max_attempts != _PLAIN.max_attempts:
        said["max_attempts"] = spec.max_attempts
    if spec.retry is not None:
        said["retry"] = {n: getattr(spec.retry, n) for n in RetryPolicy.__struct_fields__}
    for name in ("escalation", "control"):
        if (value := getattr(spec, name)) is not None:
            said |= _control(value) if name == "control" else {name: msgspec.to_builtins(value)}
    if spec.budget is not None:
        bounds = msgspec.structs.asdict(spec.budget)
        said["budget"] = {name: value for name, value in bounds.items() if value is not None}
    if spec.target_agent is not None:
        said["target_agent"] = str(spec.target_agent)
    return said


def _metadata(metadata: dict[str, Any] | None) -> dict[str, Any]:
    """The metadata, of which tools are told apart where they are what a file may say."""
    if metadata is None:
        return {}
    tools = metadata.get(TOOLS)
    if not isinstance(tools, list) or not all(isinstance(tool, str) for tool in tools):
        return {"metadata": metadata}
    rest = {name: value for name, value in metadata.items() if name != TOOLS}
    return {"metadata": rest or None, TOOLS: tools}


def _control(control: Control) -> dict[str, Any]:
    fields = {
        each.name: value
        for each in fields_of(type(control))
        if (value := getattr(control, each.name)) is not None
        and (each.required or value != each.default)
    }
    if isinstance(control, Approval):
        return {"approval": fields}
    names = CONTROLS[type(control)]
    return {names[field]: value for field, value in fields.items()}


def camel(said: dict[str, Any]) -> dict[str, Any]:
    """The same with the names of the REST contract."""
    return _renamed(said, lambda name: re.sub(r"_([a-z])", lambda m: m[1].upper(), name))


def snake(said: dict[str, Any]) -> dict[str, Any]:
    """What has the names of the REST contract, with the names of files."""
    return _renamed(said, lambda name: re.sub(r"(?<=[a-z0-9])[A-Z]", _lowered, name))


def _lowered(match: re.Match[str]) -> str:
    return f"_{match[0].lower()}"


def _renamed(said: dict[str, Any], rename: Any) -> dict[str, Any]:
    return {
        rename(name): _inner(value, rename) if rename(name) in _NESTED else value
        for name, value in said.items()
    }


def _inner(value: Any, rename: Any) -> Any:
    if isinstance(value, list):
        return [_inner(each, rename) for each in value]
    return _renamed(value, rename) if isinstance(value, dict) else value


class _Dumper(yaml.SafeDumper):
    """Writes text in blocks, and in quotes what either version of YAML would take for another."""

    def ignore_aliases(self, data: Any) -> bool:
        """Everything is written out: a reader sees what holds where it stands."""
        del data
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> Any:
        del indentless
        return super().increase_indent(flow, indentless=False)


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    odd = not text.isprintable() and _hidden(text)
    style = '"' if odd else "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)
for _pattern in (INT, FLOAT, ODD_FLOAT):
    _whole = re.compile(rf"(?:{_pattern.pattern})$")
    _Dumper.add_implicit_resolver("tag:tenuto", _whole, list("-+.0123456789"))


def _hidden(text: str) -> set[str]:
    """The characters that people do not see, or that readers take for the end of a line or not."""
    return {char for char in set(text) - {"\n"} if is_hidden(char)}


def _spelled(char: str) -> str:
    return f"\\u{ord(char):04x}" if ord(char) < 0x10000 else f"\\U{ord(char):08x}"


def yaml_of(said: Any) -> str:
    """Plain values as YAML text, in which nothing is hidden from whoever prints it."""
    text: str = yaml.dump(
        said, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=WIDTH, indent=2
    )
    # Text with such a character is in double quotes, where an escape stands for it.
    hidden = {ord(char): _spelled(char) for char in _hidden(text)}
    return text.translate(hidden)


def dump(specs: Iterable[Spec]) -> str:
    """A document that loads back to equal definitions; an empty one for none."""
    tasks: list[dict[str, Any]] = []
    groups: list[dict[str, Any]] = []
    for spec in specs:
        (groups if isinstance(spec, GroupSpec) else tasks).append(to_plain(spec))
    lists = {"tasks": tasks, "groups": groups}
    filled = {name: found for name, found in lists.items() if found}
    return yaml_of(filled) if filled else ""
