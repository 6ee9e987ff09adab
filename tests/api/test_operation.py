"""A route is declared once, with an access rule."""

from typing import Any

import pytest

from tenuto.api.app import litestar_app
from tenuto.api.operation import OPERATIONS, READ, all_operations, operation

declare: Any = operation


async def handle() -> None:
    """A handler that is never registered."""


def test_a_route_without_an_access_rule_cannot_be_declared() -> None:
    with pytest.raises(TypeError, match="access"):
        declare("GET", "/agent-tasks/{task_id:uuid}/siblings")


def test_a_route_is_declared_once() -> None:
    litestar_app()
    before = dict(OPERATIONS)
    with pytest.raises(AssertionError, match="declared twice"):
        operation("GET", "/agents", READ)(handle)
    assert before == OPERATIONS


def test_operations_have_one_order_whatever_was_imported_first() -> None:
    litestar_app()
    routes = [item.route for item in all_operations()]
    OPERATIONS.update({item.route: OPERATIONS.pop(item.route) for item in all_operations()[::-1]})
    assert [item.route for item in all_operations()] == routes
