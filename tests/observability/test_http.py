"""Over HTTP: metrics for Prometheus, and the id and log line of each request."""

import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.api.conftest import Api, problem, replaced, running
from tests.moved_time import MovedTime
from tests.waiting import eventually

from tenuto.api.edge.metrics import SAMPLE_S
from tenuto.logs import create_handler
from tenuto.metrics import PROCESS_METRICS, TABLE
from tenuto.settings import Settings

V1 = "/api/v1"


class Lines(logging.Handler):
    """Keeps what would be written."""

    def __init__(self, style: str) -> None:
        super().__init__()
        created = create_handler(style)
        self.filters = created.filters
        self.formatter = created.formatter
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


@pytest.fixture
def lines() -> Iterator[Lines]:
    created = Lines("json")
    log = logging.getLogger("tenuto")
    log.addHandler(created)
    before = log.level
    log.setLevel("DEBUG")
    yield created
    log.removeHandler(created)
    log.setLevel(before)


@pytest.fixture
def settings(sqlite_url: str, tmp_path: Path) -> Settings:
    return Settings(database=sqlite_url, data=str(tmp_path), port=0, poll_s=0.2)


@pytest.fixture
async def api(settings: Settings) -> AsyncIterator[Api]:
    async with running(settings) as api:
        yield api


def observed(**labels: str) -> float:
    return PROCESS_METRICS.value("tenuto_http_request_seconds_count", **labels)


async def test_metrics_are_valid_for_prometheus(
    moved_time: MovedTime, database_url: str, tmp_path: Path
) -> None:
    chosen = Settings(database=database_url, data=str(tmp_path), port=0)
    async with running(chosen) as api:
        await _read_as_prometheus(api, moved_time)


async def _read_as_prometheus(api: Api, moved_time: MovedTime) -> None:
    client = await api.acting()
    before = PROCESS_METRICS.value("tenuto_tasks_submitted_total")
    assert (await client.post(f"{V1}/agent-tasks", json={"title": "t"})).status_code == 201
    await eventually(lambda: PROCESS_METRICS.value("tenuto_tasks_submitted_total") == before + 1)
    moved_time.advance(SAMPLE_S)
    await eventually(lambda: PROCESS_METRICS.value("tenuto_tasks", status="PENDING") == 1)
    answer = await (await api.client()).get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    reported = {family.name for family in text_string_to_metric_families(answer.text)}
    reported.add("tenuto_database_down_seconds")  # only coordinators tell it
    assert reported == {metric.name.removesuffix("_total") for metric in TABLE}


async def test_metrics_can_require_a_token(settings: Settings) -> None:
    async with running(replaced(settings, metrics_token="mine")) as api:
        for wrong in (None, "other", "mine2"):
            assert problem(await (await api.client(wrong)).get("/metrics"))[0] == 401
        assert (await (await api.client("mine")).get("/metrics")).status_code == 200


async def test_request_metrics_use_the_route_template(api: Api) -> None:
    client = await api.acting()
    missing = "00000000-0000-7000-8000-00000000dead"
    route = f"{V1}/agent-tasks/{{task_id}}"
    before = observed(method="GET", route=route, status="404")
    assert (await client.get(f"{V1}/agent-tasks/{missing}")).status_code == 404
    assert observed(method="GET", route=route, status="404") == before + 1
    assert missing not in PROCESS_METRICS.text().decode()


async def test_unknown_path_is_no_label(api: Api) -> None:
    client = await api.client()
    assert (await client.get("/no/such/path-4711")).status_code == 404
    assert (await client.request("MKCOL", "/no/such/path-4711")).status_code == 404
    assert observed(method="GET", route="unmatched", status="404") >= 1
    assert observed(method="other", route="unmatched", status="404") >= 1
    text = PROCESS_METRICS.text().decode()
    assert "path-4711" not in text
    assert "MKCOL" not in text


async def test_refusal_before_the_routes_is_measured(api: Api, lines: Lines) -> None:
    client = await api.acting()
    answer = await client.post(f"{V1}/agent-tasks", content=b"{", headers={"content-type": "x/y"})
    assert problem(answer)[0] == 415
    assert answer.headers["x-request-id"]
    assert '"status":415' in lines.lines[-1]


@pytest.mark.parametrize("good", ["abc-1.2:3_X", "a", "x" * 64])
async def test_request_keeps_its_id(api: Api, good: str) -> None:
    answer = await (await api.client()).get("/health/live", headers={"X-Request-Id": good})
    assert answer.headers.get_list("x-request-id") == [good]


@pytest.mark.parametrize("bad", ["", "a b", "x" * 65, "a\tb", '"quoted"', "é"])
async def test_hostile_request_id_is_replaced(api: Api, bad: str) -> None:
    sent = {"X-Request-Id": bad.encode("latin-1")}
    answer = await (await api.client()).get("/health/live", headers=sent)  # type: ignore[arg-type]
    [values] = answer.headers.get_list("x-request-id")
    assert values != bad
    assert len(values) == 36


async def test_request_is_logged_in_one_line(api: Api, lines: Lines) -> None:
    import msgspec

    client = await api.acting()
    await client.get(f"{V1}/me", headers={"X-Request-Id": "mine"})
    await client.get("/nowhere")
    messages: list[dict[str, Any]] = [msgspec.json.decode(line) for line in lines.lines]
    me, nowhere = [item for item in messages if item["logger"] == "tenuto.access"]
    assert me["level"] == "INFO"
    assert me["request_id"] == "mine"
    assert (me["method"], me["route"], me["status"]) == ("GET", f"{V1}/me", 200)
    assert me["ms"] >= 0
    assert me["actor"] != "-"
    assert me["client"] == "127.0.0.1"
    assert me["message"].startswith(f"GET {V1}/me 200 ")
    assert (nowhere["route"], nowhere["actor"]) == ("unmatched", "-")


async def test_request_log_has_no_token(api: Api, lines: Lines) -> None:
    token = await api.token()
    client = await api.client(token)
    for path in (f"{V1}/me", f"{V1}/agent-tasks?search={token}", f"/{token}"):
        await client.get(path)
    await client.post(f"{V1}/login", json={"name": token, "password": token})
    assert len(lines.lines) >= 4
    assert token not in "".join(lines.lines)
