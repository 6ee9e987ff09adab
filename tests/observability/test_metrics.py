"""Task metrics: the documented names, moved by exactly the events, on each database."""

from datetime import timedelta
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.contract.conftest import (
    AGENT,
    LEASE_S,
    ManualClock,
    assigned,
    claim_one,
    failure,
    new,
    profile,
    running,
)
from tests.deploy.promql import COUNTERS, GAUGES, HISTOGRAMS, METRICS
from tests.observability.conftest import Counted
from tests.observability.hostile import HIDDEN, STORABLE

from tenuto.api.edge.event_hub import StreamSubscriber
from tenuto.coordinator.coordinator import NAME
from tenuto.coordinator.duties import ALERTS
from tenuto.engine.engine import Engine
from tenuto.engine.limits.budgets import count_in_metrics as count_spending
from tenuto.engine.operations.metrics import sample_once
from tenuto.engine.tasks.report import WorkerInfo
from tenuto.metrics import OTHER, PROCESS_METRICS, TABLE, Metrics
from tenuto.model.errors import Unavailable
from tenuto.model.limits.budgets import Usage
from tenuto.model.tasks.retry import ErrorClass
from tenuto.model.tasks.task import TERMINAL
from tenuto.store.protocol import Row, Statement

KINDS = {"counter": COUNTERS, "gauge": GAUGES, "histogram": HISTOGRAMS}


def test_metrics_equal_the_documented_ones() -> None:
    assert len({metric.name for metric in TABLE}) == len(TABLE)
    assert {metric.name for metric in TABLE} == set(METRICS)
    for metric in TABLE:
        promised = KINDS[metric.kind][metric.name]
        assert promised <= set(metric.labels), metric.name
        assert metric.help.endswith(".")


def test_every_metric_is_exported_and_no_other() -> None:
    metrics = Metrics()
    for metric in TABLE:
        if metric.kind == "gauge":
            metrics.put(metric.name, {"x": 1} if metric.labels else 1)
        elif metric.kind == "counter":
            metrics.count(metric.name, *metric.labels)
        else:
            metrics.observe(metric.name, 1, *metric.labels)
    families = {
        text_string_to_metric_family.name: text_string_to_metric_family
        for text_string_to_metric_family in text_string_to_metric_families(metrics.text().decode())
    }
    assert set(families) == {name.removesuffix("_total") for name in METRICS}
    assert not [
        family for family in families.values() if not family.samples or not family.documentation
    ]


def test_metric_labels_name_no_workspace_and_no_task() -> None:
    labels = {label for metric in TABLE for label in metric.labels}
    assert labels == {
        "broker", "duty", "error_class", "method", "model", "outcome", "result", "route", "status"
    }  # fmt: skip


def test_unknown_label_value_creates_no_series() -> None:
    metrics = Metrics()
    metrics.count("tenuto_retries_total", "made up")
    assert metrics.value("tenuto_retries_total", error_class=OTHER) == 1
    assert b"made up" not in metrics.text()


def test_counters_are_exported_from_the_start() -> None:
    text = Metrics().text().decode()
    for status in TERMINAL:
        assert f'tenuto_tasks_completed_total{{outcome="{status}"}} 0.0' in text
    for existing in ErrorClass:
        assert f'tenuto_retries_total{{error_class="{existing}"}} 0.0' in text


def test_process_without_sampling_exports_no_gauges() -> None:
    assert b"tenuto_coordinator_leader" not in Metrics().text()


