"""Sets so large that SQLite returns them as one text: the same results as row by row."""

import asyncio
import sqlite3

import pytest
from tests.contract.conftest import AGENT, LEASE_S, WORKER, Raw, claim_all, new, profile, refusal
from tests.contract.operations.test_corrupt_rows import NOT_UTF8, damage

from tenuto.engine.engine import Engine
from tenuto.engine.tasks.claim import ClaimedTask
from tenuto.model.tasks.submission import NewTask
from tenuto.model.tasks.task import Fence
from tenuto.store.sqlite.connection import JSON_FROM_ROWS
from tenuto.store.sqlite.store import SqliteStore

SIZE = 2 * JSON_FROM_ROWS
TEXTS = ["plain", 'a "quote" and a \\', "naïve 🎼 тест", "line\nline\ttab", "[1, 2]", '{"a": null}']


def various(number: int) -> NewTask:
    """Tasks that say different things, of different kinds."""
    output = TEXTS[number % len(TEXTS)]
    return new(
        f"{number} {output}",
        prompt=output if number % 2 else None,
        input={"said": output, "big": 2**60 + number} if number % 3 else output,
        metadata={"n": number},
        env={"TEXTS": output.replace("\n", " ")},
        timeout_s=number + 1,
    )


async def claimed_by(engine: Engine, token: str) -> list[ClaimedTask]:
    agent = profile(workspace=engine.workspace)
    return await engine.claim(agent, WORKER, SIZE, LEASE_S, token)


async def test_large_claim_returns_the_same_as_small_ones(engine: Engine) -> None:
    for _ in range(2):  # the first tells SQLite's columns, the second comes as one text
        tasks = [various(number) for number in range(SIZE)]
        follower = new("after the first", depends_on=["first"])
        tasks[0] = new("first", key="first")
        await engine.submit_many([*tasks, follower])
        token = engine.clock.new_token()
        claimed = await claimed_by(engine, token)
        assert len(claimed) == SIZE
        again = {work.fence.task: work for work in await engine.claimed(AGENT, token)}
        assert {work.fence.task: work for work in claimed} == again
        await asyncio.gather(*(engine.complete(work.fence) for work in claimed))
        [after] = await claim_all(engine)
        await engine.complete(after.fence)


async def test_bulk_completion_counts_only_current_fences(engine: Engine, raw: Raw) -> None:
    for _ in range(2):
        await engine.submit_many([new() for _ in range(SIZE)])
        claimed = await claim_all(engine)
        other_token = engine.clock.new_token()
        fences = [work.fence for work in claimed]
        fences[7] = Fence(fences[7].task, fences[7].attempt, other_token)
        output = await asyncio.gather(
            *(engine.complete(fence) for fence in fences), return_exceptions=True
        )
        assert [number for number, answer in enumerate(output) if answer is not None] == [7]
        assert await refusal(engine.complete(fences[7])) == "lease_lost"
        await engine.complete(claimed[7].fence)
    assert await raw.value("select count(*) from task where status = 'COMPLETED'") == 2 * SIZE


async def test_claim_too_long_for_one_text_is_read_row_by_row(sqlite_engine: Engine) -> None:
    store = sqlite_engine.store
    assert isinstance(store, SqliteStore)
    raw = store._writer_connection().raw
    for longest in (1_000_000, 100_000):
        await sqlite_engine.submit_many([new(prompt="p" * 1000) for _ in range(SIZE)])
        raw.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, longest)
        claimed = await claim_all(sqlite_engine)
        assert [len(work.prompt or "") for work in claimed] == [1000] * SIZE


@pytest.mark.parametrize("subject", NOT_UTF8)
async def test_bytes_that_are_not_text_do_not_stop_a_large_claim(
    sqlite_engine: Engine, sqlite_url: str, subject: str
) -> None:
    for _ in range(2):
        reported = await sqlite_engine.submit_many([new() for _ in range(SIZE)])
        bad = reported[7].id
        await damage(Raw(sqlite_url), bad, NOT_UTF8[subject])
        taken = {work.fence.task for work in await claim_all(sqlite_engine)}
        assert taken >= {item.id for item in reported} - {bad}
