"""Alerts and dashboard: they query existing metrics, and every alert has its runbook."""

import json
import re
from itertools import combinations
from typing import Any

import pytest
from tests.deploy.promql import METRICS, asked, faults, metric
from tests.deploy.tree import DEPLOY, ROOT, load, seconds

[GROUP] = load("prometheus/alerts.yaml")["groups"]
RULES: dict[str, dict[str, Any]] = {rule["alert"]: rule for rule in GROUP["rules"]}
THRESHOLDS = {
    "TenutoCoordinatorSlow": "> 5",
    "TenutoStaleAgents": "> 5",
    "TenutoTasksPending": "> 50",
    "TenutoTasksFailed": "[1h]))) > 10",
    "TenutoRetriesExhausted": "> 0",
    "TenutoSpawnStorm": "* 60 > 100",
    "TenutoBrokerErrors": "> 0",
}
GROWING = {"TenutoLeaseExpirations", "TenutoOutboxLag"}
DASHBOARD = json.loads((DEPLOY / "grafana" / "tenuto.json").read_text(encoding="utf-8"))
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
QUERIES = [
    target["expr"].replace("$__rate_interval", "5m")
    for panel in PANELS
    for target in panel.get("targets", [])
]
PAGE = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
SOURCE = ROOT / "src" / "tenuto" / "metrics.py"


@pytest.mark.parametrize(
    ("expression", "fault"),
    [
        ("tenuto_tusks > 5", "there is no tenuto_tusks"),
        ("sum(tenuto_dead_total) > 5", "tenuto_dead_total only ever grows"),
        ("rate(tenuto_stale_agents[5m])", "tenuto_stale_agents goes up and down"),
        ("sum by (workspace) (tenuto_tasks)", "there is no label workspace"),
        ('tenuto_tasks{state="x"}', "there is no label state"),
        ("rate(tenuto_task_wait_seconds[5m])", "there is no tenuto_task_wait_seconds"),
    ],
)
def test_query_of_an_unknown_metric_is_detected(expression: str, fault: str) -> None:
    assert faults(expression) == [fault]


def test_program_exports_the_queried_metrics() -> None:
    """From the day on that the module is there; the client library adds `_total` by itself."""
    text = SOURCE.read_text(encoding="utf-8") if SOURCE.exists() else " ".join(METRICS)
    reported = {name.removesuffix("_total") for name in re.findall(r"\btenuto_[a-z0-9_]+", text)}
    assert {name.removesuffix("_total") for name in METRICS} <= reported


@pytest.mark.parametrize("name", RULES)
def test_alert_queries_existing_metrics(name: str) -> None:
    assert faults(RULES[name]["expr"]) == []
    assert {"job", "namespace"} <= asked(RULES[name]["expr"]).labels


def test_alert_thresholds_equal_the_documented_ones() -> None:
    assert set(THRESHOLDS) | GROWING <= set(RULES)
    for name, end in THRESHOLDS.items():
        assert RULES[name]["expr"].endswith(end)


@pytest.mark.parametrize("name", RULES)
def test_alert_has_a_severity_and_a_remedy(name: str) -> None:
    rule = RULES[name]
    assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
    assert rule["labels"]["severity"] in {"warning", "critical"}
    assert seconds(rule.get("for", "0s")) <= 900
    notes = rule["annotations"]
    assert set(notes) == {"summary", "description", "runbook_url"}
    assert all(notes.values())
    assert notes["runbook_url"] == f"docs/deploy.md#{name.lower()}"


def test_every_alert_has_a_runbook_and_every_runbook_an_alert() -> None:
    assert re.findall(r"^### (Tenuto\w+)$", PAGE, re.MULTILINE) == list(RULES)


@pytest.mark.parametrize("query", QUERIES)
def test_panel_queries_existing_metrics(query: str) -> None:
    assert faults(query) == []
    assert 'job=~"$job"' in query


def test_dashboard_shows_every_metric() -> None:
    shown = {metric(series) for query in QUERIES for series in asked(query).series}
    assert shown == set(METRICS)


def test_panels_have_unique_ids() -> None:
    ids = [panel["id"] for panel in PANELS]
    assert len(set(ids)) == len(ids)


def test_panels_do_not_overlap() -> None:
    def cells(panel: dict[str, Any]) -> set[tuple[int, int]]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        rows, columns = range(at["y"], at["y"] + at["h"]), range(at["x"], at["x"] + at["w"])
        return {(x, y) for x in columns for y in rows}

    positions = {panel["title"]: cells(panel) for panel in PANELS}
    assert len(positions) == len(PANELS)
    assert [(a, b) for a, b in combinations(positions, 2) if positions[a] & positions[b]] == []


def test_dashboard_is_independent_of_an_installation() -> None:
    assert DASHBOARD["id"] is None
    names = {item["name"]: item["type"] for item in DASHBOARD["templating"]["list"]}
    assert names == {"datasource": "datasource", "job": "query"}
    sources = [panel["datasource"] for panel in PANELS if panel["type"] != "row"]
    sources += [t["datasource"] for panel in PANELS for t in panel.get("targets", [])]
    assert {source["uid"] for source in sources} == {"${datasource}"}
