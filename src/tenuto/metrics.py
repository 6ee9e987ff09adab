"""Metrics: everything that this program counts, in one table, and a registry of our own for it."""

from collections.abc import Iterable
from typing import Any, Literal

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client import Metric as Family

from tenuto.model.tasks.retry import ErrorClass
from tenuto.model.tasks.task import TERMINAL

OTHER = "other"
"""Stands for label values that are not among the known ones."""
_SECONDS = (0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_LONG = (0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0)
_TRIES = (1.0, 2.0, 3.0, 5.0, 10.0, 25.0, 100.0)

Reporter = Literal["events", "sampler", "process"]


class Metric(msgspec.Struct, frozen=True, kw_only=True):
    """One metric. `values`: what its only label can be, told from the start so that rates see it.

    `told` says from where: the audit events, the sampler, or what one process does itself.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    told: Reporter
    help: str
    labels: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


def _counter(name: str, told: Reporter, text: str, label: str = "", *values: str) -> Metric:
    labels = (label,) if label else ()
    return Metric(name=name, kind="counter", told=told, help=text, labels=labels, values=values)


def _gauge(name: str, text: str, *labels: str) -> Metric:
    return Metric(name=name, kind="gauge", told="sampler", help=text, labels=labels)


def _histogram(
    name: str, told: Reporter, text: str, buckets: tuple[float, ...], *labels: str
) -> Metric:
    return Metric(name=name, kind="histogram", told=told, help=text, labels=labels, buckets=buckets)


TABLE = (
    _gauge(
        "tenuto_tasks", "Tasks by status; of COMPLETED ones there is only the counter.", "status"
    ),
    _gauge("tenuto_tasks_pending_oldest_seconds", "How long the oldest PENDING task has been so."),
    _gauge("tenuto_retries_due", "Tasks whose retry is due and that nobody has promoted yet."),
    _gauge("tenuto_workers", "Workers by status.", "status"),
    _gauge("tenuto_agents", "Agents by status.", "status"),
    _gauge("tenuto_stale_agents", "Agents that fell silent: STALE or ERROR."),
    _gauge("tenuto_coordinator_leader", "1 while a coordinator leads, else 0."),
    _gauge("tenuto_outbox_lag", "Events that the slowest subscriber has not been handed yet."),
    _gauge("tenuto_broker_lag", "Messages that wait in a broker; 0 without one.", "broker"),
    _counter("tenuto_tasks_submitted_total", "events", "Tasks submitted."),
    _counter(
        "tenuto_tasks_completed_total",
        "events",
        "Tasks that ended, by the status they ended in.",
        "outcome",
        *sorted(TERMINAL),
    ),
    _counter(
        "tenuto_claims_total",
        "events",
        "Tasks claimed; and, told by each worker itself, its claims that found none or failed.",
        "result",
        "claimed",
        "empty",
        "error",
    ),
    _counter(
        "tenuto_retries_total",
        "events",
        "Attempts that ended and will be followed by another, by what went wrong.",
        "error_class",
        *ErrorClass,
        OTHER,
    ),
    _counter("tenuto_dead_total", "events", "Tasks that became DEAD."),
    _counter(
        "tenuto_retry_exhausted_total", "events", "Tasks that became DEAD as no try was left."
    ),
    _counter("tenuto_lease_expirations_total", "events", "Attempts whose worker was lost."),
    _counter("tenuto_compute_seconds_total", "events", "Seconds that ended attempts have run."),
    _histogram(
        "tenuto_task_wait_seconds", "events", "From PENDING to the start of an attempt.", _LONG
    ),
    _histogram("tenuto_task_duration_seconds", "events", "How long an attempt ran.", _LONG),
    _histogram(
        "tenuto_task_e2e_seconds", "events", "From submit, or retry by hand, to the end.", _LONG
    ),
    _histogram("tenuto_task_attempts", "events", "Attempts that a task had at its end.", _TRIES),
    _counter(
        "tenuto_lease_renew_failures_total",
        "process",
        "Leases that a heartbeat of this worker could not renew.",
    ),
    _histogram(
        "tenuto_coordinator_cycle_seconds",
        "process",
        "How long a cycle of this leading coordinator took.",
        _SECONDS,
    ),
    _histogram(
        "tenuto_coordinator_duty_seconds",
        "process",
        "How long a duty took in a cycle of this coordinator.",
        _SECONDS,
        "duty",
    ),
    _counter(
        "tenuto_coordinator_conflicts_total",
        "process",
        "Times that this coordinator found another leading though it had not given up the lead.",
    ),
    Metric(
        name="tenuto_database_down_seconds",
        kind="gauge",
        told="process",
        help="How long the database has not answered this coordinator; 0 while it does.",
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
        "How long a request to this API took, by the template of its path.",
        _SECONDS,
        "method",
        "route",
        "status",
    ),
    _counter("tenuto_agents_spawned_total", "process", "Sessions that a gateway was asked for."),
    _counter(
        "tenuto_tokens_total",
        "process",
        "Tokens that models used, as attempts told this process; of 100 models by name.",
        "model",
    ),
    _counter(
        "tenuto_cost_usd_total",
        "process",
        "What models cost, in US dollars, as attempts told this process.",
    ),
)
"""Every metric; the names are a promise."""
NAMED = {metric.name: metric for metric in TABLE}

_KINDS = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}


class _Registry(CollectorRegistry):
    """A registry without the series `_created`, which are not in the table."""

    def collect(self) -> Iterable[Family]:
        for family in super().collect():
            family.samples = [each for each in family.samples if not each.name.endswith("_created")]
            yield family


class Metrics:
    """The metrics of one process. Safe in threads."""

    def __init__(self) -> None:
        self.registry = _Registry()
        self._made: dict[str, Any] = {}
        for metric in TABLE:
            if metric.kind != "gauge":
                self._made[metric.name] = self._make(metric)

    def _make(self, metric: Metric) -> Any:
        more = {"buckets": metric.buckets} if metric.buckets else {}
        made = _KINDS[metric.kind](
            metric.name, metric.help, metric.labels, registry=self.registry, **more
        )
        for value in metric.values:
            made.labels(value)
        return made

    def count(self, name: str, *labels: str, by: float = 1) -> None:
        """Add to a counter. A value outside those its label is known to have is `other`."""
        known = NAMED[name].values
        told = [label if not known or label in known else OTHER for label in labels]
        self._of(name, told).inc(by)

    def observe(self, name: str, value: float, *labels: str) -> None:
        """Add to a histogram."""
        self._of(name, labels).observe(value)

    def put(self, name: str, values: dict[str, float] | float) -> None:
        """Set a gauge, or all of a gauge with a label: what is not among the values is gone.

        A gauge is first told when it is set: a process that does not sample tells none.
        """
        if name not in self._made:
            self._made[name] = self._make(NAMED[name])
        made = self._made[name]
        if not isinstance(values, dict):
            made.set(values)
            return
        made.clear()
        for label, value in values.items():
            made.labels(label).set(value)

    def _of(self, name: str, labels: Iterable[str]) -> Any:
        made, told = self._made[name], tuple(labels)
        return made.labels(*told) if told else made

    def value(self, name: str, **labels: str) -> float:
        """What a series has now; 0 when there is none."""
        return self.registry.get_sample_value(name, labels) or 0.0

    def text(self) -> bytes:
        """All of it as Prometheus reads it."""
        return generate_latest(self.registry)


PROCESS_METRICS = Metrics()
"""The metrics of this process."""
