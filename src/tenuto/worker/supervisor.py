"""Runs commands for one worker and leaves nothing of them behind.

`python -I -S supervisor.py FD` is the zygote: for each message on the socket FD it forks a
session supervisor, which starts one command, waits for it and kills its whole tree when the
worker requests it, when the command ends, or when the control socket closes because the worker is
dead. Both are subreapers: orphans of a command become children of its session supervisor, and
orphans of a dead session supervisor become children of the zygote, which kills them.

A message to the zygote is one byte with the descriptors of `RECEIVED`. The control socket carries
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
HIGH_FD = 16  # above every descriptor that a session finally uses
END_FD = 64  # above every descriptor that the zygote or a session ever has

GIVE_UP_S = 5.0  # seconds of SIGKILL after which surviving processes count as unkillable
FIRST_PAUSE_S = 0.01
MAX_PAUSE_S = 0.5
RECEIPT_LIMIT = 200

PR_SET_CHILD_SUBREAPER = 36
# Caught, not ignored: an ignored signal would stay ignored in the command. They must not end this
# program, because a service manager sends SIGTERM to all processes while the worker still drains.
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


def read_kernel_file(path: str) -> str:
    """Returns at most 16 KiB of a kernel file, without the cost of a file object."""
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.read(fd, 1 << 14).decode(errors="replace")
    finally:
        os.close(fd)


def parse_stat(text: str) -> Process:
    """Parses a line of /proc/PID/stat; the `comm` in it may contain any character."""
    head, _, tail = text.rpartition(")")
    pid, _, comm = head.partition(" (")
    state, parent, group = tail.split(maxsplit=3)[:3]
    return Process(int(pid), int(parent), int(group), comm, state in "ZX")


def list_processes() -> Iterator[Process]:
    """Yields every process in /proc that does not exit while it is read."""
    with os.scandir("/proc") as entries:
        names = [entry.name for entry in entries if entry.name.isdigit()]
    for name in names:
        try:
            yield parse_stat(read_kernel_file(f"/proc/{name}/stat"))
        except OSError:
            continue


def descendants(exempt: Container[int] = ()) -> list[Process]:
    """Returns this process's descendants, without the pids in `exempt` and their descendants."""
    children: dict[int, list[Process]] = defaultdict(list)
    for process in list_processes():
        children[process.parent].append(process)
    result: list[Process] = []
    parents = [os.getpid()]
    while parents:
        remaining = [child for child in children.pop(parents.pop(), ()) if child.pid not in exempt]
        result += remaining
        parents += [child.pid for child in remaining]
    return result


def reap() -> tuple[dict[int, int], bool]:
    """Reaps ended children; returns their wait statuses by pid, and True if no child is left."""
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
    """Signals a process, or a group if negative; False if it is gone or may not be signalled."""
    try:
        os.kill(pid, signum)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def signal_all(processes: list[Process], signum: int) -> list[Process]:
    """Signals each process once, with its group; returns those that were alive and got the signal.

    Signals by group, because no process of a group can escape by forking. A command leads a session
    of its own, so all members of such a group are below it. The processes of this program's own
    group, and of groups 0 and 1, which mean far more than a group to `kill`, are signalled singly.
    """
    not_by_group = (0, 1, os.getpgrp())
    targets = {
        process.pid if process.group in not_by_group else -process.group for process in processes
    }
    reached = {target for target in targets if send_signal(target, signum)}
    return [
        process
        for process in processes
        if not process.dead and not reached.isdisjoint((process.pid, -process.group))
    ]


def become_subreaper() -> bool:
    """Makes orphans below this process its children; False if that or /proc is not available."""
    try:
        import ctypes  # noqa: PLC0415  some Python builds lack it and only lose this

        done: int = ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        return done == 0 and parse_stat(read_kernel_file("/proc/self/stat")).pid == os.getpid()
    except (ImportError, OSError, AttributeError):
        return False


