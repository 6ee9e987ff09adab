"""Runs commands for one worker and leaves nothing of them behind.

`python -I -S supervisor.py FD` is the zygote: for each message on the socket FD it forks a
session supervisor, which starts one command, waits for it and kills its whole tree when the
worker asks for that, when the command ends, or when the control socket closes because the worker
is dead. Both are subreapers: what a command leaves behind falls to its session supervisor, and
what a dead session supervisor leaves behind falls to the zygote, which kills it.

A message to the zygote is one byte with the descriptors of `RECEIVED`. On the control socket go
lines of JSON. To the worker: `{"ready": true}`, then `{"pid"}` or `{"error": {"code", "message"}}`,
then `{"exit_code", "signal", "oom", "receipt": {"killed", "killed_count", "how", "remaining"}}`.
From the worker: `{"argv", "cwd", "env"}`, then any number of `{"kill": {"grace"}}`.

Only the standard library is imported, and nothing of this package, so that it stays small.
"""

import contextlib
import errno
import fcntl
import json
import math
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Container, Iterator
from typing import Any, NamedTuple

RECEIVED = ("stdin", "stdout", "stderr", "report", "control")
REPORT_FD = 3
CONTROL_FD = 4
LOG_FD = 5
HIGH_FD = 16  # above every descriptor that a session ends up with
END_FD = 64  # above every descriptor that the zygote or a session ever holds

GIVE_UP = 5.0  # seconds of SIGKILL after which what still lives cannot be killed by us
FIRST_PAUSE = 0.01
LONGEST_PAUSE = 0.5
RECEIPT_LIMIT = 200

PR_SET_CHILD_SUBREAPER = 36
# Caught, not ignored: an ignored signal would stay ignored in the command. They must not end us
# either, because a service manager sends SIGTERM to every process while the worker still drains.
CAUGHT = ("SIGCHLD", "SIGHUP", "SIGINT", "SIGPIPE", "SIGQUIT", "SIGTERM", "SIGUSR1", "SIGUSR2")

SPAWN_CODES = {
    errno.ENOENT: "not_found",
    errno.ENOTDIR: "not_found",
    errno.EACCES: "not_executable",
    errno.EPERM: "not_executable",
    errno.ENOEXEC: "not_executable",
    errno.E2BIG: "too_large",
}


class Process(NamedTuple):
    pid: int
    parent: int
    group: int
    comm: str
    dead: bool


def read(path: str) -> str:
    """The start of a small kernel file, without the cost of a file object."""
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.read(fd, 1 << 14).decode(errors="replace")
    finally:
        os.close(fd)


def parse_stat(text: str) -> Process:
    """The process that a line of /proc/PID/stat describes; its comm may hold any character."""
    head, _, tail = text.rpartition(")")
    pid, _, comm = head.partition(" (")
    state, parent, group = tail.split(maxsplit=3)[:3]
    return Process(int(pid), int(parent), int(group), comm, state in "ZX")


def processes() -> Iterator[Process]:
    """Every process in /proc that does not vanish while it is read."""
    with os.scandir("/proc") as entries:
        names = [entry.name for entry in entries if entry.name.isdigit()]
    for name in names:
        try:
            yield parse_stat(read(f"/proc/{name}/stat"))
        except OSError:
            continue


def descendants(spare: Container[int] = ()) -> list[Process]:
    """The processes below this one, without those in `spare` and what is below them."""
    children: dict[int, list[Process]] = defaultdict(list)
    for process in processes():
        children[process.parent].append(process)
    found: list[Process] = []
    parents = [os.getpid()]
    while parents:
        kept = [child for child in children.pop(parents.pop(), ()) if child.pid not in spare]
        found += kept
        parents += [child.pid for child in kept]
    return found


