"""Decodes YAML nodes into shapes; collects a validation error with a location for each misfit."""

import re
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
from msgspec.structs import FieldInfo

from tenuto.manifest.errors import ManifestErrors, unknown_field_message
from tenuto.manifest.yaml_nodes import Node

_TYPE_NAMES = {
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
_PATH_PART = re.compile(r"\.([^.\[\]]+)|\[([0-9]+)\]")


class MappingFields:
    """The valid field values of a mapping by name, with their nodes and paths."""

    def __init__(self, node: Node, path: str) -> None:
        self.node = node
        self.path = path
        self.values: dict[str, Any] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def get(self, name: str) -> Any:
        """Returns the value of a field; `None` if it is absent or invalid."""
        return self.values.get(name)

    def field_node(self, name: str) -> Node:
        """Returns the node of a field, or that of the whole mapping if the field is absent."""
        return self.node.get(name) or self.node

    def field_path(self, name: str) -> str:
        """Returns the path to a field, such as `tasks[0].retry`."""
        return f"{self.path}.{name}" if self.path else name


class ShapeDecoder:
    """Decodes nodes into shapes and adds validation errors to `errors`."""

    def __init__(self, errors: ManifestErrors) -> None:
        self.errors = errors

    def decode_mapping(
        self, node: Node, shape: type[msgspec.Struct], path: str
    ) -> MappingFields | None:
        """Returns a mapping's valid fields, adds errors for others; `None` for another node."""
        if not node.is_map:
            self.errors.add(node.location, path, f"must be a mapping, not {_value_kind(node)}")
            return None
        result = MappingFields(node, path)
        types = field_types(shape)
        for name, entry in node.value.items():
            if name not in types:
                self.errors.add(entry.location, path, unknown_field_message(name, types))
            elif entry.node.value is not None:
                value = self.decode_value(entry.node, types[name], result.field_path(name))
                if value is not msgspec.UNSET:
                    result.values[name] = value
        for field in struct_fields(shape):
            if field.required and node.get(field.name) is None:
                self.errors.add(node.location, path, f"{field.name} is missing")
        return result

    def decode_value(self, node: Node, type_: Any, path: str) -> Any:
        """Returns the node as a value of the type; adds an error and returns `UNSET` if invalid."""
        shape, item_type = _struct_and_item_types(type_)
        if shape is not None and node.is_map:
            return self._decode_struct(node, shape, path)
        if (
            item_type is not None
            and node.is_list
            and _struct_and_item_types(item_type)[0] is not None
        ):
            items = [
                self.decode_value(item_node, item_type, f"{path}[{index}]")
                for index, item_node in enumerate(node.value)
            ]
            return msgspec.UNSET if any(value is msgspec.UNSET for value in items) else items
        try:
            return msgspec.convert(node.plain(), type_)
        except msgspec.ValidationError as error:
            self._add_error(node, type_, path, str(error))
            return msgspec.UNSET

    def _decode_struct(self, node: Node, shape: type[msgspec.Struct], path: str) -> Any:
        """Returns a mapping as a struct, or `UNSET` if a field is invalid or missing."""
        result = self.decode_mapping(node, shape, path)
        assert result is not None
        present = {name for name in node.value if node.get(name) is not None}
        required = {field.name for field in struct_fields(shape) if field.required}
        if present != set(result.values) or not required <= present:
            return msgspec.UNSET
        return shape(**result.values)

    def _add_error(self, node: Node, type_: Any, path: str, message: str) -> None:
        """Adds an error for msgspec's message, reworded, at the location of the invalid value."""
        reason, _, value_path = message.partition(" - at `$")
        for name, index in _PATH_PART.findall(value_path):
            if name and node.is_map and name in node.value:
                node, path = node.value[name].node, f"{path}.{name}"
            elif index and node.is_list and int(index) < len(node.value):
                node, path = node.value[int(index)], f"{path}[{index}]"
        self.errors.add(node.location, path, _error_message(reason, type_, node))


def _error_message(reason: str, type_: Any, node: Node) -> str:
    """Returns msgspec's message in plain words, with the allowed values."""
    if match := _EXPECTED.match(reason):
        expected_types = [
            _TYPE_NAMES.get(word.strip(), word.strip()) for word in match[1].split("|")
        ]
        hint = "; put it in quotes" if "text" in expected_types and _is_number(node) else ""
        names = " or ".join(word for word in expected_types if word != "nothing")
        return f"must be {names}, not {_value_kind(node)}{hint}"
    if reason.startswith("Invalid enum value") and (choices := _choices(type_)):
        return f"must be one of {', '.join(choices)}, not {str(node.value)[:60]!r}"
    return reason[:1].lower() + reason[1:]


def _is_number(node: Node) -> bool:
    """True for numbers and for true and false, which also need quotes to be text."""
    return isinstance(node.value, bool | int | float)


def _value_kind(node: Node) -> str:
    """Returns the type of a node's value for error messages."""
    value = node.value
    if value is None:
        return "nothing"
    names: dict[type, str] = {dict: "a mapping", list: "a list", str: "text", bool: "true or false"}
    return names.get(type(value), "a number")


@cache
def struct_fields(shape: type[msgspec.Struct]) -> tuple[FieldInfo, ...]:
    """Returns the fields of a struct; cached, because msgspec is slow here."""
    return msgspec.structs.fields(shape)


@cache
def field_types(shape: type[msgspec.Struct]) -> dict[str, Any]:
    """Returns the types of a shape's fields by name."""
    return {field.encode_name: field.type for field in struct_fields(shape)}


def _struct_and_item_types(type_: Any) -> tuple[type[msgspec.Struct] | None, Any]:
    """Returns the struct, and the item type of the list, that a type allows; `None` for neither."""
    shape, item_type = None, None
    for alternative in _alternatives(type_):
        if isinstance(alternative, type) and issubclass(alternative, msgspec.Struct):
            shape = alternative
        elif get_origin(alternative) is list:
            [item_type] = get_args(alternative)
    return shape, item_type


def _alternatives(type_: Any) -> list[Any]:
    """Returns the member types of a union, without annotations."""
    if get_origin(type_) is Annotated:
        return _alternatives(get_args(type_)[0])
    if get_origin(type_) in (Union, UnionType):
        return [alternative for member in get_args(type_) for alternative in _alternatives(member)]
    return [type_]


def _choices(type_: Any) -> list[str]:
    """Returns the literals that a type allows; those equal except for case only once."""
    words = [
        str(word)
        for alternative in _alternatives(type_)
        if get_origin(alternative) is Literal
        for word in get_args(alternative)
    ]
    return list({word.lower(): word for word in reversed(words)}.values())[::-1]
