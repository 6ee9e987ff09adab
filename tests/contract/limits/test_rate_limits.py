"""Rate limits: shared by all claimers, never exceeded within a minute, without delay for others."""

import asyncio
from datetime import timedelta
from typing import Any
from uuid import UUID

import msgspec
import pytest
from tests.contract.conftest import (
    LEASE_S,
    WORKER,
    Another,
    ManualClock,
    Raw,
    failure,
    new,
    profile,
    refusal,
)

from tenuto.engine.engine import Engine
from tenuto.engine.limits import rate_limits
from tenuto.engine.tasks.report import WorkerInfo
from tenuto.model.agents.matching import AgentProfile
from tenuto.model.limits.budgets import Usage
from tenuto.model.limits.rate_limits import RateLimit
from tenuto.store.protocol import Script, Statement

OPUS = "anthropic/opus"


def agent(number: int = 1, **fields: Any) -> AgentProfile:
    """An agent of its own that uses a limited model, unless the task names another."""
    plain = {"id": UUID(int=number), "name": f"agent-{number}", "model": OPUS}
    return profile(**(plain | fields))


async def limited(engine: Engine, name: str = "claude", **fields: Any) -> None:
    values: dict[str, Any] = {"provider": "anthropic", "requests_per_minute": 10, **fields}
    await engine.rate_limits.put(RateLimit(name=name, **values))


async def submit(engine: Engine, number: int, **fields: Any) -> None:
    await engine.submit_many([new(**fields) for _ in range(number)])


async def claim(engine: Engine, caller: AgentProfile, n: int = 100) -> list[str]:
    return [work.title for work in await engine.claim(caller, WORKER, n, LEASE_S)]


async def charge(engine: Engine, caller: UUID | None, model: str | None, tokens: int) -> None:
    def script() -> Script[None]:
        now = engine.clock.now()
        yield from rate_limits.charge_tokens(engine.workspace, caller, model, tokens, now)

    await engine.core.store.transact(script)


async def test_claims_within_any_minute_stay_within_the_limit(
    engine: Engine, another: Another, clock: ManualClock
) -> None:
    await limited(engine, requests_per_minute=7)
    await submit(engine, 120)
    created: list[tuple[float, int]] = []
    async with another() as second:
        assert isinstance(second.clock, ManualClock)
        for step in range(60):
            asks = [
                claim(where, agent(number), 1 + (step + number) % 3)
                for number, where in enumerate((engine, second, engine, second), 1)
            ]
            got = [len(titles) for titles in await asyncio.gather(*asks)]
            created.append((clock.elapsed(), sum(got)))
            pause = (step * 7 % 11) / 2
            clock.advance(pause)
            second.clock.advance(pause)
    for end, _ in created:
        window = sum(number for at, number in created if end - 60 < at <= end)
        assert window <= 7, f"{window} claims in the minute before {end}"
    # And no fewer than the limit lets through, but for the last minute's rest.
    assert sum(number for _, number in created) >= 7 * int(clock.elapsed() / 66)


async def test_claim_takes_at_most_the_remaining_requests(
    engine: Engine, clock: ManualClock
) -> None:
    await limited(engine, requests_per_minute=3)
    await submit(engine, 9)
    assert len(await claim(engine, agent())) == 3
    assert await claim(engine, agent(2)) == []
    clock.advance(59)
    assert await claim(engine, agent()) == []
    clock.advance(1)
    assert len(await claim(engine, agent(2))) == 3


async def test_claim_from_an_empty_lane_uses_no_requests(engine: Engine) -> None:
    await limited(engine, requests_per_minute=5)
    await submit(engine, 2)
    assert len(await claim(engine, agent())) == 2
    assert await claim(engine, agent()) == []
    assert [item.requests_left for item in await engine.rate_limits.list()] == [3]


async def test_tasks_without_a_rate_limit_are_claimed_beside_limited_ones(engine: Engine) -> None:
    await limited(engine, requests_per_minute=2)
    await submit(engine, 5, title="limited")
    await submit(engine, 5, title="free", model="openai/gpt", priority=1)
    assert sorted(await claim(engine, agent())) == ["free"] * 5 + ["limited"] * 2
    await submit(engine, 5, title="free", model="openai/gpt")
    assert await claim(engine, agent()) == ["free"] * 5
    assert await claim(engine, agent(2, model=None)) == ["limited"] * 3


