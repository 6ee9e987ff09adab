"""What differs between two versions of a definition, field by field."""

from collections.abc import Iterator
from typing import Any

import msgspec

from tenuto.manifest.export import to_plain
from tenuto.model.flows.plan import Spec


class FieldChange(msgspec.Struct, frozen=True):
    """A field that is another now; `null` is one that is not there."""

    field: str
    before: Any
    after: Any


def changes(before: Spec | None, after: Spec) -> list[FieldChange]:
    """The fields that differ, under the names of files, those of mappings one by one."""
    return list(_compared("", {} if before is None else to_plain(before), to_plain(after)))


def same(before: Spec, after: Spec) -> bool:
    """Whether two definitions say the same; 1 and true, or 1 and 1.0, do not."""
    return type(before) is type(after) and _encoded(before) == _encoded(after)


def _encoded(value: Any) -> bytes:
    return msgspec.json.encode(value, order="deterministic")


def _compared(way: str, before: Any, after: Any) -> Iterator[FieldChange]:
    if not (isinstance(before, dict) and isinstance(after, dict)):
        if _encoded(before) != _encoded(after):
            yield FieldChange(way, before, after)
        return
    for name in {**before, **after}:
        inner = f"{way}.{name}" if way else name
        if (name in before) != (name in after):
            yield FieldChange(inner, before.get(name), after.get(name))
            continue
        yield from _compared(inner, before.get(name), after.get(name))
