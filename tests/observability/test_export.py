"""Traces leave the processes that make them, by OTLP, as the standard variables say."""

from pathlib import Path

import pytest
from tests.cli.orchestrate import Orchestrate, Remote, serving, started, token_of
from tests.observability.collector import Arrived, Collector, collecting

PARENTS = {"submit": "", "claim": "submit", "run": "claim", "complete": "run"}
SENDERS = {"submit": "api", "claim": "api", "run": "worker", "complete": "api"}


def run_one(home: Path, otel: dict[str, str]) -> str:
    """Run a task by a server and a worker elsewhere until both have ended; answers its id."""
    local = Orchestrate(home)
    local.environment |= otel
    with serving(local) as url:
        cli = Remote(home / "elsewhere", url, token_of(local))
        cli.home.mkdir()
        cli.environment |= otel
        with started(cli, "worker"):
            done = cli.json("run", "--follow", "--", "true")
    assert done["status"] == "COMPLETED"
    return str(done["id"])


def check(spans: list[Arrived], task: str, services: dict[str, str]) -> None:
    """The four spans of the task are one trace, each sent by the process that made it."""
    own = {span.name: span for span in spans}
    assert set(own) == set(PARENTS)
    assert len(spans) == len(PARENTS)
    assert len({span.trace for span in spans}) == 1
    for name, parent in PARENTS.items():
        assert own[name].parent == (own[parent].number if parent else ""), name
        assert own[name].service == services[SENDERS[name]]
        if name != "submit":
            assert own[name].attributes["tenuto.task"] == task


@pytest.mark.parametrize("named", ["ours", "given"])
def test_task_is_exported_as_one_trace(tmp_path: Path, named: str) -> None:
    with collecting() as collector:
        otel = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}
        services = {"api": "tenuto-api", "worker": "tenuto-worker"}
        if named == "given":
            otel |= {
                "OTEL_SERVICE_NAME": "shop",
                "OTEL_EXPORTER_OTLP_HEADERS": "x-key=k",
                "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip",
            }
            services = dict.fromkeys(services, "shop")
        task = run_one(tmp_path, otel)
    check(collector.spans, task, services)
    assert collector.refused == []
    reported = {
        (header.get("x-key"), header.get("content-encoding")) for header in collector.headers
    }
    assert reported == ({("k", "gzip")} if named == "given" else {(None, None)})


def test_task_completes_without_a_collector(tmp_path: Path) -> None:
    otel = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_EXPORTER_OTLP_TIMEOUT": "1"}
    assert run_one(tmp_path, otel)


def test_collector_refuses_requests_that_are_not_otlp() -> None:
    collector = Collector()
    right = {"content-type": "application/x-protobuf"}
    assert collector.take("/v1/traces", {"content-type": "application/json"}, b"{}") == 415
    assert collector.take("/traces", right, b"") == 404
    assert collector.take("/v1/traces", right, b"\xff\xff") == 400
    assert collector.take("/v1/traces", right | {"content-encoding": "gzip"}, b"x") == 400
    assert collector.spans == []