async def test_best_task_of_the_allowed_lanes_is_claimed_first(engine: Engine) -> None:
    await limited(engine, requests_per_minute=2)
    await submit(engine, 1, title="first", model="openai/gpt", priority=10)
    await submit(engine, 2, title="second", priority=9)
    await submit(engine, 3, title="third", model="openai/gpt", priority=8)
    assert await claim(engine, agent(), 2) == ["first", "second"]
    assert await claim(engine, agent(), 2) == ["second", "third"]


async def test_narrowest_of_several_rate_limits_applies(engine: Engine, clock: ManualClock) -> None:
    await limited(engine, "all", requests_per_minute=5)
    await limited(engine, "opus", model="opus", requests_per_minute=2)
    await limited(engine, "team", provider=None, account="team-a", requests_per_minute=4)
    await submit(engine, 6, title="opus")
    await submit(engine, 6, title="haiku", model="anthropic/haiku")
    own = await claim(engine, agent(1, account="team-a"))
    assert sorted(own) == ["haiku", "haiku", "opus", "opus"]
    assert await claim(engine, agent(2)) == ["haiku"]
    left = {item.name: item.requests_left for item in await engine.rate_limits.list()}
    assert left == {"all": 0, "opus": 0, "team": 0}
    clock.advance(60)
    assert len(await claim(engine, agent(2))) == 5


async def test_rate_limit_and_capacity_apply_together(engine: Engine) -> None:
    await limited(engine, requests_per_minute=5)
    few = await engine.register_agent(agent(1, max_concurrent=2))
    await submit(engine, 9)
    assert len(await claim(engine, few)) == 2
    assert await claim(engine, few) == []
    assert len(await claim(engine, agent(2))) == 3


async def test_claim_skips_a_used_up_limit_until_it_resets(
    engine: Engine, another: Another, clock: ManualClock
) -> None:
    await limited(engine, requests_per_minute=1)
    await submit(engine, 5)
    assert len(await claim(engine, agent())) == 1
    now = clock.now()
    assert (await engine.core.lanes.open_lanes(agent(), now)).lanes == []
    assert (await engine.core.lanes.open_lanes(agent(), now + timedelta(seconds=60))).lanes
    async with another() as operator:
        await limited(operator, requests_per_minute=3)
    assert len(await claim(engine, agent())) == 2


async def test_lane_closed_by_a_former_limit_opens_when_the_limit_changes(
    engine: Engine, clock: ManualClock
) -> None:
    await limited(engine, requests_per_minute=1)
    await submit(engine, 1)
    before = await engine.core.lanes.open_lanes(agent(), clock.now())
    await limited(engine, requests_per_minute=3)
    used_up = {"claude": clock.now() + timedelta(minutes=1)}
    engine.core.lanes.exclude_limited(
        engine.workspace, before.version, used_up
    )  # a claim ends late
    assert len(await claim(engine, agent())) == 1


async def test_new_or_deleted_rate_limit_applies_at_once(engine: Engine, another: Another) -> None:
    await submit(engine, 9)
    assert len(await claim(engine, agent(), 1)) == 1
    async with another() as operator:
        await limited(operator, requests_per_minute=2)
        assert len(await claim(engine, agent())) == 2
        await operator.rate_limits.delete("claude")
    assert len(await claim(engine, agent())) == 6


async def test_reported_tokens_are_charged_and_delay_claims(
    engine: Engine, clock: ManualClock
) -> None:
    await limited(engine, requests_per_minute=None, tokens_per_minute=600)
    await limited(engine, "team", provider=None, account="a", tokens_per_minute=60)
    existing = await engine.register_agent(agent(1, account="a"))
    await submit(engine, 9)
    assert len(await claim(engine, existing, 1)) == 1
    await charge(engine, existing.id, OPUS, 1200)
    await charge(engine, existing.id, "openai/gpt", 30)
    await charge(engine, None, "anthropic/haiku", 0)
    left = {item.name: item.tokens_left for item in await engine.rate_limits.list()}
    assert left == {"claude": -600, "team": -1170}
    other = agent(2)
    assert await claim(engine, other) == []
    clock.advance(60)
    assert await claim(engine, other) == []
    clock.advance(1)
    assert len(await claim(engine, other, 1)) == 1
    assert await claim(engine, existing) == []


@pytest.mark.parametrize("mode", ["used", "complete", "fail"])
async def test_reported_tokens_are_charged_once(engine: Engine, mode: str) -> None:
    await limited(engine, requests_per_minute=None, tokens_per_minute=600)
    await submit(engine, 2)
    existing = await engine.register_agent(agent())
    [work] = await engine.claim(existing, WORKER, 1, LEASE_S)
    # Of no model of its own: the agent's is meant.
    usage = Usage(input_tokens=500, output_tokens=300, number=1)
    await engine.used(work.fence, usage)
    await engine.used(work.fence, usage)
    if mode == "complete":
        await engine.complete(work.fence, usage=usage)
    elif mode == "fail":
        await engine.fail(work.fence, failure(), usage=usage)
    [view] = await engine.rate_limits.list()
    assert view.tokens_left == -200
    assert await claim(engine, existing) == []