def reap() -> tuple[dict[int, int], bool]:
    """The wait status of each child that has ended, and whether no child is left at all."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended, True
        if pid == 0:
            return ended, False
        ended[pid] = status


def send_signal(pid: int, signum: int) -> bool:
    """Signals a process, or a group when negative; False when it is gone or not ours to signal."""
    try:
        os.kill(pid, signum)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def signal_all(found: list[Process], signum: int) -> list[Process]:
    """Signals each process once; those that lived and were reached.

    By group, because no process of a group can escape by forking. A command leads a session of
    its own, so that all members of such a group are below it. For our own group, and for 0 and 1,
    which would stand for far more than a group, process by process.
    """
    single = (0, 1, os.getpgrp())
    targets = {process.pid if process.group in single else -process.group for process in found}
    reached = {target for target in targets if send_signal(target, signum)}
    return [
        process
        for process in found
        if not process.dead and not reached.isdisjoint((process.pid, -process.group))
    ]


def become_subreaper() -> bool:
    """Makes orphans below this process its children; False where that or /proc is missing."""
    try:
        import ctypes  # noqa: PLC0415  some builds lack it; they lose only this

        done: int = ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        return done == 0 and parse_stat(read("/proc/self/stat")).pid == os.getpid()
    except (ImportError, OSError, AttributeError):
        return False


def catch_signals() -> None:
    """Leaves no signal ignored or blocked that a command would inherit."""
    for signum in signal.valid_signals():
        if signal.getsignal(signum) is signal.SIG_IGN:
            signal.signal(signum, signal.SIG_DFL)
    for name in CAUGHT:
        signal.signal(getattr(signal, name), lambda *_: None)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def open_child_events() -> int:
    """A descriptor that turns readable when a child ends."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    return reader


def wait_for(sources: list[int], events: int, timeout: float | None) -> list[int]:
    """The readable ones of `sources`, after one of them, a child's end or the timeout."""
    poll = select.poll()  # select knows no descriptor from 1,024 on
    for source in (*sources, events):
        poll.register(source, select.POLLIN)
    ready = [source for source, _ in poll.poll(None if timeout is None else timeout * 1000)]
    if events in ready:
        os.read(events, 4096)
        ready.remove(events)
    return ready


def oom_kills() -> int:
    """How many processes of this cgroup the kernel has killed for memory; 0 where it cannot say."""
    try:
        for line in read("/proc/self/cgroup").splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                return oom_counter(f"/sys/fs/cgroup{path}/memory.events")
            if "memory" in controllers.split(","):
                return oom_counter(f"/sys/fs/cgroup/memory{path}/memory.oom_control")
    except (OSError, ValueError):
        pass
    return 0


def oom_counter(path: str) -> int:
    counters = dict(line.split(maxsplit=1) for line in read(path).splitlines())
    return int(counters.get("oom_kill", 0))


class ScanBackoff:
    """When /proc may be walked again: at once, then ever less often."""

    def __init__(self) -> None:
        self._next = 0.0
        self._pause = FIRST_PAUSE
        self.again = False

    def due(self) -> bool:
        return time.monotonic() >= self._next

    def left(self) -> float:
        return max(0.0, self._next - time.monotonic())

    def walked(self) -> None:
        self._next = time.monotonic() + self._pause
        self._pause = min(self._pause * 2, LONGEST_PAUSE)
        self.again = True


class SpawnRefused(Exception):
    def __init__(self, code: str, subject: str, error: Exception) -> None:
        reason = error.strerror if isinstance(error, OSError) else error
        self.code = code
        self.message = f"{subject}: {reason}".encode(errors="replace").decode()
        super().__init__(self.message)


def launch(argv: list[str], cwd: str | None, env: dict[str, str]) -> subprocess.Popen[bytes]:
    """Starts the command as leader of its own session, with descriptors 0 to 3 of this process."""
    try:
        if cwd is not None:
            os.chdir(cwd)
    except (OSError, ValueError) as error:
        raise SpawnRefused("bad_cwd", str(cwd), error) from None
    try:
        return subprocess.Popen(
            argv, env=env, pass_fds=(REPORT_FD,), start_new_session=True, restore_signals=False
        )
    except OSError as error:
        code = SPAWN_CODES.get(error.errno or 0, "spawn_failed")
        raise SpawnRefused(code, argv[0], error) from None
    except (ValueError, IndexError, TypeError, subprocess.SubprocessError) as error:
        raise SpawnRefused("spawn_failed", "the command", error) from None


