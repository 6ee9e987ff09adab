"""Attacks: every hole that was found once is answered as it should be, on both databases."""

from collections.abc import Iterator

import pytest
from tests.proof.attacks import high, low, medium
from tests.proof.attacks.holes import HOLES
from tests.proof.attacks.world import World, world

GRADES = (high, medium, low)
"""To import them lists their attacks."""


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def installation(request: pytest.FixtureRequest) -> Iterator[World]:
    with world(request.param) as created:
        yield created


@pytest.mark.parametrize("number", HOLES)
def test_known_attack_is_refused(installation: World, number: str) -> None:
    print(f"\n{number} {installation.name}: {HOLES[number](installation)}")
