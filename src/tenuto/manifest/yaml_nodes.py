"""Parses YAML text into a tree of nodes with locations. No tag is ever executed.

Values follow the YAML 1.2 core schema, so `no`, `on` and `12:30` are text. The tree is built from
the parser's events, not by PyYAML's composer, so depth and size are limited while it is built.
"""

import re
from collections.abc import Iterator
from typing import Any

import msgspec
import yaml

from tenuto.model.bounds import MAX_DEPTH

MAX_BYTES = 10 * 1024 * 1024
MAX_NODES = 200_000
"""Maximum number of values in all files together; an aliased value counts at each use."""
MAX_NUMBER_LENGTH = 40
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_NULL = frozenset({"", "~", "null", "Null", "NULL"})
_TRUE = frozenset({"true", "True", "TRUE"})
_FALSE = frozenset({"false", "False", "FALSE"})
INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
SPECIAL_FLOAT = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_YAML = "tag:yaml.org,2002:"
OUTDENTED_FIELDS = {"schedule": ("type",), "escalation": ("reason", "prompt")}
"""Mappings of a task that are accepted without indentation, because copied text often lost it.

The name is then empty, and its fields follow. The first of them is not a field of a task."""
_STR, _SEQ, _MAP = f"{_YAML}str", f"{_YAML}seq", f"{_YAML}map"


class SourceLocation(msgspec.Struct, frozen=True):
    """A location in a file. Lines and columns count from 1; 0 means unknown."""

    file: str = ""
    line: int = 0
    column: int = 0


class YamlError(Exception):
    """The text is not valid or not supported YAML; `location` is where."""

    def __init__(self, reason: str, location: SourceLocation, code: str = "yaml_invalid") -> None:
        super().__init__(reason)
        self.reason = reason
        self.location = location
        self.code = code


class Node(msgspec.Struct):
    """A value with its location. A list's `value` has nodes, a mapping's has `Entry` by name."""

    value: Any
    location: SourceLocation
    size: int = 1
    """Number of values in the tree below and including this node."""
    height: int = 0
    """Levels of lists and mappings in the node."""

    @property
    def is_map(self) -> bool:
        return isinstance(self.value, dict)

    @property
    def is_list(self) -> bool:
        return isinstance(self.value, list)

    def get(self, name: str) -> "Node | None":
        """Returns the node of a field; `None` if it is absent or has no value."""
        entry = self.value.get(name) if isinstance(self.value, dict) else None
        return None if entry is None or entry.node.value is None else entry.node

    def plain(self) -> Any:
        """Returns the value without locations."""
        if isinstance(self.value, dict):
            return {name: entry.node.plain() for name, entry in self.value.items()}
        if isinstance(self.value, list):
            return [item.plain() for item in self.value]
        return self.value


class Entry(msgspec.Struct, frozen=True):
    """A field of a mapping: the location of its name, and the node of its value."""

    location: SourceLocation
    node: Node


def node_of(value: Any, location: SourceLocation = SourceLocation(), depth: int = 0) -> Node:  # noqa: B008  frozen
    """Returns a plain value as nodes of one location; raises `YamlError` if nested too deeply."""
    if depth > MAX_DEPTH:
        raise YamlError(f"nested deeper than {MAX_DEPTH}", location, "too_deep")
    deeper = depth + 1
    if isinstance(value, dict):
        return Node(
            {k: Entry(location, node_of(v, location, deeper)) for k, v in value.items()}, location
        )
    if isinstance(value, list | tuple):
        return Node([node_of(item, location, deeper) for item in value], location)
    return Node(value, location)


def decode_text(file: str, content: bytes | str) -> str:
    """Returns a file's text; raises `YamlError` if it is not text or too large."""
    if len(content) > MAX_BYTES:
        raise YamlError(f"is larger than {MAX_BYTES:,} bytes", SourceLocation(file), "too_large")
    if isinstance(content, bytes):
        try:
            text = content.decode()
        except UnicodeDecodeError as error:
            location = _location_after(file, content[: error.start].decode(errors="replace"))
            raise YamlError("is not UTF-8 text", location, "text_invalid") from error
    else:
        text = content
    for match in re.finditer("[\x00\ud800-\udfff]", text):
        location = _location_after(file, text[: match.start()])
        raise YamlError("contains a NUL or lone surrogate character", location, "text_invalid")
    return text.removeprefix("\ufeff")


