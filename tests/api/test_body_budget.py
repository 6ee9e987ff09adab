"""How many bytes of bodies one token, one workspace and all together may have in progress."""

from pathlib import Path
from uuid import UUID

import httpx2
import pytest
from tests.api.conftest import V1, problem, replaced, running
from tests.api.test_connection import TASKS, raw
from tests.waiting import eventually

from tenuto.api.edge import body_budget
from tenuto.api.edge.body_budget import FREE_BYTES, BodyBudget
from tenuto.model.errors import TooMany, Unavailable
from tenuto.model.tenancy.access import Caller, Role
from tenuto.settings import Settings


def caller(key: str, workspace: int) -> Caller:
    return Caller(
        workspace=UUID(int=workspace), role=Role.MEMBER, scopes=frozenset(), actor=key, key=key
    )


def test_bytes_are_counted_per_token_workspace_and_in_all() -> None:
    budget = BodyBudget(100)
    first = budget.of(caller("a", 1))
    first.grow(FREE_BYTES)
    assert not budget._held
    first.grow(FREE_BYTES + 150)
    first.grow(FREE_BYTES + 400)
    with pytest.raises(TooMany, match="the token may have 400 bytes") as refused:
        first.grow(FREE_BYTES + 401)
    assert refused.value.code == "too_many_bytes"
    budget.of(caller("b", 1)).grow(FREE_BYTES + 400)
    with pytest.raises(TooMany, match="the workspace"):
        budget.of(caller("c", 1)).grow(FREE_BYTES + 1)
    for key in ("d", "e"):
        budget.of(caller(key, 2)).grow(FREE_BYTES + 400)
    last = budget.of(caller("f", 3))
    with pytest.raises(Unavailable, match="the server"):
        last.grow(FREE_BYTES + 1)
    first.end()
    first.end()
    last.grow(FREE_BYTES + 400)
    last.end()
    assert (budget._held["a"], budget._held["f"], budget._all) == (0, 0, 1200)


async def test_a_token_has_so_many_bytes_of_bodies_in_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    take = BodyBudget.take

    def noted(budget: BodyBudget, caller: Caller, count: int) -> None:
        take(budget, caller, count)
        taken.append(count)

    monkeypatch.setattr(BodyBudget, "take", noted)
    monkeypatch.setattr(body_budget, "PER_TOKEN", 1)
    settings = Settings(database=f"sqlite:///{tmp_path}/t.db", data=str(tmp_path), port=0)
    async with running(replaced(settings, body_kb=200)) as api:
        token = await api.token()
        client, other = await api.client(token), await api.acting()

        async def submit(who: httpx2.AsyncClient) -> httpx2.Response:
            return await who.post(f"{V1}/agent-tasks", json={"title": "a", "prompt": "x" * 150_000})

        async with raw(api) as slow:
            head = f"Authorization: Bearer {token}\r\nContent-Length: 199000\r\n\r\n"
            await slow.send(TASKS + head.encode() + b" " * 190_000)
            await eventually(lambda: sum(taken) == 190_000 - FREE_BYTES)
            assert problem(await submit(client)) == (429, "too_many_bytes")
            assert (await submit(other)).status_code == 201

        async def accepted() -> bool:
            return (await submit(client)).status_code == 201

        await eventually(accepted)
