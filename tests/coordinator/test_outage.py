"""Outages of the store: retry delays, alerts, and work that waits."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any
from uuid import UUID

import pytest
from tests.contract.conftest import ManualClock, opened
from tests.services.postgres import PostgresServer
from tests.waiting import eventually
from tests.webhooks.receiver import answer, receiving

from tenuto import app
from tenuto.coordinator import outage as alarm
from tenuto.coordinator.coordinator import NAME, Coordinator
from tenuto.coordinator.outage import Alert, AlertSender, OutageMonitor, retry_delay
from tenuto.engine.engine import Engine
from tenuto.engine.operations.coordination import recent_logs
from tenuto.metrics import PROCESS_METRICS
from tenuto.model.agents.matching import AgentProfile
from tenuto.model.errors import Invalid, Unavailable
from tenuto.model.tasks.submission import NewTask
from tenuto.settings import Settings, load
from tenuto.store.protocol import Statement, Store

SETTINGS = Settings(heartbeat_s=5, tick_s=2)
DOWN = "tenuto_database_down_seconds"


class Frail:
    """A store that does not answer between two instants, and notes when it was asked."""

    def __init__(self, store: Store, clock: ManualClock) -> None:
        self._store = store
        self._clock = clock
        self.away = (float("inf"), float("inf"))
        self.asked: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def for_workspace(self, workspace: UUID) -> "Frail":
        del workspace
        return self

    def for_maintenance(self) -> "Frail":
        return self

    def _check(self) -> None:
        if self.away[0] <= self._clock.elapsed() < self.away[1]:
            raise Unavailable("the database does not answer")

    async def fetch(self, statement: Statement) -> Any:
        self._check()
        return await self._store.fetch(statement)

    async def transact(self, script: Any) -> Any:
        self.asked.append(self._clock.elapsed())
        self._check()
        return await self._store.transact(script)

    async def transact_one(self, script: Any) -> Any:
        self._check()
        return await self._store.transact_one(script)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def store(database_url: str, clock: ManualClock) -> AsyncIterator[Frail]:
    async with opened(database_url, clock) as created:
        yield Frail(created, clock)


def test_retry_delays_double_up_to_forty_seconds() -> None:
    assert [retry_delay(n) for n in range(1, 8)] == [5, 10, 20, 40, 40, 40, 40]


async def leased(engine: Engine, lease_s: int) -> UUID:
    await engine.submit(NewTask(title="held"))
    profile = AgentProfile(
        id=engine.clock.new_id(), workspace=engine.workspace, name="a", runtimes=("function",)
    )
    agent = await engine.register_agent(profile)
    [work] = await engine.claim(agent, "host:1:worker", 1, lease_s)
    return work.fence.task


async def test_outage_is_reported_from_its_first_failure_to_its_end(
    store: Frail, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """The whole of it: longer and longer pauses, one alert, one end of it, and nobody reaped."""
    engine = Engine(store, actor="test")
    task = await leased(engine, 30)
    async with receiving() as receiver:
        settings = Settings(heartbeat_s=5, tick_s=2, alert_url=receiver.url)
        coordinator = Coordinator(engine, settings, {}, "one")
        store.away = (21.0, 21.0 + 400)
        stop = asyncio.Event()
        expired: list[float] = []
        expire = engine.maintenance.expire_once

        async def noted(actor: str, workspace: UUID | None = None, **exempt: Any) -> int:
            expired.append(clock.elapsed())
            return await expire(actor, workspace, **exempt)

        engine.maintenance.expire_once = noted  # type: ignore[method-assign]
        with caplog.at_level(logging.INFO, "tenuto.coordinator"):
            running = asyncio.create_task(coordinator.run(stop))
            await eventually(lambda: len(receiver.got) == 2)
            await eventually(lambda: expired[-1] > 440)
            stop.set()
            await running
    first = 22.0
    looks = sorted({at for at in store.asked if first <= at < 460})
    waits = [later - at for at, later in pairwise(looks)]
    assert waits[:12] == [5, 10, 20, 40, 40, 40, 40, 40, 40, 40, 40, 40]
    back = next(at for at in looks if at >= 421)
    assert {looks[n + 1] - looks[n] for n in range(13, len(looks) - 1)} == {2.0}
    reports = [record for record in caplog.records if record.levelno >= logging.CRITICAL]
    assert [record.getMessage().split(":")[0] for record in reports] == ["database_down"]
    bodies = [json.loads(item.body) for item in receiver.got]
    assert [body["alert"] for body in bodies] == ["database_down", "database_up"]
    assert {body["instance"] for body in bodies} == {"one"}
    assert {body["since"] for body in bodies} == {"2030-01-01T00:00:22Z"}
    # The rule about pauses holds after an outage: nobody is reaped before one heartbeat is over.
    assert min(at for at in expired if at > 30) >= back + SETTINGS.heartbeat_s
    assert (await engine.show(task)).status == "PENDING"
    notes = [line.event for line in await recent_logs(engine, "WARN", 10)]
    assert "coordinator.outage" in notes
    assert PROCESS_METRICS.value(DOWN) == 0


async def test_short_outage_sends_no_alert(
    clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    outage = OutageMonitor(AlertSender("", clock), clock, "one")
    with caplog.at_level(logging.INFO, "tenuto.coordinator"):
        for _ in range(8):  # 5 + 10 + 20 + 40 * 5 = 235 s
            outage.record_failure("away")
            assert PROCESS_METRICS.value(DOWN) == clock.elapsed()
            clock.advance(outage.next_delay(2))
        assert outage.record_answer() == 235
    assert (outage.next_delay(2), PROCESS_METRICS.value(DOWN), caplog.records) == (2, 0, [])


async def test_failure_gone_at_the_next_poll_is_no_outage(clock: ManualClock) -> None:
    outage = OutageMonitor(AlertSender("", clock), clock, "one")
    outage.record_failure("away")
    clock.advance(5)
    assert outage.record_answer() is None
    assert outage.next_delay(2) == 2


async def test_second_outage_sends_another_alert(
    clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    outage = OutageMonitor(AlertSender("", clock), clock, "one")
    with caplog.at_level(logging.CRITICAL, "tenuto.coordinator"):
        for _ in range(2):
            for _ in range(4):
                outage.record_failure("away")
                clock.advance(200)
            outage.record_answer()
    assert len(caplog.records) == 2


async def test_failing_duty_does_not_lengthen_the_retry_delays(
    store: Frail, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store answers who leads: it is there, and it is no outage."""
    engine = Engine(store, actor="test")
    coordinator = Coordinator(engine, SETTINGS, {}, "one")

    async def away(*_: object, **__: object) -> None:
        raise Unavailable("no")

    monkeypatch.setattr(engine.maintenance, "promote_once", away)
    for _ in range(200):
        await coordinator._run_cycle_logged()
        assert coordinator._next_delay() == 5
        clock.advance(coordinator._next_delay())
    assert PROCESS_METRICS.value(DOWN) == 0