async def test_counters_follow_the_events(
    engine: Engine, counted: Counted, clock: ManualClock
) -> None:
    await _one_that_fails_and_then_completes(engine, clock)
    await _one_that_dies_of_failures(engine)
    await _one_whose_worker_is_lost_for_good(engine, clock)
    await engine.cancel((await engine.submit(new())).id)
    fence = await running(engine)
    await engine.fail(fence, failure("syntax"))
    await counted.look()

    reported = counted.value
    assert reported("tenuto_tasks_submitted_total") == 5
    assert reported("tenuto_claims_total", result="claimed") == 5
    assert reported("tenuto_retries_total", error_class="error") == 1
    assert reported("tenuto_dead_total") == 2
    assert reported("tenuto_retry_exhausted_total") == 2
    assert reported("tenuto_lease_expirations_total") == 1
    ends = {"COMPLETED": 1, "DEAD": 2, "CANCELLED": 1, "FAILED": 1, "SKIPPED": 0}
    for outcome, n in ends.items():
        assert reported("tenuto_tasks_completed_total", outcome=outcome) == n
    assert reported("tenuto_task_attempts_count") == 5
    assert reported("tenuto_task_attempts_sum") == 2 + 1 + 1 + 0 + 1


async def test_every_duration_is_measured(
    engine: Engine, counted: Counted, clock: ManualClock
) -> None:
    await _one_that_fails_and_then_completes(engine, clock)
    await counted.look()
    reported = counted.value
    assert reported("tenuto_task_wait_seconds_count") == 2
    assert reported("tenuto_task_wait_seconds_sum") == 3 + 7  # from submit, from due
    assert reported("tenuto_task_duration_seconds_count") == 2
    assert reported("tenuto_task_duration_seconds_sum") == 10 + 20
    assert reported("tenuto_compute_seconds_total") == 30
    assert reported("tenuto_task_e2e_seconds_count") == 1
    assert reported("tenuto_task_e2e_seconds_sum") == 3 + 10 + 60 + 7 + 20


async def _one_that_fails_and_then_completes(engine: Engine, clock: ManualClock) -> None:
    await engine.submit(new())
    clock.advance(3)
    work = await claim_one(engine)
    clock.advance(10)
    await engine.fail(work.fence, failure())
    clock.advance(60)
    assert await engine.maintenance.promote_once("promoter") == 1
    clock.advance(7)
    work = await claim_one(engine)
    clock.advance(20)
    await engine.complete(work.fence)


async def _one_that_dies_of_failures(engine: Engine) -> None:
    await engine.fail(await running(engine, max_attempts=1), failure())


async def _one_whose_worker_is_lost_for_good(engine: Engine, clock: ManualClock) -> None:
    await running(engine, max_attempts=1)
    clock.advance(LEASE_S + 1)
    assert await engine.maintenance.expire_once("reaper") == 1


async def test_retried_lost_lease_is_counted(
    engine: Engine, counted: Counted, clock: ManualClock
) -> None:
    await running(engine)
    clock.advance(LEASE_S + 1)
    assert await engine.maintenance.expire_once("reaper") == 1
    await counted.look()
    assert counted.value("tenuto_lease_expirations_total") == 1
    assert counted.value("tenuto_retries_total", error_class="crash") == 1
    assert counted.value("tenuto_dead_total") == 0


async def test_too_many_releases_are_not_an_exhausted_retry(
    engine: Engine, counted: Counted
) -> None:
    fence = await running(engine, max_attempts=1)
    for _ in range(20):
        await engine.release(fence)
        fence = (await claim_one(engine)).fence
    await engine.release(fence)
    await counted.look()
    assert counted.value("tenuto_dead_total") == 1
    assert counted.value("tenuto_retry_exhausted_total") == 0
    assert counted.value("tenuto_retries_total", error_class=OTHER) == 0


async def test_attempt_that_never_ran_has_no_duration(
    engine: Engine, counted: Counted, clock: ManualClock
) -> None:
    await engine.release(await assigned(engine))
    clock.advance(1)
    fence = (await claim_one(engine)).fence
    clock.advance(5)
    await engine.complete(fence)
    await counted.look()
    assert counted.value("tenuto_task_duration_seconds_count") == 1
    assert counted.value("tenuto_task_duration_seconds_sum") == 5
    assert counted.value("tenuto_task_wait_seconds_sum") == 1


