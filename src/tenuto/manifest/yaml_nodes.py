"""YAML text as a tree that knows where each value stands. Nothing in it is ever run.

Values are those of YAML 1.2's core schema, so `no`, `on` and `12:30` are text. Built from the
parser's events and not by its own composer: depth and size are limited before anything grows.
"""

import re
from collections.abc import Iterator
from typing import Any

import msgspec
import yaml

from tenuto.model.bounds import MAX_DEPTH

MAX_BYTES = 10 * 1024 * 1024
MAX_NODES = 200_000
"""Values in all files together, those behind aliases counted as often as they are named."""
MAX_NUMBER = 40
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_NULL = frozenset({"", "~", "null", "Null", "NULL"})
_TRUE = frozenset({"true", "True", "TRUE"})
_FALSE = frozenset({"false", "False", "FALSE"})
INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
ODD_FLOAT = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_YAML = "tag:yaml.org,2002:"
OUTDENTED = {"schedule": ("type",), "escalation": ("reason", "prompt")}
"""Mappings of a task that are found without their indentation, because copied text often has lost
it: the name is empty then, and its own fields follow. The first of them is no field of a task."""
_STR, _SEQ, _MAP = f"{_YAML}str", f"{_YAML}seq", f"{_YAML}map"


class SourceLocation(msgspec.Struct, frozen=True):
    """Where something stands; lines and columns count from 1, and 0 is nowhere."""

    file: str = ""
    line: int = 0
    column: int = 0


class YamlError(Exception):
    """Text that is no YAML of ours, and where."""

    def __init__(self, why: str, place: SourceLocation, code: str = "yaml_invalid") -> None:
        super().__init__(why)
        self.why = why
        self.place = place
        self.code = code


class Node(msgspec.Struct):
    """A value and its place. A list's `value` has nodes, a mapping's has `Entry` by name."""

    value: Any
    place: SourceLocation
    size: int = 1
    height: int = 0

    @property
    def is_map(self) -> bool:
        return isinstance(self.value, dict)

    @property
    def is_list(self) -> bool:
        return isinstance(self.value, list)

    def get(self, name: str) -> "Node | None":
        """The value under a name of a mapping; `None` also for one that says nothing."""
        entry = self.value.get(name) if isinstance(self.value, dict) else None
        return None if entry is None or entry.node.value is None else entry.node

    def plain(self) -> Any:
        """The value without places."""
        if isinstance(self.value, dict):
            return {name: entry.node.plain() for name, entry in self.value.items()}
        if isinstance(self.value, list):
            return [item.plain() for item in self.value]
        return self.value


class Entry(msgspec.Struct, frozen=True):
    """A name in a mapping, where it stands, and what it has."""

    place: SourceLocation
    node: Node


def node_of(value: Any, place: SourceLocation = SourceLocation(), depth: int = 0) -> Node:  # noqa: B008  it is frozen
    """A plain value as a tree, all of it at one place."""
    if depth > MAX_DEPTH:
        raise YamlError(f"nested deeper than {MAX_DEPTH}", place, "too_deep")
    deeper = depth + 1
    if isinstance(value, dict):
        return Node({k: Entry(place, node_of(v, place, deeper)) for k, v in value.items()}, place)
    if isinstance(value, list | tuple):
        return Node([node_of(item, place, deeper) for item in value], place)
    return Node(value, place)


def decoded(file: str, content: bytes | str) -> str:
    """A file's text; `Unreadable` for what is not text or too large."""
    if len(content) > MAX_BYTES:
        raise YamlError(f"is larger than {MAX_BYTES:,} bytes", SourceLocation(file), "too_large")
    if isinstance(content, bytes):
        try:
            text = content.decode()
        except UnicodeDecodeError as error:
            place = _place_in(file, content[: error.start].decode(errors="replace"))
            raise YamlError("is not UTF-8 text", place, "text_invalid") from error
    else:
        text = content
    for bad in re.finditer("[\x00\ud800-\udfff]", text):
        place = _place_in(file, text[: bad.start()])
        raise YamlError("a NUL or lone surrogate character", place, "text_invalid")
    return text.removeprefix("\ufeff")


def _place_in(file: str, before: str) -> SourceLocation:
    line = before.count("\n") + 1
    return SourceLocation(file, line, len(before) - (before.rfind("\n") + 1) + 1)


class _OpenNode:
    """A list or mapping whose end has not come yet."""

    def __init__(self, node: Node, anchor: str | None) -> None:
        self.node = node
        self.anchor = anchor
        self.name: tuple[str, SourceLocation] | None = None
        self.last: str | None = None
        """The name that was filled last."""
        self.inner: tuple[Node, tuple[str, ...]] | None = None
        """A mapping that lost its indentation, and the fields that it may have."""


