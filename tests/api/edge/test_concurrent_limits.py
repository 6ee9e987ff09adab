"""Limits of concurrent use: login tries, live streams, waiting claims."""

import asyncio
from contextlib import AsyncExitStack
from uuid import UUID, uuid4

import httpx2
import pytest
from tests.api.conftest import V1, Api, problem, replaced, running
from tests.api.edge.test_streams import stream
from tests.contract.conftest import ManualClock
from tests.waiting import eventually

from tenuto.api.auth import logins
from tenuto.api.auth.logins import BURST, FREE_TRIES, LoginLimiter, LoginSource, LoginThrottle
from tenuto.api.auth.throttling import RequestThrottle
from tenuto.api.edge.concurrent import ConcurrencyLimiter, Holder
from tenuto.clock import Clock
from tenuto.engine.engine import DEFAULT_WORKSPACE
from tenuto.model.errors import TooMany
from tenuto.model.limits.quota import Quota
from tenuto.model.tenancy.access import Role
from tenuto.settings import Settings

ANN = LoginSource("192.0.2.1", "ann")


def may(tries: LoginThrottle, caller: LoginSource, now: float) -> bool:
    try:
        tries.count_try(caller, now)
    except TooMany:
        return False
    return True


def test_user_and_address_pair_waits_after_failures() -> None:
    tries = LoginThrottle()
    assert [may(tries, ANN, 0) for _ in range(FREE_TRIES + 1)] == [True] * FREE_TRIES + [False]
    assert not may(tries, ANN, 4.9)
    assert may(tries, ANN, 5.1)
    assert not may(tries, ANN, 5.2)
    assert may(tries, LoginSource("192.0.2.2", "ann"), 0)
    assert may(tries, LoginSource("192.0.2.1", "bob"), 0)


def test_successful_login_makes_the_pair_known() -> None:
    tries = LoginThrottle()
    for _ in range(FREE_TRIES):
        assert may(tries, ANN, 0)
    tries.record_success(ANN)
    assert [may(tries, ANN, 0) for _ in range(BURST + 1)] == [True] * BURST + [False]
    assert may(tries, ANN, 1.1)


def test_successful_login_of_a_namesake_gives_no_more_tries() -> None:
    tries, other = LoginThrottle(), LoginSource(ANN.address, ANN.name, "other")
    for _ in range(FREE_TRIES - 1):
        assert may(tries, ANN, 0)
    assert may(tries, other, 0)
    tries.record_success(other)
    assert may(tries, other, 0)
    assert [may(tries, ANN, 0) for _ in range(2)] == [True, False]
    assert not may(tries, LoginSource(ANN.address, ANN.name, "a third"), 0)


def test_address_limit_does_not_delay_known_users() -> None:
    tries = LoginThrottle()
    tries.record_success(ANN)
    names = [LoginSource(ANN.address, f"name-{n}") for n in range(BURST + 1)]
    assert [may(tries, pair, 0) for pair in names] == [True] * BURST + [False]
    assert may(tries, ANN, 0)
    assert may(tries, names[-1], 1.1)
    assert not may(tries, LoginSource(ANN.address, "another"), 1.2)


def test_remembered_pairs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logins, "MAX_ENTRIES", 3)
    tries = LoginThrottle()
    tries.record_success(ANN)
    for n in range(10):
        assert may(tries, LoginSource(f"192.0.2.{n}", "x"), 0)
    assert [len(item) for item in (tries._tries, tries._buckets, tries._known)] == [3, 3, 1]


def test_pair_that_keeps_trying_stays_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logins, "MAX_ENTRIES", 3)
    tries = LoginThrottle()
    for n in range(FREE_TRIES):
        assert may(tries, ANN, 0)
        assert may(tries, LoginSource(f"198.51.100.{n}", "x"), 0)
    assert not may(tries, ANN, 0)