def catch_signals() -> None:
    """Blocks and ignores no signal, because a command inherits that; `CAUGHT` ones do nothing."""
    for signum in signal.valid_signals():
        if signal.getsignal(signum) is signal.SIG_IGN:
            signal.signal(signum, signal.SIG_DFL)
    for name in CAUGHT:
        signal.signal(getattr(signal, name), lambda *_: None)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def open_child_events() -> int:
    """Returns a descriptor that becomes readable when a child ends or a caught signal arrives."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    return reader


def wait_for(sources: list[int], events: int, timeout: float | None) -> list[int]:
    """Waits `timeout` s (`None`: forever) for a source or child's end; returns readable sources."""
    poll = select.poll()  # select supports no descriptor above 1,023
    for source in (*sources, events):
        poll.register(source, select.POLLIN)
    ready = [source for source, _ in poll.poll(None if timeout is None else timeout * 1000)]
    if events in ready:
        os.read(events, 4096)
        ready.remove(events)
    return ready


def count_oom_kills() -> int:
    """Returns the number of out-of-memory kills in this cgroup; 0 if it is unknown."""
    try:
        for line in read_kernel_file("/proc/self/cgroup").splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                return read_oom_counter(f"/sys/fs/cgroup{path}/memory.events")
            if "memory" in controllers.split(","):
                return read_oom_counter(f"/sys/fs/cgroup/memory{path}/memory.oom_control")
    except (OSError, ValueError):
        pass
    return 0


def read_oom_counter(path: str) -> int:
    counters = dict(line.split(maxsplit=1) for line in read_kernel_file(path).splitlines())
    return int(counters.get("oom_kill", 0))


class ScanBackoff:
    """Decides when /proc may be scanned again: at once, then less and less often."""

    def __init__(self) -> None:
        self._next_scan_at = 0.0
        self._pause = FIRST_PAUSE_S
        self.scanned_before = False

    def is_due(self) -> bool:
        return time.monotonic() >= self._next_scan_at

    def seconds_left(self) -> float:
        return max(0.0, self._next_scan_at - time.monotonic())

    def on_scanned(self) -> None:
        self._next_scan_at = time.monotonic() + self._pause
        self._pause = min(self._pause * 2, MAX_PAUSE_S)
        self.scanned_before = True


class SpawnRefused(Exception):
    def __init__(self, code: str, subject: str, error: Exception) -> None:
        reason = error.strerror if isinstance(error, OSError) else error
        self.code = code
        self.message = f"{subject}: {reason}".encode(errors="replace").decode()
        super().__init__(self.message)


def launch(argv: list[str], cwd: str | None, env: dict[str, str]) -> subprocess.Popen[bytes]:
    """Enters `cwd` and starts the command as leader of its session; raises `SpawnRefused`."""
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
    """Lines of JSON to and from the worker; `is_open` until a read finds the worker gone."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._rest = b""
        self.is_open = True

    def receive(self) -> list[dict[str, Any]]:
        """Blocks for one read; returns the messages it completes, none if the worker is gone."""
        try:
            data = self._connection.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self.is_open = False
            return []
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def receive_first(self) -> dict[str, Any] | None:
        """Waits for a message, `None` if the worker is gone; drops the others of its read."""
        while self.is_open:
            for message in self.receive():
                return message
        return None

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message, or does nothing if the worker is gone: the next read detects that."""
        with contextlib.suppress(OSError):
            self._connection.sendall(json.dumps(message).encode() + b"\n")