async def test_duration_uses_the_start_of_its_own_attempt(engine: Engine) -> None:
    fence = await running(engine)
    await engine.release(fence)
    marks = [(fence.task, 3, 1), (fence.task, 5, 2)]
    rows = await engine.store.fetch(Statement("event_history", rows={"mark": marks}))
    began = {row["seq"]: row["running_at"] for row in rows}
    assert began == {3: engine.clock.now(), 5: None}


async def test_retry_by_an_operator_restarts_the_durations(
    engine: Engine, counted: Counted, clock: ManualClock
) -> None:
    fence = await running(engine, max_attempts=1)
    await engine.fail(fence, failure())
    clock.advance(days=7)
    await engine.retry(fence.task)
    clock.advance(2)
    await engine.complete((await claim_one(engine)).fence)
    await counted.look()
    assert counted.value("tenuto_task_e2e_seconds_count") == 2
    assert counted.value("tenuto_task_e2e_seconds_sum") == 2
    assert counted.value("tenuto_tasks_submitted_total") == 1


async def test_events_before_the_start_are_not_counted(engine: Engine, counted: Counted) -> None:
    await engine.submit(new())
    await counted.look()
    later = Counted(engine)
    await later.listen()
    await later.look()
    await counted.look()
    assert counted.value("tenuto_tasks_submitted_total") == 1
    assert later.value("tenuto_tasks_submitted_total") == 0


async def test_ended_stream_does_not_stop_the_counting(engine: Engine, counted: Counted) -> None:
    reader = StreamSubscriber(engine.workspace, None)
    await counted.hub.subscribe(reader)
    await engine.submit(new())
    counted.hub.unsubscribe(reader)
    await counted.look()
    assert counted.value("tenuto_tasks_submitted_total") == 1


async def test_each_of_two_processes_counts_every_event_once(
    engine: Engine, counted: Counted, clock: ManualClock
) -> None:
    other = Counted(engine)
    await other.listen()
    await _one_that_fails_and_then_completes(engine, clock)
    for _ in range(2):
        await counted.look()
        await other.look()
    assert counted.metrics.text() == other.metrics.text()
    assert counted.value("tenuto_tasks_submitted_total") == 1


