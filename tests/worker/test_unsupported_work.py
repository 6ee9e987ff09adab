"""A worker runs only what it supports."""

from typing import Any
from uuid import UUID

import msgspec
import pytest
from tests.proof.crash.inside import WAIT_S, working
from tests.waiting import eventually

from tenuto.model.agents.matching import AgentProfile


async def test_unsupported_task_is_released_without_counting_a_try(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with working(database_url, {"mine": lambda _ctx: "done"}) as inside:
        claim = inside.worker.engine.claim

        def careless(agent: AgentProfile, *rest: Any) -> Any:
            anything = {"task_types": None, "means": None, "accept_commands": True, "version": 99}
            return claim(msgspec.structs.replace(agent, **anything), *rest)

        monkeypatch.setattr(inside.worker.engine, "claim", careless)
        other = await inside.submit(task_type="other")
        command = await inside.shell("echo no")
        for task in (other, command):

            async def back(task: UUID = task) -> bool:
                return "RELEASED" in await inside.outcomes(task)

            await eventually(back, WAIT_S, 0.02)
            await inside.engine.cancel(task)
        assert (await inside.ended(await inside.submit(task_type="mine"))).output == "done"
