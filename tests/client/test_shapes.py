"""What the client reads is what the server says, field by field."""

from typing import Any

import msgspec
import pytest

from tenuto.api import ops, remote, work
from tenuto.client import admin as told
from tenuto.client import client
from tenuto.client import work as told_work

SAME = [
    (ops.Stats, client.Stats),
    (remote.Unconfirmed, told_work._Unconfirmed),
    (remote.Swept, told_work._Swept),
    (remote.Kept, told_work._Kept),
    (remote.Found, told_work._Found),
    (remote.StepView, told_work._Step),
]
READ = [
    (work.Claimed, told_work._Claimed),
    (work.Held, told_work._Held),
    (ops.CoordinatorStatus, told.CoordinatorStatus),
]


def names(kind: Any) -> dict[str, str]:
    return {field.name: field.encode_name for field in msgspec.structs.fields(kind)}


@pytest.mark.parametrize(("said", "read"), SAME, ids=lambda kind: kind.__name__)
def test_a_shape_is_the_same_on_both_sides(said: Any, read: Any) -> None:
    assert names(said) == names(read)


@pytest.mark.parametrize(("said", "read"), READ, ids=lambda kind: kind.__name__)
def test_what_is_read_is_said(said: Any, read: Any) -> None:
    wanted = {field.encode_name for field in msgspec.structs.fields(read) if field.required}
    known = set(names(said).values())
    assert wanted <= known
    optional = {field.encode_name for field in msgspec.structs.fields(read)} - known
    assert optional <= {"until"}
