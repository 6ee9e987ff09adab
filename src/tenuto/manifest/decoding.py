"""A tree of values read as one of the shapes; what does not fit is noted where it stands."""

import re
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
from msgspec.structs import FieldInfo

from tenuto.manifest.errors import ManifestErrors, unknown
from tenuto.manifest.yaml_nodes import Node

_WORDS = {
    "str": "text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "array": "a list",
    "object": "a mapping",
    "null": "nothing",
    "uuid": "an id",
    "datetime": "a time",
}
_EXPECTED = re.compile(r"Expected `([^`]*)`, got `([^`]*)`")
_WAY = re.compile(r"\.([^.\[\]]+)|\[([0-9]+)\]")


class MappingFields:
    """What a mapping says: good values by name, and where they stand."""

    def __init__(self, node: Node, where: str) -> None:
        self.node = node
        self.where = where
        self.values: dict[str, Any] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def get(self, name: str) -> Any:
        return self.values.get(name)

    def at(self, name: str) -> Node:
        """The node of a field, or of the whole where the field is not there."""
        return self.node.get(name) or self.node

    def way(self, name: str) -> str:
        """The way to a field."""
        return f"{self.where}.{name}" if self.where else name


class ShapeDecoder:
    """Reads values into shapes and notes the faults."""

    def __init__(self, faults: ManifestErrors) -> None:
        self.faults = faults

    def mapping(self, node: Node, shape: type[msgspec.Struct], where: str) -> MappingFields | None:
        """The fields of a mapping that fit; nothing when it is none at all."""
        if not node.is_map:
            self.faults.note(node.place, where, f"must be a mapping, not {_kind(node)}")
            return None
        given = MappingFields(node, where)
        fields = types_of(shape)
        for name, entry in node.value.items():
            if name not in fields:
                self.faults.note(entry.place, where, unknown(name, fields))
            elif entry.node.value is not None:
                found = self.value(entry.node, fields[name], given.way(name))
                if found is not msgspec.UNSET:
                    given.values[name] = found
        for field in fields_of(shape):
            if field.required and node.get(field.name) is None:
                self.faults.note(node.place, where, f"{field.name} is missing")
        return given

    def value(self, node: Node, kind: Any, where: str) -> Any:
        """A value of that type; `UNSET` for one that does not fit, which is noted."""
        shape, item = _parts(kind)
        if shape is not None and node.is_map:
            return self._shaped(node, shape, where)
        if item is not None and node.is_list and _parts(item)[0] is not None:
            found = [self.value(each, item, f"{where}[{at}]") for at, each in enumerate(node.value)]
            return msgspec.UNSET if any(each is msgspec.UNSET for each in found) else found
        try:
            return msgspec.convert(node.plain(), kind)
        except msgspec.ValidationError as error:
            self._note(node, kind, where, str(error))
            return msgspec.UNSET

    def _shaped(self, node: Node, shape: type[msgspec.Struct], where: str) -> Any:
        given = self.mapping(node, shape, where)
        assert given is not None
        said = {name for name in node.value if node.get(name) is not None}
        needed = {field.name for field in fields_of(shape) if field.required}
        if said != set(given.values) or not needed <= said:
            return msgspec.UNSET
        return shape(**given.values)

    def _note(self, node: Node, kind: Any, where: str, said: str) -> None:
        """Note what msgspec says, in our words and at the value that it means."""
        why, _, path = said.partition(" - at `$")
        for name, index in _WAY.findall(path):
            if name and node.is_map and name in node.value:
                node, where = node.value[name].node, f"{where}.{name}"
            elif index and node.is_list and int(index) < len(node.value):
                node, where = node.value[int(index)], f"{where}[{index}]"
        self.faults.note(node.place, where, _told(why, kind, node))


def _told(why: str, kind: Any, node: Node) -> str:
    if expected := _EXPECTED.match(why):
        wanted = [_WORDS.get(word.strip(), word.strip()) for word in expected[1].split("|")]
        hint = "; put it in quotes" if "text" in wanted and _is_number(node) else ""
        names = " or ".join(word for word in wanted if word != "nothing")
        return f"must be {names}, not {_kind(node)}{hint}"
    if why.startswith("Invalid enum value") and (choices := _choices(kind)):
        return f"must be one of {', '.join(choices)}, not {str(node.value)[:60]!r}"
    return why[:1].lower() + why[1:]


def _is_number(node: Node) -> bool:
    return isinstance(node.value, bool | int | float)


def _kind(node: Node) -> str:
    value = node.value
    if value is None:
        return "nothing"
    names: dict[type, str] = {dict: "a mapping", list: "a list", str: "text", bool: "true or false"}
    return names.get(type(value), "a number")


@cache
def fields_of(shape: type[msgspec.Struct]) -> tuple[FieldInfo, ...]:
    """The fields of a structure; asking msgspec takes long."""
    return msgspec.structs.fields(shape)


@cache
def types_of(shape: type[msgspec.Struct]) -> dict[str, Any]:
    """The fields of a shape with their types."""
    return {field.encode_name: field.type for field in fields_of(shape)}


def _parts(kind: Any) -> tuple[type[msgspec.Struct] | None, Any]:
    """The shape that a type allows, and the type of items of a list that it allows."""
    shape, item = None, None
    for each in _alternatives(kind):
        if isinstance(each, type) and issubclass(each, msgspec.Struct):
            shape = each
        elif get_origin(each) is list:
            [item] = get_args(each)
    return shape, item


def _alternatives(kind: Any) -> list[Any]:
    """The types that a union joins, without remarks on them."""
    if get_origin(kind) is Annotated:
        return _alternatives(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        return [found for each in get_args(kind) for found in _alternatives(each)]
    return [kind]


def _choices(kind: Any) -> list[str]:
    """The words that a type allows, those alike but for capitals once."""
    words = [
        str(word)
        for each in _alternatives(kind)
        if get_origin(each) is Literal
        for word in get_args(each)
    ]
    return list({word.lower(): word for word in reversed(words)}.values())[::-1]