async def test_durations_wait_for_an_unavailable_store(
    engine: Engine, counted: Counted, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch, down = engine.store.fetch, True

    async def failing(statement: Statement) -> list[Row]:
        if down and statement.query == "event_history":
            raise Unavailable("gone")
        return await fetch(statement)

    monkeypatch.setattr(engine.store, "fetch", failing)
    await _one_that_fails_and_then_completes(engine, clock)
    await counted.look()
    assert counted.value("tenuto_tasks_completed_total", outcome="COMPLETED") == 1
    assert counted.value("tenuto_task_duration_seconds_count") == 0
    down = False
    await engine.submit(new())
    await counted.look()
    assert counted.value("tenuto_task_duration_seconds_count") == 2


async def test_unmeasurable_duration_stops_no_other(
    engine: Engine, counted: Counted, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch, spoilt = engine.store.fetch, (await running(engine)).task

    async def failing(statement: Statement) -> list[Row]:
        if statement.query == "event_history":
            assert spoilt not in {mark[0] for mark in statement.rows["mark"]}
        return await fetch(statement)

    monkeypatch.setattr(engine.store, "fetch", failing)
    await counted.look()
    await _one_that_fails_and_then_completes(engine, clock)
    await counted.look()
    assert counted.value("tenuto_task_duration_seconds_count") == 2


async def test_clock_set_back_measures_no_duration(
    engine: Engine, counted: Counted, clock: ManualClock
) -> None:
    fence = await running(engine)
    clock.advance(-60)
    await engine.complete(fence)
    await engine.complete(await running(engine))
    await counted.look()
    reported = counted.value
    assert (
        reported("tenuto_task_duration_seconds_count")
        == reported("tenuto_task_e2e_seconds_count")
        == 2
    )
    assert (
        reported("tenuto_task_duration_seconds_sum") == reported("tenuto_task_e2e_seconds_sum") == 0
    )


async def sample(counted: Counted) -> None:
    await sample_once(counted.core, counted.metrics, NAME, ALERTS)


async def test_gauges_of_an_empty_database_are_zero(counted: Counted) -> None:
    await sample(counted)
    reported = counted.value
    for name in ("tasks_pending_oldest_seconds", "retries_due", "stale_agents"):
        assert reported(f"tenuto_{name}") == 0
    assert reported("tenuto_coordinator_leader") == reported("tenuto_outbox_lag") == 0
    assert 'tenuto_tasks{status="PENDING"} 0.0' in counted.metrics.text().decode()
    assert 'tenuto_broker_lag{broker="none"} 0.0' in counted.metrics.text().decode()


async def test_gauges_show_the_current_rows(
    engine: Engine, counted: Counted, clock: ManualClock
) -> None:
    await engine.register_agent(profile())
    fence = await running(engine)
    await engine.fail(fence, failure())  # due in a few seconds
    await running(engine)
    await engine.submit(new())
    clock.advance(40)
    await engine.submit_many([new(), new(run_at=clock.now() + timedelta(days=1))])
    assert await engine.maintenance.acquire_leadership(NAME, "somebody", 10) is not None
    await engine.record_worker(WorkerInfo("w", "host", 1, ["agent"], 1, "RUNNING"))
    await sample(counted)

    reported = counted.value
    statuses = {"PENDING": 2, "WAITING": 1, "RETRY_WAIT": 1, "RUNNING": 1, "DEAD": 0}
    assert {status: reported("tenuto_tasks", status=status) for status in statuses} == statuses
    assert reported("tenuto_tasks_pending_oldest_seconds") == 40
    assert reported("tenuto_retries_due") == 1
    assert reported("tenuto_workers", status="RUNNING") == 1
    assert reported("tenuto_agents", status="WORKING") == 1
    assert reported("tenuto_stale_agents") == 0
    assert reported("tenuto_coordinator_leader") == 1

    clock.advance(100)
    await engine.record_worker(WorkerInfo("w", "host", 1, ["agent"], 1, "STOPPED"))
    await sample(counted)
    assert reported("tenuto_agents", status="STALE") == reported("tenuto_stale_agents") == 1
    assert reported("tenuto_coordinator_leader") == 0
    assert 'status="WORKING"' not in counted.metrics.text().decode()
    assert {reported("tenuto_workers", status=item) for item in ("RUNNING", "STOPPED")} == {0, 1}


@pytest.mark.parametrize(("threshold", "stale"), [(None, 0), (30, 1), (0, 0)])
async def test_agent_is_stale_by_its_own_threshold(
    engine: Engine, counted: Counted, clock: ManualClock, threshold: int | None, stale: int
) -> None:
    existing = await engine.register_agent(profile(stale_threshold_s=threshold))
    assert existing.id == AGENT
    await running(engine)
    clock.advance(60)
    await sample(counted)
    assert counted.value("tenuto_stale_agents") == stale


async def test_relay_lag_is_that_of_the_slowest_subscriber(
    engine: Engine, counted: Counted
) -> None:
    async def take(events: Any) -> None:
        del events

    await engine.submit_many([new() for _ in range(3)])
    await engine.maintenance.relay_once("quick", take)
    await engine.maintenance.relay_once("slow", take, limit=1)
    await engine.maintenance.relay_once(ALERTS, take, errors=True)
    await sample(counted)
    assert counted.value("tenuto_outbox_lag") == 2
    await engine.maintenance.relay_once("slow", take)
    await sample(counted)
    assert counted.value("tenuto_outbox_lag") == 0


def test_model_name_in_a_label_is_escaped() -> None:
    count_spending(Usage(model=STORABLE, input_tokens=3))
    [line] = [line for line in PROCESS_METRICS.text().decode().split("\n") if "forged" in line]
    assert line.startswith('tenuto_tokens_total{model="')
    assert not HIDDEN.search(line)
