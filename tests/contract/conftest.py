"""One engine on each kind of store with a clock that tests move, and the oracles behind it."""

import asyncio
import random
import sqlite3
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import asyncpg
import msgspec
import pytest

from tenuto.clock import Clock
from tenuto.engine.engine import DEFAULT_WORKSPACE, Engine
from tenuto.engine.rows import CorruptRow, parse_task
from tenuto.engine.tasks.claim import ClaimedTask
from tenuto.engine.tasks.maintenance import SYSTEM_WORKSPACE
from tenuto.engine.views import LogLine, TaskView
from tenuto.model.agents.matching import AgentProfile
from tenuto.model.errors import TenutoError
from tenuto.model.tasks import commands
from tenuto.model.tasks.commands import Failure
from tenuto.model.tasks.retry import ErrorClass
from tenuto.model.tasks.submission import NewTask
from tenuto.model.tasks.task import (
    LEASED,
    TRANSITIONS,
    Fence,
    Status,
    Task,
    next_due_at,
    token_hash,
)
from tenuto.settings import sqlite_path
from tenuto.store.postgres.store import PostgresStore
from tenuto.store.protocol import Rows, Script, Statement
from tenuto.store.sqlite.store import SqliteStore

AnyStore = SqliteStore | PostgresStore

START = datetime(2030, 1, 1, tzinfo=UTC)
WORKER = "host:1:worker"
LEASE_S = 20
AGENT = UUID("00000000-0000-7000-8000-00000000a9e7")
LEGAL = frozenset().union(*TRANSITIONS.values())


class ManualClock(Clock):
    """A clock that stands still until a test moves it; ids, tokens and rolls follow the seed."""

    def __init__(self, seed: int = 1) -> None:
        super().__init__()
        self._random = random.Random(seed)
        self._now = START
        self.roll = 0.5

    def now(self) -> datetime:
        return self._now

    def elapsed(self) -> float:
        return (self._now - START).total_seconds()

    async def sleep(self, seconds: float) -> None:
        self.advance(seconds)
        await asyncio.sleep(0)

    def random(self) -> float:
        return self.roll

    def new_token(self) -> str:
        return f"{self._random.getrandbits(128):032x}"

    def advance(self, seconds: float = 0, **parts: float) -> None:
        self._now += timedelta(seconds=seconds, **parts)


