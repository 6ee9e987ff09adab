"""Compares two versions of a definition field by field."""

from collections.abc import Iterator
from typing import Any

import msgspec

from tenuto.manifest.export import to_plain
from tenuto.model.flows.plan import Spec


class FieldChange(msgspec.Struct, frozen=True):
    """A changed field with its old and new value; `null` means that the field is absent."""

    field: str
    before: Any
    after: Any


def field_changes(before: Spec | None, after: Spec) -> list[FieldChange]:
    """Returns the changed fields under their YAML names; fields of mappings one by one."""
    return list(_iter_changes("", {} if before is None else to_plain(before), to_plain(after)))


def is_same(before: Spec, after: Spec) -> bool:
    """True if two definitions are equal; 1 and true, or 1 and 1.0, are not."""
    return type(before) is type(after) and _canonical_json(before) == _canonical_json(after)


def _canonical_json(value: Any) -> bytes:
    """Returns JSON with sorted keys; 1, 1.0 and true differ in it."""
    return msgspec.json.encode(value, order="deterministic")


def _iter_changes(path: str, before: Any, after: Any) -> Iterator[FieldChange]:
    """Yields the changes between two values at a path."""
    if not (isinstance(before, dict) and isinstance(after, dict)):
        if _canonical_json(before) != _canonical_json(after):
            yield FieldChange(path, before, after)
        return
    for name in {**before, **after}:
        inner_path = f"{path}.{name}" if path else name
        if (name in before) != (name in after):
            yield FieldChange(inner_path, before.get(name), after.get(name))
            continue
        yield from _iter_changes(inner_path, before.get(name), after.get(name))
