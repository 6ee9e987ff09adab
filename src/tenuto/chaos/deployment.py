"""The processes of a run: starts, replaces, stops, continues and kills them."""

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from tenuto import app, private
from tenuto.chaos.plan import SHORT_SETTINGS, ChaosPlan
from tenuto.chaos.recorder import RECORD_VARIABLE
from tenuto.clock import Clock
from tenuto.periodic import run_periodically, wait_first_event
from tenuto.settings import environment_without_settings

POLL_S = 0.1
STOP_TIMEOUT_S = 20.0
"""Seconds that a process has to exit after SIGTERM."""
CRASH_TIMEOUT_S = 15.0
"""Seconds that a process has to reach its crash point; after that it is replaced."""
KILLED = -signal.SIGKILL


class ManagedProcess:
    """One process of the deployment."""

    def __init__(
        self,
        kind: str,
        index: int,
        popen: subprocess.Popen[bytes],
        point: str | None,
        deadline: float,
    ) -> None:
        self.kind = kind
        self.index = index
        self.pid = popen.pid
        self.point = point
        """The crash point at which it kills itself."""
        self.deadline = deadline
        """Elapsed time at which it is replaced if it has not reached its crash point."""
        self.killed_on_purpose = False
        """True if the run killed it."""
        self.stopped = False
        """True between SIGSTOP and SIGCONT."""
        self._popen = popen

    @property
    def code(self) -> int | None:
        """The exit code, negative for a signal; `None` while it is running."""
        return self._popen.poll()

    def signal(self, number: int) -> None:
        """Sends a signal; does nothing if the process has exited."""
        with suppress(ProcessLookupError):
            self._popen.send_signal(number)

    def kill(self) -> None:
        """Sends SIGKILL, which also ends a stopped process; marks the exit as intended."""
        self.killed_on_purpose = True
        self.signal(signal.SIGKILL)

    def close(self) -> None:
        """Waits until the process has exited and closes its standard input."""
        self._popen.wait()
        if self._popen.stdin is not None:
            self._popen.stdin.close()


class Deployment:
    """Workers, coordinators and clients on one database; exited processes are replaced."""

    def __init__(self, plan: ChaosPlan, url: str, folder: Path, clock: Clock) -> None:
        self._plan = plan
        self._url = url
        self._folder = folder
        self._clock = clock
        self.log = folder / "processes.log"
        self.record = folder / "record"
        self.record.touch(private.FILE_MODE)
        self.alive: list[ManagedProcess] = []
        self.armed: dict[str, str] = {}
        """Crash point of the next started process, by kind."""
        self.crashed: Counter[str] = Counter()
        """Number of crashes by crash point."""
        self.ended: Counter[int] = Counter()
        """Number of processes that exited without being killed by the run, by exit code."""
        self._retired: set[str] = set()

    def start(self) -> None:
        """Starts all processes."""
        for kind, count in self._plan.process_counts.items():
            for index in range(count):
                self._start(kind, index)

    async def supervise(self, stop: asyncio.Event) -> None:
        """Replaces exited processes, unless retired, until `stop` is set."""

        async def check() -> None:
            self.replace_ended()

        await run_periodically(check, lambda: POLL_S, stop, self._clock)

    def replace_ended(self) -> None:
        """Counts exited processes, replaces them unless retired; kills those late for a crash."""
        for process in self.alive:
            if process.point is not None and process.deadline < self._clock.elapsed():
                process.kill()
        for process in [process for process in self.alive if process.code is not None]:
            self.alive.remove(process)
            process.close()
            if (
                process.point is not None
                and process.code == KILLED
                and not process.killed_on_purpose
            ):
                self.crashed[process.point] += 1
            elif not process.killed_on_purpose and process.code is not None:
                self.ended[process.code] += 1
            if process.kind not in self._retired:
                self._start(process.kind, process.index)

    def running(self, *kinds: str) -> list[ManagedProcess]:
        """Returns processes of these kinds not stopped by SIGSTOP; some may have just exited."""
        return [process for process in self.alive if process.kind in kinds and not process.stopped]

    async def retire(self, *kinds: str) -> bool:
        """Ends all processes of these kinds for good; returns False if some had to be killed."""
        self._retired |= set(kinds)
        for process in self.running(*kinds):
            process.signal(signal.SIGTERM)
        if await self._wait_until(lambda: not self.running(*kinds)):
            return True
        for process in self.running(*kinds):
            process.kill()
        return False

    async def heal(self) -> None:
        """Continues stopped processes, and replaces those with a crash point, which it kills."""
        self.armed.clear()
        for process in self.alive:
            process.signal(signal.SIGCONT)
            process.stopped = False
            if process.point is not None:
                process.kill()
        await self._wait_until(
            lambda: not [process for process in self.alive if process.point is not None]
        )

    def kill_all(self) -> None:
        """Kills all processes with their child processes."""
        self._retired |= set(self._plan.process_counts)
        for process in self.alive:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.close()
        self.alive.clear()

    async def _wait_until(self, check: Callable[[], bool]) -> bool:
        """Replaces exited processes until `check` is true; returns False after `STOP_TIMEOUT_S`."""
        deadline = self._clock.elapsed() + STOP_TIMEOUT_S
        while self._clock.elapsed() < deadline:
            self.replace_ended()
            if check():
                return True
            await wait_first_event([], POLL_S, self._clock)
        return False

    def _start(self, kind: str, index: int) -> None:
        """Starts a process; it gets the crash point armed for its kind, if any."""
        point = self.armed.pop(kind, None)
        module, *arguments = self._module_and_arguments(kind, index)
        with open(self.log, "ab", opener=private.opener) as log:
            popen = subprocess.Popen(
                [sys.executable, "-m", *self._plan.program, module, *arguments],
                env=self._environment(point),
                cwd=self._folder,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = self._clock.elapsed() + CRASH_TIMEOUT_S
        self.alive.append(ManagedProcess(kind, index, popen, point, deadline))

    def _module_and_arguments(self, kind: str, index: int) -> Sequence[str]:
        """Returns the module that a process of this kind runs, and its arguments."""
        program, plan = "tenuto.cli.main", self._plan
        if kind == "client":
            mixture = msgspec.json.encode(plan.mixture).decode()
            name = f"client-{index}"
            return ("tenuto.chaos.client", name, str(plan.seed), str(plan.rate), mixture)
        if kind == "coordinator":
            return (program, "coordinator")
        if kind == "commands":
            return (program, "worker", "--agent", "chaos-commands")
        return (program, "worker", "--agent", "chaos", "--app", "tenuto.chaos.handlers:handlers")

    def _environment(self, point: str | None) -> dict[str, str]:
        """Returns the environment of a process, with the crash point to exit at, if any."""
        env = environment_without_settings()
        env |= {f"TENUTO_{name.upper()}": str(value) for name, value in SHORT_SETTINGS.items()}
        env |= {"TENUTO_DATABASE": self._url, "TENUTO_DATA": str(self._folder)}
        env |= {"TENUTO_LEADER": str(self._plan.leader).lower(), app.PARENT_PIPE: "1"}
        env[RECORD_VARIABLE] = str(self.record)
        return env | ({"CRASH_AT": point} if point else {})