class Raw:
    """The database behind the store's back, with one SQL text for both."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.path = sqlite_path(url)
        self._kept: Any = None

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        """Keep a connection to PostgreSQL until the block ends: to make one costs 10 ms."""
        if self.path is None:
            self._kept = await asyncpg.connect(self.url, statement_cache_size=0)
        try:
            yield
        finally:
            if self._kept is not None:
                self._kept.terminate()
                self._kept = None

    async def fetch(self, sql: str) -> list[tuple[Any, ...]]:
        if self.path is not None:
            return self._on_sqlite(sql)
        # A statement may wait for another one of the same test: then each has its connection.
        stored, self._kept = self._kept, None
        if stored is not None and not stored.is_closed():
            try:
                return [tuple(row) for row in await stored.fetch(sql)]
            finally:
                self._kept = stored
        connection = await asyncpg.connect(self.url)
        try:
            return [tuple(row) for row in await connection.fetch(sql)]
        finally:
            await connection.close()

    async def value(self, sql: str) -> Any:
        return (await self.fetch(sql))[0][0]

    async def execute(self, sql: str) -> None:
        await self.fetch(sql)

    def _on_sqlite(self, sql: str) -> list[tuple[Any, ...]]:
        assert self.path is not None
        connection = sqlite3.connect(self.path, isolation_level=None)
        try:
            return connection.execute(sql).fetchall()
        finally:
            connection.close()

    async def count(self, table: str) -> int:
        return int(await self.value(f"select count(*) from {table}"))

    async def counts(self) -> dict[str, int]:
        """Returns the number of rows of every table."""
        if self.path is not None:
            names = (
                "select name from sqlite_master where type = 'table' and name not like 'sqlite%'"
            )
        else:
            names = "select tablename from pg_tables where schemaname = 'public'"
        parts = [f"select '{row[0]}', count(*) from {row[0]}" for row in await self.fetch(names)]
        return {table: int(n) for table, n in await self.fetch(" union all ".join(parts))}

    async def workspace(self, number: int) -> UUID:
        """A workspace of its own."""
        created = UUID(int=(7 << 76) | (2 << 62) | number)
        at = "0" if self.path is not None else "to_timestamp(0)"
        await self.execute(
            f"insert into workspace (id, name, created_at) values ('{created}', 'w{number}', {at})"
        )
        return created


def make_store(url: str, clock: Clock) -> AnyStore:
    path = sqlite_path(url)
    return PostgresStore(url, clock) if path is None else SqliteStore(path, clock)


@asynccontextmanager
async def opened(url: str, clock: Clock) -> AsyncIterator[AnyStore]:
    """A store on a database that is migrated first."""
    store = make_store(url, clock)
    try:
        await store.migrate()
        await store.open()
        yield store
    finally:
        await store.close()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def raw(database_url: str) -> AsyncIterator[Raw]:
    raw = Raw(database_url)
    async with raw.connected():
        yield raw


@pytest.fixture
async def store(database_url: str, clock: ManualClock) -> AsyncIterator[AnyStore]:
    async with opened(database_url, clock) as store:
        yield store


@pytest.fixture
async def engine(store: AnyStore, raw: Raw) -> AsyncIterator[Engine]:
    """An engine; whatever a test does to it, rows and audit trail must agree in the end."""
    engine = Engine(store, actor="tester")
    yield engine
    assert await engine.maintenance.audit() == []
    await check_trail(raw)
    await check_attempts(raw)
    await check_awaited(raw)
    await check_timers(engine, raw)
    await check_whole(raw)


@pytest.fixture
async def postgres_engine(postgres_url: str) -> AsyncIterator[Engine]:
    """An engine for what only PostgreSQL can do, without the oracles."""
    async with opened(postgres_url, ManualClock()) as store:
        yield Engine(store, actor="tester")


@pytest.fixture
async def sqlite_engine(sqlite_url: str) -> AsyncIterator[Engine]:
    """An engine for what only SQLite can do, without the oracles."""
    async with opened(sqlite_url, ManualClock()) as store:
        yield Engine(store, actor="tester")


@pytest.fixture
def agent() -> AgentProfile:
    """An agent that takes every plain task."""
    return profile()


Another = Callable[[], AbstractAsyncContextManager[Engine]]


@pytest.fixture
def another(database_url: str, clock: ManualClock, engine: Engine) -> Another:
    """Another process's engine on the same database."""
    seeds = iter(range(100, 200))

    @asynccontextmanager
    async def connected_engine() -> AsyncIterator[Engine]:
        other = ManualClock(next(seeds))
        other.advance(clock.elapsed())
        async with opened(database_url, other) as store:
            yield Engine(store, actor="another")

    return connected_engine


async def check_trail(raw: Raw) -> None:
    """Every event follows from the one before by a legal transition: the oracle of I11."""
    put_away = await raw.fetch("select id from task where archived_at is not null")
    before: dict[Any, str] = {}
    rows = await raw.fetch(
        "select task, seq, kind, previous, new from event"
        " where task not in (select id from flow) and task not in (select id from task_group)"
        " and kind not like 'agent_%' and kind not like 'schedule_%'"
        " and kind not like 'trigger_%' and kind <> 'event'"
        " and kind not like 'gate_%' and kind not like 'limit_%'"
        f" and workspace <> '{SYSTEM_WORKSPACE}'"
        " order by 1, 2"
    )
    for task, seq, kind, previous, new in rows:
        if task not in before and seq > 1:
            assert (task,) in put_away  # its first events are past their age
        elif seq == 1:
            assert (kind, previous) == ("submitted", None)
            assert new in (Status.PENDING, Status.WAITING)
        else:
            assert previous == before[task], f"event {seq} of {task} starts elsewhere"
            pair = (Status(previous), Status(new))
            assert pair in LEGAL or previous == new, f"illegal: {pair} by {kind}"
        before[task] = new


