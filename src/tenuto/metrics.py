"""Metrics: one table of everything that this program counts, and its own registry."""

from collections.abc import Iterable
from typing import Any, Literal

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client import Metric as Family

from tenuto.model.tasks.retry import ErrorClass
from tenuto.model.tasks.task import TERMINAL

OTHER = "other"
"""Replaces label values that are not among the known ones."""
_SHORT_BUCKETS_S = (0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_LONG_BUCKETS_S = (0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0)
_ATTEMPT_BUCKETS = (1.0, 2.0, 3.0, 5.0, 10.0, 25.0, 100.0)

Reporter = Literal["events", "sampler", "process"]


class Metric(msgspec.Struct, frozen=True, kw_only=True):
    """One metric.

    `values`: all values of its only label, exported from the start so that rates see the first
    increase. `reported_by`: the source, which is the audit events, the sampler, or each process.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    reported_by: Reporter
    help: str
    labels: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


def _counter(name: str, reported_by: Reporter, text: str, label: str = "", *values: str) -> Metric:
    """Returns a counter with at most one label and its known values."""
    labels = (label,) if label else ()
    return Metric(
        name=name, kind="counter", reported_by=reported_by, help=text, labels=labels, values=values
    )


def _gauge(name: str, text: str, *labels: str) -> Metric:
    """Returns a gauge, which the sampler of coordinators and APIs sets."""
    return Metric(name=name, kind="gauge", reported_by="sampler", help=text, labels=labels)


def _histogram(
    name: str, reported_by: Reporter, text: str, buckets: tuple[float, ...], *labels: str
) -> Metric:
    """Returns a histogram with these upper bucket limits."""
    return Metric(
        name=name,
        kind="histogram",
        reported_by=reported_by,
        help=text,
        labels=labels,
        buckets=buckets,
    )


TABLE = (
    _gauge(
        "tenuto_tasks",
        "Tasks by status; COMPLETED tasks are only in tenuto_tasks_completed_total.",
        "status",
    ),
    _gauge(
        "tenuto_tasks_pending_oldest_seconds",
        "Seconds that the oldest PENDING task has been PENDING.",
    ),
    _gauge("tenuto_retries_due", "Tasks whose retry is due but not yet promoted."),
    _gauge("tenuto_workers", "Workers by status.", "status"),
    _gauge("tenuto_agents", "Agents by status.", "status"),
    _gauge("tenuto_stale_agents", "Agents that stopped sending heartbeats: STALE or ERROR."),
    _gauge("tenuto_coordinator_leader", "1 while a coordinator leads, else 0."),
    _gauge("tenuto_outbox_lag", "Events not yet delivered to the slowest subscriber."),
    _gauge("tenuto_broker_lag", "Messages waiting in a broker; 0 without one.", "broker"),
    _counter("tenuto_tasks_submitted_total", "events", "Tasks submitted."),
    _counter(
        "tenuto_tasks_completed_total",
        "events",
        "Finished tasks, by terminal status.",
        "outcome",
        *sorted(TERMINAL),
    ),
    _counter(
        "tenuto_claims_total",
        "events",
        "Tasks claimed; each worker also counts its own claims that found no task or failed.",
        "result",
        "claimed",
        "empty",
        "error",
    ),
    _counter(
        "tenuto_retries_total",
        "events",
        "Attempts that ended and will be retried, by error class.",
        "error_class",
        *ErrorClass,
        OTHER,
    ),
    _counter("tenuto_dead_total", "events", "Tasks that became DEAD."),
    _counter(
        "tenuto_retry_exhausted_total", "events", "Tasks that became DEAD because no try was left."
    ),
    _counter(
        "tenuto_lease_expirations_total",
        "events",
        "Attempts that ended because their worker was lost.",
    ),
    _counter("tenuto_compute_seconds_total", "events", "Run time of ended attempts in seconds."),
    _histogram(
        "tenuto_task_wait_seconds",
        "events",
        "Seconds from PENDING to the start of an attempt.",
        _LONG_BUCKETS_S,
    ),
    _histogram(
        "tenuto_task_duration_seconds",
        "events",
        "Run time of an attempt in seconds.",
        _LONG_BUCKETS_S,
    ),
    _histogram(
        "tenuto_task_e2e_seconds",
        "events",
        "Seconds from submit, or manual retry, to the end of the task.",
        _LONG_BUCKETS_S,
    ),
    _histogram("tenuto_task_attempts", "events", "Attempts of a finished task.", _ATTEMPT_BUCKETS),
    _counter(
        "tenuto_lease_renew_failures_total",
        "process",
        "Leases that a heartbeat of this worker could not renew.",
    ),
    _histogram(
        "tenuto_coordinator_cycle_seconds",
        "process",
        "Duration of a cycle of this leading coordinator in seconds.",
        _SHORT_BUCKETS_S,
    ),
    _histogram(
        "tenuto_coordinator_duty_seconds",
        "process",
        "Duration of a duty in a cycle of this coordinator in seconds.",
        _SHORT_BUCKETS_S,
        "duty",
    ),
    _counter(
        "tenuto_coordinator_conflicts_total",
        "process",
        "Times that this coordinator found another one leading without having resigned itself.",
    ),
    Metric(
        name="tenuto_database_down_seconds",
        kind="gauge",
        reported_by="process",
        help="Seconds that the database has not answered this coordinator; 0 while it answers.",
    ),
    _counter("tenuto_broker_errors_total", "process", "Hints that this process could not send."),
    _counter(
        "tenuto_webhook_deliveries_total",
        "process",
        "Webhook messages that this process tried to deliver.",
        "result",
        "delivered",
        "failed",
    ),
    _histogram(
        "tenuto_http_request_seconds",
        "process",
        "Duration of a request to this API in seconds, by route template.",
        _SHORT_BUCKETS_S,
        "method",
        "route",
        "status",
    ),
    _counter("tenuto_agents_spawned_total", "process", "Sessions requested from gateways."),
    _counter(
        "tenuto_tokens_total",
        "process",
        "Tokens used by models, as attempts reported to this process; at most 100 model names.",
        "model",
    ),
    _counter(
        "tenuto_cost_usd_total",
        "process",
        "Cost of models in US dollars, as attempts reported to this process.",
    ),
)
"""Every metric; the names are a stable contract."""
BY_NAME = {metric.name: metric for metric in TABLE}

_KINDS = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}


class _Registry(CollectorRegistry):
    """A registry without the series `_created`, which are not in the table."""

    def collect(self) -> Iterable[Family]:
        """Yields the metric families without their `_created` samples."""
        for family in super().collect():
            family.samples = [
                sample for sample in family.samples if not sample.name.endswith("_created")
            ]
            yield family


class Metrics:
    """The metrics of one process. Thread-safe."""

    def __init__(self) -> None:
        self.registry = _Registry()
        self._instruments: dict[str, Any] = {}
        for metric in TABLE:
            if metric.kind != "gauge":
                self._instruments[metric.name] = self._create(metric)

    def _create(self, metric: Metric) -> Any:
        """Registers the metric with a series per known label value; returns its instrument."""
        options = {"buckets": metric.buckets} if metric.buckets else {}
        instrument = _KINDS[metric.kind](
            metric.name, metric.help, metric.labels, registry=self.registry, **options
        )
        for value in metric.values:
            instrument.labels(value)
        return instrument

    def count(self, name: str, *labels: str, by: float = 1) -> None:
        """Adds to a counter; if the metric lists its label values, others become `other`."""
        known_values = BY_NAME[name].values
        label_values = [
            label if not known_values or label in known_values else OTHER for label in labels
        ]
        self._series(name, label_values).inc(by)

    def observe(self, name: str, value: float, *labels: str) -> None:
        """Adds a value to a histogram."""
        self._series(name, labels).observe(value)

    def put(self, name: str, values: dict[str, float] | float) -> None:
        """Sets a gauge, or all values of a gauge with a label; label values not given are removed.

        A gauge exists from its first `put`: a process that does not sample exports no gauges.
        """
        if name not in self._instruments:
            self._instruments[name] = self._create(BY_NAME[name])
        gauge = self._instruments[name]
        if not isinstance(values, dict):
            gauge.set(values)
            return
        gauge.clear()
        for label, value in values.items():
            gauge.labels(label).set(value)

    def _series(self, name: str, labels: Iterable[str]) -> Any:
        """Returns the series of a metric for these label values."""
        instrument, label_values = self._instruments[name], tuple(labels)
        return instrument.labels(*label_values) if label_values else instrument

    def value(self, name: str, **labels: str) -> float:
        """Returns the current value of a series; 0 if there is none."""
        return self.registry.get_sample_value(name, labels) or 0.0

    def text(self) -> bytes:
        """Returns all metrics in the text format of Prometheus."""
        return generate_latest(self.registry)


PROCESS_METRICS = Metrics()
"""The metrics of this process."""
