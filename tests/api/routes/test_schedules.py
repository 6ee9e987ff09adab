"""Schedules, triggers and events over HTTP."""

import asyncio
from typing import Any

import httpx2
import pytest
from tests.api.conftest import V1, Api, problem

from tenuto.engine.schedules.event_matching import TriggerRunner
from tenuto.engine.schedules.firing import ScheduleRunner
from tenuto.model.tenancy.access import Role

DAILY = {"type": "cron", "expression": "0 9 * * *", "timezone": "Europe/Berlin"}
BODY = {"name": "s", "target": "job", "schedule": DAILY, "input": {"n": 1}}
RULE = {"name": "t", "event": "deploy.*", "target": "job", "filter": "event.data.live"}


@pytest.fixture
async def user(api: Api, owner: httpx2.AsyncClient) -> httpx2.AsyncClient:
    """A member of a workspace in which a task `job` is defined."""
    await owner.put(f"{V1}/definitions/job", json={"spec": {"prompt": "work"}})
    return await api.acting(Role.MEMBER)


async def test_schedule_is_created_changed_and_deleted(user: httpx2.AsyncClient) -> None:
    created = await user.post(f"{V1}/schedules", json=BODY)
    assert created.status_code == 201
    view = created.json()
    assert (view["name"], view["input"], view["status"]) == ("s", {"n": 1}, "ACTIVE")
    assert view["schedule"]["catchUp"] == "none"
    assert view["nextAt"] is not None
    path = f"{V1}/schedules/{view['id']}"
    assert (await user.get(path)).json() == view
    assert (await user.get(f"{V1}/schedules")).json()["schedules"] == [view]
    assert (await user.get(f"{V1}/schedules?name=other")).json()["schedules"] == []
    assert len((await user.get(f"{path}/next?n=3")).json()["times"]) == 3
    assert problem(await user.post(f"{V1}/schedules", json=BODY)) == (409, "name_taken")
    paused = await user.post(f"{path}/pause")
    assert (paused.status_code, paused.json()["status"]) == (200, "PAUSED")
    assert problem(await user.post(f"{path}/pause")) == (409, "out_of_turn")
    assert (await user.post(f"{path}/resume")).json()["status"] == "ACTIVE"
    change = {"schedule": {"type": "cron", "expression": "@hourly", "catchUp": "last"}}
    stale = await user.patch(path, json=change, headers={"If-Match": '"1"'})
    assert problem(stale) == (412, "version_conflict")
    changed = (await user.patch(path, json=change)).json()
    assert (changed["schedule"]["catchUp"], changed["input"]) == ("last", {"n": 1})
    assert (await user.patch(path, json={"input": None})).json()["input"] is None
    assert (await user.delete(path)).status_code == 204
    assert problem(await user.get(path)) == (404, "not_found")


@pytest.mark.parametrize(
    ("changes", "code", "field"),
    [
        (
            {"schedule": {"type": "cron", "expression": "61 * * * *"}},
            "schedule_invalid",
            "expression",
        ),
        ({"schedule": {"type": "cron", "expresion": "x"}}, "invalid_value", None),
        ({"schedule": DAILY | {"timezone": "Mars/Base"}}, "schedule_invalid", "timezone"),
        ({"target": "nothing"}, "target_unknown", None),
        ({"name": "a b"}, "invalid_value", "name"),
        ({"input": {"secrets": {"a": "hush-hush"}}}, "secret_in_definition", "input"),
    ],
)
async def test_invalid_schedule_body_is_refused(
    user: httpx2.AsyncClient, changes: Any, code: str, field: str | None
) -> None:
    answer = await user.post(f"{V1}/schedules", json=BODY | changes)
    assert problem(answer) == (422, code), answer.text
    if field is not None:
        assert answer.json()["field"] == field


async def test_immediate_schedule_returns_its_flow(user: httpx2.AsyncClient) -> None:
    body = BODY | {"schedule": {"type": "immediate"}}
    answers = [
        await user.post(f"{V1}/schedules", json=body, headers={"Idempotency-Key": "k"})
        for _ in range(2)
    ]
    assert answers[0].json() == answers[1].json()
    flow = answers[0].json()["lastFlowId"]
    assert (await user.get(f"{V1}/flows/{flow}")).json()["source"].startswith("schedule:")