async def check_attempts(raw: Raw) -> None:
    """Ended attempts are numbered without gaps; at most one completed, as the last."""
    ended = defaultdict(list)
    for task, attempt, outcome in await raw.fetch("select task, attempt, outcome from attempt"):
        ended[task].append((attempt, outcome))
    rows = await raw.fetch("select id, status, attempt, error_class from task")
    for task, status, attempt, error_class in rows:
        numbers = sorted(number for number, _ in ended[task])
        last = attempt - 1 if status in LEASED else attempt
        if error_class != "corrupt":
            assert numbers == list(range(1, last + 1)), f"attempts of {task}: {numbers}"
        completed = [number for number, outcome in ended[task] if outcome == "COMPLETED"]
        by_attempt = status == "COMPLETED" and attempt > 0  # the engine itself needs none
        assert completed == ([attempt] if by_attempt else [])


async def check_awaited(raw: Raw) -> None:
    """A row counts all who wait for its task: by that, ends are known that need no look."""
    waits = "select count(*) from task_dependency d where d.needs = task.id"
    assert await raw.value(f"select count(*) from task where awaited < ({waits})") == 0


async def check_timers(engine: Engine, raw: Raw) -> None:
    """Every row's timer is the one that the model computes from the row."""
    for row in await all_rows(engine, raw):
        try:
            task = parse_task(row)
        except CorruptRow:
            continue
        if task.hung_warned_at is not None and task.progress_at is not None:
            continue  # progress moves the deadline, and the promoter the timer when it comes
        timer = next_due_at(task)
        if timer is not None and timer <= engine.clock.now() and task.due_at is not None:
            assert task.due_at >= timer  # it called for nothing, and is looked at again later
        else:
            assert task.due_at == timer, f"timer of {task.id}, {task.status}"


async def check_whole(raw: Raw) -> None:
    """Asserts that no part of a missing task is stored."""
    parts = ("body", "output", "label", "tag", "capability", "dependency", "step", "secret")
    orphans = " union all ".join(
        f"select '{part}', task from task_{part} where task not in (select id from task)"
        for part in parts
    )
    assert await raw.fetch(orphans) == []


async def all_rows(engine: Engine, raw: Raw) -> Rows:
    ids = [UUID(str(row[0])) for row in await raw.fetch("select id from task")]

    def script() -> Script[Rows]:
        rows: Rows = yield Statement("tasks_locked", {"ids": ids})
        return rows

    return await engine.core.store.transact(script)


async def row_of(engine: Engine, task: UUID) -> Task:
    """The hot row of a task, as the model sees it, but for what only the store writes."""

    def script() -> Script[Task]:
        rows = yield Statement("tasks_locked", {"ids": [task]})
        return parse_task(rows[0])

    return msgspec.structs.replace(await engine.core.store.transact(script), event_xid=0)


def profile(**changes: Any) -> AgentProfile:
    """An agent that takes every plain task."""
    plain = AgentProfile(
        id=AGENT, workspace=DEFAULT_WORKSPACE, name="agent", runtimes=("function",)
    )
    return msgspec.structs.replace(plain, **changes)


def new(title: str = "a task", **options: Any) -> NewTask:
    return NewTask(title=title, **options)


def failure(error_class: str = "error", message: str = "boom", **options: Any) -> Failure:
    return Failure(message=message, error_class=ErrorClass(error_class), **options)


async def claim_one(engine: Engine, **changes: Any) -> ClaimedTask:
    claimed = await engine.claim(profile(workspace=engine.workspace, **changes), WORKER, 1, LEASE_S)
    assert len(claimed) == 1
    return claimed[0]


