"""Flows, groups and the inbox over HTTP."""

from typing import Any
from uuid import UUID, uuid4

import httpx2
import pytest
from tests.api.conftest import V1, Api, problem

from tenuto.model.tenancy.access import Role


class Flowing:
    """A client, and an agent that does what the flows of its workspace ask for."""

    def __init__(self, client: httpx2.AsyncClient) -> None:
        self.client = client
        self.agent = str(uuid4())

    async def post(self, path: str, body: Any = None, **headers: str) -> httpx2.Response:
        more = {} if body is None else {"json": body}
        return await self.client.post(f"{V1}/{path}", headers=headers, **more)

    async def get(self, path: str) -> Any:
        answer = await self.client.get(f"{V1}/{path}")
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def define(self, key: str, kind: str = "task", **spec: Any) -> None:
        answer = await self.client.put(f"{V1}/definitions/{key}", json={"kind": kind, "spec": spec})
        assert answer.status_code == 200, answer.text

    async def start(self, key: str, **more: Any) -> Any:
        answer = await self.post("flows", {"key": key, **more})
        assert answer.status_code == 201, answer.text
        assert answer.headers["location"].endswith(answer.json()["id"])
        return answer.json()

    async def claim(self) -> list[Any]:
        await self.client.put(f"{V1}/agents/{self.agent}", json={"name": "worker"})
        answer = await self.post(f"agents/{self.agent}/claim", {"limit": 10})
        result: list[Any] = answer.json()["tasks"]
        return result

    async def work(self, *fails: str) -> list[Any]:
        """Finish what can be claimed, until nothing is left; answers what the claims gave."""
        done: list[Any] = []
        while result := await self.claim():
            for task in result:
                fence = {"attempt": task["attempt"], "leaseToken": task["leaseToken"]}
                path = f"agent-tasks/{task['id']}"
                if task["key"] in fails:
                    body = {"error": "no", "retryable": False}
                    await self.post(f"{path}/fail", fence | body)
                else:
                    output = {"made": task["key"], "n": len(done)}
                    await self.post(f"{path}/complete", fence | {"outputResult": output})
            done += result
        return done


@pytest.fixture
def flowing(owner: httpx2.AsyncClient) -> Flowing:
    return Flowing(owner)


async def nightly(flowing: Flowing) -> None:
    await flowing.define("fetch", prompt="Fetch.")
    await flowing.define("clean", prompt="Clean.")
    await flowing.define("report", prompt="Report.", next="sign")
    await flowing.define("sign", approval={"message": "Ship it?"})
    await flowing.define(
        "nightly", "group", type="Sequential", children=["fetch", "clean"], next="report"
    )


async def test_flow_runs_from_its_start_to_an_approval(api: Api, flowing: Flowing) -> None:
    await nightly(flowing)
    created = await flowing.start("nightly", input={"day": 1}, priority=9)
    flow = created["id"]
    assert (created["status"], created["key"], created["input"]) == (
        "RUNNING",
        "nightly",
        {"day": 1},
    )
    assert (created["progressPercent"], created["tasks"]) == (0, {"WAITING": 1, "PENDING": 1})
    assert [open_group["key"] for open_group in created["openGroups"]] == ["nightly"]
    claimed = await flowing.work()
    assert [work["key"] for work in claimed] == ["fetch", "clean", "report"]
    assert {work["flowId"] for work in claimed} == {flow}
    [item] = (await flowing.get("inbox?status=OPEN"))["items"]
    assert (item["title"], item["kind"], item["body"]["flow"]) == ("Ship it?", "approval", flow)
    view = await flowing.get(f"agent-tasks/{item['taskId']}")
    assert (view["key"], view["kind"], view["flowId"]) == ("sign", "approval", flow)
    assert (view["status"], view["waitingFor"]) == ("WAITING", "approval")
    done = await flowing.post(f"inbox/{item['id']}/approve", {"comment": "go"})
    assert (done.status_code, done.json()["status"]) == (200, "APPROVED")
    assert done.json()["decision"]["comment"] == "go"
    late = await flowing.post(f"inbox/{item['id']}/reject")
    assert problem(late) == (409, "out_of_turn")
    ended = await flowing.get(f"flows/{flow}")
    assert (ended["status"], ended["progressPercent"]) == ("COMPLETED", 100)
    assert (await flowing.get("inbox?status=OPEN"))["items"] == []
    assert (await flowing.get("inbox"))["items"][0]["id"] == item["id"]