def test_correct_password_counts_no_try_and_returns_none_twice() -> None:
    tries, other = LoginThrottle(), LoginSource(ANN.address, ANN.name, "other")
    assert may(tries, other, 0)
    for _ in range(3):
        tries.record_success(other)
    assert [may(tries, ANN, 0) for _ in range(FREE_TRIES + 1)] == [True] * FREE_TRIES + [False]


class Waiting:
    """Logins that are verified until a test ends them."""

    def __init__(self) -> None:
        self.logins = LoginLimiter(Clock())
        self.seen: list[str] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._end = asyncio.Semaphore(0)

    async def login(self, address: str, name: str) -> None:
        async with self.logins.admit(address, name):
            self.seen.append(name)
            await self._end.acquire()

    def begin(self, address: str, *names: str) -> None:
        self._tasks += [asyncio.create_task(self.login(address, name)) for name in names]

    async def end(self) -> None:
        """Let all of them be verified."""
        for _ in self._tasks:
            self._end.release()
        await asyncio.gather(*self._tasks)

    def log_in(self, address: str, name: str) -> None:
        """The user has logged in from there before."""
        self.logins._throttle.record_success(LoginSource(address, name))


async def test_flood_of_logins_does_not_delay_other_requests() -> None:
    waiting = Waiting()
    waiting.log_in("192.0.2.9", "ann")
    for address in ("192.0.2.1", "192.0.2.2"):
        waiting.begin(address, *(f"{address} {n}" for n in range(6)))
    await eventually(lambda: waiting.logins._queue.total_waiting() == 10)
    for address in ("192.0.2.1", "192.0.2.2"):
        with pytest.raises(TooMany, match="from this address at once"):
            await waiting.login(address, "more")
    waiting.begin("192.0.2.3", "bob")
    await eventually(lambda: waiting.logins._queue.total_waiting() == 11)
    waiting.begin("192.0.2.9", "ann")
    await eventually(lambda: waiting.logins._queue._preferred)
    await waiting.end()
    assert waiting.seen[:2] == ["192.0.2.1 0", "192.0.2.2 0"]
    assert waiting.seen.index("ann") == 2
    assert waiting.seen.index("bob") <= 4


async def test_waiting_logins_are_limited_in_total(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logins, "MAX_WAITING", 2)
    waiting = Waiting()
    waiting.log_in("192.0.2.9", "ann")
    for n in range(4):
        waiting.begin(f"192.0.2.{n}", f"user {n}")
    await eventually(lambda: waiting.logins._queue.total_waiting() == 2)
    with pytest.raises(TooMany, match="too many logins are waiting") as refused:
        await waiting.login("192.0.2.8", "bob")
    assert refused.value.code == "rate_limited"
    waiting.begin("192.0.2.9", "ann")
    await waiting.end()
    assert waiting.seen[2] == "ann"


def test_rate_limited_caller_gets_retry_after() -> None:
    clock = ManualClock()
    rates = RequestThrottle(clock, Settings(rate_per_s=2))
    for _ in range(4):
        rates.count_request("a")
    with pytest.raises(TooMany) as refused:
        rates.count_request("a")
    assert refused.value.retry_after == 0.5
    rates.count_request("b")
    clock.advance(0.5)
    rates.count_request("a")


async def test_workspaces_have_separate_request_rates() -> None:
    clock = ManualClock()
    rates = RequestThrottle(clock, Settings())

    async def look() -> Quota:
        return Quota(tasks_per_minute=2)

    one, two = UUID(int=1), UUID(int=2)
    for workspace in (one, two):
        await rates.count_tasks(workspace, 2, look)
    with pytest.raises(TooMany) as refused:
        await rates.count_tasks(one, 1, look)
    assert refused.value.retry_after == 30
    clock.advance(30)
    await rates.count_tasks(one, 1, look)


