"""Definitions over HTTP: one by one with ETags, and YAML as a whole."""

from typing import Any

import httpx2
import pytest
from tests.api.conftest import V1, Api, problem
from tests.manifest.examples import FLOW, S2

from tenuto.model.tenancy.access import Role

PATH = f"{V1}/definitions"


async def test_definition_is_created_changed_and_deleted(owner: httpx2.AsyncClient) -> None:
    spec: dict[str, Any] = {
        "id": "team/a:1",
        "name": "A",
        "taskTags": ["x"],
        "maxRetries": 1,
        "approval": {"onReject": "skip"},
        "metadata": {"snake_case": 1, "camelCase": 2},
    }
    created = await owner.post(PATH, json={"spec": spec})
    assert (created.status_code, created.headers["etag"]) == (201, '"1"')
    view = created.json()
    assert (view["key"], view["kind"], view["title"]) == ("team/a:1", "task", "A")
    assert view["spec"] == {
        "id": "team/a:1",
        "name": "A",
        "taskTags": ["x"],
        "maxAttempts": 2,
        "approval": {"onReject": "skip"},
        "metadata": {"snake_case": 1, "camelCase": 2},
    }
    for name in ("team/a:1", "team%2Fa%3A1"):
        assert (await owner.get(f"{PATH}/{name}")).json() == view
    assert problem(await owner.post(PATH, json={"spec": spec})) == (409, "name_taken")
    same = await owner.put(f"{PATH}/team/a:1", json={"spec": view["spec"]})
    assert (same.status_code, same.headers["etag"]) == (200, '"1"')
    stale = await owner.put(
        f"{PATH}/team/a:1", json={"spec": {"name": "B"}}, headers={"If-Match": '"7"'}
    )
    assert problem(stale) == (412, "version_conflict")
    fresh = await owner.put(
        f"{PATH}/team/a:1", json={"spec": {"name": "B"}}, headers={"If-Match": '"1"'}
    )
    assert fresh.json()["version"] == 2
    assert [definition["key"] for definition in (await owner.get(PATH)).json()["definitions"]] == [
        "team/a:1"
    ]
    gone = await owner.delete(f"{PATH}/team/a:1", headers={"If-Match": '"1"'})
    assert problem(gone) == (412, "version_conflict")
    assert (await owner.delete(f"{PATH}/team/a:1")).status_code == 204
    assert problem(await owner.get(f"{PATH}/team/a:1")) == (404, "not_found")


async def test_group_is_a_definition(owner: httpx2.AsyncClient) -> None:
    children = ["a", {"childId": "b", "kind": "Task"}]
    body = {"kind": "group", "spec": {"type": "Parallel", "children": children}}
    view = (await owner.put(f"{PATH}/g", json=body)).json()
    assert view["spec"] == {"id": "g", "name": "g", "type": "Parallel", "children": ["a", "b"]}


@pytest.mark.parametrize(
    ("spec", "code", "field"),
    [
        ({"priority": 11}, "invalid_value", "priority"),
        ({"promt": "x"}, "yaml_invalid", None),
        ({"id": "other"}, "invalid_value", "key"),
        ({"input": {"secrets": {"a": "b"}}}, "secret_in_definition", "input"),
        ({"schedule": {"type": "immediate"}}, "yaml_invalid", "schedule"),
        ({"nextTask": "k"}, "dependency_cycle", None),
        ({"foreachItems": 1, "foreachTemplateTaskId": "x"}, "invalid_value", "foreach_items"),
    ],
)
async def test_bad_definition_is_refused(
    owner: httpx2.AsyncClient, spec: Any, code: str, field: str | None
) -> None:
    answer = await owner.put(f"{PATH}/k", json={"spec": spec})
    assert problem(answer) == (422, code), answer.text
    assert answer.json().get("field") == field
    assert (await owner.get(PATH)).json()["definitions"] == []


async def test_deeply_nested_values_are_refused(owner: httpx2.AsyncClient) -> None:
    for depth in (100, 500, 900):
        body = '{"spec": {"input": ' + "[" * depth + "]" * depth + "}}"
        headers = {"Content-Type": "application/json"}
        answer = await owner.put(f"{PATH}/k", content=body, headers=headers)
        assert answer.status_code == 422, answer.text


async def test_yaml_is_applied(owner: httpx2.AsyncClient) -> None:
    dry = await owner.post(f"{PATH}/apply", json={"manifest": S2, "dryRun": True})
    assert dry.status_code == 200
    assert dry.json()["started"] == [{"key": "task-200", "flowId": None}]
    assert (await owner.get(PATH)).json()["definitions"] == []
    done = (await owner.post(f"{PATH}/apply", json={"manifest": S2})).json()
    assert done["dryRun"] is False
    assert [(definition["key"], definition["action"]) for definition in done["definitions"]] == [
        ("task-200", "created"),
        ("group-preprocessing", "created"),
    ]
    assert done["started"][0]["flowId"]
    again = (await owner.post(f"{PATH}/apply", json={"files": {"s2.yaml": S2, "f": FLOW}})).json()
    assert {
        definition["key"]
        for definition in again["definitions"]
        if definition["action"] == "unchanged"
    } == {"task-200"}
    assert again["started"] == []


async def test_every_yaml_error_has_its_location(owner: httpx2.AsyncClient) -> None:
    text = "tasks:\n- {id: a, priority: 0}\n- {id: b, promt: x}\n"
    answer = await owner.post(f"{PATH}/apply", json={"files": {"flow.yaml": text}})
    assert problem(answer) == (422, "invalid_value")
    assert answer.json()["detail"].splitlines() == [
        "flow.yaml:2:21: tasks[0].priority: must be between 1 and 10, not 0",
        "flow.yaml:3:11: tasks[1]: unknown field 'promt'; did you mean 'prompt'?",
    ]
    unnamed = await owner.post(f"{PATH}/apply", json={"manifest": "a: ["})
    assert unnamed.json()["detail"].startswith("manifest.yaml:")
    for body in ({}, {"manifest": S2, "files": {"f": S2}}):
        assert problem(await owner.post(f"{PATH}/apply", json=body)) == (422, "invalid_value")
    evil = {"manifest": "a: !!python/object/apply:os.system [x]"}
    assert problem(await owner.post(f"{PATH}/apply", json=evil)) == (422, "yaml_invalid")


async def test_members_write_and_viewers_read_definitions(api: Api) -> None:
    member, viewer = await api.acting(Role.MEMBER), await api.acting(Role.VIEWER)
    assert (await member.post(f"{PATH}/apply", json={"manifest": "id: a"})).status_code == 200
    assert (await viewer.get(f"{PATH}/a")).status_code == 200
    assert problem(await viewer.post(f"{PATH}/apply", json={"manifest": ""})) == (403, "forbidden")
    assert problem(await viewer.delete(f"{PATH}/a")) == (403, "forbidden")