async def test_flows_are_listed_in_pages(api: Api, flowing: Flowing) -> None:
    await flowing.define("a", prompt="A.")
    await flowing.define("b", prompt="B.")
    ids = [(await flowing.start(key))["id"] for key in ("a", "b", "a")]
    page = await flowing.get("flows?limit=2")
    assert [flow["id"] for flow in page["flows"]] == [ids[2], ids[1]]
    rest = await flowing.get(f"flows?limit=2&cursor={page['nextCursor']}")
    assert ([flow["id"] for flow in rest["flows"]], rest["nextCursor"]) == ([ids[0]], None)
    assert [flow["id"] for flow in (await flowing.get("flows?key=b"))["flows"]] == [ids[1]]
    assert (await flowing.get("flows?status=CANCELLED"))["flows"] == []
    wrong = await flowing.client.get(f"{V1}/flows?status=GONE")
    assert problem(wrong) == (422, "invalid_filter")
    tasks = await flowing.get(f"flows/{ids[0]}/tasks")
    assert [(task["key"], task["flowId"]) for task in tasks["tasks"]] == [("a", ids[0])]


async def test_graph_is_returned_as_data_and_as_mermaid(api: Api, flowing: Flowing) -> None:
    await nightly(flowing)
    flow = (await flowing.start("nightly"))["id"]
    graph = await flowing.get(f"flows/{flow}/graph")
    keys = {node["id"]: node["key"] for node in graph["nodes"]}
    assert [(keys[e["from"]], keys[e["to"]], e["kind"]) for e in graph["edges"]] == [
        ("fetch", "clean", "sequence"),
        ("nightly", "report", "next"),
        ("report", "sign", "next"),
    ]
    planned = {n["key"] for n in graph["nodes"] if n["status"] == "PLANNED"}
    assert (planned, graph["truncated"]) == ({"report", "sign"}, False)
    reported = await flowing.client.get(f"{V1}/flows/{flow}/graph?format=mermaid")
    assert reported.headers["content-type"].startswith("text/vnd.mermaid")
    assert reported.text.startswith("flowchart TD\n")
    [run] = (await flowing.get(f"groups?flowId={flow}"))["groups"]
    inner = await flowing.get(f"groups/{run['id']}/graph")
    assert {node["key"] for node in inner["nodes"]} == {"nightly", "fetch", "clean"}
    text = await flowing.client.get(f"{V1}/groups/nightly/graph?format=mermaid")
    assert "subgraph" in text.text


async def test_flow_is_paused_cancelled_and_run_again(api: Api, flowing: Flowing) -> None:
    await nightly(flowing)
    flow = (await flowing.start("nightly", input={"day": 1}))["id"]
    assert (await flowing.post(f"flows/{flow}/pause")).json()["status"] == "PAUSED"
    assert await flowing.claim() == []
    assert problem(await flowing.post(f"flows/{flow}/pause")) == (409, "out_of_turn")
    assert (await flowing.post(f"flows/{flow}/resume")).json()["status"] == "RUNNING"
    ended = (await flowing.post(f"flows/{flow}/cancel", {"reason": "not today"})).json()
    assert (ended["status"], ended["tasks"]) == ("CANCELLED", {"CANCELLED": 2})
    again = await flowing.post(f"flows/{flow}/rerun", **{"Idempotency-Key": "once"})
    assert again.status_code == 201
    assert (again.json()["rerunOf"], again.json()["input"]) == (flow, {"day": 1})
    same = await flowing.post(f"flows/{flow}/rerun", **{"Idempotency-Key": "once"})
    assert same.json()["id"] == again.json()["id"]


