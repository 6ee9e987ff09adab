"""Fingerprints stay what they are from version to version."""

from datetime import UTC, datetime
from uuid import UUID

import msgspec
import pytest

from tenuto.model.flows.definition import Approval
from tenuto.model.limits.budgets import Budget
from tenuto.model.tasks.fingerprint import _FIELDS_V0_1, fingerprint, fingerprints
from tenuto.model.tasks.retry import RetryPolicy
from tenuto.model.tasks.submission import NewTask

PLAIN = NewTask(title="a task", idempotency_key="k")
FULL = NewTask(
    title="a task",
    id=UUID(int=7),
    idempotency_key="k",
    prompt="do it",
    priority=7,
    tags=["a", "b"],
    input={"b": [1, 2.5], "a": None},
    metadata={"tools": ["git"]},
    run_at=datetime(2030, 1, 1, tzinfo=UTC),
    parent=UUID(int=1),
    retry=RetryPolicy(base_s=1),
    budget=Budget(cost_usd=2.5),
)
GATE = NewTask(title="a gate", idempotency_key="k", control=Approval())

PINNED = {
    "plain": (PLAIN, "", "181993c8863cec8d42b0218927951626", "a32f6843d512ed1714b978f32a63f1d7"),
    "full": (FULL, "", "018abe2f713c5777f254bce755b8db39", "7e3498897fac1ede4003021f1cc81c85"),
    "gate": (GATE, "", "18ef69239401e1f18b93f5566fb85f68", "17080e92e9637e074d8465b5aa3f7b4e"),
    "secret": (
        PLAIN,
        "5ec4e7",
        "1f1de5a57349f65bf3dd4acbe16b1ece",
        "63c26f06d35015c89c03e389064320c0",
    ),
}


@pytest.mark.parametrize("name", PINNED)
def test_fingerprints_equal_those_of_previous_versions(name: str) -> None:
    new, secret, today, of_01 = PINNED[name]
    assert fingerprints(new, secret) == (today, of_01)


def test_new_unused_field_keeps_the_fingerprint() -> None:
    """Callers of this version send new fields of the next one at their defaults."""
    fields = [
        (field.name, field.type, field.default)
        for field in msgspec.structs.fields(NewTask)
        if field.default is not msgspec.NODEFAULT
    ]
    later = msgspec.defstruct(
        "Later",
        [("title", str), *fields, ("cost_center", str | None, None)],
        kw_only=True,
    )
    reported = {name: getattr(FULL, name) for name in NewTask.__struct_fields__}
    assert fingerprint(later(**reported)) == fingerprint(FULL)  # type: ignore[arg-type]
    used = later(**reported | {"cost_center": "c"})
    assert fingerprint(used) != fingerprint(FULL)  # type: ignore[arg-type]
    assert not set(fingerprints(used)) & set(fingerprints(FULL))  # type: ignore[arg-type]


def test_whole_float_has_the_fingerprint_of_its_integer() -> None:
    """A program gives 7 where the API reads 7.0 from the same request."""
    values = NewTask(title="t", budget=Budget(cost_usd=2), retry=RetryPolicy(base_s=7))
    read = NewTask(title="t", budget=Budget(cost_usd=2.0), retry=RetryPolicy(base_s=7.0))
    assert fingerprint(values) == fingerprint(read)
    assert fingerprint(values) != fingerprint(NewTask(title="t", retry=RetryPolicy(base_s=8)))


def test_fields_of_the_previous_version_still_exist() -> None:
    assert set(_FIELDS_V0_1) <= set(NewTask.__struct_fields__)
