"""Parses Prometheus expressions and checks that the metrics can answer them."""

from typing import Any, NamedTuple

import promql_parser

COUNTERS = {
    "tenuto_agents_spawned_total": set[str](),
    "tenuto_broker_errors_total": set(),
    "tenuto_claims_total": {"result"},
    "tenuto_compute_seconds_total": set(),
    "tenuto_coordinator_conflicts_total": set(),
    "tenuto_cost_usd_total": set(),
    "tenuto_dead_total": set(),
    "tenuto_lease_expirations_total": set(),
    "tenuto_lease_renew_failures_total": set(),
    "tenuto_retries_total": {"error_class"},
    "tenuto_retry_exhausted_total": set(),
    "tenuto_tasks_completed_total": {"outcome"},
    "tenuto_tasks_submitted_total": set(),
    "tenuto_tokens_total": {"model"},
    "tenuto_webhook_deliveries_total": {"result"},
}
GAUGES = {
    "tenuto_agents": {"status"},
    "tenuto_broker_lag": {"broker"},
    "tenuto_coordinator_leader": set[str](),
    "tenuto_database_down_seconds": set(),
    "tenuto_outbox_lag": set(),
    "tenuto_retries_due": set(),
    "tenuto_stale_agents": set(),
    "tenuto_tasks": {"status"},
    "tenuto_tasks_pending_oldest_seconds": set(),
    "tenuto_workers": {"status"},
}
HISTOGRAMS = {
    "tenuto_coordinator_cycle_seconds": set[str](),
    "tenuto_coordinator_duty_seconds": {"duty"},
    "tenuto_http_request_seconds": set(),
    "tenuto_task_attempts": set(),
    "tenuto_task_duration_seconds": set(),
    "tenuto_task_e2e_seconds": set(),
    "tenuto_task_wait_seconds": set(),
}
METRICS = COUNTERS | GAUGES | HISTOGRAMS
"""The metrics that the interface promises, with their labels."""
SERIES = (
    COUNTERS
    | GAUGES
    | {
        f"{name}_{part}": labels | ({"le"} if part == "bucket" else set())
        for name, labels in HISTOGRAMS.items()
        for part in ("bucket", "sum", "count")
    }
)
SCRAPED = {"instance", "job", "namespace"}
"""Labels that Prometheus adds."""


class Asked(NamedTuple):
    """The series that an expression reads, those it takes rates of, and the labels it uses."""

    series: set[str]
    rated: set[str]
    labels: set[str]


def asked(expression: str) -> Asked:
    """Parse an expression; raises `ValueError` when it is none."""
    result = Asked(set(), set(), set())

    def visit(node: Any) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            result.series.add(node.name or "")
            result.labels.update(matcher.name for matcher in node.matchers.matchers)
        elif isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            result.labels.update(node.modifier.labels)
        elif isinstance(node, promql_parser.Call) and node.func.name in {"rate", "increase"}:
            selector: Any = node.args[0]
            result.rated.add(selector.vector_selector.name)

    promql_parser.walk(promql_parser.parse(expression), visit)
    return result


def faults(expression: str) -> list[str]:
    """Returns the parts of an expression that the metrics cannot answer."""
    series, rated, labels = asked(expression)
    existing = {label for name in series for label in SERIES.get(name, set())} | SCRAPED
    return [
        *(f"there is no {name}" for name in sorted(series - set(SERIES))),
        *(
            f"{name} only ever grows"
            for name in sorted((series & set(SERIES)) - set(GAUGES) - rated)
        ),
        *(f"{name} goes up and down" for name in sorted(rated & set(GAUGES))),
        *(f"there is no label {label}" for label in sorted(labels - existing)),
    ]


def metric(series: str) -> str:
    """The metric that a series belongs to."""
    stem = series.rpartition("_")[0]
    return stem if stem in HISTOGRAMS else series