async def test_flow_continues_from_failed_tasks(api: Api, flowing: Flowing) -> None:
    await nightly(flowing)
    flow = (await flowing.start("nightly"))["id"]
    await flowing.work("clean")
    failed = await flowing.get(f"flows/{flow}")
    assert failed["status"] == "FAILED"
    [reason] = failed["failures"]
    assert (reason["key"], reason["status"], reason["lastError"]) == ("clean", "FAILED", "no")
    [node] = [n for n in (await flowing.get(f"flows/{flow}/graph"))["nodes"] if n["error"]]
    assert (node["key"], node["error"]) == ("clean", "no")
    both = await flowing.post(f"flows/{flow}/rerun", {"fromFailed": True, "steps": 3})
    assert problem(both) == (422, "invalid_value")
    again = await flowing.post(f"flows/{flow}/rerun", {"fromFailed": True})
    assert (again.status_code, again.json()["id"]) == (200, flow)
    assert [work["key"] for work in await flowing.work()] == ["clean", "report"]


async def test_idempotency_key_starts_one_flow(api: Api, flowing: Flowing) -> None:
    await flowing.define("a", prompt="A.")
    key = {"Idempotency-Key": "monday"}
    first = await flowing.post("flows", {"key": "a"}, **key)
    second = await flowing.post("flows", {"key": "a"}, **key)
    assert first.json()["id"] == second.json()["id"]
    assert second.headers["idempotency-replayed"] == "true"
    other = await flowing.post("flows", {"key": "a", "steps": 3}, **key)
    assert problem(other) == (409, "idempotency_conflict")


async def test_invalid_flow_start_is_refused(api: Api, flowing: Flowing) -> None:
    await flowing.define("a", prompt="A.", next="nowhere")
    for body, code in (
        ({"key": "a"}, "target_unknown"),
        ({"key": "nobody"}, "target_unknown"),
        ({"key": "a", "steps": 0}, "target_unknown"),
        ({"key": "a", "more": 1}, "invalid_value"),
        ({}, "invalid_value"),
    ):
        assert problem(await flowing.post("flows", body)) == (422, code), body


async def test_group_is_defined_started_and_controlled(api: Api, flowing: Flowing) -> None:
    for key in ("x", "y", "end"):
        await flowing.define(key, prompt=key)
    body = {
        "key": "both",
        "name": "Both of them",
        "type": "Parallel",
        "children": ["x", {"childId": "y", "kind": "Task"}],
        "next": {"childId": "end", "kind": "Task"},
        "join": "all_done",
        "prompt": "Be brief.",
        "start": True,
        "input": {"n": 1},
    }
    created = (await flowing.post("groups", body)).json()
    assert created["definition"]["kind"] == "group"
    flow = created["flow"]["id"]
    assert problem(await flowing.post("groups", body)) == (409, "name_taken")
    shown = await flowing.get("groups/both")
    assert (shown["flowId"], shown["type"], shown["join"]) == (flow, "parallel", "all_done")
    assert (shown["total"], shown["tasks"], shown["progressPercent"]) == (2, 2, 0)
    assert shown["costUsd"] is None
    run = shown["id"]
    assert (await flowing.post(f"groups/{run}/pause")).json()["status"] == "PAUSED"
    assert (await flowing.post("groups/both/resume")).json()["status"] == "RUNNING"
    claimed = await flowing.work("y")
    assert claimed[0]["prompt"] in ("Be brief.\n\nx", "Be brief.\n\ny")
    assert [work["key"] for work in claimed][2:] == ["end"]
    assert (await flowing.get(f"groups/{run}"))["failed"] == 1
    again = await flowing.post("groups/both/start", {"priority": 3})
    assert (again.status_code, again.json()["priority"]) == (201, 3)
    newest = await flowing.get("groups/both")
    assert newest["flowId"] == again.json()["id"]
    ended = await flowing.post("groups/both/cancel", {"reason": "enough"})
    assert ended.json()["status"] == "CANCELLED"
    listed = (await flowing.get("groups?key=both&status=CANCELLED"))["groups"]
    assert [item["id"] for item in listed] == [newest["id"]]


