"""A worker and a coordinator inside the test's own process, on a database of their own."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any
from uuid import UUID

from tests.waiting import eventually

from tenuto import app
from tenuto.coordinator.coordinator import Coordinator
from tenuto.engine.engine import Engine
from tenuto.engine.views import AttemptView, TaskView
from tenuto.model.agents.matching import AgentProfile
from tenuto.model.tasks.retry import RetryPolicy
from tenuto.model.tasks.submission import NewTask
from tenuto.settings import Settings
from tenuto.worker.runtime.command import CommandRuntime
from tenuto.worker.runtime.environment import allowed_environment
from tenuto.worker.session import Supervisor
from tenuto.worker.worker import Worker

WAIT_S = 20.0
SHORT: dict[str, Any] = {
    "heartbeat_s": 0.2,
    "lease_s": 5,
    "tick_s": 0.1,
    "poll_s": 0.2,
    "grace_s": 0.5,
    "drain_s": 1,
}
RETRY = RetryPolicy(base_s=0.05, cap_s=0.5)
TERMINAL = ("COMPLETED", "FAILED", "DEAD", "CANCELLED", "SKIPPED")

Handlers = dict[str | None, Callable[[Any], Any]]


class Inside:
    """What runs, and what a test asks of it."""

    def __init__(self, engine: Engine, worker: Worker) -> None:
        self.engine = engine
        self.worker = worker

    async def submit(self, **options: Any) -> UUID:
        """A task that is tried up to three times, soon."""
        plain: dict[str, Any] = {"title": "test", "max_attempts": 3, "retry": RETRY}
        return (await self.engine.submit(NewTask(**plain | options))).id

    async def shell(self, script: str, **options: Any) -> UUID:
        """A task that runs a shell script."""
        return await self.submit(command=["sh", "-c", script], **options)

    async def until(self, task: UUID, *statuses: str, limit: float = WAIT_S) -> TaskView:
        """The task once it is in one of the statuses."""

        async def there() -> TaskView | None:
            view = await self.engine.show(task)
            return view if view.status in statuses else None

        try:
            return await eventually(there, limit, 0.02)
        except AssertionError as error:
            view = await self.engine.show(task)
            raise AssertionError(f"not {statuses} in {limit} s: {view}") from error

    async def ended(self, task: UUID, limit: float = WAIT_S) -> TaskView:
        return await self.until(task, *TERMINAL, limit=limit)

    async def logged(self, task: UUID, text: str, limit: float = WAIT_S) -> None:
        """Wait until the task's transcript has a line with the text."""

        async def there() -> bool:
            return any(text in line for line in await self.transcript(task))

        await eventually(there, limit, 0.02)

    async def transcript(self, task: UUID) -> list[str]:
        lines = await self.engine.query.transcript(task, self.engine.workspace, limit=100_000)
        return [line.text for line in lines]

    async def outcomes(self, task: UUID) -> list[str | None]:
        return [attempt.outcome for attempt in await self.engine.attempts(task)]

    async def last(self, task: UUID) -> AttemptView:
        return (await self.engine.attempts(task))[-1]


@contextmanager
def faults() -> Iterator[list[logging.LogRecord]]:
    """Returns the log records with an exception: each is an internal error."""
    matches: list[logging.LogRecord] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.exc_info:
                matches.append(record)

    handler = Keep()
    logging.getLogger("tenuto").addHandler(handler)
    try:
        yield matches
    finally:
        logging.getLogger("tenuto").removeHandler(handler)


async def migrated(url: str) -> None:
    store = app.create_store(url)
    await store.migrate()
    await store.close()


@asynccontextmanager
async def working(
    url: str,
    handlers: Handlers | None = None,
    *,
    coordinate: bool = True,
    own_loop: bool = True,
    faulty: bool = False,
    own: Sequence[str] | None = None,
    **changes: Any,
) -> AsyncIterator[Inside]:
    """A worker for the handlers, or for commands, and a coordinator, until the block ends.

    `own` is the command of the worker, which takes none from tasks then.

    Unless the test is about a fault of ours, none may be logged.
    """
    settings = Settings(database=url, **SHORT | changes)
    await migrated(url)
    stop = asyncio.Event()
    supervisor = Supervisor()
    async with app.connect(settings, actor="test", listen=True) as engine:
        connect = (lambda: app.connect(settings)) if own_loop else None
        worker = Worker(engine, settings, connect=connect)
        if handlers is None:
            profile = AgentProfile(
                id=engine.clock.new_id(),
                workspace=engine.workspace,
                name="local",
                runtimes=("command",) if own else (),
                accept_commands=own is None,
            )
            runtime = CommandRuntime(supervisor, own, allowed_environment(settings))
            await worker.host(profile, runtime)
        else:
            await worker.host_functions("local", handlers)
        with faults() as result:
            running = [asyncio.create_task(worker.run(stop))]
            if coordinate:
                running.append(asyncio.create_task(Coordinator(engine, settings).run(stop)))
            try:
                yield Inside(engine, worker)
            finally:
                stop.set()
                async with asyncio.timeout(WAIT_S + 40):
                    await asyncio.gather(*running)
                await supervisor.close()
        assert await engine.maintenance.audit() == []
        reports = [(record.getMessage(), record.exc_info) for record in result]
        assert bool(reports) is faulty, reports