async def test_concurrent_token_reports_are_all_charged(engine: Engine, another: Another) -> None:
    await limited(engine, tokens_per_minute=1000)
    async with another() as second:
        reports = [charge(where, None, OPUS, 10) for where in (engine, second) for _ in range(20)]
        await asyncio.gather(*reports)
    [view] = await engine.rate_limits.list()
    assert view.tokens_left == 600


async def test_explain_names_the_rate_limit_and_the_next_start(
    engine: Engine, clock: ManualClock
) -> None:
    await limited(engine, requests_per_minute=1)
    existing = await engine.register_agent(agent())
    await engine.record_worker(WorkerInfo(WORKER, "host", 1, [existing.name], 5, "RUNNING"))
    await submit(engine, 1)
    task = (await engine.submit(new())).id
    assert (await engine.explain(task)).agents == {existing.name: []}
    await claim(engine, existing)
    result = await engine.explain(task)
    text = "rate limit claude: next at 2030-01-01T00:01:00Z"
    assert result.agents == {existing.name: [text]}
    [gate] = result.gates
    assert (gate.gate, gate.detail) == ("rate_limit", text)
    assert gate.clears_at == clock.now() + timedelta(seconds=60)
    clock.advance(60)
    assert (await engine.explain(task)).agents == {existing.name: []}


async def test_rate_limit_is_shown_changed_and_deleted(engine: Engine, raw: Raw) -> None:
    await limited(engine, model="opus", tokens_per_minute=100)
    [view] = await engine.rate_limits.list()
    assert (view.name, view.provider, view.model, view.account) == (
        "claude",
        "anthropic",
        "opus",
        None,
    )
    assert (view.requests_left, view.tokens_left, view.next_at) == (10, 100, None)
    await submit(engine, 4)
    await claim(engine, agent())
    await limited(engine, model="opus", requests_per_minute=4)
    [view] = await engine.rate_limits.list()
    assert (view.requests_left, view.tokens_per_minute, view.created_by) == (0, None, "tester")
    assert view.next_at is not None
    await engine.rate_limits.delete("claude")
    assert await engine.rate_limits.list() == []
    assert await refusal(engine.rate_limits.delete("claude")) == "not_found"
    reported = await raw.fetch(
        "select kind, message, actor from event where kind like 'limit%' order by kind, at"
    )
    assert (
        reported
        == [("limit_deleted", "claude", "tester")] + [("limit_set", "claude", "tester")] * 2
    )


@pytest.mark.parametrize(
    "fields",
    [{"requests_per_minute": 0}, {"provider": None}, {"provider": "\x00"}, {"name": " "}],
)
async def test_invalid_rate_limit_is_refused(
    engine: Engine, raw: Raw, fields: dict[str, Any]
) -> None:
    expected = RateLimit(name="x", provider="p", requests_per_minute=1)
    await refusal(engine.rate_limits.put(msgspec.structs.replace(expected, **fields)))
    assert await raw.count("rate_limit") == 0


async def test_rate_limit_applies_to_its_own_workspace(engine: Engine, raw: Raw) -> None:
    other = Engine(engine.store, workspace=await raw.workspace(5), actor="tester")
    await limited(other, requests_per_minute=1)
    await submit(engine, 3)
    assert len(await claim(engine, agent())) == 3
    assert await engine.rate_limits.list() == []


async def test_claim_without_rate_limits_is_one_statement(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await limited(engine)
    await submit(engine, 2, model="openai/gpt")
    await claim(engine, agent(), 1)
    asked: list[str] = []
    once, fetch = engine.core.store.transact_one, engine.core.store.fetch

    async def noted_once(script: Any) -> Any:
        def noted_script() -> Any:
            inner = script()
            rows = None
            while True:
                try:
                    statement: Statement = inner.send(rows)
                except StopIteration as stop:
                    return stop.value
                asked.append(statement.query)
                rows = yield statement

        return await once(noted_script)

    async def noted_fetch(statement: Statement) -> Any:
        asked.append(statement.query)
        return await fetch(statement)

    monkeypatch.setattr(engine.core.store, "transact_one", noted_once)
    monkeypatch.setattr(engine.core.store, "fetch", noted_fetch)
    assert len(await claim(engine, agent(), 1)) == 1
    assert asked == ["claim_lane"]
