"""`docs/generate_remote.py`: where a parameter is sent, and what must be written by hand."""

from typing import Any
from uuid import UUID

import generate_remote
import pytest
from msgspec.structs import replace

from tenuto.api.operation import OPERATIONS
from tenuto.engine.engine import Engine
from tenuto.engine.flows.definitions import DefinitionView


async def put(
    self: Any, key: str, spec: dict[str, Any], kind: str = "task", version: int | None = None
) -> DefinitionView:
    """Sends each parameter to another place."""
    raise NotImplementedError


async def move(self: Any, task: UUID, shelf: str) -> None:
    """Has a parameter that no route takes."""


async def find_all(self: Any, task: UUID) -> list[UUID]:
    """Returns a field that is not the result of the route."""
    raise NotImplementedError


async def list_all(self: Any) -> None:
    """Does not know which object it is about."""


def text_of(route: str, method: Any) -> str:
    module = generate_remote.Module()
    operation = replace(OPERATIONS[route], remote=method)
    return generate_remote._method_text(operation, method, module) + module.text()


def test_a_parameter_is_sent_where_the_route_takes_it() -> None:
    text = text_of("PUT /api/v1/definitions/{key}", put)
    call = """self._call(DefinitionView, 'PUT', f'definitions/{path_segment(key)}',"""
    assert f"{call} {{'spec': spec, 'kind': kind}}, version=version)" in text
    assert "from tenuto.client.remote.http import path_segment\n" in text
    assert "from tenuto.engine.flows.definitions import DefinitionView\n" in text


def test_a_replayed_request_is_sent_once() -> None:
    text = text_of("POST /api/v1/flows/{flow_id}/rerun", Engine.rerun_flow)
    assert "f'flows/{flow}/rerun', {'steps': steps}, once=True)).id\n" in text


@pytest.mark.parametrize(
    ("route", "method", "reason"),
    [
        ("POST /api/v1/agent-tasks/{task_id}/archive", move, "for 'shelf'"),
        ("GET /api/v1/agent-tasks/{task_id}", find_all, "of type list[UUID]"),
        ("GET /api/v1/agents/{agent_id}", Engine.workers, "of type Sequence[WorkerView]"),
        ("DELETE /api/v1/agents/{agent_id}", list_all, "nothing is sent as 'agent_id'"),
    ],
)
def test_what_no_rule_covers_is_written_by_hand(route: str, method: Any, reason: str) -> None:
    with pytest.raises(SystemExit) as refused:
        text_of(route, method)
    assert reason in str(refused.value)
    assert "by hand" in str(refused.value)
