"""Limits of request body bytes in progress per token, per workspace and in total."""

from pathlib import Path
from uuid import UUID

import httpx2
import pytest
from tests.api.conftest import V1, problem, replaced, running
from tests.api.edge.test_connection import TASKS, raw
from tests.waiting import eventually

from tenuto.api.edge import body_budget
from tenuto.api.edge.body_budget import UNCOUNTED_BYTES, BodyBudget
from tenuto.model.errors import TooMany, Unavailable
from tenuto.model.tenancy.access import Caller, Role
from tenuto.settings import Settings


def caller(key: str, workspace: int) -> Caller:
    return Caller(
        workspace=UUID(int=workspace), role=Role.MEMBER, scopes=frozenset(), actor=key, key=key
    )


def test_body_bytes_are_counted_per_token_workspace_and_in_total() -> None:
    budget = BodyBudget(100)
    first = budget.new_reservation(caller("a", 1))
    first.grow_to(UNCOUNTED_BYTES)
    assert not budget._used
    first.grow_to(UNCOUNTED_BYTES + 150)
    first.grow_to(UNCOUNTED_BYTES + 400)
    with pytest.raises(TooMany, match="the token may have 400 bytes") as refused:
        first.grow_to(UNCOUNTED_BYTES + 401)
    assert refused.value.code == "too_many_bytes"
    budget.new_reservation(caller("b", 1)).grow_to(UNCOUNTED_BYTES + 400)
    with pytest.raises(TooMany, match="the workspace"):
        budget.new_reservation(caller("c", 1)).grow_to(UNCOUNTED_BYTES + 1)
    for key in ("d", "e"):
        budget.new_reservation(caller(key, 2)).grow_to(UNCOUNTED_BYTES + 400)
    last = budget.new_reservation(caller("f", 3))
    with pytest.raises(Unavailable, match="the server"):
        last.grow_to(UNCOUNTED_BYTES + 1)
    first.release()
    first.release()
    last.grow_to(UNCOUNTED_BYTES + 400)
    last.release()
    assert (budget._used["a"], budget._used["f"], budget._total) == (0, 0, 1200)


async def test_body_bytes_in_progress_per_token_are_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    take = BodyBudget.reserve

    def noted(budget: BodyBudget, caller: Caller, count: int) -> None:
        take(budget, caller, count)
        taken.append(count)

    monkeypatch.setattr(BodyBudget, "reserve", noted)
    monkeypatch.setattr(body_budget, "MAX_PER_TOKEN", 1)
    settings = Settings(database=f"sqlite:///{tmp_path}/t.db", data=str(tmp_path), port=0)
    async with running(replaced(settings, body_kb=200)) as api:
        token = await api.token()
        client, other = await api.client(token), await api.acting()

        async def submit(user: httpx2.AsyncClient) -> httpx2.Response:
            return await user.post(
                f"{V1}/agent-tasks", json={"title": "a", "prompt": "x" * 150_000}
            )

        async with raw(api) as slow:
            head = f"Authorization: Bearer {token}\r\nContent-Length: 199000\r\n\r\n"
            await slow.send(TASKS + head.encode() + b" " * 190_000)
            await eventually(lambda: sum(taken) == 190_000 - UNCOUNTED_BYTES)
            assert problem(await submit(client)) == (429, "too_many_bytes")
            assert (await submit(other)).status_code == 201

        async def accepted() -> bool:
            return (await submit(client)).status_code == 201

        await eventually(accepted)