def _location_after(file: str, before: str) -> SourceLocation:
    """Returns the location after the text `before` at the start of a file."""
    line = before.count("\n") + 1
    return SourceLocation(file, line, len(before) - (before.rfind("\n") + 1) + 1)


class _OpenNode:
    """A list or mapping that is not closed yet."""

    def __init__(self, node: Node, anchor: str | None) -> None:
        self.node = node
        self.anchor = anchor
        self.name: tuple[str, SourceLocation] | None = None
        self.last_name: str | None = None
        """The name whose value was added last."""
        self.inner: tuple[Node, tuple[str, ...]] | None = None
        """A mapping that lost its indentation, and the names of its fields."""


class Composer:
    """Parses the documents of files. One composer counts the values of all files of a manifest."""

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self._remaining = MAX_NODES
        self._file = ""
        self._stack: list[_OpenNode] = []
        self._anchors: dict[str, Node | None] = {}
        self._root: Node | None = None

    def documents(self, file: str, text: str) -> Iterator[Node]:
        """Yields the documents of a file, including empty ones; raises `YamlError` if invalid."""
        self._file = file
        try:
            for event in yaml.parse(text, Loader=_LOADER):
                if isinstance(event, yaml.DocumentStartEvent):
                    self._stack, self._anchors, self._root = [], {}, None
                elif isinstance(event, yaml.DocumentEndEvent):
                    assert self._root is not None
                    yield self._root
                else:
                    self._handle_event(event)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            problem = error.problem or error.context or "invalid YAML"
            raise YamlError(problem, self._location(mark)) from error
        except yaml.YAMLError as error:
            raise YamlError(str(error).splitlines()[0], SourceLocation(file)) from error

    def _location(self, mark: Any) -> SourceLocation:
        """Returns the location of a parser mark; without a mark only the file."""
        return SourceLocation(self._file) if mark is None else _location_of_mark(self._file, mark)

    def _handle_event(self, event: Any) -> None:
        """Adds the node that a parser event begins or ends to the tree."""
        location = self._location(event.start_mark)
        if isinstance(event, yaml.ScalarEvent):
            self._add_scalar(event, location)
        elif isinstance(event, yaml.AliasEvent):
            self._add_alias(event.anchor or "", location)
        elif isinstance(event, yaml.SequenceStartEvent | yaml.MappingStartEvent):
            self._open_collection(event, location)
        elif isinstance(event, yaml.SequenceEndEvent | yaml.MappingEndEvent):
            closed = self._stack.pop()
            if closed.anchor is not None:
                self._anchors[closed.anchor] = closed.node
            self._add_node(closed.node)

    def _add_scalar(self, event: Any, location: SourceLocation) -> None:
        """Adds a scalar as a field name or a value."""
        if self._expects_name():
            if event.value == "<<" and event.implicit[0]:
                raise YamlError("merging by << is not supported; repeat the fields", location)
            self._stack[-1].name = (self._check_name(event.value, location), location)
            return
        tag = event.tag
        if tag in (_STR, "!") or (tag is None and not event.implicit[0]):
            node = Node(event.value, location)
        elif tag is None:
            node = Node(_resolve_scalar(event.value, location), location)
        else:
            raise _forbidden_tag_error(tag, location)
        self._charge_values(1, location)
        if event.anchor is not None:
            self._anchors[event.anchor] = node
        self._add_node(node)

    def _open_collection(self, event: Any, location: SourceLocation) -> None:
        """Pushes a new list or mapping onto the stack; its end adds it to the tree."""
        is_map = isinstance(event, yaml.MappingStartEvent)
        if event.tag not in (None, "!", _MAP if is_map else _SEQ):
            raise _forbidden_tag_error(event.tag, location)
        if self._expects_name():
            raise YamlError("a field name must be text, not a list or mapping", location)
        self._charge_values(1, location)
        self._check_depth(len(self._stack) + 1, location)
        if event.anchor is not None:
            self._anchors[event.anchor] = None
        self._stack.append(_OpenNode(Node({} if is_map else [], location), event.anchor))

    def _add_alias(self, anchor: str, location: SourceLocation) -> None:
        """Adds the value of an alias as a field name or a value."""
        if anchor not in self._anchors:
            raise YamlError(f"alias *{anchor} has no anchor &{anchor} before it", location)
        target = self._anchors[anchor]
        if target is None:
            raise YamlError(f"alias *{anchor} is inside the value that it refers to", location)
        if self._expects_name():
            if not isinstance(target.value, str):
                raise YamlError("a field name must be text, not a list or mapping", location)
            self._stack[-1].name = (self._check_name(target.value, location), location)
            return
        self._charge_values(target.size, location)
        self._check_depth(len(self._stack) + target.height, location)
        self._add_node(Node(target.value, location, target.size, target.height))

    def _expects_name(self) -> bool:
        """True if the next event is a field name of the open mapping."""
        return bool(self._stack) and self._stack[-1].node.is_map and self._stack[-1].name is None

    def _check_name(self, name: str, location: SourceLocation) -> str:
        """Returns the field name unchanged; raises `YamlError` if the mapping has it already."""
        fields = self._mapping_for(self._stack[-1], name, location).value
        if name in fields:
            first = fields[name].location
            raise YamlError(f"{name!r} is defined twice, first in line {first.line}", location)
        return name

    def _mapping_for(self, open_node: _OpenNode, name: str, location: SourceLocation) -> Node:
        """Returns the mapping of a name: the open one, or one in it that lost its indentation.

        The first name of such a mapping creates it and adds a warning.
        """
        if open_node.inner is not None and name in open_node.inner[1]:
            return open_node.inner[0]
        open_node.inner = None
        last_name = open_node.last_name
        inner_fields = OUTDENTED_FIELDS.get(last_name or "", ())
        if last_name is None or len(self._stack) > 1 or name != next(iter(inner_fields), None):
            return open_node.node
        entry = open_node.node.value[last_name]
        if entry.node.value is not None:
            return open_node.node
        inner = Node({}, location)
        open_node.node.value[last_name] = Entry(entry.location, inner)
        open_node.inner = (inner, inner_fields)
        position = f"{location.file}:{location.line}:{location.column}"
        self.warnings.append(f"{position}: {name} is read as indented under {last_name}")
        return inner

    def _add_node(self, node: Node) -> None:
        """Adds a finished node to the open list or mapping, or makes it the root."""
        if not self._stack:
            self._root = node
            return
        parent = self._stack[-1]
        parent.node.size += node.size
        parent.node.height = max(parent.node.height, node.height + 1)
        if parent.node.is_list:
            parent.node.value.append(node)
        else:
            assert parent.name is not None
            name, location = parent.name
            owner = parent.node if parent.inner is None else parent.inner[0]
            owner.value[name] = Entry(location, node)
            parent.name, parent.last_name = None, name

    def _charge_values(self, size: int, location: SourceLocation) -> None:
        """Subtracts `size` from the values that all files may have; raises `YamlError` below 0."""
        self._remaining -= size
        if self._remaining < 0:
            raise YamlError(f"more than {MAX_NODES:,} values", location, "too_large")

    def _check_depth(self, depth: int, location: SourceLocation) -> None:
        """Raises `YamlError` if nodes are nested too deeply."""
        if depth > MAX_DEPTH:
            raise YamlError(f"nested deeper than {MAX_DEPTH}", location, "too_deep")