async def test_bad_groups_are_refused(api: Api, flowing: Flowing) -> None:
    await flowing.define("x", prompt="X.")
    for body in (
        {"children": ["x"]},
        {"key": "g", "type": "Parallel", "order": "sequential"},
        {"key": "g", "input": 1},
        {"key": "g", "children": [{"childId": "x", "more": 1}]},
        {"key": "g", "join": "some"},
    ):
        assert problem(await flowing.post("groups", body))[0] == 422, body
    assert problem(await flowing.post("groups", {"key": "g", "children": ["g"]}))[1] == (
        "dependency_cycle"
    )
    unready = {"key": "g", "children": ["nobody"], "start": True}
    assert problem(await flowing.post("groups", unready)) == (422, "target_unknown")
    assert (await flowing.post("groups", unready | {"start": False})).status_code == 201
    assert problem(await flowing.post("groups/x/start")) == (404, "not_found")
    assert problem(await flowing.post("groups/nobody/start")) == (404, "not_found")


async def test_group_that_cannot_start_is_not_stored(api: Api, flowing: Flowing) -> None:
    await flowing.define("x", prompt="X.")
    body = {"key": "g", "children": ["x"], "start": True}
    hidden = await flowing.post("groups", body | {"input": {"secrets": {"a": "b" * 20}}})
    assert problem(hidden) == (422, "secret_in_definition")
    own = (await flowing.get("me"))["workspaceId"]
    quota = f"{V1}/workspaces/{own}/quota"
    await flowing.client.put(quota, json={"pending": 0})
    assert problem(await flowing.post("groups", body)) == (429, "quota_exceeded")
    await flowing.client.put(quota, json={})
    assert (await flowing.post("groups", body)).status_code == 201


async def test_task_shows_its_dependencies(api: Api, flowing: Flowing) -> None:
    first = (await flowing.post("agent-tasks", {"title": "a", "key": "a"})).json()["id"]
    created = await flowing.post(
        "agent-tasks",
        {
            "title": "b",
            "dependsOn": [first],
            "onDependencyFailure": "run",
            "complexityLevel": "Middle",
            "escalation": {"reason": "stuck", "prompt": "Help."},
            "input": {"$from": "a", "path": "made"},
        },
    )
    view = created.json()
    assert (view["status"], view["waitingFor"]) == ("WAITING", "dependencies")
    assert (view["dependsOn"], view["onDependencyFailure"]) == ([first], "run")
    assert (view["complexity"], view["escalation"]) == (
        "Middle",
        {"reason": "stuck", "prompt": "Help."},
    )
    blocker = await flowing.post("agent-tasks", {"title": "c", "blocks": [view["id"]]})
    assert blocker.status_code == 201
    assert len((await flowing.get(f"agent-tasks/{view['id']}"))["dependsOn"]) == 2
    claimed = {work["title"]: work for work in await flowing.work()}
    assert claimed["b"]["inputContext"] == "a"


async def test_bulk_tasks_refer_to_each_other_by_key(api: Api, flowing: Flowing) -> None:
    body = {
        "tasks": [
            {"title": "b", "key": "b", "dependsOn": ["a"]},
            {"title": "a", "key": "a"},
        ]
    }
    created = (await flowing.post("agent-tasks/bulk", body)).json()["tasks"]
    assert [work["key"] for work in await flowing.work()] == ["a", "b"]
    assert (await flowing.get(f"agent-tasks/{created[0]['id']}"))["dependsOn"] == [created[1]["id"]]


NESTED = {"kind": "condition", "expression": "true", "onTrue": "yes", "onFalse": "no"}
FLAT = {"condition": "true", "trueNextTaskId": "yes", "falseNextTaskId": "no"}


