"""The JSON Schema of the files, made from the shapes that the reader follows."""

from typing import Any

import msgspec

from tenuto.manifest.shapes import NOT_YET, GroupShape, Lists, TaskShape

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_KEYED = [{"required": ["id"]}, {"required": ["key"]}]


def schema() -> dict[str, Any]:
    """What one document of a file may be: a task, a group, or lists."""
    _, parts = msgspec.json.schema_components(
        [TaskShape, GroupShape, Lists], ref_template="#/$defs/{name}"
    )
    found: dict[str, Any] = dict(parts)
    for name in ("TaskShape", "GroupShape"):
        found[name] = found[name] | {"anyOf": _KEYED}
    found["Lists"] = found["Lists"] | {"minProperties": 1}
    return {
        "$schema": DIALECT,
        "title": "Tenuto definitions",
        "description": f"One document of a file. Not supported yet: lists of {', '.join(NOT_YET)}.",
        "anyOf": [
            {"$ref": "#/$defs/TaskShape"},
            {"allOf": [{"$ref": "#/$defs/GroupShape"}, {"required": ["children"]}]},
            {"$ref": "#/$defs/Lists"},
            {"type": "null"},
        ],
        "$defs": dict(sorted(found.items())),
    }
