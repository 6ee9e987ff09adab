"""Push dispatch by real processes: coordinator, API, gateways and the sessions they spawn.

`TENUTO_PROOF_SESSIONS=500` plays the killed gateway in full size.
"""

import logging
import os
import signal
import socket
from collections.abc import AsyncIterator
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx2
import pytest
from tests.contract.conftest import Raw
from tests.proof.crash.system import ROOT, WAIT_S, Process, System, carrying, system
from tests.waiting import eventually

from tenuto.clock import to_micros
from tenuto.engine.agents.gateways import Gateways
from tenuto.model.agents.matching import AgentProfile
from tenuto.model.tasks.retry import RetryPolicy
from tenuto.model.tasks.submission import NewTask

log = logging.getLogger(__name__)

SESSIONS = int(os.environ.get("TENUTO_PROOF_SESSIONS", "40"))
CAP = 20
HEARTBEAT_S = max(1.0, SESSIONS / 50)
DISPATCH_POINTS = ("dispatch.claimed", "dispatch.spawned", "dispatch.begun")
GATEWAY = str(ROOT / "examples" / "gateway" / "gateway.py")


def free_port() -> int:
    with socket.socket() as result:
        result.bind(("127.0.0.1", 0))
        return int(result.getsockname()[1])


class World:
    """A system with an API, a coordinator that pushes, and a gateway."""

    def __init__(self, base: System) -> None:
        self.base = base
        self.engine = base.engine
        self.gateway_port = free_port()
        self.api_port = free_port()
        self.gateway_url = f"http://127.0.0.1:{self.gateway_port}"

    async def open(self, **changes: Any) -> None:
        """Start the API and the coordinator."""
        self.base.start("serve", port=self.api_port)
        self.coordinator = self.coordinate(**changes)
        await self._answers(f"http://127.0.0.1:{self.api_port}/health/live")

    def coordinate(self, **changes: Any) -> Process:
        settings = {
            "gateways": f"default={self.gateway_url}",
            "public_url": f"http://127.0.0.1:{self.api_port}",
            "spawn_timeout_s": 10,
            "dispatch_per_s": CAP,
        }
        return self.base.coordinator(**settings | changes)

    async def gateway(self, *command: str, **changes: Any) -> Process:
        """The reference gateway, running that command for every session."""
        port = str(self.gateway_port)
        mark = f"{self.base.mark} session"
        process = self.base.start(
            "python", GATEWAY, "--port", port, "--", *command, TENUTO_PROOF_MARK=mark, **changes
        )
        await self._answers(self.gateway_url)
        return process

    async def light_gateway(self, run_s: float) -> Process:
        words = ("-m", "tests.proof.light_gateway", self.gateway_port, HEARTBEAT_S, run_s)
        process = self.base.start("python", *map(str, words))
        await self._answers(self.gateway_url)
        return process

    async def _answers(self, url: str) -> None:
        async with httpx2.AsyncClient(timeout=5) as client:

            async def answered() -> bool:
                try:
                    await client.get(url)
                except httpx2.HTTPError:
                    return False
                return True

            await eventually(answered, WAIT_S, 0.05)

    async def agent(self, **changes: Any) -> AgentProfile:
        plain: dict[str, Any] = {
            "id": self.engine.clock.new_id(),
            "workspace": self.engine.workspace,
            "name": "pushed",
            "runtimes": ("gateway",),
            "gateway": "default",
            "stale_threshold_s": 3,
        }
        return await self.engine.register_agent(AgentProfile(**plain | changes), managed=True)

    async def submit(self, n: int = 1, **options: Any) -> list[UUID]:
        plain: dict[str, Any] = {"max_attempts": 20, "retry": RetryPolicy(base_s=0.2, cap_s=1)}
        new_tasks = [NewTask(title=f"task {number}", **plain | options) for number in range(n)]
        return await self.base.submit(*new_tasks)

    async def in_status(self, tasks: list[UUID], status: str, limit: float = WAIT_S) -> None:
        await self.base.in_status(tasks, status, limit=limit)

    def sessions(self, gateway: Process) -> list[int]:
        """The processes below a gateway."""
        return [pid for pid in carrying(f"{self.base.mark} session") if pid != gateway.pid]

    async def claims(self) -> list[float]:
        """Returns the times at which tasks were claimed, in seconds."""
        rows = await Raw(self.base.url).fetch("select at from event where kind = 'claimed'")
        return sorted(
            (to_micros(at) if isinstance(at, datetime) else int(at)) / 1e6 for (at,) in rows
        )

    async def completed(self) -> int:
        return (await self.engine.counts())["COMPLETED"]


