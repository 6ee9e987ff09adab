"""Traces: one task is one trace, from its submit to its completion."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tests.api.conftest import running as serving
from tests.contract.conftest import claim_one, failure, new, running
from tests.waiting import eventually

from tenuto import tracing
from tenuto.client.remote.engine import AnyEngine, RemoteEngine, connect_to_server
from tenuto.engine.engine import Engine
from tenuto.logs import TASK
from tenuto.model.errors import Invalid
from tenuto.settings import Settings
from tenuto.store.sqlite.store import SqliteStore
from tenuto.worker.worker import Worker

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    yield exporter
    provider.shutdown()


def by_name(spans: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    matches = {span.name: span for span in spans.get_finished_spans()}
    assert len(matches) == len(spans.get_finished_spans())
    return matches


def parent_of(span: ReadableSpan) -> int | None:
    return None if span.parent is None else span.parent.span_id


def number_of(span: ReadableSpan) -> int:
    position = span.get_span_context()
    assert position is not None
    return position.span_id


def one_trace(spans: InMemorySpanExporter, task: object) -> int:
    """The number of the only trace, in which each of a task's spans is under the one before."""
    result = by_name(spans)
    assert set(result) == {"submit", "claim", "run", "complete"}
    assert parent_of(result["submit"]) is None
    for before, after in (("submit", "claim"), ("claim", "run"), ("run", "complete")):
        assert parent_of(result[after]) == number_of(result[before]), after
        attributes = result[after].attributes
        assert attributes is not None
        assert attributes["tenuto.task"] == str(task)
    [number] = {span.get_span_context().trace_id for span in result.values()}  # type: ignore[union-attr]
    return number


@asynccontextmanager
async def near(url: str) -> AsyncIterator[Engine]:
    """An engine on the database."""
    store = SqliteStore(url.removeprefix("sqlite:///"))
    await store.migrate()
    await store.open()
    try:
        yield Engine(store)
    finally:
        await store.close()


@asynccontextmanager
async def far(url: str, folder: Path) -> AsyncIterator[RemoteEngine]:
    """An engine behind a server."""
    settings = Settings(database=url, data=str(folder), port=0)
    async with serving(settings) as api, connect_to_server(api.url, await api.token()) as engine:
        yield engine


async def run_one(engine: AnyEngine, handler: Any) -> Any:
    """Submit a task and let a real worker run it; answers what the task is then."""
    worker = Worker(engine, Settings(poll_s=0.05, drain_s=5))
    await worker.host_functions("agent", {None: handler})
    stop = asyncio.Event()
    working = asyncio.create_task(worker.run(stop))
    task = (await engine.submit(new())).id

    async def ended() -> Any:
        view = await engine.show(task)
        return view if view.finished_at is not None else None

    view = await eventually(ended)
    stop.set()
    await working
    return view


@pytest.mark.parametrize("kind", ["coroutine", "function"])
async def test_task_is_one_trace_of_four_spans(
    spans: InMemorySpanExporter, sqlite_url: str, kind: str
) -> None:
    inside: list[tuple[str | None, str | None]] = []

    def now(ctx: Any) -> None:
        inside.append((tracing.trace_id(), str(TASK.get())))

    async def later(ctx: Any) -> None:
        now(ctx)

    async with near(sqlite_url) as engine:
        view = await run_one(engine, later if kind == "coroutine" else now)
    number = one_trace(spans, view.id)
    assert inside == [(f"{number:032x}", str(view.id))]
    assert view.trace_id.split("-")[1] == f"{number:032x}"


async def test_task_of_a_remote_worker_is_one_trace(
    spans: InMemorySpanExporter, sqlite_url: str, tmp_path: Path
) -> None:
    async def handler(ctx: Any) -> None:
        await ctx.progress(50)

    async with far(sqlite_url, tmp_path) as engine:
        view = await run_one(engine, handler)
    number = one_trace(spans, view.id)
    assert view.trace_id.split("-")[1] == f"{number:032x}"


async def test_trace_of_the_caller_is_continued(
    spans: InMemorySpanExporter, engine: Engine
) -> None:
    with tracing.use_parent_trace(PARENT):
        task = (await engine.submit(new())).id
    submit = by_name(spans)["submit"]
    assert f"{parent_of(submit):016x}" == PARENT.split("-")[2]
    assert (await engine.show(task)).trace_id == f"{PARENT[:36]}{number_of(submit):016x}-01"


@pytest.mark.parametrize("values", [PARENT, "order 4711"])
async def test_trace_of_the_request_is_stored(
    spans: InMemorySpanExporter, engine: Engine, values: str
) -> None:
    task = (await engine.submit(new(trace_id=values))).id
    assert (await engine.show(task)).trace_id == values
    work = await claim_one(engine)
    if values == PARENT:
        assert work.trace_id is not None
        assert work.trace_id.startswith(PARENT[:36])
    claim = by_name(spans)["claim"]
    assert (parent_of(claim) is not None) == (values == PARENT)


async def test_task_without_a_trace_does_not_join_its_workers_trace(
    spans: InMemorySpanExporter, engine: Engine
) -> None:
    await engine.submit(new(trace_id="order 4711"))
    with tracing.span("a request"):
        await claim_one(engine)
    assert parent_of(by_name(spans)["claim"]) is None


async def test_failure_is_a_span(spans: InMemorySpanExporter, engine: Engine) -> None:
    await engine.fail(await running(engine), failure())
    assert "fail" in by_name(spans)


async def test_repeated_submit_in_another_trace_returns_the_same_task(
    spans: InMemorySpanExporter, engine: Engine
) -> None:
    first = await engine.submit(new(idempotency_key="k"))
    again = await engine.submit(new(idempotency_key="k"))
    assert (again.id, again.created) == (first.id, False)


async def test_only_the_callers_trace_is_stored_without_an_sdk(engine: Engine) -> None:
    plain = (await engine.submit(new())).id
    with tracing.use_parent_trace(PARENT):
        carried = (await engine.submit(new())).id
    assert (await engine.show(plain)).trace_id is None
    assert (await engine.show(carried)).trace_id == PARENT
    assert not tracing.is_on()


@pytest.mark.parametrize(
    "bad", ["", "x", PARENT[:-1], f"ff{PARENT[2:]}", f"00-{'0' * 32}-{'1' * 16}-01", PARENT.upper()]
)
def test_invalid_traceparent_starts_no_trace(bad: str) -> None:
    with tracing.use_parent_trace(bad):
        assert tracing.current_traceparent() is None


def test_missing_otel_extra_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(Invalid, match="tracing needs the extra `otel`"):
        tracing.set_up("worker", enabled=True)
    tracing.set_up("worker", enabled=False)
    assert not tracing.is_on()