class ControlChannel:
    """Lines of JSON to and from the worker; `open` until a read finds the worker gone."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._rest = b""
        self.open = True

    def receive(self) -> list[dict[str, Any]]:
        """The messages that one read completes; blocks when nothing is there to read."""
        try:
            data = self._connection.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self.open = False
            return []
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def receive_first(self) -> dict[str, Any] | None:
        while self.open:
            for message in self.receive():
                return message
        return None

    def send(self, message: dict[str, Any]) -> None:
        """Sends it, or does nothing when the worker is gone: the next read tells."""
        with contextlib.suppress(OSError):
            self._connection.sendall(json.dumps(message).encode() + b"\n")


class ProcessTree:
    """A command and everything it started: exactly the children of this subreaper.

    Without a subreaper (`exact` False) it is the command's process group.
    """

    def __init__(self, process: subprocess.Popen[bytes], *, exact: bool) -> None:
        self._process = process  # kept, because its destructor would reap the child
        self.main = process.pid
        self.exact = exact
        self.status: int | None = None
        self.killed: dict[int, str] = {}

    def reap(self) -> bool:
        """Collects the dead; True when nothing is left, which no fork can make untrue."""
        ended, gone = reap()
        if self.status is None and self.main in ended:
            self.status = ended[self.main]
            if not self.exact:
                send_signal(-self.main, signal.SIGKILL)
        return gone

    def signal(self, signum: int) -> None:
        """Signals every process of the tree that can be found now."""
        if self.exact:
            reached = signal_all(descendants(), signum)
            self.killed |= {process.pid: process.comm for process in reached}
        else:
            self.signal_group(signum)

    def signal_group(self, signum: int) -> None:
        """Signals the command's process group: all of most trees."""
        if self.status is None and send_signal(-self.main, signum):
            self.killed.setdefault(self.main, "")

    def survivors(self) -> list[int]:
        return [process.pid for process in descendants()] if self.exact else []


class SessionSupervisor:
    """The supervision of one command until nothing of it is left."""

    def __init__(self, tree: ProcessTree, control: ControlChannel, events: int) -> None:
        self._tree = tree
        self._control = control
        self._events = events
        self._oom_kills = oom_kills()
        self._kill_at: float | None = None
        self._asked = False
        self._how = "exited"
        self._pace = ScanBackoff()

    def run(self) -> bool:
        """Returns when nothing is left of the tree, or False when the rest cannot be killed."""
        while not self._tree.reap():
            now = time.monotonic()
            if self._kill_at is None and self._tree.status is not None:
                self._kill_at = now  # a session ends with its main process
            if self._kill_at is not None and now > self._kill_at + GIVE_UP:
                return False
            self._wait(self._press(now))
        return True

    def result(self, *, gone: bool) -> dict[str, Any]:
        """What the worker is told at the end."""
        code = None if self._tree.status is None else os.waitstatus_to_exitcode(self._tree.status)
        survivors = [] if gone else self._tree.survivors()
        killed = [
            {"pid": pid, "comm": comm}
            for pid, comm in self._tree.killed.items()
            if pid not in survivors
        ]
        return {
            "exit_code": code if code is not None and code >= 0 else None,
            "signal": -code if code is not None and code < 0 else None,
            "oom": self._out_of_memory(code),
            "receipt": {
                "killed": killed[:RECEIPT_LIMIT],
                "killed_count": len(killed),
                "how": self._how,
                "remaining": len(survivors) if self._tree.exact else None,
            },
        }

    def _press(self, now: float) -> float | None:
        """Kills the tree when its time is over; the seconds until the next look at it."""
        if self._kill_at is None:
            return None
        if now < self._kill_at:
            return self._kill_at - now
        if self._pace.due():
            self._tree.signal(signal.SIGKILL)
            self._pace.walked()
            self._how = "SIGKILL" if self._asked else "exited"
        return self._pace.left()

    def _wait(self, timeout: float | None) -> None:
        sources = [CONTROL_FD] if self._control.open else []
        if not wait_for(sources, self._events, timeout):
            return
        for message in self._control.receive():
            self._ask(float(message["kill"]["grace"]))
        if not self._control.open:
            self._ask(0.0)
            self._tree.signal_group(signal.SIGKILL)  # often enough, and needs no walk
            self._pace.walked()

    def _ask(self, grace: float) -> None:
        """The tree has that long from now; an earlier limit stays."""
        kill_at = time.monotonic() + grace
        first = self._kill_at is None
        self._kill_at = kill_at if self._kill_at is None else min(self._kill_at, kill_at)
        self._asked = self._asked or self._tree.status is None
        if first and grace > 0:
            self._tree.signal(signal.SIGTERM)
            self._how = "SIGTERM"

    def _out_of_memory(self, code: int | None) -> bool:
        """The kernel ended the main process, or what a shell waited for, for want of memory."""
        died = code in (-signal.SIGKILL, 128 + signal.SIGKILL)
        return died and self._how != "SIGKILL" and oom_kills() > self._oom_kills


