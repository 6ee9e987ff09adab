"""Any file is loaded or refused with a location, without an internal error."""

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.manifest.examples import FLOW, S2
from tests.manifest.test_writing import values

from tenuto.manifest.documents import parse_spec
from tenuto.manifest.export import dump, to_yaml
from tenuto.manifest.manifest import Manifest, read_manifest
from tenuto.manifest.shapes import GroupShape, Lists, TaskShape
from tenuto.model.errors import Invalid


def outcome(text: str | bytes) -> Manifest | None:
    """Returns the manifest, or `None` if it is refused with a location or the file's name."""
    try:
        return read_manifest({"f.yaml": text})
    except Invalid as error:
        reported = error
    assert all(line.startswith(("f.yaml:", "... and")) for line in reported.message.split("\n")), (
        reported
    )
    assert reported.details["file"] == "f.yaml"
    return None


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=200) | st.binary(max_size=200))
def test_any_text_loads_or_is_refused(text: str | bytes) -> None:
    outcome(text)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([S2, FLOW]),
    st.integers(0, 1200),
    st.integers(0, 20),
    st.text("abc:-{}[]&*!|>'\"%@` \n\t#?,~0<", max_size=8),
)
def test_altered_example_loads_or_is_refused(text: str, at: int, length: int, piece: str) -> None:
    at %= len(text)
    outcome(text[:at] + piece + text[at + length :])


task_names = st.sampled_from(TaskShape.__struct_fields__)
group_names = st.sampled_from([*GroupShape.__struct_fields__, *Lists.__struct_fields__])


@settings(max_examples=400, deadline=None)
@given(st.dictionaries(task_names | group_names, values, max_size=5), st.booleans())
def test_any_value_in_any_field_loads_or_is_refused(fields: dict[str, Any], is_group: bool) -> None:
    fields = {"id": "a"} | fields
    result = outcome(to_yaml(fields))
    if result is not None and result.specs:
        again = read_manifest({"f": dump(result.specs.values())})
        assert again.specs == result.specs
    with suppress(Invalid):
        parse_spec("group" if is_group else "task", fields)


@pytest.mark.parametrize("name", TaskShape.__struct_fields__)
@pytest.mark.parametrize("value", [True, -1, 1e300, "", "x y", [], [[]], {}, {"a": {}}, 2**63])
def test_odd_values_in_every_field_load_or_are_refused(name: str, value: Any) -> None:
    outcome(to_yaml({"id": "a"} | {name: value}))
