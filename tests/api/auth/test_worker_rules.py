"""Workers that run prompts only: members cannot change what they run beyond the owner's rules."""

from pathlib import Path
from typing import Any

import httpx2
import pytest
from tests.api.conftest import V1, Api, problem
from tests.proof.crash.system import WAIT_S, System, system
from tests.waiting import eventually

from tenuto.model.tenancy.access import Role
from tenuto.settings import Settings

TASKS = f"{V1}/agent-tasks"
ENDED = ("COMPLETED", "FAILED", "DEAD")


class PromptWorker:
    """A worker process with a command of its own, and a member who sends it tasks."""

    def __init__(self, world: System, member: httpx2.AsyncClient, folder: Path) -> None:
        self.world = world
        self.member = member
        self.owned = folder / "owned"

    async def submit(self, **output: Any) -> str:
        answer = await self.member.post(TASKS, json={"title": "x", "prompt": "p", **output})
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])

    async def show(self, task: str) -> dict[str, Any]:
        result: dict[str, Any] = (await self.member.get(f"{TASKS}/{task}")).json()
        return result

    async def ended(self, task: str) -> dict[str, Any]:
        async def there() -> dict[str, Any] | None:
            view = await self.show(task)
            return view if view["status"] in ENDED else None

        return await eventually(there, WAIT_S, 0.1)


@pytest.fixture
async def prompt_worker(api: Api, settings: Settings, tmp_path: Path) -> Any:
    member = await api.acting(Role.MEMBER)
    async with system(settings.database, tmp_path) as world:
        command = "bash -c 'echo fixed; pwd -P'"
        world.worker("--no-accept-commands", "--command", command, task_env="")
        world.coordinator()
        yield PromptWorker(world, member, tmp_path)


async def test_member_cannot_change_what_a_prompt_worker_runs(
    prompt_worker: PromptWorker, tmp_path: Path
) -> None:
    code = f"$(touch {prompt_worker.owned})"
    for name in ("BASH_ENV", "LD_PRELOAD", "PATH", "bash_env", "ANTHROPIC_BASE_URL"):
        answer = await prompt_worker.member.post(
            TASKS, json={"title": "x", "prompt": "p", "env": {name: code}}
        )
        assert problem(answer) == (422, "invalid_value")
        assert (answer.json()["field"], name in answer.text) == ("env", True)
    refused = {
        await prompt_worker.submit(env={"DEPTH": code}): "start it with --allow-env DEPTH",
        await prompt_worker.submit(cwd="/etc"): "start it with --allow-folder /etc",
        await prompt_worker.submit(cwd="../.."): "start it with --allow-folder ",
    }
    for task, reason in refused.items():
        view = await prompt_worker.ended(task)
        assert (view["status"], view["errorClass"]) == ("FAILED", "invalid_input")
        assert reason in view["lastError"]
        [attempt] = (await prompt_worker.member.get(f"{TASKS}/{task}/attempts")).json()
        assert attempt["outcome"] == "NOT_STARTED"
    plain = await prompt_worker.submit()
    assert (await prompt_worker.ended(plain))["status"] == "COMPLETED"
    output = (await prompt_worker.member.get(f"{TASKS}/{plain}/transcript")).json()["lines"]
    assert [line["text"] for line in output] == ["fixed", str(tmp_path)]
    assert not prompt_worker.owned.exists()


async def test_workers_command_setting_overrides_the_agents(
    prompt_worker: PromptWorker,
) -> None:
    await prompt_worker.ended(await prompt_worker.submit())
    [agent] = (await prompt_worker.member.get(f"{V1}/agents")).json()["agents"]
    changed = await prompt_worker.member.put(
        f"{V1}/agents/{agent['id']}", json={"name": agent["name"], "acceptCommands": True}
    )
    assert changed.status_code == 200, changed.text
    brought = await prompt_worker.submit(command=["touch", str(prompt_worker.owned)], prompt=None)
    for _ in range(3):  # claims go on beside it
        assert (await prompt_worker.ended(await prompt_worker.submit()))["status"] == "COMPLETED"
    assert (await prompt_worker.show(brought))["status"] == "PENDING"
    assert not prompt_worker.owned.exists()


async def test_definition_with_a_refused_variable_is_refused(prompt_worker: PromptWorker) -> None:
    spec = {"id": "d", "name": "d", "prompt": "p", "env": {"LD_PRELOAD": "/tmp/x.so"}}
    created = await prompt_worker.member.post(f"{V1}/definitions", json={"spec": spec})
    assert problem(created)[0] == 422
    assert "tasks may never set LD_PRELOAD" in created.text
    yaml = "id: d\nname: d\nprompt: p\nenv: {LD_PRELOAD: /tmp/x.so}\n"
    applied = await prompt_worker.member.post(f"{V1}/definitions/apply", json={"manifest": yaml})
    assert problem(applied)[0] == 422
    assert "tasks may never set LD_PRELOAD" in applied.text