class ProcessTree:
    """A command and everything it started: exactly the children of this subreaper.

    Without a subreaper (`exact` is False) it is the command's process group.
    """

    def __init__(self, process: subprocess.Popen[bytes], *, exact: bool) -> None:
        self._process = process  # referenced, because its destructor would reap the child
        self.main = process.pid
        self.exact = exact
        self.status: int | None = None
        self.killed: dict[int, str] = {}

    def reap(self) -> bool:
        """Reaps children, keeps the command's status; True if no child is left, which is final."""
        ended, gone = reap()
        if self.status is None and self.main in ended:
            self.status = ended[self.main]
            if not self.exact:
                send_signal(-self.main, signal.SIGKILL)
        return gone

    def signal(self, signum: int) -> None:
        """Signals every process that a scan of the tree finds now, and records it in `killed`."""
        if self.exact:
            reached = signal_all(descendants(), signum)
            self.killed |= {process.pid: process.comm for process in reached}
        else:
            self.signal_group(signum)

    def signal_group(self, signum: int) -> None:
        """Signals the command's process group, unless it has ended, and records it in `killed`."""
        if self.status is None and send_signal(-self.main, signum):
            self.killed.setdefault(self.main, "")

    def survivors(self) -> list[int]:
        """Returns the pids that are left; empty without a subreaper."""
        return [process.pid for process in descendants()] if self.exact else []


class SessionSupervisor:
    """Supervises one command until nothing of its tree is left."""

    def __init__(self, tree: ProcessTree, control: ControlChannel, events: int) -> None:
        self._tree = tree
        self._control = control
        self._events = events
        self._oom_kills = count_oom_kills()
        self._kill_at: float | None = None
        self._kill_requested = False
        self._how = "exited"
        self._backoff = ScanBackoff()

    def run(self) -> bool:
        """Waits, and kills when due, until the tree is gone; False if the rest cannot be killed."""
        while not self._tree.reap():
            now = time.monotonic()
            if self._kill_at is None and self._tree.status is not None:
                self._kill_at = now  # a session ends with its main process
            if self._kill_at is not None and now > self._kill_at + GIVE_UP_S:
                return False
            self._wait_and_handle_kills(self._kill_if_due(now))
        return True

    def result(self, *, gone: bool) -> dict[str, Any]:
        """Returns the final message for the worker; `gone`: nothing of the tree is left."""
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
            "oom": self._is_out_of_memory(code),
            "receipt": {
                "killed": killed[:RECEIPT_LIMIT],
                "killed_count": len(killed),
                "how": self._how,
                "remaining": len(survivors) if self._tree.exact else None,
            },
        }

    def _kill_if_due(self, now: float) -> float | None:
        """Kills the tree if due; returns seconds until the next check, `None` if no kill is set."""
        if self._kill_at is None:
            return None
        if now < self._kill_at:
            return self._kill_at - now
        if self._backoff.is_due():
            self._tree.signal(signal.SIGKILL)
            self._backoff.on_scanned()
            self._how = "SIGKILL" if self._kill_requested else "exited"
        return self._backoff.seconds_left()

    def _wait_and_handle_kills(self, timeout: float | None) -> None:
        """Waits, applies kill requests, and kills the tree if the worker is gone."""
        sources = [CONTROL_FD] if self._control.is_open else []
        if not wait_for(sources, self._events, timeout):
            return
        for message in self._control.receive():
            self._request_kill(float(message["kill"]["grace"]))
        if not self._control.is_open:
            self._request_kill(0.0)
            self._tree.signal_group(signal.SIGKILL)  # often enough, and needs no scan
            self._backoff.on_scanned()

    def _request_kill(self, grace: float) -> None:
        """Schedules SIGKILL in `grace` s unless due earlier; the first above 0 sends SIGTERM."""
        kill_at = time.monotonic() + grace
        is_first = self._kill_at is None
        self._kill_at = kill_at if self._kill_at is None else min(self._kill_at, kill_at)
        self._kill_requested = self._kill_requested or self._tree.status is None
        if is_first and grace > 0:
            self._tree.signal(signal.SIGTERM)
            self._how = "SIGTERM"

    def _is_out_of_memory(self, code: int | None) -> bool:
        """True if the kernel killed the main process, or a shell's child, for lack of memory."""
        was_killed = code in (-signal.SIGKILL, 128 + signal.SIGKILL)
        return was_killed and self._how != "SIGKILL" and count_oom_kills() > self._oom_kills


