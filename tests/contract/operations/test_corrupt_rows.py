"""Corrupt rows: quarantined with an alert, while all other tasks continue."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import UUID

import msgspec
import pytest
from tests.contract.conftest import (
    LEASE_S,
    Another,
    ManualClock,
    Raw,
    claim_all,
    failure,
    forget,
    in_status,
    new,
    refusal,
    running,
    status,
)

from tenuto.engine.engine import Engine
from tenuto.model.errors import TenutoError
from tenuto.model.tasks.task import Status


async def damage(raw: Raw, task: UUID, change: str) -> None:
    table, column = ("task_body", "task") if change.startswith("body.") else ("task", "id")
    change = change.removeprefix("body.")
    await raw.execute(f"update {table} set {change} where {column} = '{task}'")


async def check_quarantined(engine: Engine, task: UUID) -> None:
    view = await engine.show(task)
    assert (view.status, view.error_class) == ("FAILED", "corrupt")
    event = (await engine.events(task))[-1]
    assert (event.event, event.level, event.new_status) == ("failed", "CRITICAL", "FAILED")


HALF = "'{\"half\": '"
GARBAGE = {
    "retry of another shape": "retry = '{\"bogus\": 1}'",
    "retry that is no object": "retry = '[1, 2]'",
}
GARBAGE_BODY = {
    "command that is no list": "body.command = '{\"a\": 1}'",
    "command of numbers": "body.command = '[1, 2]'",
    "env that is no object": "body.env = '[1]'",
    "env of numbers": "body.env = '{\"A\": 1}'",
    "metadata that is no object": "body.metadata = '5'",
}
SQLITE_BODY = {
    "input that is not JSON": f"body.input = {HALF}",
    "command that is not JSON": f"body.command = {HALF}",
    "metadata that is not JSON": "body.metadata = ''",
}
NOT_UTF8 = {
    "prompt": "body.prompt = cast(x'ff41' as text)",
    "title": "body.title = cast(x'c328' as text)",
    "input": "body.input = cast(x'22ff22' as text)",
}
SQLITE_GARBAGE = {
    "retry that is not JSON": f"retry = {HALF}",
    "a time beyond the calendar": "run_at = 4611686018427387904",
}


async def claim_around(engine: Engine, raw: Raw, change: str) -> UUID:
    """Damage the best of three tasks; the others are claimed. Answers the damaged one."""
    bad = await engine.submit(new("bad", priority=10))
    good = [(await engine.submit(new(f"good {n}"))).id for n in range(2)]
    await damage(raw, bad.id, change)
    taken = []
    for _ in range(3):
        taken += [work.fence.task for work in await claim_all(engine, 1)]
    assert taken == good
    return bad.id


async def reap_around(engine: Engine, raw: Raw, change: str) -> UUID:
    """Damage the older of two running tasks; the other is reaped. Answers the damaged one."""
    bad, good = (await running(engine)).task, (await running(engine)).task
    await damage(raw, bad, change)
    assert isinstance(engine.clock, ManualClock)
    engine.clock.advance(LEASE_S + 1)
    await engine.maintenance.expire_once("reaper")
    await engine.maintenance.promote_once("promoter")
    assert await status(engine, good) == "PENDING"
    return bad


@pytest.mark.parametrize("subject", GARBAGE_BODY)
async def test_claim_continues_past_a_corrupt_row(engine: Engine, raw: Raw, subject: str) -> None:
    await check_quarantined(engine, await claim_around(engine, raw, GARBAGE_BODY[subject]))


@pytest.mark.parametrize("subject", SQLITE_BODY)
async def test_claim_continues_past_a_value_that_only_sqlite_stores(
    sqlite_engine: Engine, sqlite_url: str, subject: str
) -> None:
    raw = Raw(sqlite_url)
    await check_quarantined(
        sqlite_engine, await claim_around(sqlite_engine, raw, SQLITE_BODY[subject])
    )


@pytest.mark.parametrize("subject", GARBAGE)
async def test_reaper_continues_past_a_corrupt_row(engine: Engine, raw: Raw, subject: str) -> None:
    await check_quarantined(engine, await reap_around(engine, raw, GARBAGE[subject]))


@pytest.mark.parametrize("subject", SQLITE_GARBAGE)
async def test_reaper_continues_past_a_value_that_only_sqlite_stores(
    sqlite_engine: Engine, sqlite_url: str, subject: str
) -> None:
    raw = Raw(sqlite_url)
    bad = await reap_around(sqlite_engine, raw, SQLITE_GARBAGE[subject])
    assert await raw.value(f"select status from task where id = '{bad}'") == "FAILED"


@pytest.mark.parametrize("subject", NOT_UTF8)
async def test_bytes_that_are_not_text_do_not_stop_a_claim(
    sqlite_engine: Engine, sqlite_url: str, subject: str
) -> None:
    bad = await sqlite_engine.submit(new("bad", priority=10))
    good = await sqlite_engine.submit(new("good"))
    await damage(Raw(sqlite_url), bad.id, NOT_UTF8[subject])
    claimed = [work for _ in range(3) for work in await claim_all(sqlite_engine, 1)]
    assert good.id in [work.fence.task for work in claimed]


async def test_bytes_that_are_not_text_do_not_stop_the_reaper(
    sqlite_engine: Engine, sqlite_url: str
) -> None:
    await reap_around(sqlite_engine, Raw(sqlite_url), "current_step = cast(x'ff' as text)")


async def test_failed_statement_leaves_the_writer_usable(
    sqlite_engine: Engine, sqlite_url: str
) -> None:
    raw = Raw(sqlite_url)
    bad = await sqlite_engine.submit(new())
    await damage(raw, bad.id, NOT_UTF8["prompt"])
    await claim_all(sqlite_engine, 1)
    await damage(raw, bad.id, "body.prompt = null")  # another process writes meanwhile
    assert (await sqlite_engine.submit(new())).created


@pytest.mark.parametrize("subject", GARBAGE)
async def test_promoter_continues_past_a_corrupt_row(
    engine: Engine, raw: Raw, clock: ManualClock, subject: str
) -> None:
    bad, good = await running(engine), await running(engine)
    for fence in (bad, good):
        await engine.fail(fence, failure())
    await damage(raw, bad.task, GARBAGE[subject])
    clock.advance(6)
    await engine.maintenance.promote_once("promoter")
    assert await status(engine, good.task) == "PENDING"
    await check_quarantined(engine, bad.task)


async def test_report_on_a_corrupt_row_gets_an_error_code(engine: Engine, raw: Raw) -> None:
    fence = await running(engine)
    await damage(raw, fence.task, GARBAGE["retry of another shape"])
    assert await refusal(engine.fail(fence, failure())) == "corrupt"
    await check_quarantined(engine, fence.task)


@pytest.mark.parametrize("call", ["checkpoint", "record_step", "spawn", "rerun"])
async def test_other_call_on_a_corrupt_row_gets_an_error_code(
    engine: Engine, raw: Raw, call: str
) -> None:
    fence = await running(engine)
    await damage(raw, fence.task, GARBAGE["retry of another shape"])
    calls: dict[str, Callable[[], Awaitable[Any]]] = {
        "checkpoint": lambda: engine.checkpoint(fence, 1),
        "record_step": lambda: engine.record_step(fence, "k", 1),
        "spawn": lambda: engine.spawn(fence, "k", new()),
        "rerun": lambda: engine.rerun(fence.task),
    }
    try:
        with pytest.raises(TenutoError) as caught:
            await calls[call]()
        assert caught.value.code == "corrupt"
    finally:
        await damage(raw, fence.task, "retry = null")


async def test_batch_with_a_corrupt_row_runs_the_other_commands(engine: Engine, raw: Raw) -> None:
    bad, good = await engine.submit(new()), await engine.submit(new())
    await damage(raw, bad.id, GARBAGE["retry of another shape"])
    answers = await asyncio.gather(
        engine.pause(bad.id), engine.pause(good.id), return_exceptions=True
    )
    assert isinstance(answers[0], TenutoError)
    assert (answers[0].code, answers[1]) == ("corrupt", None)
    assert await status(engine, good.id) == "PAUSED"
    await check_quarantined(engine, bad.id)


async def test_corrupt_row_is_shown_and_listed(engine: Engine, raw: Raw) -> None:
    submitted = await engine.submit(new())
    await damage(raw, submitted.id, GARBAGE["retry of another shape"])
    assert (await engine.show(submitted.id)).retry == {"bogus": 1}
    assert [task.id for task in (await engine.list()).tasks] == [submitted.id]
    assert (await engine.explain(submitted.id)).summary


async def test_finished_corrupt_task_keeps_its_status(engine: Engine, raw: Raw) -> None:
    fence = await in_status(engine, Status.COMPLETED)
    await damage(raw, fence.task, GARBAGE["retry of another shape"])
    await refusal(engine.archive(fence.task))
    result = await status(engine, fence.task)
    await forget(raw, fence.task)
    assert result == "COMPLETED"


async def test_quarantine_event_names_the_former_status(engine: Engine, raw: Raw) -> None:
    submitted = await engine.submit(new())
    await damage(raw, submitted.id, GARBAGE["retry of another shape"])
    await refusal(engine.pause(submitted.id))
    assert (await engine.events(submitted.id))[-1].previous_status == "PENDING"


async def test_quarantine_ends_the_attempt(engine: Engine, raw: Raw) -> None:
    fence = await running(engine)
    await damage(raw, fence.task, GARBAGE["retry of another shape"])
    await refusal(engine.fail(fence, failure()))
    assert len(await engine.attempts(fence.task)) == 1


async def test_corrupt_task_can_be_repaired_and_retried(engine: Engine, raw: Raw) -> None:
    submitted = await engine.submit(new())
    await damage(raw, submitted.id, GARBAGE["retry of another shape"])
    await refusal(engine.pause(submitted.id))
    await damage(raw, submitted.id, "retry = null")
    await engine.retry(submitted.id)
    assert len(await claim_all(engine)) == 1


BEYOND = "4611686018427387904"
UNSEEN = {
    "a creation beyond the calendar": f"task set created_at = {BEYOND}",
    "an end beyond the calendar": f"task set finished_at = {BEYOND}",
    "a command of numbers": "task_body set command = '[1, 2]'",
    "metadata that is no object": "task_body set metadata = '5'",
    "an event's data": "event set data = '['",
    "an attempt's receipt": "attempt set receipt = '['",
}


@pytest.mark.parametrize("subject", UNSEEN)
async def test_damaged_row_is_shown(sqlite_engine: Engine, sqlite_url: str, subject: str) -> None:
    fence = await running(sqlite_engine)
    await sqlite_engine.complete(fence)
    await Raw(sqlite_url).execute(f"update {UNSEEN[subject]}")
    view = await sqlite_engine.show(fence.task)
    logs = await sqlite_engine.logs(fence.task)
    attempts = await sqlite_engine.attempts(fence.task)
    page = await sqlite_engine.list()
    assert [task.id for task in page.tasks] == [fence.task]
    for shown in (view, page, *logs, *attempts):
        assert msgspec.json.decode(msgspec.json.encode(shown), type=type(shown)) == shown


async def test_damaged_lane_blocks_only_its_own_tasks(
    engine: Engine, raw: Raw, another: Another
) -> None:
    lost = await engine.submit(new(task_type="lost"))
    lane = await raw.value(f"select lane from task where id = '{lost.id}'")
    await raw.execute(f"update lane set key = '[' where id = {lane}")
    async with another() as other:
        stored = await other.submit(new(task_type="kept"))
        assert [work.fence.task for work in await claim_all(other)] == [stored.id]
        assert "lane" in [gate.gate for gate in (await other.explain(lost.id)).gates]
        assert await refusal(other.submit(new(task_type="lost"))) == "corrupt"


async def test_audit_trail_ahead_of_its_row_blocks_only_its_task(engine: Engine, raw: Raw) -> None:
    *good, bad = [(await engine.submit(new())).id for _ in range(4)]
    await engine.pause(bad)
    await damage(raw, bad, "version = 1")
    calls: list[Awaitable[Any]] = [engine.submit(new()) for _ in range(3)]
    calls += [engine.cancel(task) for task in (*good, bad)]
    *answers, refused = await asyncio.gather(*calls, return_exceptions=True)
    await forget(raw, bad)
    assert isinstance(refused, TenutoError)
    assert not [answer for answer in answers if isinstance(answer, BaseException)]
    assert {await status(engine, task) for task in good} == {"CANCELLED"}


async def test_task_without_its_body_is_detected(engine: Engine, raw: Raw) -> None:
    task = (await engine.submit(new())).id
    await raw.execute(f"delete from task_body where task = '{task}'")
    [reported] = await engine.maintenance.audit()
    assert str(task) in reported
    await forget(raw, task)
