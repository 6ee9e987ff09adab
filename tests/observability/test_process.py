"""Metrics of a process, and the port that serves them."""

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen
from uuid import UUID

import asyncpg
import pytest
from tests.cli.orchestrate import Orchestrate
from tests.contract.conftest import ManualClock, running
from tests.waiting import eventually, eventually_sync

from tenuto.broker.postgres import PostgresWakeups
from tenuto.clock import Clock
from tenuto.coordinator.coordinator import Coordinator
from tenuto.engine.engine import Engine
from tenuto.engine.tasks.report import WorkerInfo
from tenuto.engine.webhooks.deliveries import DueDelivery
from tenuto.engine.webhooks.endpoints import new_secret
from tenuto.metrics import PROCESS_METRICS
from tenuto.model.errors import Unavailable
from tenuto.settings import Settings
from tenuto.webhooks.deliver import deliver_once
from tenuto.webhooks.sender import SendResult
from tenuto.worker.heartbeat import HeartbeatLoop
from tenuto.worker.leases import HeldLease, HeldLeases
from tenuto.worker.worker import Worker


def since(name: str, **labels: str) -> Callable[[], float]:
    """Returns a function that returns the growth of a series from now on."""
    before = PROCESS_METRICS.value(name, **labels)
    return lambda: PROCESS_METRICS.value(name, **labels) - before


async def test_only_the_leader_measures_its_cycle(engine: Engine) -> None:
    grown = since("tenuto_coordinator_cycle_seconds_count")
    first, second = Coordinator(engine, name="first"), Coordinator(engine, name="second")
    for item in (first, second, first):
        await item._run_cycle_logged()
    assert grown() == 2


async def test_empty_claims_are_counted(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    empty, failed = (since("tenuto_claims_total", result=item) for item in ("empty", "error"))
    worker = Worker(engine, Settings())
    await worker.host_functions("agent", {None: lambda ctx: None})
    await worker._claim(0, 1)
    assert (empty(), failed()) == (1, 0)

    async def down(*args: object) -> list[object]:
        raise Unavailable("gone")

    monkeypatch.setattr(engine, "claim", down)
    await worker._claim(0, 1)
    assert (empty(), failed()) == (1, 1)


async def test_failed_renewals_are_counted(
    engine: Engine, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    leases = HeldLeases()
    for _ in range(2):
        leases.add(HeldLease(await running(engine), lambda reason: None))
    caller = WorkerInfo(worker="w", host="h", pid=1, agents=[], slots=2, status="RUNNING")
    heartbeat_loop = HeartbeatLoop(
        engine, leases, caller, Settings(), lambda held, reason: None, lambda: None
    )
    grown = since("tenuto_lease_renew_failures_total")
    await heartbeat_loop.heartbeat_once()
    assert grown() == 0
    clock.advance(60)
    assert await engine.maintenance.expire_once("reaper") == 2
    await heartbeat_loop.heartbeat_once()
    assert grown() == 2

    async def down(*args: object) -> object:
        raise Unavailable("gone")

    monkeypatch.setattr(engine, "worker_heartbeat", down)
    await heartbeat_loop.heartbeat_once()
    assert grown() == 4


async def test_failed_hints_are_counted() -> None:
    grown = since("tenuto_broker_errors_total")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        url = f"postgresql://nobody@127.0.0.1:{port}/x"
        wakeups = PostgresWakeups(lambda: asyncpg.connect(url), Clock(), listen=False)
        wakeups.notify(["lane:1"])
        await eventually(lambda: grown() == 1)
        await wakeups.close()


class Ended:
    """A connection that the server ends while it is spoken to."""

    def is_closed(self) -> bool:
        return False

    async def execute(self, *args: object) -> None:
        raise asyncpg.InternalClientError("another operation is in progress")

    async def close(self, timeout: float) -> None:  # noqa: ASYNC109  as the driver has it
        raise asyncpg.InternalClientError("another operation is in progress")


async def test_hint_on_a_closed_connection_is_counted() -> None:
    grown = since("tenuto_broker_errors_total")
    wakeups = PostgresWakeups(asyncpg.connect, Clock(), listen=False)
    wakeups._connection = Ended()
    wakeups.notify(["lane:1"])
    await eventually(lambda: grown() == 1)
    await wakeups.close()


class Endpoint:
    """Both sides of a message: records nothing, answers as told."""

    clock = Clock()

    def __init__(self, answer: SendResult) -> None:
        self._answer = answer

    async def lease_due(self, slots: int) -> list[DueDelivery]:
        return [
            DueDelivery(
                id=UUID(int=1),
                webhook=UUID(int=2),
                url="https://example.org",
                secrets=[new_secret(self.clock)],
                body=b"{}",
                attempt=1,
                probe=False,
            )
        ]

    async def post(self, *args: object) -> SendResult:
        return self._answer

    async def record_success(self, *args: object) -> None:
        """Drops the success."""

    record_failure = record_success


@pytest.mark.parametrize(
    ("answer", "result"), [(SendResult(200), "delivered"), (SendResult(500, "no"), "failed")]
)
async def test_deliveries_are_counted_by_outcome(answer: SendResult, result: str) -> None:
    names = ("delivered", "failed")
    grown = {name: since("tenuto_webhook_deliveries_total", result=name) for name in names}
    endpoint: Any = Endpoint(answer)
    assert await deliver_once(endpoint, endpoint) == 1
    assert {name: grown[name]() for name in names} == {name: name == result for name in names}


def read(port: int) -> str | None:
    try:
        with urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            return str(answer.read().decode())
    except URLError:
        return None


@pytest.mark.parametrize("words", [["coordinator"], ["coordinator", "run"], ["worker"]])
def test_process_without_an_api_can_serve_its_metrics(tmp_path: Path, words: list[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    process = Orchestrate(tmp_path).start(*words, "--metrics-port", str(port))
    try:
        text = eventually_sync(lambda: read(port), timeout=30)
    finally:
        process.terminate()
        process.communicate(timeout=30)
    assert "tenuto_coordinator_cycle_seconds_count" in text
    assert "tenuto_coordinator_leader" not in text


def test_used_metrics_port_is_reported(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        answer = Orchestrate(tmp_path)("coordinator", "--metrics-port", port)
    assert answer.code == 3
    assert f"cannot serve metrics on 127.0.0.1:{port}" in answer.err
    assert "[port_taken]" in answer.err
