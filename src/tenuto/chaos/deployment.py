"""The processes of a run: started, kept alive, stopped, continued and killed."""

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
from tenuto.chaos.plan import SHORT, ChaosPlan
from tenuto.chaos.recorder import FILE
from tenuto.clock import Clock
from tenuto.periodic import run_periodically, wait_first_event
from tenuto.settings import environment_without_settings

LOOK_S = 0.1
GONE_S = 20.0
"""Seconds that a process has to end when it is asked to."""
REACH_S = 15.0
"""Seconds in which a process has to get to its crash point; then it makes room for another."""
KILLED = -signal.SIGKILL


class ManagedProcess:
    """One process of the deployment."""

    def __init__(
        self, kind: str, place: int, popen: subprocess.Popen[bytes], point: str | None, until: float
    ) -> None:
        self.kind = kind
        self.place = place
        self.pid = popen.pid
        self.point = point
        """The crash point that it is to die at."""
        self.until = until
        """When it must have."""
        self.doomed = False
        """Whether we have killed it ourselves."""
        self.stopped = False
        self._popen = popen

    @property
    def code(self) -> int | None:
        """The exit code, negative for a signal; nothing while it lives."""
        return self._popen.poll()

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            self._popen.send_signal(number)

    def kill(self) -> None:
        """End it at once, even if it stands still."""
        self.doomed = True
        self.signal(signal.SIGKILL)

    def close(self) -> None:
        """Forget one that has ended."""
        self._popen.wait()
        if self._popen.stdin is not None:
            self._popen.stdin.close()


class Deployment:
    """Workers, coordinators and clients on one database; whoever ends is replaced."""

    def __init__(self, plan: ChaosPlan, url: str, folder: Path, clock: Clock) -> None:
        self._plan = plan
        self._url = url
        self._folder = folder
        self._clock = clock
        self.log = folder / "processes.log"
        self.record = folder / "record"
        self.record.touch(private.FILE)
        self.alive: list[ManagedProcess] = []
        self.armed: dict[str, str] = {}
        """The crash point of the next process of a kind."""
        self.crashed: Counter[str] = Counter()
        """How often each point was died at."""
        self.ended: Counter[int] = Counter()
        """How often processes ended by themselves, by exit code."""
        self._retired: set[str] = set()

    def start(self) -> None:
        """Start everything."""
        for kind, count in self._plan.staff.items():
            for place in range(count):
                self._start(kind, place)

    async def keep(self, stop: asyncio.Event) -> None:
        """Replace whoever ends, until told to stop."""

        async def once() -> None:
            self.look()

        await run_periodically(once, lambda: LOOK_S, stop, self._clock)

    def look(self) -> None:
        """Replace those that have ended since the last look, and armed ones that do not."""
        for process in self.alive:
            if process.point is not None and process.until < self._clock.elapsed():
                process.kill()
        for process in [each for each in self.alive if each.code is not None]:
            self.alive.remove(process)
            process.close()
            if process.point is not None and process.code == KILLED and not process.doomed:
                self.crashed[process.point] += 1
            elif not process.doomed and process.code is not None:
                self.ended[process.code] += 1
            if process.kind not in self._retired:
                self._start(process.kind, process.place)

    def of(self, *kinds: str) -> list[ManagedProcess]:
        """Those of the kinds that move."""
        return [each for each in self.alive if each.kind in kinds and not each.stopped]

    async def retire(self, *kinds: str) -> bool:
        """Ask all of the kinds to end, and replace none; whether they did."""
        self._retired |= set(kinds)
        for process in self.of(*kinds):
            process.signal(signal.SIGTERM)
        if await self._until(lambda: not self.of(*kinds)):
            return True
        for process in self.of(*kinds):
            process.kill()
        return False

    async def heal(self) -> None:
        """Continue what stands still, and replace those that would crash."""
        self.armed.clear()
        for process in self.alive:
            process.signal(signal.SIGCONT)
            process.stopped = False
            if process.point is not None:
                process.kill()
        await self._until(lambda: not [each for each in self.alive if each.point is not None])

    def end(self) -> None:
        """Kill everything with all it started."""
        self._retired |= set(self._plan.staff)
        for process in self.alive:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.close()
        self.alive.clear()

    async def _until(self, check: Callable[[], bool]) -> bool:
        deadline = self._clock.elapsed() + GONE_S
        while self._clock.elapsed() < deadline:
            self.look()
            if check():
                return True
            await wait_first_event([], LOOK_S, self._clock)
        return False

    def _start(self, kind: str, place: int) -> None:
        point = self.armed.pop(kind, None)
        module, *words = self._words(kind, place)
        with open(self.log, "ab", opener=private.opener) as log:
            popen = subprocess.Popen(
                [sys.executable, "-m", *self._plan.program, module, *words],
                env=self._environment(point),
                cwd=self._folder,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        until = self._clock.elapsed() + REACH_S
        self.alive.append(ManagedProcess(kind, place, popen, point, until))

    def _words(self, kind: str, place: int) -> Sequence[str]:
        """The module that a process runs, and its arguments."""
        program, plan = "tenuto.cli.main", self._plan
        if kind == "client":
            mixture = msgspec.json.encode(plan.mixture).decode()
            name = f"client-{place}"
            return ("tenuto.chaos.client", name, str(plan.seed), str(plan.rate), mixture)
        if kind == "coordinator":
            return (program, "coordinator")
        if kind == "commands":
            return (program, "worker", "--agent", "chaos-commands")
        return (program, "worker", "--agent", "chaos", "--app", "tenuto.chaos.handlers:handlers")

    def _environment(self, point: str | None) -> dict[str, str]:
        env = environment_without_settings()
        env |= {f"TENUTO_{name.upper()}": str(value) for name, value in SHORT.items()}
        env |= {"TENUTO_DATABASE": self._url, "TENUTO_DATA": str(self._folder)}
        env |= {"TENUTO_LEADER": str(self._plan.leader).lower(), app.PARENT_PIPE: "1"}
        env[FILE] = str(self.record)
        return env | ({"CRASH_AT": point} if point else {})
