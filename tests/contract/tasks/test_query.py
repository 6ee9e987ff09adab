"""Queries: filters and their aliases, pages, history, and why a task is not running."""

from contextlib import suppress
from datetime import timedelta
from itertools import combinations
from typing import Any
from uuid import UUID

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.contract.conftest import (
    LEASE_S,
    START,
    WORKER,
    ManualClock,
    Raw,
    claim_all,
    claim_one,
    failure,
    in_status,
    new,
    opened,
    profile,
    reclaimed,
    refusal,
    running,
)
from tests.services.postgres import PostgresServer

from tenuto.engine.engine import Engine
from tenuto.engine.tasks.report import WorkerInfo
from tenuto.engine.views import TaskView
from tenuto.model.errors import TenutoError
from tenuto.model.tasks.submission import Filter
from tenuto.model.tasks.task import Status
from tenuto.model.tasks.transcript import Line
from tenuto.store import sql
from tenuto.store.postgres.store import PostgresStore
from tenuto.store.protocol import Script, Statement


async def titles(engine: Engine, **where: Any) -> list[str]:
    return [task.title for task in (await engine.list(Filter(**where))).tasks]


def spellings(engine: Engine) -> int:
    """Returns how many query texts the store's fullest connection has prepared."""
    store: Any = engine.core.store
    if isinstance(store, PostgresStore):
        return len(store._connections.compiled)
    file: Any = engine.store
    return max(len(item._prepared) for item in (file._connection, *file._reader_connections))


async def test_filters_prepare_a_bounded_number_of_statements(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sql, "MAX_CACHED", 20)
    await engine.submit(new("a"))
    for n in range(1, 4):
        for statuses in combinations(("PENDING", "RUNNING", "PAUSED", "DEAD", "FAILED"), n):
            expected = ["a"] if "PENDING" in statuses else []
            assert await titles(engine, status=statuses) == expected
            assert await titles(engine, status=statuses, min_priority=1) == expected
    assert spellings(engine) <= 20


async def test_filter_accepts_every_status(engine: Engine) -> None:
    created: dict[Status, UUID] = {}
    for of in sorted(Status, key=lambda of: of is Status.PENDING):  # else a later claim takes it
        created[of] = (await in_status(engine, of)).task
    for of, task in created.items():
        for spelled in (of.value, of.value.lower(), of.value.title()):
            page = await engine.list(Filter(status=(spelled,)))
            assert [item.id for item in page.tasks] == [task]
    page = await engine.list(Filter(status=("DEAD", "running", "Waiting")))
    expected = {created[Status.DEAD], created[Status.RUNNING], created[Status.WAITING]}
    assert {item.id for item in page.tasks} == expected
    assert len((await engine.list()).tasks) == 11
    counts = await engine.query.counts(engine.workspace)
    assert counts == {of.value: 1 for of in Status}


async def test_filter_accepts_status_aliases(engine: Engine, clock: ManualClock) -> None:
    stalled = await running(engine, title="stalled")
    clock.advance(LEASE_S + 1)
    await engine.maintenance.expire_once("reaper")
    await engine.complete(await running(engine, title="done"))
    await engine.submit(new("queued"))
    assert await titles(engine, status=("queued",)) == ["queued"]
    assert await titles(engine, status=("Succeeded",)) == ["done"]
    assert await titles(engine, status=("STALLED",)) == ["stalled"]
    assert await titles(engine, status=("aborted",)) == []
    assert await titles(engine, status=("archived",)) == []
    await engine.cancel(stalled.task)
    await engine.archive(stalled.task)
    assert await titles(engine, status=("archived",)) == ["stalled"]
    assert await titles(engine, status=("cancelled",)) == ["stalled"]


async def hung(engine: Engine, clock: ManualClock) -> None:
    fence = await running(engine, title="aborted", estimate_minutes=1)
    await engine.heartbeat([fence], 100_000)
    clock.advance(minutes=31)
    await engine.maintenance.promote_once("promoter")
    clock.advance(minutes=10)
    await engine.maintenance.promote_once("promoter")