async def test_trigger_is_created_changed_and_deleted(api: Api, user: httpx2.AsyncClient) -> None:
    created = await user.post(f"{V1}/triggers", json=RULE)
    assert created.status_code == 201
    view = created.json()
    path = f"{V1}/triggers/{view['id']}"
    assert (await user.get(path)).json() == view
    assert (await user.get(f"{V1}/triggers?name=t")).json()["triggers"] == [view]
    assert problem(await user.post(f"{V1}/triggers", json=RULE)) == (409, "name_taken")
    bad = RULE | {"name": "u", "filter": "event."}
    assert problem(await user.post(f"{V1}/triggers", json=bad)) == (422, "expression_invalid")
    reported = {"name": "deploy.done", "data": {"live": True}}
    first, second = [
        await user.post(f"{V1}/events", json=reported, headers={"Idempotency-Key": "once"})
        for _ in range(2)
    ]
    assert (first.status_code, first.json()) == (201, second.json())
    assert first.json()["data"] == {"live": True}
    await TriggerRunner(api.service.engine_for(api_workspace(api)).system).trigger_once()
    seen = (await user.get(path)).json()
    assert (seen["fired"], seen["lastError"]) == (1, None)
    flow = (await user.get(f"{V1}/flows/{seen['lastFlowId']}")).json()
    assert flow["source"] == f"trigger:{view['id']}:1"
    assert (await user.post(f"{path}/pause")).json()["status"] == "PAUSED"
    assert (await user.post(f"{path}/resume")).json()["status"] == "ACTIVE"
    assert (await user.patch(path, json={"filter": None})).json()["filter"] is None
    assert (await user.delete(path)).status_code == 204
    assert problem(await user.get(path)) == (404, "not_found")


def api_workspace(api: Api) -> Any:
    from tenuto.engine.engine import DEFAULT_WORKSPACE

    return DEFAULT_WORKSPACE


async def test_schedules_fire_for_a_server(api: Api, user: httpx2.AsyncClient) -> None:
    past = {"type": "datetime-event", "at": "2020-01-01T09:00:00"}
    created = (await user.post(f"{V1}/schedules", json=BODY | {"schedule": past})).json()
    assert await ScheduleRunner(api.service.engine_for(api_workspace(api)).system).fire_once() == 1
    view = (await user.get(f"{V1}/schedules/{created['id']}")).json()
    assert (view["status"], view["fired"]) == ("ENDED", 1)
    assert view["firedAt"] == "2020-01-01T09:00:00Z"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"name": "a b"}, "invalid_value"),
        ({"name": "task.done"}, "invalid_value"),
        ({"name": "x", "data": "y" * 65_536}, "too_large"),
        ({"name": "x", "date": 1}, "invalid_value"),
    ],
)
async def test_invalid_event_body_is_refused(
    user: httpx2.AsyncClient, body: Any, code: str
) -> None:
    assert problem(await user.post(f"{V1}/events", json=body)) == (422, code)


async def test_viewer_cannot_change_schedules(api: Api, user: httpx2.AsyncClient) -> None:
    created = (await user.post(f"{V1}/schedules", json=BODY)).json()["id"]
    viewer = await api.acting(Role.VIEWER)
    assert (await viewer.get(f"{V1}/schedules/{created}")).status_code == 200
    for method, path, body in (
        ("POST", "schedules", BODY | {"name": "other"}),
        ("POST", f"schedules/{created}/pause", None),
        ("DELETE", f"schedules/{created}", None),
        ("POST", "triggers", RULE),
        ("POST", "events", {"name": "x"}),
    ):
        more: dict[str, Any] = {} if body is None else {"json": body}
        answer = await viewer.request(method, f"{V1}/{path}", **more)
        assert problem(answer) == (403, "forbidden"), path


async def test_published_event_is_in_the_stream(user: httpx2.AsyncClient) -> None:
    async with user.stream("GET", f"{V1}/events") as stream, asyncio.timeout(20):
        lines = stream.aiter_lines()
        assert await anext(lines) == ": open"
        await user.post(f"{V1}/events", json={"name": "build.done", "data": [1]})
        matches = [line async for line in _until(lines, "data: ")]
    assert "event: event" in matches
    assert '"event":"build.done"' in matches[-1]
    assert '"data":[1]' in matches[-1]


async def _until(lines: Any, beginning: str) -> Any:
    async for line in lines:
        yield line
        if line.startswith(beginning):
            return


@pytest.mark.parametrize("kind", ["schedules", "triggers"])
async def test_filter_by_an_invalid_name_is_refused(owner: httpx2.AsyncClient, kind: str) -> None:
    refused = await owner.get(f"{V1}/{kind}?name=%00")
    assert problem(refused) == (422, "text_invalid")
    assert (await owner.get(f"{V1}/{kind}?name=nobody")).json()[kind] == []