def take_descriptors(fds: list[int]) -> None:
    """Gives the received descriptors and the log their numbers and closes all others.

    A control socket kept open by a sibling would hide the worker's death.
    """
    signal.set_wakeup_fd(-1)  # the zygote's, whose number gets another meaning here
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, HIGH_FD) for fd in [*fds, 2]]
    for number, fd in enumerate(high):
        os.dup2(fd, number, inheritable=False)
    for number in (0, 1, 2):
        os.set_inheritable(number, True)
    os.closerange(LOG_FD + 1, END_FD)


def release_descriptors() -> None:
    """Lets go of the command's streams and directory, so that they end when its tree does."""
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.dup2(LOG_FD, 2)
    os.close(REPORT_FD)
    os.close(null)
    os.chdir("/")


def run_session(fds: list[int]) -> int:
    """Runs one command; 0 when nothing of it is left."""
    take_descriptors(fds)
    control = ControlChannel(socket.socket(fileno=CONTROL_FD))
    control.send({"ready": True})
    request = control.receive_first()
    if request is None:
        return 0
    exact = become_subreaper()
    events = open_child_events()
    try:
        process = launch(request["argv"], request["cwd"], request["env"])
    except SpawnRefused as error:
        control.send({"error": {"code": error.code, "message": error.message}})
        return 0
    release_descriptors()
    control.send({"pid": process.pid})
    session = SessionSupervisor(ProcessTree(process, exact=exact), control, events)
    gone = session.run()
    control.send(session.result(gone=gone))
    return 0 if gone else 1


class Zygote:
    """Forks session supervisors and kills what one that failed has left behind."""

    def __init__(self, worker: socket.socket) -> None:
        self._worker = worker
        self._exact = become_subreaper()
        self._events = open_child_events()
        self._supervisors: set[int] = set()
        self._worker_gone = False
        self._give_up = math.inf
        self._strays: ScanBackoff | None = None

    def run(self) -> None:
        """Returns after the worker has gone and every child with it."""
        while not (self._reap() and self._worker_gone) and time.monotonic() < self._give_up:
            sources = [] if self._worker_gone else [self._worker.fileno()]
            if wait_for(sources, self._events, self._sweep()):
                self._receive()

    def _reap(self) -> bool:
        ended, gone = reap()
        failed = [pid for pid, status in ended.items() if status and pid in self._supervisors]
        self._supervisors -= ended.keys()
        if failed and self._exact:
            self._strays = ScanBackoff()
        return gone

    def _sweep(self) -> float | None:
        """Kills strays when it is time to; the seconds until the next look, None without any.

        One walk can miss a process whose parent ends meanwhile, so the first is never the last.
        """
        if self._strays is None:
            return None
        if self._strays.due():
            found = descendants(spare=self._supervisors)
            signal_all(found, signal.SIGKILL)
            if not found and self._strays.again:
                self._strays = None
                return None
            self._strays.walked()
        return self._strays.left()

    def _receive(self) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(self._worker, 1, len(RECEIVED))
        except OSError:
            data, fds = b"", []
        if not data:
            self._lose_worker()
        elif len(fds) == len(RECEIVED):
            self._fork(fds)
        for fd in fds:
            os.close(fd)

    def _lose_worker(self) -> None:
        """Takes part in the killing: one walk for all, and supervisors may be stopped or stuck."""
        self._worker_gone = True
        self._give_up = time.monotonic() + GIVE_UP
        if self._exact:
            self._supervisors.clear()
            self._strays = ScanBackoff()

    def _fork(self, fds: list[int]) -> None:
        try:
            pid = os.fork()
        except OSError:
            return  # the worker sees its control socket close before `ready`
        if pid == 0:
            status = 1
            try:
                status = run_session(fds)
            except BaseException:  # noqa: BLE001  nothing may unwind into the zygote's loop
                traceback.print_exc()
            finally:
                os._exit(status)
        self._supervisors.add(pid)


def main() -> None:
    """Serves the worker at the other end of the socket whose descriptor is the argument."""
    catch_signals()
    worker = socket.socket(fileno=int(sys.argv[1]))
    worker.set_inheritable(False)
    zygote = Zygote(worker)
    with contextlib.suppress(OSError):  # a worker that died meanwhile: `run` finds out
        worker.sendall(b"+")
    zygote.run()


if __name__ == "__main__":
    main()
