"""The operator's ceiling bounds every workspace quota."""

from pathlib import Path

import httpx2
from tests.api.conftest import V1, Api, problem, replaced, running

from tenuto.settings import Settings


async def start(api: Api, folder: Path) -> tuple[httpx2.AsyncClient, str]:
    owner = await api.client((folder / "token").read_text().strip())
    return owner, f"{V1}/workspaces/{(await owner.get(f'{V1}/me')).json()['workspaceId']}"


async def test_quota_above_the_ceiling_is_refused(settings: Settings, tmp_path: Path) -> None:
    bounded = replaced(settings, quota_pending=2, quota_running=1, quota_tasks_per_minute=60)
    async with running(bounded) as api:
        owner, own = await start(api, tmp_path)
        shown = (await owner.get(own)).json()["quota"]
        assert shown == {"tasksPerMinute": 60, "pending": 2, "running": 1}
        above = await owner.put(f"{own}/quota", json={"pending": 3})
        assert problem(above) == (422, "invalid_value")
        assert "quota_pending" in above.json()["detail"]
        below = await owner.put(f"{own}/quota", json={"pending": 1})
        assert below.json()["quota"] == {"tasksPerMinute": 60, "pending": 1, "running": 1}
        free = await owner.put(f"{own}/quota", json={})
        assert free.json()["quota"] == shown


async def test_ceiling_applies_without_a_quota(settings: Settings, tmp_path: Path) -> None:
    async with running(replaced(settings, quota_pending=2, quota_running=1)) as api:
        owner, _ = await start(api, tmp_path)
        for _ in range(2):
            assert (await owner.post(f"{V1}/agent-tasks", json={"title": "t"})).status_code == 201
        more = await owner.post(f"{V1}/agent-tasks", json={"title": "t"})
        assert problem(more) == (429, "quota_exceeded")
        agents = [f"{V1}/agents/00000000-0000-7000-8000-00000000000{number}" for number in (1, 2)]
        taken = []
        for number, agent in enumerate(agents):
            await owner.put(agent, json={"name": f"a{number}"})
            claim = (await owner.post(f"{agent}/claim", json={"limit": 2})).json()
            taken.append(len(claim["tasks"]))
        assert taken == [1, 0]
        tasks = (await owner.get(f"{V1}/agent-tasks?status=PENDING")).json()["tasks"]
        reported = (await owner.get(f"{V1}/agent-tasks/{tasks[0]['id']}/explain")).json()
        [gate] = [item for item in reported["gates"] if item["gate"] == "quota"]
        assert "its quota is 1 at once" in gate["detail"]


async def test_submits_per_minute_are_bounded_by_the_ceiling(
    settings: Settings, tmp_path: Path
) -> None:
    async with running(replaced(settings, quota_tasks_per_minute=1)) as api:
        owner, _ = await start(api, tmp_path)
        assert (await owner.post(f"{V1}/agent-tasks", json={"title": "t"})).status_code == 201
        more = await owner.post(f"{V1}/agent-tasks", json={"title": "t"})
        assert problem(more) == (429, "quota_exceeded")
