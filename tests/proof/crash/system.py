"""Real processes of one system on one database: started, watched, stopped and killed by a test.

Every process carries a mark in its environment, and so does every command of a task, so that
whatever is left of them is found in /proc whoever its parent has become.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

from tests.waiting import eventually, eventually_sync

from tenuto import app
from tenuto.engine.engine import Engine
from tenuto.engine.views import AttemptView
from tenuto.model.tasks.retry import RetryPolicy
from tenuto.model.tasks.submission import NewTask
from tenuto.model.tasks.task import TRANSITIONS, Status
from tenuto.settings import Settings
from tenuto.worker import supervisor

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = Path(sys.executable).with_name("orchestrate")
WAIT_S = 60.0  # seconds for what takes one on an idle machine
SHORT: dict[str, Any] = {
    "heartbeat_s": 0.3,
    "lease_s": 1,
    "tick_s": 0.2,
    "poll_s": 0.2,
    "grace_s": 0.5,
    "drain_s": 1,
}
LEGAL = frozenset().union(*TRANSITIONS.values())
TERMINAL = frozenset("COMPLETED FAILED DEAD CANCELLED SKIPPED".split())

_MARK = "PROOF_MARK"
_LIBC = ctypes.CDLL(None)


def _die_with_parent() -> None:
    _LIBC.prctl(1, signal.SIGKILL)


def carrying(mark: str) -> list[int]:
    """The processes whose environment holds the mark; the dead have none."""
    matches = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdigit() and mark.encode() in (folder / "environ").read_bytes():
                matches.append(int(folder.name))
    return matches


class Process:
    """One `orchestrate` process."""

    def __init__(self, words: Sequence[str], env: dict[str, str], log: Path) -> None:
        self.words = words
        self.log = log
        with log.open("ab") as file:
            self._popen = subprocess.Popen(
                words,
                env=env,
                cwd=log.parent,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
                preexec_fn=_die_with_parent,  # noqa: PLW1509  one call into the kernel
            )
        self.pid = self._popen.pid

    @property
    def code(self) -> int | None:
        """The exit code, negative for a signal; nothing while it runs."""
        return self._popen.poll()

    def signal(self, number: int) -> None:
        self._popen.send_signal(number)

    async def ended(self, limit: float = WAIT_S) -> int:
        await eventually(lambda: self.code is not None, limit)
        assert self.code is not None
        return self.code

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def stands_still(self) -> bool:
        stats = [path.read_text() for path in Path(f"/proc/{self.pid}/task").glob("*/stat")]
        return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)

    def end(self) -> None:
        """Kill it, if it still runs, and forget it."""
        if self.code is None:
            self.signal(signal.SIGKILL)
            self.signal(signal.SIGCONT)
        self._popen.wait()


class System:
    """Everything that runs on one database for one test."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self.folder = folder
        self.mark = uuid4().hex
        self.processes: list[Process] = []
        self.settings = Settings(database=url, **SHORT)
        self.engine: Engine

    def start(self, *words: str, **changes: Any) -> Process:
        """`orchestrate WORDS` with short times; `changes` are settings or CRASH_AT."""
        program = [str(PROGRAM)] if words[:1] != ("python",) else [sys.executable]
        arguments = words if program == [str(PROGRAM)] else words[1:]
        process = Process(
            [*program, *arguments],
            self.environment(**changes),
            self.folder / f"{len(self.processes)}-{words[0]}.log",
        )
        self.processes.append(process)
        return process

    def environment(self, **changes: Any) -> dict[str, str]:
        env = {k: v for k, v in os.environ.items() if not k.startswith(("TENUTO_", "CRASH_"))}
        env |= {f"TENUTO_{name.upper()}": str(value) for name, value in SHORT.items()}
        env |= {"TENUTO_DATABASE": self.url, _MARK: f"{self.mark} process"}
        env |= {"TENUTO_DATA": str(self.folder), "TENUTO_PORT": "0", "TENUTO_TASK_ENV": "*"}
        env["PYTHONPATH"] = os.pathsep.join([*filter(None, [env.get("PYTHONPATH")]), str(ROOT)])
        for name, value in changes.items():
            env[name if name.isupper() else f"TENUTO_{name.upper()}"] = str(value)
        return env

    def worker(self, *words: str, **changes: Any) -> Process:
        return self.start("worker", *words, **changes)

    def coordinator(self, **changes: Any) -> Process:
        return self.start("coordinator", **changes)

    def task(self, script: str, **options: Any) -> NewTask:
        """A task that runs a shell script, tried often and soon."""
        plain: dict[str, Any] = {
            "title": "proof",
            "command": ["sh", "-c", script],
            "env": {_MARK: f"{self.mark} session", **options.pop("env", {})},
            "max_attempts": 10,
            "retry": RetryPolicy(base_s=0.05, cap_s=0.5),
        }
        return NewTask(**plain | options)

    def handled(self, handler: str, **options: Any) -> NewTask:
        """A task for one of `handlers.py`, tried often and soon."""
        plain: dict[str, Any] = {
            "title": "proof",
            "task_type": handler,
            "max_attempts": 10,
            "retry": RetryPolicy(base_s=0.05, cap_s=0.5),
        }
        return NewTask(**plain | options)

    async def logged(self, task: UUID, text: str) -> None:
        """Wait until the task's transcript has that line."""

        async def there() -> bool:
            lines = await self.engine.query.transcript(task, self.engine.workspace)
            return text in [line.text for line in lines]

        await eventually(there, WAIT_S, 0.05)

    async def submit(self, *new_tasks: NewTask) -> list[UUID]:
        return [submitted.id for submitted in await self.engine.submit_many(new_tasks)]

    def sessions(self) -> list[int]:
        """The processes of tasks' commands."""
        return carrying(f"{self.mark} session")

    def others(self) -> list[int]:
        """The processes of the system that are still there, besides commands."""
        return carrying(f"{self.mark} process")

    def kill(self, pid: int) -> None:
        assert pid in self.others(), "not a process of this test"
        os.kill(pid, signal.SIGKILL)

    async def in_status(self, ids: Iterable[UUID], *statuses: str, limit: float = WAIT_S) -> None:
        """Wait until each of the tasks is in one of the statuses."""

        async def missing() -> dict[str, str]:
            matches = {task: (await self.engine.show(task)).status for task in ids}
            return {str(task): status for task, status in matches.items() if status not in statuses}

        async def nothing_missing() -> bool:
            return not await missing()

        try:
            await eventually(nothing_missing, limit, 0.05)
        except AssertionError as error:
            stuck = await missing()
            trail = [
                f"{line.at} {line.text} {line.actor}"
                for task in stuck
                for line in await self.engine.logs(UUID(task))
            ]
            views = [str(await self.engine.show(UUID(task))) for task in stuck]
            raise AssertionError("\n".join([f"not {statuses}: {stuck}", *views, *trail])) from error

    async def attempts(self, task: UUID) -> Sequence[AttemptView]:
        return await self.engine.attempts(task)

    async def outcomes(self, task: UUID) -> list[str | None]:
        return [attempt.outcome for attempt in await self.engine.attempts(task)]

    async def check(self, acknowledged: Iterable[UUID], *, gone: bool = True) -> None:
        """The demands on a system whose faults are over."""
        await self.in_status(acknowledged, *TERMINAL)
        if gone:
            await eventually(lambda: not self.sessions(), 5.0)
        for task in acknowledged:
            outcomes = await self.outcomes(task)
            assert outcomes.count("COMPLETED") == 1, (task, outcomes)
            assert outcomes[-1] == "COMPLETED"
            await self._check_legal(task)
        assert await self.engine.maintenance.audit() == []

    async def _check_legal(self, task: UUID) -> None:
        for event in (await self.engine.events(task))[1:]:
            assert event.previous_status is not None
            assert event.new_status is not None
            pair = (Status(event.previous_status), Status(event.new_status))
            assert pair in LEGAL or pair[0] is pair[1], (task, event)

    def kill_all(self) -> None:
        """Leave nothing running."""
        for process in self.processes:
            process.end()
        eventually_sync(self._killed, WAIT_S)

    def _killed(self) -> bool:
        left = carrying(self.mark)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not left


