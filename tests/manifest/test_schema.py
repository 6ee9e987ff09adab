"""The published schema: current, true of every example, and as strict as the reader about names."""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from docs import generate
from tests.manifest.examples import FLOW, S2

from tenuto.manifest.manifest import read_manifest
from tenuto.manifest.schema import json_schema
from tenuto.model.errors import Invalid

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "yaml.md"
PUBLISHED = ROOT / "docs" / "tenuto.schema.json"
EXAMPLES = re.findall(r"^```yaml\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)


def faults(text: str) -> list[str]:
    validator = jsonschema.Draft202012Validator(json_schema())
    documents: list[Any] = list(yaml.load_all(text, Loader=_Core))
    return [error.message for document in documents for error in validator.iter_errors(document)]


class _Core(yaml.SafeLoader):
    """Times stay text, as in JSON."""


_Core.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith("timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def test_published_schema_is_current() -> None:
    assert PUBLISHED.read_text(encoding="utf-8") == generate.yaml_schema()
    jsonschema.Draft202012Validator.check_schema(json.loads(PUBLISHED.read_text(encoding="utf-8")))


@pytest.mark.parametrize("text", [S2, FLOW, *EXAMPLES])
def test_every_example_validates_and_loads(text: str) -> None:
    assert faults(text) == []
    read_manifest({"example.yaml": text})


@pytest.mark.parametrize(
    "text",
    [
        "name: no id",
        "id: a\npriority: 11",
        "id: a\nunknown: 1",
        "id: -a",
        "tasks: [{id: a, retry: {backof: fixed}}]",
        "agents: []",
        "[]",
        "groups: [{id: g, type: sideways}]",
    ],
)
def test_schema_refuses_what_the_parser_refuses(text: str) -> None:
    assert faults(text)
    with pytest.raises(Invalid):
        read_manifest({"f": text})


def test_manifest_page_has_examples() -> None:
    assert len(EXAMPLES) >= 4
    assert S2 in EXAMPLES