class Composer:
    """Documents of files. One counts for all the files that are read together."""

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self._left = MAX_NODES
        self._file = ""
        self._stack: list[_OpenNode] = []
        self._anchors: dict[str, Node | None] = {}
        self._root: Node | None = None

    def documents(self, file: str, text: str) -> Iterator[Node]:
        """The documents of a file, the empty ones too; raises `Unreadable` where it must stop."""
        self._file = file
        try:
            for event in yaml.parse(text, Loader=_LOADER):
                if isinstance(event, yaml.DocumentStartEvent):
                    self._stack, self._anchors, self._root = [], {}, None
                elif isinstance(event, yaml.DocumentEndEvent):
                    assert self._root is not None
                    yield self._root
                else:
                    self._take(event)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            said = error.problem or error.context or "cannot be understood"
            raise YamlError(said, self._place(mark)) from error
        except yaml.YAMLError as error:
            raise YamlError(str(error).splitlines()[0], SourceLocation(file)) from error

    def _place(self, mark: Any) -> SourceLocation:
        return SourceLocation(self._file) if mark is None else _at(self._file, mark)

    def _take(self, event: Any) -> None:
        place = self._place(event.start_mark)
        if isinstance(event, yaml.ScalarEvent):
            self._scalar(event, place)
        elif isinstance(event, yaml.AliasEvent):
            self._alias(event.anchor or "", place)
        elif isinstance(event, yaml.SequenceStartEvent | yaml.MappingStartEvent):
            self._begin(event, place)
        elif isinstance(event, yaml.SequenceEndEvent | yaml.MappingEndEvent):
            done = self._stack.pop()
            if done.anchor is not None:
                self._anchors[done.anchor] = done.node
            self._put(done.node)

    def _scalar(self, event: Any, place: SourceLocation) -> None:
        if self._names_next():
            if event.value == "<<" and event.implicit[0]:
                raise YamlError("merging by << is not supported: repeat the fields", place)
            self._stack[-1].name = (self._name(event.value, place), place)
            return
        tag = event.tag
        if tag in (_STR, "!") or (tag is None and not event.implicit[0]):
            node = Node(event.value, place)
        elif tag is None:
            node = Node(_resolved(event.value, place), place)
        else:
            raise _forbidden(tag, place)
        self._count(1, place)
        if event.anchor is not None:
            self._anchors[event.anchor] = node
        self._put(node)

    def _begin(self, event: Any, place: SourceLocation) -> None:
        is_map = isinstance(event, yaml.MappingStartEvent)
        if event.tag not in (None, "!", _MAP if is_map else _SEQ):
            raise _forbidden(event.tag, place)
        if self._names_next():
            raise YamlError("a name must be text, not a list or mapping", place)
        self._count(1, place)
        self._check_depth(len(self._stack) + 1, place)
        if event.anchor is not None:
            self._anchors[event.anchor] = None
        self._stack.append(_OpenNode(Node({} if is_map else [], place), event.anchor))

    def _alias(self, anchor: str, place: SourceLocation) -> None:
        if anchor not in self._anchors:
            raise YamlError(f"there is no anchor &{anchor} before it", place)
        target = self._anchors[anchor]
        if target is None:
            raise YamlError(f"*{anchor} stands inside of what it refers to", place)
        if self._names_next():
            if not isinstance(target.value, str):
                raise YamlError("a name must be text, not a list or mapping", place)
            self._stack[-1].name = (self._name(target.value, place), place)
            return
        self._count(target.size, place)
        self._check_depth(len(self._stack) + target.height, place)
        self._put(Node(target.value, place, target.size, target.height))

    def _names_next(self) -> bool:
        return bool(self._stack) and self._stack[-1].node.is_map and self._stack[-1].name is None

    def _name(self, name: str, place: SourceLocation) -> str:
        fields = self._owner(self._stack[-1], name, place).value
        if name in fields:
            first = fields[name].place
            raise YamlError(f"{name!r} stands twice, first in line {first.line}", place)
        return name

    def _owner(self, open_: _OpenNode, name: str, place: SourceLocation) -> Node:
        """The mapping that a name belongs to: the open one, or one in it without indentation."""
        if open_.inner is not None and name in open_.inner[1]:
            return open_.inner[0]
        open_.inner = None
        last = open_.last
        fields = OUTDENTED.get(last or "", ())
        if last is None or len(self._stack) > 1 or name != next(iter(fields), None):
            return open_.node
        entry = open_.node.value[last]
        if entry.node.value is not None:
            return open_.node
        inner = Node({}, place)
        open_.node.value[last] = Entry(entry.place, inner)
        open_.inner = (inner, fields)
        told = f"{place.file}:{place.line}:{place.column}"
        self.warnings.append(f"{told}: {name} is read as indented under {last}")
        return inner

    def _put(self, node: Node) -> None:
        if not self._stack:
            self._root = node
            return
        above = self._stack[-1]
        above.node.size += node.size
        above.node.height = max(above.node.height, node.height + 1)
        if above.node.is_list:
            above.node.value.append(node)
        else:
            assert above.name is not None
            name, place = above.name
            owner = above.node if above.inner is None else above.inner[0]
            owner.value[name] = Entry(place, node)
            above.name, above.last = None, name

    def _count(self, size: int, place: SourceLocation) -> None:
        self._left -= size
        if self._left < 0:
            raise YamlError(f"more than {MAX_NODES:,} values", place, "too_large")

    def _check_depth(self, depth: int, place: SourceLocation) -> None:
        if depth > MAX_DEPTH:
            raise YamlError(f"nested deeper than {MAX_DEPTH}", place, "too_deep")


def _at(file: str, mark: Any) -> SourceLocation:
    return SourceLocation(file, mark.line + 1, mark.column + 1)


def _forbidden(tag: str, place: SourceLocation) -> YamlError:
    shown = "!!" + tag.removeprefix(_YAML) if tag.startswith(_YAML) else tag
    return YamlError(f"the tag {shown[:100]} is not allowed", place)


def _resolved(text: str, place: SourceLocation) -> Any:
    """What a scalar without quotes stands for."""
    if text in _NULL:
        return None
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    if ODD_FLOAT.fullmatch(text):
        return float(text.replace(".", "", 1))
    if len(text) > MAX_NUMBER:
        if text.isascii() and text.isdigit():
            raise YamlError("a number with too many digits; put text in quotes", place)
        return text
    if INT.fullmatch(text):
        # A leading zero is no sign of octal here.
        return int(text, 0 if text[:2] in ("0o", "0x") else 10)
    return float(text) if FLOAT.fullmatch(text) else text