def install_descriptors(fds: list[int]) -> None:
    """Moves the received descriptors and the log to their fixed numbers and closes all others.

    A control socket kept open by a sibling would hide the worker's death.
    """
    signal.set_wakeup_fd(-1)  # it was the zygote's; its number is reused here
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, HIGH_FD) for fd in [*fds, 2]]
    for number, fd in enumerate(high):
        os.dup2(fd, number, inheritable=False)
    for number in (0, 1, 2):
        os.set_inheritable(number, True)
    os.closerange(LOG_FD + 1, END_FD)


def release_descriptors() -> None:
    """Closes the command's streams and leaves its folder, so that only its tree uses them."""
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.dup2(LOG_FD, 2)
    os.close(REPORT_FD)
    os.close(null)
    os.chdir("/")


def run_session(fds: list[int]) -> int:
    """Runs one command; returns this supervisor's exit status: 0 if nothing of the tree is left."""
    install_descriptors(fds)
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
    """Forks session supervisors and kills the processes that a failed one leaves behind."""

    def __init__(self, worker: socket.socket) -> None:
        self._worker = worker
        self._exact = become_subreaper()
        self._events = open_child_events()
        self._supervisors: set[int] = set()
        self._worker_gone = False
        self._give_up_at = math.inf
        self._stray_backoff: ScanBackoff | None = None

    def run(self) -> None:
        """Forks sessions until the worker and all children are gone; waits 5 s for the children."""
        while not (self._reap() and self._worker_gone) and time.monotonic() < self._give_up_at:
            sources = [] if self._worker_gone else [self._worker.fileno()]
            if wait_for(sources, self._events, self._kill_strays_if_due()):
                self._receive_request()

    def _reap(self) -> bool:
        """Reaps children; True if none is left. Schedules a stray scan if a supervisor failed."""
        ended, gone = reap()
        failed = [pid for pid, status in ended.items() if status and pid in self._supervisors]
        self._supervisors -= ended.keys()
        if failed and self._exact:
            self._stray_backoff = ScanBackoff()
        return gone

    def _kill_strays_if_due(self) -> float | None:
        """Kills strays if a scan is due; returns seconds until the next, `None` if none follows.

        One scan can miss a process whose parent ends meanwhile, so one scan is never enough.
        """
        if self._stray_backoff is None:
            return None
        if self._stray_backoff.is_due():
            strays = descendants(exempt=self._supervisors)
            signal_all(strays, signal.SIGKILL)
            if not strays and self._stray_backoff.scanned_before:
                self._stray_backoff = None
                return None
            self._stray_backoff.on_scanned()
        return self._stray_backoff.seconds_left()

    def _receive_request(self) -> None:
        """Forks a session supervisor for one request; starts to kill all if the worker is gone."""
        try:
            data, fds, _, _ = socket.recv_fds(self._worker, 1, len(RECEIVED))
        except OSError:
            data, fds = b"", []
        if not data:
            self._on_worker_gone()
        elif len(fds) == len(RECEIVED):
            self._fork_session(fds)
        for fd in fds:
            os.close(fd)

    def _on_worker_gone(self) -> None:
        """Schedules the kill of all sessions by one scan: supervisors may hang or be stopped."""
        self._worker_gone = True
        self._give_up_at = time.monotonic() + GIVE_UP_S
        if self._exact:
            self._supervisors.clear()
            self._stray_backoff = ScanBackoff()

    def _fork_session(self, fds: list[int]) -> None:
        """Forks a session supervisor; does nothing if the system cannot fork."""
        try:
            pid = os.fork()
        except OSError:
            return  # the worker sees its control socket close before it gets `ready`
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
    with contextlib.suppress(OSError):  # the worker has died: `run` detects it
        worker.sendall(b"+")
    zygote.run()


if __name__ == "__main__":
    main()