def test_concurrent_use_is_counted_for_all_holders_or_none() -> None:
    held, workspace = ConcurrencyLimiter("things", "too_many_streams"), UUID(int=1)
    first = held.acquire({"a": 1, workspace: 2})
    second = held.acquire({"b": 1, workspace: 2})
    over: list[dict[Holder, int]] = [{"a": 1, workspace: 3}, {"c": 1, workspace: 2}]
    for bounds in over:
        with pytest.raises(TooMany) as refused:
            held.acquire(bounds)
        assert refused.value.code == "too_many_streams"
    assert [held.count(item) for item in ("a", "b", "c", workspace)] == [1, 1, 0, 2]
    first()
    first()
    assert held.count(workspace) == 1
    second()
    assert not held._counts


async def test_streams_are_counted_per_token_and_workspace(settings: Settings) -> None:
    few = replaced(settings, streams_per_token=2, streams_per_workspace=3)
    async with running(few) as api:
        one, two = await api.acting(), await api.acting()
        created = (await one.post(f"{V1}/agent-tasks", json={"title": "a"})).json()["id"]
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(stream(one, "/events"))
            await stack.enter_async_context(stream(one, f"/agent-tasks/{created}/events"))
            assert problem(await one.get(f"{V1}/events")) == (429, "too_many_streams")
            await stack.enter_async_context(stream(two, "/events"))
            refused = await two.get(f"{V1}/events")
            assert problem(refused) == (429, "too_many_streams")
            assert "the workspace has reached its limit of 3" in refused.json()["detail"]
            elsewhere = await api.acting(Role.OWNER, await api.workspace("other"))
            async with stream(elsewhere, "/events"):
                pass
        await eventually(lambda: api.service.open_streams.count(DEFAULT_WORKSPACE) == 0)
        async with stream(one, "/events"):
            assert api.service.open_streams.count(DEFAULT_WORKSPACE) == 1
        for path in (f"/agent-tasks/{uuid4()}/events", "/agent-tasks/x/events"):
            assert problem(await one.get(f"{V1}{path}"))[0] == 404
        await eventually(lambda: api.service.open_streams.count(DEFAULT_WORKSPACE) == 0)


async def test_logins_of_a_user_count_together(settings: Settings) -> None:
    async with running(replaced(settings, streams_per_token=2)) as api:
        identity = api.service.identity
        for name in ("ann", "bob"):
            await identity.create_user(name, "a long password", DEFAULT_WORKSPACE, Role.VIEWER)

        async def client(name: str) -> httpx2.AsyncClient:
            return await api.client((await identity.login(name, "a long password")).token)

        ann, bob = [await client("ann") for _ in range(3)], await client("bob")
        async with stream(ann[0], "/events"), stream(ann[1], "/events"), stream(bob, "/events"):
            assert problem(await ann[2].get(f"{V1}/events")) == (429, "too_many_streams")


async def test_waiting_claims_are_counted_per_token(settings: Settings) -> None:
    async with running(replaced(settings, polls_per_token=1)) as api:
        owner, other = await api.acting(), await api.acting()
        agent = uuid4()
        await owner.put(f"{V1}/agents/{agent}", json={"name": "a"})
        claim = f"{V1}/agents/{agent}/claim"
        waiting = asyncio.create_task(owner.post(claim, json={"waitSeconds": 20}))
        await eventually(lambda: held(api) == 1)
        assert problem(await owner.post(claim, json={"waitSeconds": 5})) == (429, "too_many_polls")
        assert (await owner.post(claim, json={})).json()["tasks"] == []
        second = asyncio.create_task(other.post(claim, json={"waitSeconds": 20}))
        await eventually(lambda: held(api) == 2)
        for _ in range(2):
            assert (await owner.post(f"{V1}/agent-tasks", json={"title": "a"})).status_code == 201
        assert len([*(await waiting).json()["tasks"], *(await second).json()["tasks"]]) == 2
        assert held(api) == 0


def held(api: Api) -> int:
    """Returns how many claims wait."""
    return api.service.waiting_claims._counts.total()
