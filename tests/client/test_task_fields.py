"""Every field of a task and of a filter arrives, under each of its names."""

from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import msgspec
import pytest
from tests.model.test_bounds import FIELDS as VALUES

from tenuto.api.routes.flow_bodies import to_camel
from tenuto.api.routes.task_bodies import TaskBody
from tenuto.api.routes.task_filter import FilterBody, with_filter_parameters
from tenuto.client.remote.bodies import filter_body, filter_params
from tenuto.engine import rows
from tenuto.engine.views import TaskView
from tenuto.manifest.shapes import TaskShape
from tenuto.model.errors import Invalid
from tenuto.model.tasks.submission import FIELDS, FILTER_FIELDS, Filter, NewTask
from tenuto.store import sql
from tenuto.store.dialects import SQLITE

WHEN = datetime(2030, 1, 1, tzinfo=UTC)
BODY: dict[str, Any] = {
    "title": "other",
    "name": "other",
    "id": str(UUID(int=2)),
    "taskType": "build",
    "targetAgentId": str(UUID(int=1)),
    "agentId": str(UUID(int=1)),
    "estimatedDurationMinutes": 1,
    "maxRetries": 6,
    "attempts": 7,
    "retry": {"baseS": 1.0},
    "retryBackoffSeconds": 1.0,
    "timeoutSeconds": 1,
    "parentId": str(UUID(int=1)),
    "nextTask": {"childId": "n"},
    "groupId": "g",
    "control": {"kind": "goto", "target": "t"},
    "foreachItems": [1],
    "foreachTemplateTaskId": "t",
    "foreachOrder": "parallel",
    "foreachJoin": "any_failed",
    "gotoTargetTaskId": "t",
    "gotoPrompt": "p",
    "condition": "true",
    "trueNextTaskId": "t",
    "falseNextTaskId": "t",
    "approval": {"message": "m"},
    "complexityLevel": "Hard",
    "inputContext": {"a": 1},
}
"""Values of the fields of a request that `NewTask` does not have under the same name."""
GIVEN: dict[str, dict[str, Any]] = {
    "name": {},
    "gotoPrompt": {"title": "t", "gotoTargetTaskId": "u"},
    "foreachItems": {"title": "t", "foreachTemplateTaskId": "t"},
    "foreachTemplateTaskId": {"title": "t", "foreachItems": []},
    "foreachOrder": {"title": "t", "foreachItems": [], "foreachTemplateTaskId": "t"},
    "foreachJoin": {"title": "t", "foreachItems": [], "foreachTemplateTaskId": "t"},
    "trueNextTaskId": {"title": "t", "condition": "true"},
    "falseNextTaskId": {"title": "t", "condition": "true"},
}
"""The other fields of a request that has the field."""
NAMES = {field.encode_name: field.name for field in msgspec.structs.fields(TaskBody)}
CHECKED_ONLY = "kind"
"""It must agree with the other fields, and adds nothing to them."""
HIDDEN = {"env", "conversation", "max_turns", "lease_s", "region", "blocks", "group"}
"""Fields that a view does not show, or not under the same name."""


def read(body: dict[str, Any]) -> NewTask | None:
    """The task of a request; `None` if the request lacks a field that is required with others."""
    try:
        return msgspec.convert(body, TaskBody).new_task()
    except Invalid:
        return None


@pytest.mark.parametrize("name", sorted(NAMES.keys() - {CHECKED_ONLY}))
def test_no_field_of_a_request_is_dropped(name: str) -> None:
    request = GIVEN.get(name, {"title": "t"})
    value = BODY[name] if name in BODY else VALUES[NAMES[name]]
    task = read(request | {name: msgspec.to_builtins(value)})
    assert task is not None
    assert task != read(request)


def test_a_file_has_every_field_of_a_definition() -> None:
    own = {"max_attempts", "retry", "escalation", "budget", "control"}
    names = set(TaskShape.__struct_fields__)
    for name, field in FIELDS.items():
        if field.definition and name not in own:
            assert set(field.yaml) <= names, name


def test_rows_are_in_the_order_of_their_query() -> None:
    for query in ("submit", "submit_new", "complete_and_activate"):
        columns = sql.load(SQLITE)[query].rows
        assert tuple(name for name, _ in columns["body"]) == rows._BODY.columns
        assert tuple(name for name, _ in columns["hot"]) == rows._HOT.columns


def test_the_row_of_a_plain_task_is_the_beginning_of_any_row() -> None:
    task = NewTask(title="t", prompt="p", task_type="x", input=[1], metadata={"a": 1}, source="s")
    one, two = UUID(int=1), UUID(int=2)
    body = rows.plain_body_row(task, one, two, "me")
    assert rows.body_row(task, one, two, None, "me", None, None)[: len(body)] == body
    rank = rows.hot_row(task, one, two, 5, "me", WHEN)[rows.RANK_COLUMN]
    hot = rows.plain_hot_row(task, one, two, 5, "me", rank)
    assert rows.hot_row(task, one, two, 5, "me", WHEN)[: len(hot)] == hot
    assert (len(body), len(hot)) == (rows._COMMON_BODY_END, rows._COMMON_HOT_END)


def test_a_view_shows_every_field() -> None:
    assert set(FIELDS) - set(TaskView.__struct_fields__) == HIDDEN


FILTERS: dict[str, Any] = {
    "status": ("RUNNING", "DEAD"),
    "tags": ("x", "y"),
    "priority": 3,
    "min_priority": 2,
    "task_type": "build",
    "agent": UUID(int=1),
    "parent": UUID(int=2),
    "since": WHEN,
    "until": WHEN,
    "text": "t",
}


def test_every_filter_has_an_example() -> None:
    assert FILTERS.keys() == FILTER_FIELDS.keys()
    assert {name for name, field in FIELDS.items() if field.filter} <= FILTER_FIELDS.keys()


@pytest.mark.parametrize("name", FILTERS)
async def test_no_filter_is_dropped(name: str) -> None:
    """Neither in a body nor in a query, whose handler gets the filter as it was sent."""
    where = Filter(**{name: FILTERS[name]})
    assert msgspec.convert(filter_body(where), FilterBody).to_filter() == where

    async def handler(where: Filter) -> Filter:
        return where

    names = {key: FILTER_FIELDS[key].names[0] for key in FILTER_FIELDS}
    sent = filter_params(where)
    values = {key: sent[to_camel(rest)] for key, rest in names.items()}
    assert await with_filter_parameters(handler)(**values) == where