async def test_filter_by_several_statuses_matches_any(engine: Engine, clock: ManualClock) -> None:
    await hung(engine, clock)
    await running(engine, title="stalled")
    clock.advance(LEASE_S + 1)
    await engine.maintenance.expire_once("reaper")
    await engine.complete(await running(engine, title="done", priority=10))
    assert sorted(await titles(engine, status=("stalled", "aborted"))) == ["aborted", "stalled"]
    assert sorted(await titles(engine, status=("stalled", "completed"))) == ["done", "stalled"]
    done = (await engine.list(Filter(status=("completed",)))).tasks[0]
    await engine.archive(done.id)
    assert sorted(await titles(engine, status=("archived", "stalled"))) == ["done", "stalled"]


async def test_filter_by_an_unknown_status_is_refused(engine: Engine) -> None:
    assert await refusal(engine.list(Filter(status=("BOGUS",)))) == "invalid_filter"
    assert await refusal(engine.list(Filter(status=("x'; drop",)))) == "invalid_filter"


async def test_filters_by_other_fields_match(engine: Engine, clock: ManualClock) -> None:
    parent = (await engine.submit(new("plain"))).id
    clock.advance(10)
    await engine.submit(new("urgent", priority=9, tags=["x"], task_type="build"))
    clock.advance(10)
    await engine.submit(new("child 100%", parent=parent, tags=["x", "y"]))
    taken = await engine.claim(profile(task_types=("build",)), WORKER, 1)
    assert len(taken) == 1
    assert await titles(engine, min_priority=6) == ["urgent"]
    assert await titles(engine, task_type="build") == ["urgent"]
    assert await titles(engine, parent=parent) == ["child 100%"]
    assert await titles(engine, agent=profile().id) == ["urgent"]
    assert await titles(engine, tags=("x",)) == ["child 100%", "urgent"]
    assert await titles(engine, tags=("y", "x", "y")) == ["child 100%"]
    assert await titles(engine, tags=("z",)) == []
    assert await titles(engine, since=START + timedelta(seconds=10)) == ["child 100%", "urgent"]
    assert await titles(engine, until=START + timedelta(seconds=10)) == ["plain"]
    assert await titles(engine, text="URG") == ["urgent"]
    assert await titles(engine, tags=("x",), min_priority=9, text="ent") == ["urgent"]
    assert await titles(engine, text="0%") == ["child 100%"]
    for wild in ("%", "_", "!", "\\", "'"):
        assert await titles(engine, text=wild) == (["child 100%"] if wild == "%" else [])


TITLES = ["plain", "ÉCOLE", "Straße", "ПРИВЕТ", "100%_!x", "İstanbul"]


async def found_by_themselves(engine: Engine) -> None:
    """Every title is found by its own text."""
    await engine.submit_many([new(title) for title in (*TITLES, "another")])
    for title in TITLES:
        assert await titles(engine, text=title) == [title]
        assert await titles(engine, text=title[1:4]) == [title]


async def test_title_search_finds_the_task(engine: Engine) -> None:
    await found_by_themselves(engine)


async def test_title_search_finds_the_task_in_any_locale(postgres: PostgresServer) -> None:
    url = postgres.create_database(options="encoding 'UTF8' lc_ctype 'C.UTF-8'")
    async with opened(url, ManualClock()) as store:
        await found_by_themselves(Engine(store))
    postgres.drop_database(url)