def _location_of_mark(file: str, mark: Any) -> SourceLocation:
    """Returns the location of a parser mark, whose lines and columns count from 0."""
    return SourceLocation(file, mark.line + 1, mark.column + 1)


def _forbidden_tag_error(tag: str, location: SourceLocation) -> YamlError:
    """Returns the error for a tag other than text, list and mapping."""
    tag_name = "!!" + tag.removeprefix(_YAML) if tag.startswith(_YAML) else tag
    return YamlError(f"the tag {tag_name[:100]} is not allowed", location)


def _resolve_scalar(text: str, location: SourceLocation) -> Any:
    """Returns the text, number, bool or `None` of a scalar; `YamlError` for too many digits."""
    if text in _NULL:
        return None
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    if SPECIAL_FLOAT.fullmatch(text):
        return float(text.replace(".", "", 1))
    if len(text) > MAX_NUMBER_LENGTH:
        if text.isascii() and text.isdigit():
            raise YamlError(
                f"a number has more than {MAX_NUMBER_LENGTH} digits; put text in quotes", location
            )
        return text
    if INT.fullmatch(text):
        # A leading zero does not mean octal in YAML 1.2.
        return int(text, 0 if text[:2] in ("0o", "0x") else 10)
    return float(text) if FLOAT.fullmatch(text) else text