@pytest.mark.parametrize(
    "output",
    [{"control": NESTED}, FLAT, FLAT | {"taskType": "ConditionTask", "kind": "condition"}],
    ids=["nested", "flat", "typed"],
)
async def test_control_task_is_a_flow_of_its_own(
    api: Api, flowing: Flowing, output: dict[str, Any]
) -> None:
    await flowing.define("yes", prompt="Yes.")
    await flowing.define("no", prompt="No.")
    created = (await flowing.post("agent-tasks", {"title": "if", "key": "if", **output})).json()
    assert (created["kind"], created["control"]) == ("condition", NESTED)
    assert UUID(created["flowId"])
    assert [work["key"] for work in await flowing.work()] == ["yes"]
    assert (await flowing.get(f"flows/{created['flowId']}"))["status"] == "COMPLETED"


async def test_task_with_a_next_task_starts_a_chain(api: Api, flowing: Flowing) -> None:
    await flowing.define("after", prompt="After.")
    body = {"title": "first", "key": "first", "prompt": "First.", "next": "after"}
    created = await flowing.post("agent-tasks", body, **{"Idempotency-Key": "k"})
    again = await flowing.post("agent-tasks", body, **{"Idempotency-Key": "k"})
    assert (created.status_code, again.status_code) == (201, 200)
    assert created.json()["id"] == again.json()["id"]
    claimed = await flowing.work()
    assert [work["title"] for work in claimed] == ["first", "after"]
    assert claimed[1]["previous"]["n"] == 0


@pytest.mark.parametrize(
    "output",
    [
        {"control": NESTED, "condition": "true"},
        {"control": {"kind": "goto", "expression": "x"}},
        {"control": {"kind": "goto"}},
        {"gotoPrompt": "x"},
        {"kind": "goto"},
        {"condition": "1 +"},
        {"foreachItems": 3, "foreachTemplateTaskId": "x"},
        {"approval": {"onTimeout": "maybe"}},
        {"complexity": "Low", "complexityLevel": "Hard"},
        {"next": "a", "nextTask": "b"},
        {"dependsOn": ["no key of this request"]},
        {"escalation": {"reason": "r"}},
    ],
    ids=str,
)
async def test_invalid_flow_body_is_refused(flowing: Flowing, output: dict[str, Any]) -> None:
    assert problem(await flowing.post("agent-tasks", {"title": "t", **output}))[0] == 422


async def test_agent_cannot_answer_the_inbox(api: Api, flowing: Flowing) -> None:
    await flowing.define("sign", approval={})
    await flowing.define("work", prompt="Work.")
    await flowing.start("sign")
    await flowing.start("work")
    [item] = (await flowing.get("inbox"))["items"]
    [work] = await flowing.claim()
    agent = (await flowing.post(f"agents/{flowing.agent}/token")).json()["token"]
    for token in (work["token"], agent):
        client = await api.client(token)
        for subject in ("approve", "reject", "answer"):
            answer = await client.post(
                f"{V1}/inbox/{item['id']}/{subject}", json={"comment": "yes"}
            )
            assert problem(answer) == (403, "forbidden"), subject
    viewer = await api.acting(Role.VIEWER)
    assert problem(await viewer.post(f"{V1}/inbox/{item['id']}/approve")) == (403, "forbidden")
    assert (await viewer.get(f"{V1}/inbox/{item['id']}")).json()["status"] == "OPEN"
    member = await api.acting(Role.MEMBER)
    wrong = await member.post(f"{V1}/inbox/{item['id']}/answer", json={"comment": "yes"})
    assert problem(wrong) == (409, "out_of_turn")
    no = await member.post(f"{V1}/inbox/{item['id']}/reject", json={"comment": "no"})
    assert no.json()["status"] == "REJECTED"
    [flow] = (await flowing.get("flows?key=sign"))["flows"]
    assert flow["status"] == "FAILED"