@settings(
    deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(limit=st.integers(1, 40), start=st.integers(0, 30))
async def test_pages_show_every_task_once(engine: Engine, limit: int, start: int) -> None:
    if not (await engine.list(limit=1)).tasks:
        await engine.submit_many([new(f"t{n}", tags=["odd"] if n % 2 else []) for n in range(30)])
    for where in (Filter(), Filter(tags=("odd",)), Filter(status=("waiting",))):
        whole = [task.id for task in (await engine.list(where, 1000)).tasks]
        assert whole == sorted(whole, reverse=True)
        cursor = whole[start] if start < len(whole) else None
        paged = []
        while True:
            page = await engine.list(where, limit, cursor)
            assert len(page.tasks) <= limit
            paged += [task.id for task in page.tasks]
            cursor = page.next_cursor
            if cursor is None:
                break
        assert paged == (whole[start + 1 :] if start < len(whole) else whole)


async def test_last_page_has_no_cursor(engine: Engine) -> None:
    await engine.submit_many([new(f"t{n}") for n in range(3)])
    first = await engine.list(limit=2)
    assert first.next_cursor == first.tasks[-1].id
    assert (await engine.list(Filter(), 1, first.next_cursor)).next_cursor is None
    assert (await engine.list(limit=3)).next_cursor is None


async def test_page_size_is_bounded(engine: Engine) -> None:
    for limit in (0, -1, 1001):
        assert await refusal(engine.list(limit=limit)) == "invalid_value"


async def test_end_of_an_id_finds_its_task(engine: Engine, clock: ManualClock) -> None:
    first = (await engine.submit(new())).id
    clock.advance(days=3650)
    second = (await engine.submit(new())).id
    assert await engine.find(str(first)) == first
    assert await engine.find(f" {str(first)[:8].upper()} ") == first
    assert await engine.find(str(second)[:13]) == second
    for wrong in ("abc", "zzzz", "ffff", "%%%%", "'; --", "", "0\x000"):
        assert await refusal(engine.find(wrong)) == "not_found"


async def test_ambiguous_end_of_an_id_is_refused(engine: Engine) -> None:
    ids = [str((await engine.submit(new())).id) for _ in range(2)]
    assert ids[0][:13] == ids[1][:13]
    assert await refusal(engine.find(ids[0][:13])) == "not_found"


async def test_task_of_another_workspace_is_not_found(engine: Engine, raw: Raw) -> None:
    elsewhere = Engine(engine.store, workspace=await raw.workspace(5))
    others = (await elsewhere.submit(new())).id
    missing = UUID(int=12345)
    reads: list[Any] = [engine.show, engine.attempts, engine.events, engine.logs, engine.explain]
    for read in reads:
        for task in (others, missing):
            assert await refusal(read(task)) == "not_found"
    assert await refusal(engine.find(str(others)[:18])) == "not_found"
    assert (await engine.list()).tasks == []


async def test_task_view_survives_json(engine: Engine) -> None:
    fence = await running(engine, input={"a": 1}, tags=["x"])
    await engine.checkpoint(fence, [1])
    view = await engine.show(fence.task)
    text = msgspec.json.encode(view)
    assert msgspec.json.decode(text, type=TaskView) == view
    assert b'"inputContext":{"a":1}' in text
    assert b'"checkpointData":[1]' in text
    page = await engine.list()
    assert msgspec.json.decode(msgspec.json.encode(page), type=type(page)) == page
    for read in (engine.events, engine.attempts, engine.logs):
        msgspec.json.encode(await read(fence.task))
    msgspec.json.encode(await engine.explain(fence.task))


async def test_attempts_list_ends_with_the_running_one(engine: Engine, clock: ManualClock) -> None:
    fence = await running(engine)
    await reclaimed(engine, fence)
    first, second = await engine.attempts(fence.task)
    assert (first.attempt, first.outcome, first.error_class) == (1, "STALLED", "crash")
    assert (second.attempt, second.outcome, second.ended_at) == (2, None, None)
    assert second.worker == WORKER


async def test_events_are_listed_from_a_version_on(engine: Engine) -> None:
    fence = await running(engine)
    await engine.release(fence)
    events = await engine.events(fence.task)
    assert [event.seq for event in events] == [1, 2, 3]
    assert [event.text for event in events] == [
        "submitted -> PENDING",
        "claimed PENDING -> RUNNING",
        "released RUNNING -> PENDING",
    ]
    assert list(await engine.events(fence.task, after=2)) == list(events[2:])


async def test_logs_are_merged_by_time_and_filtered_by_level(
    engine: Engine, clock: ManualClock
) -> None:
    fence = await running(engine)
    clock.advance(1)
    await engine.append(fence, [Line(1, "DEBUG", "quiet"), Line(2, "ERROR", "loud")])
    clock.advance(1)
    await engine.fail(fence, failure())
    texts = [line.text for line in await engine.logs(fence.task)]
    assert texts[2:4] == ["quiet", "loud"]
    assert texts[4].startswith("retry_scheduled")
    warned = [line.text for line in await engine.logs(fence.task, "warn")]
    assert warned[0] == "loud"
    assert len(warned) == 2
    assert await refusal(engine.logs(fence.task, "LOUD")) == "invalid_filter"


async def test_limited_logs_are_the_newest_lines(engine: Engine, clock: ManualClock) -> None:
    fence = await running(engine)
    for start in (0, 1000):
        clock.advance(1)
        lines = [Line(start + n, "INFO", f"line {start + n}") for n in range(1000)]
        await engine.append(fence, lines)
    logs = await engine.logs(fence.task, limit=3)
    assert [line.text for line in logs] == ["line 1997", "line 1998", "line 1999"]


async def explained(engine: Engine, task: UUID) -> tuple[str, list[str]]:
    reason = await engine.explain(task)
    return reason.summary, [gate.gate for gate in reason.gates]


async def test_explain_shows_why_a_task_is_not_running(engine: Engine, clock: ManualClock) -> None:
    first = (await engine.submit(new())).id
    second = (await engine.submit(new(queue_ttl_s=60))).id
    assert await explained(engine, first) == ("no agent exists", ["agent"])
    await engine.register_agent(profile())
    assert (await engine.explain(first)).agents == {"agent": ["no live worker hosts this agent"]}
    await engine.record_worker(WorkerInfo(WORKER, "host", 1, ["agent"], 1, "RUNNING"))
    assert await explained(engine, first) == ("ready: the next free slot claims it", [])
    assert (await explained(engine, second))[1] == ["ttl", "queue"]
    fence = (await claim_one(engine)).fence
    assert (await explained(engine, first))[0] == f"running: attempt 1 on {WORKER}"
    assert (await engine.explain(second)).agents == {"agent": ["all its slots are busy"]}
    await engine.cancel(first)
    assert (await explained(engine, first))[1] == ["cancel"]
    await engine.confirm_cancel(fence, {})
    assert await explained(engine, first) == ("ended CANCELLED", [])


async def test_explain_shows_why_a_task_waits(engine: Engine, clock: ManualClock) -> None:
    await engine.register_agent(profile())
    await engine.record_worker(WorkerInfo(WORKER, "host", 1, ["agent"], 9, "RUNNING"))
    later = (await engine.submit(new(run_at=START + timedelta(hours=1)))).id
    gate = (await engine.explain(later)).gates[0]
    assert (gate.gate, gate.clears_at) == ("schedule", START + timedelta(hours=1))
    fence = await running(engine)
    await engine.fail(fence, failure(message="no luck"))
    gate = (await engine.explain(fence.task)).gates[0]
    assert (gate.gate, gate.clears_at) == ("retry", START + timedelta(seconds=5))
    assert "try 2 of 3" in gate.detail
    assert "no luck" in gate.detail
    await engine.pause(fence.task)
    assert (await explained(engine, fence.task))[1][0] == "paused"
    parked = await in_status(engine, Status.WAITING)
    assert (await explained(engine, parked.task))[1] == ["approval"]
    picky = (await engine.submit(new(capabilities=["gpu"]))).id
    assert (await engine.explain(picky)).agents == {"agent": ["needs capabilities gpu"]}


async def test_explain_shows_why_a_lane_is_closed(engine: Engine, raw: Raw) -> None:
    submitted = await engine.submit(new())
    lane = await raw.value("select id from lane")
    until = START + timedelta(hours=1)

    def script() -> Script[None]:
        yield Statement("lane_close", {"lane": lane, "until": until, "why": "provider limit"})

    await engine.core.store.transact(script)
    reason = await engine.explain(submitted.id)
    gate = next(gate for gate in reason.gates if gate.gate == "lane")
    assert (gate.detail, gate.clears_at) == ("lane closed: provider limit", until)
    await engine.core.store.transact(script)


async def test_explain_covers_every_status(engine: Engine) -> None:
    for of in Status:
        fence = await in_status(engine, of)
        reason = await engine.explain(fence.task)
        assert reason.status == of.value
        assert reason.summary
        if of is Status.PENDING:
            await engine.cancel(fence.task)
    assert await claim_all(engine) == []


async def test_agent_name_keeps_its_id(engine: Engine) -> None:
    first = await engine.register_agent(profile())
    again = await engine.register_agent(profile(id=UUID(int=8), capabilities=("new",)))
    assert again.id == first.id
    assert again.version > first.version
    existing = await engine.query.agents(engine.workspace)
    assert existing["agent"].id == first.id
    assert existing["agent"].capabilities == ("new",)


async def test_agent_id_under_another_name_is_no_error(engine: Engine) -> None:
    await engine.register_agent(profile())
    with suppress(TenutoError):  # renamed or refused, as the engine likes
        renamed = await engine.register_agent(profile(name="renamed"))
        assert renamed.name == "renamed"
        assert "renamed" in await engine.query.agents(engine.workspace)