def fullest_second(times: list[float]) -> int:
    """Returns the greatest number of times within any one second."""
    maximum, first = 0, 0
    for last, time in enumerate(times):
        while times[first] <= time - 1:
            first += 1
        maximum = max(maximum, last - first + 1)
    return maximum


def test_fullest_second_is_computed() -> None:
    assert fullest_second([0.0, 0.5, 0.9, 1.0, 1.4, 3.0]) == 4
    assert fullest_second([]) == 0


@pytest.fixture
async def world(database_url: str, tmp_path: Path) -> AsyncIterator[World]:
    async with system(database_url, tmp_path) as base:
        created = World(base)
        yield created


STEPS = {"steps": 2, "stepSeconds": 0.05, "beatSeconds": 0.5}


async def test_pushed_task_completes_over_its_callback(world: World) -> None:
    await world.agent()
    gateway = await world.gateway()
    await world.open()
    tasks = await world.submit(3, prompt="count", input=STEPS)
    await world.in_status(tasks, "COMPLETED")
    for task in tasks:
        view = await world.engine.show(task)
        assert view.output == {"said": "count", "from": 0, "to": 2}
        assert (view.worker, view.attempt) == ("gateway:default", 1)
        assert view.session_key
    await eventually(lambda: not world.sessions(gateway), WAIT_S)
    [state] = await Gateways(world.engine.system).states()
    assert (state.name, state.failures) == ("default", 0)
    async with httpx2.AsyncClient(timeout=30) as client:
        health = await client.get(f"http://127.0.0.1:{world.api_port}/health/coordinator")
    assert health.json()["gateway"] == "connected"


async def test_cancel_kills_all_processes_of_the_session(world: World) -> None:
    await world.agent(stale_threshold_s=60)
    gateway = await world.gateway("sh", "-c", "sleep 1000 & sleep 1000")
    await world.open()
    [task] = await world.submit()
    await world.in_status([task], "RUNNING")
    await eventually(lambda: len(world.sessions(gateway)) == 4, WAIT_S)
    world.coordinator.signal(signal.SIGKILL)
    await world.engine.cancel(task)
    world.coordinate()
    await world.in_status([task], "CANCELLED")
    [attempt] = await world.engine.attempts(task)
    assert (attempt.receipt or {})["state"] == "killed"
    assert world.sessions(gateway) == []


async def test_silent_session_is_killed_and_its_task_runs_again(world: World) -> None:
    """A command that never reports: its lease runs out, its gateway has to kill it."""
    await world.agent(max_concurrent=1, stale_threshold_s=1)
    gateway = await world.gateway("sleep", "1000")
    await world.open()
    [task] = await world.submit()

    async def again() -> bool:
        return (await world.engine.show(task)).attempt >= 3

    await eventually(again, WAIT_S, 0.05)
    assert len(world.sessions(gateway)) <= 2, "one keeper and one command at a time"
    attempts = await world.engine.attempts(task)
    ended = [attempt for attempt in attempts if attempt.outcome == "STALLED"]
    assert [(item.receipt or {}).get("state") for item in ended[:2]] == ["killed", "killed"]


async def test_restarted_gateway_loses_its_sessions_and_no_task(world: World) -> None:
    await world.agent(stale_threshold_s=2)
    slow = {"steps": 20, "stepSeconds": 0.2, "beatSeconds": 0.4}
    gateway = await world.gateway()
    await world.open()
    tasks = await world.submit(4, input=slow)
    await world.in_status(tasks, "RUNNING")

    async def saved() -> bool:
        return all([(await world.engine.show(task)).checkpoint_seq >= 2 for task in tasks])

    await eventually(saved, WAIT_S, 0.05)
    gateway.signal(signal.SIGKILL)
    await eventually(lambda: not world.sessions(gateway), WAIT_S)
    await world.gateway()
    await world.in_status(tasks, "COMPLETED")
    for task in tasks:
        view = await world.engine.show(task)
        assert view.attempt > 1
        assert view.output["from"] >= 2, "it went on from its checkpoint"
    await world.base.check(tasks, gone=False)


