"""Builds the JSON Schema of YAML files from the shapes that the decoder uses."""

from typing import Any

import msgspec

from tenuto.manifest.shapes import UNSUPPORTED_LISTS, GroupShape, Lists, TaskShape

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_ID_OR_KEY = [{"required": ["id"]}, {"required": ["key"]}]


def json_schema() -> dict[str, Any]:
    """Returns the JSON Schema of one document: a task, a group, or lists."""
    _, parts = msgspec.json.schema_components(
        [TaskShape, GroupShape, Lists], ref_template="#/$defs/{name}"
    )
    definitions: dict[str, Any] = dict(parts)
    for name in ("TaskShape", "GroupShape"):
        definitions[name] = definitions[name] | {"anyOf": _ID_OR_KEY}
    definitions["Lists"] = definitions["Lists"] | {"minProperties": 1}
    return {
        "$schema": DIALECT,
        "title": "Tenuto definitions",
        "description": (
            f"One document of a file. Not supported yet: lists of {', '.join(UNSUPPORTED_LISTS)}."
        ),
        "anyOf": [
            {"$ref": "#/$defs/TaskShape"},
            {"allOf": [{"$ref": "#/$defs/GroupShape"}, {"required": ["children"]}]},
            {"$ref": "#/$defs/Lists"},
            {"type": "null"},
        ],
        "$defs": dict(sorted(definitions.items())),
    }