async def claim_all(engine: Engine, n: int = 1000) -> list[ClaimedTask]:
    return await engine.claim(profile(workspace=engine.workspace), WORKER, n, LEASE_S)


async def running(engine: Engine, **options: Any) -> Fence:
    """The fence of a new task that is RUNNING."""
    submitted = await engine.submit(new(**options))
    work = await claim_one(engine)
    assert work.fence.task == submitted.id
    return work.fence


async def reclaimed(engine: Engine, fence: Fence) -> Fence:
    """The fence of the next attempt, after the first one's lease ran out."""
    clock = engine.clock
    assert isinstance(clock, ManualClock)
    clock.advance(LEASE_S + 1)
    assert await engine.maintenance.expire_once("reaper") == 1
    await engine.maintenance.promote_once("promoter")
    work = await claim_one(engine)
    assert work.fence.task == fence.task
    return work.fence


async def assigned(engine: Engine) -> Fence:
    """The fence of a new task that a gateway has taken and not begun."""
    task = (await engine.submit(new())).id
    token = engine.clock.new_token()
    lane = (await row_of(engine, task)).lane
    existing = await engine.core.store.fetch(
        Statement("lanes_version", {"workspace": engine.workspace})
    )
    params = {"lane": lane, "n": 1, "status": Status.ASSIGNED, "agent": AGENT, "worker": WORKER}
    params |= {"token": token_hash(token), "lease_s": LEASE_S, "now": engine.clock.now()}
    params |= {"workspace": engine.workspace, "lanes_version": existing[0]["lanes_version"]}

    def script() -> Script[int]:
        rows = yield Statement("claim_lane", params)
        return len(rows)

    assert await engine.core.store.transact_one(script) == 1
    return Fence(task, 1, token)


async def in_status(engine: Engine, status: Status) -> Fence:
    """The fence of the first attempt of a task that is now in that status."""
    if status is Status.ASSIGNED:
        return await assigned(engine)
    fence = await running(engine, max_attempts=1 if status is Status.DEAD else 3)
    match status:
        case Status.WAITING:
            await engine.park(fence, "approval", wait_until=START + timedelta(days=3650))
        case Status.PENDING:
            await engine.release(fence)
        case Status.PAUSED:
            await engine.pause(fence.task)
            await engine.confirm_pause(fence, {"state": "killed"})
        case Status.RETRY_WAIT | Status.DEAD:
            await engine.fail(fence, failure())
        case Status.COMPLETED:
            await engine.complete(fence)
        case Status.FAILED:
            await engine.fail(fence, failure("syntax"))
        case Status.CANCELLED:
            await engine.cancel(fence.task)
            await engine.confirm_cancel(fence, {"state": "killed"})
        case Status.SKIPPED:
            await engine.fail(fence, failure())
            await engine.core.apply_command(fence.task, commands.Skip())
    assert (await row_of(engine, fence.task)).status is status
    return fence


async def forget(raw: Raw, task: UUID) -> None:
    """Remove a task that a test has damaged, so that the oracles see only what is left."""
    for table, column in {
        "task": "id",
        "task_body": "task",
        "event": "task",
        "attempt": "task",
    }.items():
        await raw.execute(f"delete from {table} where {column} = '{task}'")


async def status(engine: Engine, task: UUID) -> str:
    return (await engine.show(task)).status


async def snapshot(engine: Engine, task: UUID) -> Any:
    """Everything that can be seen of a task: a refused call must leave it the same."""
    view: TaskView = await engine.show(task)
    events: list[LogLine] = list(await engine.logs(task))
    return view, list(await engine.attempts(task)), events, await engine.steps(task)


async def refusal(call: Awaitable[Any]) -> str:
    """The code of the error that the call is refused with."""
    with pytest.raises(TenutoError) as caught:
        await call
    return caught.value.code