async def test_leader_without_the_store_lets_another_lead(
    store: Frail, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(store, actor="test")
    one, two = (Coordinator(engine, SETTINGS, {}, name) for name in ("one", "two"))
    await one._run_cycle_logged()
    await two._run_cycle_logged()
    assert (one.epoch, two.epoch) == (1, None)

    async def away(*_: object, **__: object) -> None:
        raise Unavailable("no")

    with monkeypatch.context() as patch:
        patch.setattr(engine.maintenance, "promote_once", away)
        await one._run_cycle_logged()
    assert one.epoch is None
    clock.advance(0.001)
    await two._run_cycle_logged()
    assert two.epoch == 2, "it resigned: nobody waits for the end of its lease"
    before = PROCESS_METRICS.value("tenuto_coordinator_conflicts_total")
    await one._run_cycle_logged()
    assert PROCESS_METRICS.value("tenuto_coordinator_conflicts_total") == before


async def test_hint_or_stop_ends_a_long_retry_delay(store: Frail, clock: ManualClock) -> None:
    engine = Engine(store, actor="test")
    store.away = (0.0, float("inf"))
    waits: list[float] = []
    forever = asyncio.Event()

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        await forever.wait()

    clock.sleep = sleep  # type: ignore[method-assign]
    stop = asyncio.Event()
    running = asyncio.create_task(Coordinator(engine, SETTINGS, {}, "one").run(stop))
    await eventually(lambda: waits == [5])
    engine.core.wakeups.notify({"flow"})
    await eventually(lambda: waits == [5, 10])
    stop.set()
    await running


def test_alert_is_posted_to_its_url() -> None:
    assert load({"alert_url": "https://pager.example/x"}).alert_url == "https://pager.example/x"
    with pytest.raises(Invalid):
        load({"alert_url": "pager.example"})


@pytest.mark.parametrize(
    ("replies", "posts"), [((503, 500, 204), 3), ((503, 503, 503, 204), 3), ((204,), 1)]
)
async def test_alert_is_retried_a_few_times(
    clock: ManualClock, replies: tuple[int, ...], posts: int, caplog: pytest.LogCaptureFixture
) -> None:
    alert = Alert(alert="database_down", message="m", since=clock.now(), instance="one")
    async with receiving() as receiver:
        receiver.replies = [answer(status) for status in replies]
        sender = AlertSender(receiver.url, clock)
        sender.send(alert)
        await eventually(lambda: not sender._posts)
    assert len(receiver.got) == posts
    assert receiver.url not in caplog.text


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/", "http://[", "http://no.such.invalid/"])
async def test_undeliverable_alert_does_no_harm(
    clock: ManualClock, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    sender = AlertSender(url, clock)
    alert = Alert(alert="database_down", message="m", since=clock.now(), instance="one")
    sender.send(alert)
    await eventually(lambda: not sender._posts)
    assert caplog.text.count("could not be posted") == len(alarm.POST_DELAYS_S)
    await sender.close()


async def test_alert_endpoint_without_a_response_delays_nothing(
    clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alarm, "POST_TIMEOUT_S", 1.0)
    never = asyncio.Event()

    async def silence(writer: asyncio.StreamWriter) -> None:
        del writer
        await never.wait()

    async with receiving() as receiver:
        receiver.replies = [silence]
        sender = AlertSender(receiver.url, clock)
        for _ in range(3):
            sender.send(
                Alert(alert="database_down", message="m", since=clock.now(), instance="one")
            )
        await eventually(lambda: receiver.got)
        await sender.close()
        assert not sender._posts


async def test_outage_of_a_real_server_is_reported(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alarm, "RETRY_DELAYS_S", (0.1, 0.2, 0.4, 0.8))
    monkeypatch.setattr(alarm, "ALERT_AFTER_S", 1.0)
    with PostgresServer(fast=True) as server:
        url = server.create_database()
        store = app.create_store(url)
        await store.migrate()
        await store.close()
        async with receiving() as receiver:
            settings = Settings(database=url, heartbeat_s=0.3, tick_s=0.2, alert_url=receiver.url)
            async with app.connect(settings) as engine:
                coordinator = Coordinator(engine, settings, name="one")
                stop = asyncio.Event()
                with caplog.at_level(logging.WARNING, "tenuto.coordinator"):
                    running = asyncio.create_task(coordinator.run(stop))
                    await eventually(lambda: coordinator.cycles > 2)
                    await asyncio.to_thread(server.stop, "immediate")
                    await eventually(lambda: "database_down" in caplog.text, 60)
                    assert PROCESS_METRICS.value(DOWN) > 1.0
                    assert coordinator.epoch is None
                    await asyncio.to_thread(server.start)
                    before = coordinator.cycles
                    await eventually(lambda: coordinator.cycles > before + 2, 60)
                    await eventually(lambda: len(receiver.got) == 2)
                    stop.set()
                    await running
                assert PROCESS_METRICS.value(DOWN) == 0
                events = [line.event for line in await recent_logs(engine, "WARN", 10)]
                assert "coordinator.outage" in events
                leader = await engine.maintenance.leader(NAME)
                assert leader is not None
                assert leader.epoch == 1
                assert await engine.maintenance.audit() == []
    alerts = [json.loads(item.body)["alert"] for item in receiver.got]
    assert alerts == ["database_down", "database_up"]
