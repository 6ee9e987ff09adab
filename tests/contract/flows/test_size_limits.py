"""Depth and size limits of flows, and valid references."""

from collections.abc import Awaitable, Callable
from typing import Any
from uuid import UUID

import pytest
from tests.contract.flows.helpers import group, plan, task

from tenuto.model.errors import Invalid
from tenuto.model.flows.definition import (
    MAX_ITEMS,
    MAX_NESTING,
    Foreach,
)
from tenuto.model.flows.progress import ControlTaskFailed, foreach_items

Control = Callable[[UUID], Awaitable[None]]


@pytest.mark.parametrize("order", ["sequential", "parallel"])
def test_child_refers_to_results_of_earlier_children_only(order: Any) -> None:
    both = [task("a"), task("b", input={"$from": "a"})]
    if order == "sequential":
        assert plan("g", group("g", "a", "b", order=order), *both).root == "g"
    else:
        with pytest.raises(Invalid) as caught:
            plan("g", group("g", "a", "b", order=order), *both)
        assert caught.value.code == "reference_invalid"


def test_nesting_of_groups_is_bounded() -> None:
    deep = [group(f"g{n}", f"g{n + 1}") for n in range(MAX_NESTING - 1)]
    last = f"g{MAX_NESTING - 1}"
    assert plan("g0", *deep, group(last)).groups.keys() >= {last}
    with pytest.raises(Invalid) as caught:
        plan("g0", *deep, group(last, "more"), group("more"))
    assert caught.value.code == "nesting_too_deep"


def test_items_of_a_foreach_are_bounded() -> None:
    foreach = Foreach(items={"$from": "list"}, template="one")
    maximum: list[Any] = [0] * MAX_ITEMS
    assert foreach_items(foreach, {"list": maximum}) == maximum
    with pytest.raises(ControlTaskFailed) as caught:
        foreach_items(foreach, {"list": [*maximum, 0]})
    assert caught.value.code == "too_large"
