"""The client decodes every field that the server sends."""

from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import msgspec
import pytest
from tests.model.test_bounds import FIELDS

from tenuto.api.routes import agent_protocol, operations, worker_protocol
from tenuto.api.routes.bodies import TaskPatch
from tenuto.api.routes.task_bodies import TaskBody
from tenuto.api.routes.task_filter import FilterBody
from tenuto.client import accounts as told
from tenuto.client import client
from tenuto.client.remote import worker as told_work
from tenuto.client.remote.bodies import change_body, filter_body, task_body
from tenuto.engine.tasks.edit import TaskChanges
from tenuto.model.flows.definition import Approval, Condition, Control, Foreach, Goto
from tenuto.model.limits.budgets import Budget
from tenuto.model.limits.concurrency import Concurrency
from tenuto.model.tasks.retry import RetryPolicy
from tenuto.model.tasks.submission import Filter, NewTask

WHEN = datetime(2030, 1, 1, tzinfo=UTC)
TASK = NewTask(
    **FIELDS
    | {
        "id": UUID(int=2),
        "env": {"A": "b", "B": {"$secret": "b"}},
        "retry": RetryPolicy(base_s=2.0, multiplier=3.0, cap_s=60.0, jitter=0.1),
        "concurrency": Concurrency("turn", 2, "cancel_old"),
        "budget": Budget(tokens=7, cost_usd=2.5),
        "control": None,
    }
)
CONTROLS: list[Control] = [
    Foreach(items=[1], template="t", order="parallel", join="any_failed"),
    Goto(target="t", prompt="p"),
    Condition(expression="result > 1", on_true="a", on_false="b"),
    Approval(message="m", timeout_s=9, on_timeout="approve", on_reject="skip"),
]
FILTER = Filter(
    status=("RUNNING", "DEAD"),
    tags=("x", "y"),
    min_priority=2,
    priority=3,
    task_type="build",
    agent=UUID(int=1),
    parent=UUID(int=2),
    since=WHEN,
    until=WHEN,
    text="t",
)
CHANGES = TaskChanges(
    title="t", description="d", metadata={"m": 1}, tags=("x",), priority=9, status="PAUSED"
)

SAME = [
    (operations.Stats, client.Stats),
    (worker_protocol.UnconfirmedEnd, told_work._UnconfirmedEnd),
    (worker_protocol.SweepReply, told_work._SweepReply),
    (worker_protocol.CheckpointReply, told_work._CheckpointReply),
    (worker_protocol.TaskIdReply, told_work._TaskId),
    (worker_protocol.StepView, told_work._StepReply),
]
READ = [
    (agent_protocol.ClaimedTaskView, told_work._ClaimedTask),
    (agent_protocol.WorkerHeartbeatReply, told_work._HeartbeatReply),
    (operations.CoordinatorStatus, told.CoordinatorStatus),
]


def names(kind: Any) -> dict[str, str]:
    return {field.name: field.encode_name for field in msgspec.structs.fields(kind)}


@pytest.mark.parametrize(("output", "read"), SAME, ids=lambda kind: kind.__name__)
def test_response_type_is_equal_on_both_sides(output: Any, read: Any) -> None:
    assert names(output) == names(read)


@pytest.mark.parametrize(("output", "read"), READ, ids=lambda kind: kind.__name__)
def test_every_field_read_by_the_client_is_sent(output: Any, read: Any) -> None:
    expected = {field.encode_name for field in msgspec.structs.fields(read) if field.required}
    existing = set(names(output).values())
    assert expected <= existing
    optional = {field.encode_name for field in msgspec.structs.fields(read)} - existing
    assert optional <= {"until"}


def is_set(value: Any, name: str, plain: Any) -> bool:
    return bool(getattr(value, name) != getattr(plain, name))


def test_request_body_of_the_client_has_every_field() -> None:
    for full, plain in ((TASK, NewTask(title="")), (FILTER, Filter()), (CHANGES, TaskChanges())):
        names = type(full).__struct_fields__
        assert {name for name in names if not is_set(full, name, plain)} <= {"control"}
    for control in CONTROLS:
        for field in msgspec.structs.fields(control):
            assert field.required or getattr(control, field.name) != field.default


@pytest.mark.parametrize("control", [None, *CONTROLS], ids=lambda item: type(item).__name__)
def test_task_is_decoded_as_it_was_sent(control: Control | None) -> None:
    asked = msgspec.structs.replace(TASK, control=control)
    sent = msgspec.json.encode(task_body(asked))
    read = msgspec.json.decode(sent, type=TaskBody).new_task()
    assert msgspec.json.decode(msgspec.json.encode(read)) == msgspec.json.decode(
        msgspec.json.encode(asked)
    )


def test_filter_is_decoded_as_it_was_sent() -> None:
    sent = msgspec.json.encode(filter_body(FILTER))
    assert msgspec.json.decode(sent, type=FilterBody).to_filter() == FILTER


def test_edit_is_decoded_as_it_was_sent() -> None:
    sent = msgspec.json.encode(change_body(CHANGES))
    read = msgspec.json.decode(sent, type=TaskPatch)
    assert msgspec.json.decode(msgspec.json.encode(read)) == msgspec.json.decode(sent)
    assert set(names(TaskPatch)) == set(TaskChanges.__struct_fields__)
