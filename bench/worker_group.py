"""Worker processes of a peer: prepared, started together, killed as a group."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

from bench.peer import Mode

READY = "ready"
START = "start"


class WorkerGroup:
    """`size` worker processes, each in its own session, which wait for `start` after their imports.

    The wait keeps the start-up of the interpreter out of every figure and lets all workers start
    at the same moment.
    """

    def __init__(self, command: list[str], mode: Mode, journal: Path, size: int = 1) -> None:
        self._command = [*command, "--mode", mode.value, "--journal", str(journal)]
        self._log = journal.with_suffix(".log")
        self._size = size
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        try:
            with self._log.open("w") as log:
                for _ in range(self._size):
                    self._processes.append(self._spawn(log.fileno()))
            for process in self._processes:
                self._wait_until_ready(process)
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()

    def start(self) -> None:
        """Lets all workers start."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{START}\n")
            process.stdin.flush()

    def kill(self) -> None:
        """Kills the workers and their child processes; returns when the workers have exited."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()
        self._processes.clear()

    def check_running(self) -> None:
        """Raises `RuntimeError` if a worker has exited by itself."""
        for process in self._processes:
            if process.poll() is not None:
                raise RuntimeError(
                    f"a worker exited with status {process.returncode}: {self._read_log_tail()}"
                )

    def read_memory_mb(self) -> float:
        """Returns the first worker's resident set plus the private memory of its children."""
        leader = self._processes[0].pid
        total = _read_status_kb(leader, "VmRSS:")
        for pid in _list_session_members(leader):
            total += _read_private_kb(pid)
        return total / 1024

    def _spawn(self, log: int) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )

    def _wait_until_ready(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        if process.stdout.readline().strip() != READY:
            raise RuntimeError(f"a worker did not start: {self._read_log_tail()}")

    def _read_log_tail(self) -> str:
        return self._log.read_text(errors="replace")[-500:]


def wait_for_start() -> None:
    """Reports that this worker is ready; returns when the group starts it.

    Afterwards its standard output goes to the log, so that no library can fill the pipe.
    """
    print(READY, flush=True)
    if sys.stdin.readline().strip() != START:
        raise SystemExit(1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    threading.Thread(target=_exit_with_parent, args=(os.dup(0),), daemon=True).start()


def _exit_with_parent(stdin: int) -> None:
    """Kills this worker's process group when the process that started it exits."""
    while os.read(stdin, 1):
        pass
    os.killpg(0, signal.SIGKILL)


def _list_session_members(leader: int) -> list[int]:
    """Returns the other processes in the leader's session."""
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            after_name = stat.read_text().rpartition(")")[2].split()
            pid = int(stat.parent.name)
            if int(after_name[3]) == leader and pid != leader:
                members.append(pid)
    return members


def _read_status_kb(pid: int, field: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1])
    raise LookupError(field)


def _read_private_kb(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))