async def test_killed_gateway_with_many_sessions_starts_no_stampede(world: World) -> None:
    """Sessions are coroutines of the gateway, so that as many fit; they report like any other."""
    await world.agent(max_concurrent=SESSIONS, stale_threshold_s=int(4 * HEARTBEAT_S))
    gateway = await world.light_gateway(run_s=3600)
    await world.open(tick_s=0.5)
    await world.submit(SESSIONS)
    timeout_s = WAIT_S + 6 * SESSIONS / CAP + 8 * HEARTBEAT_S

    async def all_run() -> bool:
        return (await world.engine.counts())["RUNNING"] == SESSIONS

    await eventually(all_run, timeout_s, 0.1)
    killed_at = len(await world.claims())
    gateway.signal(signal.SIGKILL)
    await gateway.ended()

    async def all_lost() -> bool:
        rows = await Raw(world.base.url).fetch(
            "select count(*) from attempt where outcome = 'STALLED'"
        )
        return int(rows[0][0]) >= SESSIONS

    await eventually(all_lost, timeout_s, 0.1)
    await world.light_gateway(run_s=HEARTBEAT_S / 2)

    async def all_done() -> bool:
        return await world.completed() == SESSIONS

    await eventually(all_done, timeout_s, 0.2)
    claims = await world.claims()
    assert killed_at == SESSIONS
    assert len(claims) >= 2 * SESSIONS
    assert fullest_second(claims) <= CAP
    twice = "select task from attempt where outcome = 'COMPLETED' group by task having count(*) > 1"
    assert await Raw(world.base.url).fetch(twice) == []
    assert await world.engine.maintenance.audit() == []
    again = claims[killed_at:]
    took, maximum = again[-1] - again[0], fullest_second(claims)
    log.info("%d claims again in %.1f s, at most %d in a second", len(again), took, maximum)


async def test_coordinator_killed_after_a_spawn_loses_no_task(world: World) -> None:
    """The session works all the same: its report says that it has begun."""
    await world.agent()
    await world.gateway()
    await world.open(CRASH_AT=DISPATCH_POINTS[1])
    [task] = await world.submit(input=STEPS)
    assert await world.coordinator.ended() == -signal.SIGKILL
    await world.in_status([task], "COMPLETED")
    assert (await world.engine.show(task)).attempt == 1
    world.coordinate()
    [other] = await world.submit(input=STEPS)
    await world.in_status([other], "COMPLETED")


@pytest.mark.parametrize("point", [DISPATCH_POINTS[0], DISPATCH_POINTS[2]])
async def test_coordinator_killed_during_a_push_loses_no_task(world: World, point: str) -> None:
    await world.agent()
    await world.gateway()
    await world.open(CRASH_AT=point, spawn_timeout_s=1)
    [task] = await world.submit(input=STEPS)
    assert await world.coordinator.ended() == -signal.SIGKILL
    world.coordinate(spawn_timeout_s=1)
    await world.in_status([task], "COMPLETED")


async def test_reference_gateway_follows_the_contract(tmp_path: Path, sqlite_url: str) -> None:
    async with system(sqlite_url, tmp_path) as base:
        world = World(base)
        gateway = await world.gateway("sleep", "1000", GATEWAY_TOKEN="key")
        headers = {"authorization": "Bearer key"}
        body = {
            "agentId": "a",
            "taskId": "t",
            "context": {},
            "callback": {"url": "http://x", "token": "y"},
            "idempotencyKey": "t:1",
        }
        odd = [{**body, "callback": 5}, {**body, "taskId": 7}]
        wrongs: list[Any] = [{}, [], None, {"context": 1}, *odd]
        async with httpx2.AsyncClient(base_url=world.gateway_url, timeout=30) as client:
            spawn = "/api/agents/spawn"
            assert (await client.post(spawn, json=body)).status_code == 401
            for wrong in wrongs:
                answer = await client.post(spawn, json=wrong, headers=headers)
                assert answer.status_code == 400, wrong
            first = await client.post(spawn, json=body, headers=headers)
            second = await client.post(spawn, json=body, headers=headers)
            assert first.json() == second.json()
            key = first.json()["session"]["sessionKey"]
            await eventually(lambda: len(world.sessions(gateway)) == 2, WAIT_S)
            kill = f"/api/agents/sessions/{key}/kill"
            assert (await client.post(kill, json={})).status_code == 401
            assert (await client.post(kill, json={}, headers=headers)).json() == {"killed": True}
            await eventually(lambda: not world.sessions(gateway), WAIT_S)
            assert (await client.post(kill, json={}, headers=headers)).json() == {"killed": False}
            gone = await client.post("/api/agents/sessions/x/kill", json={}, headers=headers)
            assert gone.status_code == 404