@asynccontextmanager
async def system(url: str, folder: Path) -> AsyncIterator[System]:
    """A system on an empty database; nothing of it is left, and none of it ended in a fault."""
    created = System(url, folder)
    store = app.create_store(url)
    await store.migrate()
    await store.close()
    try:
        async with app.connect(created.settings, actor="test") as engine:
            created.engine = engine
            yield created
    finally:
        created.kill_all()
    faults = {
        str(process.log): process.text()
        for process in created.processes
        if "Traceback" in process.text()
    }
    assert not faults, "\n".join(faults.values())


@contextmanager
def stopped(*processes: Process, free: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Processes that stand still meanwhile, stopped at a moment when `free` holds.

    One that stands still inside a write transaction of SQLite would hold up everybody.
    """

    def hold() -> bool:
        for process in processes:
            process.signal(signal.SIGSTOP)
        eventually_sync(lambda: all(process.stands_still() for process in processes))
        if free():
            return True
        for process in processes:
            process.signal(signal.SIGCONT)
        return False

    eventually_sync(hold, WAIT_S)
    try:
        yield
    finally:
        for process in processes:
            process.signal(signal.SIGCONT)


@contextmanager
def frozen(root: int) -> Iterator[None]:
    """A process and its children that stand still meanwhile, such as a database server."""
    os.kill(root, signal.SIGSTOP)
    below = [
        list_process.pid
        for list_process in supervisor.list_processes()
        if list_process.parent == root
    ]
    for pid in below:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in (*below, root):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
