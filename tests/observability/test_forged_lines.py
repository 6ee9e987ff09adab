"""Hostile text from tasks, agents, gateways and requests forges no line of the log."""

import re
import socket
from pathlib import Path
from urllib.parse import urlsplit
from uuid import uuid4

import httpx2
import pytest
from tests.cli.orchestrate import Orchestrate, serving, started, token_of
from tests.contract.conftest import claim_one, new
from tests.coordinator.helpers import staged
from tests.observability.conftest import Log
from tests.observability.hostile import HOSTILE, STORABLE, SURROGATE, check_log
from tests.waiting import eventually_sync

from tenuto.clock import Clock
from tenuto.coordinator.coordinator import Coordinator
from tenuto.coordinator.outage import ALERT_AFTER_S, Alert, AlertSender, OutageMonitor
from tenuto.engine.engine import Engine
from tenuto.model.tasks.commands import Failure

V1 = "/api/v1"


async def test_error_of_a_task_is_one_line(engine: Engine, log: Log, style: str) -> None:
    await engine.submit(new(max_attempts=1))
    work = await claim_one(engine)
    await engine.fail(work.fence, Failure(message=STORABLE))
    coordinator = Coordinator(engine, name=STORABLE)
    await coordinator._run_cycle_logged()
    assert "forged" in log.text
    check_log(log.text, style)


async def test_response_of_a_gateway_is_one_line(database_url: str, log: Log, style: str) -> None:
    async with staged(database_url) as stage:
        await stage.agent(name=STORABLE[:100])

        async def refuse() -> tuple[int, bytes]:
            return 500, HOSTILE.encode()

        stage.gateway.answer = refuse
        await stage.submit(10, max_attempts=1)
        for _ in range(10):
            await stage.push()
    assert "circuit open" in log.text
    assert "forged" in log.text
    check_log(log.text, style)


async def test_alert_is_one_line_everywhere(log: Log, style: str) -> None:
    clock = Later()
    alarm = RecordingAlertSender(clock)
    outage = OutageMonitor(alarm, clock, SURROGATE)
    outage.record_failure(SURROGATE)
    clock.by = ALERT_AFTER_S + 1
    outage.record_failure(SURROGATE)
    check_log(log.text, style)
    [alert] = alarm.alerts
    assert alert.message.isprintable()
    assert alert.instance.isprintable()


class RecordingAlertSender(AlertSender):
    """An alarm that keeps what it is told."""

    def __init__(self, clock: Clock) -> None:
        super().__init__("", clock)
        self.alerts: list[Alert] = []

    def send(self, alert: Alert) -> None:
        self.alerts.append(alert)
        super().send(alert)


class Later(Clock):
    """A clock that a test sets forward."""

    by = 0.0

    def elapsed(self) -> float:
        return super().elapsed() + self.by


@pytest.fixture
def cli(tmp_path: Path, style: str) -> Orchestrate:
    created = Orchestrate(tmp_path)
    created.environment["TENUTO_LOG"] = style
    return created


def fail_a_task(client: httpx2.Client) -> None:
    """An agent with a hostile name claims a task, tells a hostile step and fails with such text."""
    agent = str(uuid4())
    body = {"name": STORABLE[:100], "agentType": STORABLE[:100], "runtimes": ["function"]}
    assert client.put(f"{V1}/agents/{agent}", json=body).status_code == 200
    task = {"title": STORABLE, "maxAttempts": 1}
    assert client.post(f"{V1}/agent-tasks", json=task).status_code == 201
    claim = client.post(f"{V1}/agents/{agent}/claim", json={"worker": STORABLE[:100]})
    [work] = claim.json()["tasks"]
    fence = {"attempt": work["attempt"], "leaseToken": work["leaseToken"]}
    reported = client.post(
        f"{V1}/agent-tasks/{work['id']}/fail", json=fence | {"error": STORABLE, "retryable": False}
    )
    assert reported.status_code < 300, reported.text


def ask_raw(url: str, request: bytes) -> bytes:
    """The beginning of the answer to a request as it is."""
    where = urlsplit(url)
    with socket.create_connection((where.hostname, where.port), 10) as wire:
        wire.sendall(request)
        return wire.recv(1 << 16)


def test_deployment_name_cannot_forge_lines(cli: Orchestrate, style: str) -> None:
    evil = STORABLE.encode().replace(b"\n", b"\r").replace(b"\r", b"%0d%0a").decode()
    with serving(cli, "up", "--workers", "0") as url:
        headers = {"Authorization": f"Bearer {token_of(cli)}"}
        with httpx2.Client(base_url=url, headers=headers) as client:
            fail_a_task(client)
        for line in (f"GET /{evil} HTTP/1.1", f"{evil} / HTTP/1.1", "GET / HTTP/1.1"):
            ask_raw(url, f"{line}\r\nhost: x\r\nuser-agent: {evil}\r\n\r\n".encode())
        log = cli.home / "up.log"
        eventually_sync(lambda: re.search("ERROR|CRITICAL", log.read_text()), timeout=30)
    check_log(log.read_text(), style)
    assert "forged" in log.read_text()


def test_hostile_worker_name_cannot_forge_lines(cli: Orchestrate, style: str) -> None:
    with started(cli, "worker", "--agent", STORABLE[:100], "--command", "true") as log:
        eventually_sync(lambda: "hosts" in log.read_text(), timeout=30)
    check_log(log.read_text(), style)
