"""Sessions with real processes: start, end, and no process that outlives them."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import TypeVar

import pytest
import uvloop
from tests.waiting import eventually

from tenuto.worker import session as session_module
from tenuto.worker import supervisor as program
from tenuto.worker.session import Session, SessionEnd, SpawnError, Supervisor

T = TypeVar("T")

LIMIT = 20.0
ENV = {"PATH": os.defpath}
PYTHON = [sys.executable, "-I", "-S", "-c"]

# Ignores what asks it to end, and starts: a child in its group, one in a session of its own, and
# a daemon without any descriptor that has a child too. Each writes its pid to the report.
NASTY_SIZE = 5
NASTY = """
import os, signal
for name in ("SIGTERM", "SIGHUP", "SIGINT"):
    signal.signal(getattr(signal, name), signal.SIG_IGN)

def stay():
    os.write(3, b"%d\\n" % os.getpid())
    os.closerange(0, 64)
    while True:
        signal.pause()

if os.fork() == 0:
    stay()
if os.fork() == 0:
    os.setsid()
    stay()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.fork()
        stay()
    os._exit(0)
os.wait()
stay()
"""

WORKER = """
import asyncio, sys
from tenuto.worker.session import Supervisor

async def main(python, nasty, size, sessions):
    supervisor = Supervisor()
    running = [
        await supervisor.spawn([python, "-I", "-S", "-c", nasty], cwd=None, env={})
        for _ in range(int(sessions))
    ]
    for session in running:
        for _ in range(int(size)):
            print((await session.report.readline()).decode(), end="", flush=True)
    await running[0].wait()

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture
async def supervisor() -> AsyncIterator[Supervisor]:
    supervisor = Supervisor()
    await supervisor.start()
    yield supervisor
    await soon(supervisor.close())


async def soon(result: Awaitable[T]) -> T:
    """The result, or a failure instead of a test that hangs."""
    return await asyncio.wait_for(result, LIMIT)


async def shell(supervisor: Supervisor, script: str) -> Session:
    return await soon(supervisor.spawn(["sh", "-c", script], cwd=None, env=ENV))


async def python(supervisor: Supervisor, script: str) -> Session:
    return await soon(supervisor.spawn([*PYTHON, script], cwd=None, env=ENV))


async def read_pids(reader: asyncio.StreamReader, count: int) -> list[int]:
    return [int(await soon(reader.readline())) for _ in range(count)]


def parent_of(pid: int) -> int:
    parent = program.parse_stat(Path(f"/proc/{pid}/stat").read_text()).parent
    assert parent > 1, "it escaped its supervisor; a signal to its parent would hit others"
    return parent


def is_gone(pid: int) -> bool:
    try:
        return program.parse_stat(Path(f"/proc/{pid}/stat").read_text()).dead
    except (FileNotFoundError, ProcessLookupError):
        return True


def has_children(pid: int) -> bool:
    return any(process.parent == pid for process in program.list_processes())


def real_path(path: Path) -> str:
    return str(path.resolve())


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


class Watch:
    """Processes that live now, held by descriptors, so that a reused pid cannot deceive."""

    def __init__(self, pids: list[int]) -> None:
        self._fds = [os.pidfd_open(pid) for pid in pids]

    async def all_end(self, within: float) -> None:
        try:
            async with asyncio.timeout(within):
                for fd in self._fds:
                    await self._end(fd)
        finally:
            for fd in self._fds:
                os.close(fd)

    async def _end(self, fd: int) -> None:
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        loop.add_reader(fd, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(fd)


async def test_session_returns_exit_code_and_output(supervisor: Supervisor) -> None:
    session = await shell(supervisor, "echo out; echo err >&2; echo note >&3; exit 7")
    end = await soon(session.wait())
    receipt = {"killed": [], "killed_count": 0, "how": "exited", "remaining": 0}
    assert end == SessionEnd(exit_code=7, signal=None, oom=False, receipt=receipt)
    assert await soon(session.stdout.read()) == b"out\n"
    assert await soon(session.stderr.read()) == b"err\n"
    assert await soon(session.report.read()) == b"note\n"


async def test_command_killed_by_a_signal_reports_it(supervisor: Supervisor) -> None:
    session = await shell(supervisor, "kill -USR1 $$")
    end = await soon(session.wait())
    assert (end.exit_code, end.signal, end.oom) == (None, signal.SIGUSR1, False)


async def test_output_larger_than_every_buffer_is_read(supervisor: Supervisor) -> None:
    session = await shell(supervisor, "head -c 3000000 /dev/zero")
    assert len(await soon(session.stdout.read())) == 3_000_000
    assert (await soon(session.wait())).exit_code == 0


async def test_stdin_is_fed(supervisor: Supervisor) -> None:
    text = os.urandom(1 << 20)
    session = await soon(supervisor.spawn(["cat"], cwd=None, env=ENV, stdin=text))
    assert await soon(session.stdout.read()) == text
    assert (await soon(session.wait())).exit_code == 0


async def test_unread_stdin_does_not_block(supervisor: Supervisor) -> None:
    text = bytes(1 << 20)
    session = await soon(supervisor.spawn(["true"], cwd=None, env=ENV, stdin=text))
    assert (await soon(session.wait())).exit_code == 0


async def test_stdin_is_empty_by_default(supervisor: Supervisor) -> None:
    session = await soon(supervisor.spawn(["cat"], cwd=None, env=ENV))
    assert await soon(session.stdout.read()) == b""


async def test_environment_is_exact(supervisor: Supervisor) -> None:
    env = shutil.which("env")
    assert env is not None
    session = await soon(supervisor.spawn([env], cwd=None, env={"A": "1", "B": "ü=\n"}))
    assert await soon(session.stdout.read()) == "A=1\nB=ü=\n\n".encode()


async def test_large_request_is_sent_whole(supervisor: Supervisor) -> None:
    env = {**ENV, **{f"LARGE_{number}": "x" * 100_000 for number in range(10)}}
    session = await soon(supervisor.spawn(["env"], cwd=None, env=env))
    assert len(await soon(session.stdout.read())) > 1_000_000


async def test_command_runs_in_its_directory(supervisor: Supervisor, tmp_path: Path) -> None:
    session = await soon(supervisor.spawn(["pwd", "-P"], cwd=str(tmp_path), env=ENV))
    assert (await soon(session.stdout.read())).decode().strip() == real_path(tmp_path)


async def test_command_has_four_descriptors(supervisor: Supervisor) -> None:
    script = """
import os
def is_open(fd):
    try:
        return bool(os.fstat(fd))
    except OSError:
        return False
print([fd for fd in range(256) if is_open(fd)])
"""
    others = [await shell(supervisor, "echo; exec sleep 60") for _ in range(3)]
    for other in others:
        await soon(other.stdout.readline())
    argv = [*PYTHON, script]
    fed = await soon(supervisor.spawn(argv, cwd=None, env=ENV, stdin=b"text"))
    unfed = await soon(supervisor.spawn(argv, cwd=None, env=ENV))
    for session in (fed, unfed):
        assert await soon(session.stdout.read()) == b"[0, 1, 2, 3]\n"


async def test_command_ignores_and_blocks_no_signal(supervisor: Supervisor) -> None:
    session = await shell(supervisor, "exec grep -E 'SigBlk|SigIgn' /proc/self/status")
    masks = (await soon(session.stdout.read())).split()[1::2]
    # 32 and 33 belong to the C library, which lets no program set them.
    own = sum(1 << (number - 1) for number in signal.valid_signals())
    assert [int(mask, 16) & own for mask in masks] == [0, 0]


async def test_command_leads_its_own_session(supervisor: Supervisor) -> None:
    session = await python(supervisor, "import os; print(os.getsid(0), os.getpgrp(), os.getpid())")
    assert (await soon(session.stdout.read())).split() == [str(session.pid).encode()] * 3


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["no-such-command"], "not_found"),
        (["/no/such/command"], "not_found"),
        (["/dev/null"], "not_executable"),
        (["/"], "not_executable"),
        (["a\0b"], "spawn_failed"),
        ([], "spawn_failed"),
        (["true", "x" * 3_000_000], "too_large"),
    ],
)
async def test_command_that_cannot_start_is_reported(
    supervisor: Supervisor, argv: list[str], code: str
) -> None:
    with pytest.raises(SpawnError) as caught:
        await soon(supervisor.spawn(argv, cwd=None, env=ENV))
    assert caught.value.code == code
    assert caught.value.message


@pytest.mark.parametrize("cwd", ["/no/such/directory", "/dev/null", "a\0b"])
async def test_missing_directory_is_reported(supervisor: Supervisor, cwd: str) -> None:
    with pytest.raises(SpawnError) as caught:
        await soon(supervisor.spawn(["true"], cwd=cwd, env=ENV))
    assert caught.value.code == "bad_cwd"


async def test_refused_commands_leave_no_descriptor(supervisor: Supervisor) -> None:
    before = open_descriptors()
    for _ in range(5):
        with pytest.raises(SpawnError):
            await soon(supervisor.spawn(["no-such-command"], cwd=None, env=ENV, stdin=b"text"))
    await asyncio.sleep(0)
    assert open_descriptors() == before


async def test_ended_sessions_leave_no_descriptor(supervisor: Supervisor) -> None:
    before = open_descriptors()
    for _ in range(5):
        session = await soon(supervisor.spawn(["cat"], cwd=None, env=ENV, stdin=b"text"))
        pipes = (session.stdout, session.stderr, session.report)
        await soon(asyncio.gather(session.wait(), *(pipe.read() for pipe in pipes)))
    assert session.is_drained
    await asyncio.sleep(0)
    assert open_descriptors() == before


async def test_ended_sessions_are_dropped(supervisor: Supervisor) -> None:
    for _ in range(5):
        session = await shell(supervisor, "true")
        pipes = (session.stdout, session.stderr, session.report)
        await soon(asyncio.gather(session.wait(), *(pipe.read() for pipe in pipes)))
    assert supervisor._sessions == {session}


async def test_kill_of_a_command_that_obeys_sigterm(supervisor: Supervisor) -> None:
    session = await shell(supervisor, "trap 'echo bye; exit 3' TERM; echo; while :; do wait; done")
    await soon(session.stdout.readline())
    end = await soon(session.kill(LIMIT))
    assert (end.exit_code, end.receipt["how"], end.receipt["remaining"]) == (3, "SIGTERM", 0)
    assert session.pid in [killed["pid"] for killed in end.receipt["killed"]]
    assert await soon(session.stdout.read()) == b"bye\n"


async def test_kill_lets_a_signal_handler_start_helpers(supervisor: Supervisor) -> None:
    helper = f"{sys.executable} -I -S -c 'raise SystemExit(7)'"
    session = await shell(supervisor, f'trap "{helper}; exit \\$?" TERM; echo; while :; do :; done')
    await soon(session.stdout.readline())
    end = await soon(session.kill(LIMIT))
    assert (end.exit_code, end.receipt["how"]) == (7, "SIGTERM")


async def test_kill_of_a_command_that_ignores_sigterm(supervisor: Supervisor) -> None:
    session = await shell(supervisor, "trap '' TERM; echo; while :; do sleep 60; done")
    await soon(session.stdout.readline())
    end = await soon(session.kill(0.05))
    assert (end.exit_code, end.signal, end.oom) == (None, signal.SIGKILL, False)
    assert (end.receipt["how"], end.receipt["remaining"]) == ("SIGKILL", 0)


async def test_kill_without_grace(supervisor: Supervisor) -> None:
    session = await shell(supervisor, "exec sleep 60")
    end = await soon(session.kill(0))
    assert (end.signal, end.receipt["how"]) == (signal.SIGKILL, "SIGKILL")


async def test_second_kill_shortens_the_grace(supervisor: Supervisor) -> None:
    session = await shell(supervisor, "trap '' TERM; echo; while :; do sleep 60; done")
    await soon(session.stdout.readline())
    patient = asyncio.create_task(session.kill(3600))
    await asyncio.sleep(0)
    ends = await soon(asyncio.gather(session.kill(0), session.wait(), patient))
    assert [end.receipt["how"] for end in ends] == ["SIGKILL"] * 3
    assert await soon(session.kill(1)) == ends[0]


async def test_kill_ends_the_whole_tree(supervisor: Supervisor) -> None:
    session = await python(supervisor, NASTY)
    pids = await read_pids(session.report, NASTY_SIZE)
    end = await soon(session.kill(0.05))
    assert all(is_gone(pid) for pid in pids)
    assert {killed["pid"] for killed in end.receipt["killed"]} == set(pids)
    assert end.receipt["killed_count"] == NASTY_SIZE
    assert (end.receipt["how"], end.receipt["remaining"]) == ("SIGKILL", 0)


async def test_daemon_ends_with_its_main_process(supervisor: Supervisor) -> None:
    main = f"""
import os
reader, writer = os.pipe()
if os.fork():
    pids = b""
    while pids.count(b"\\n") < {NASTY_SIZE}:
        pids += os.read(reader, 64)
    os.write(3, pids)
    os._exit(5)
os.dup2(writer, 3)
"""
    session = await python(supervisor, main + NASTY)
    end = await soon(session.wait())
    pids = [int(line) for line in (await soon(session.report.read())).split()]
    assert all(is_gone(pid) for pid in pids)
    assert (end.exit_code, end.receipt["how"], end.receipt["remaining"]) == (5, "exited", 0)
    assert {killed["pid"] for killed in end.receipt["killed"]} == set(pids)


async def test_process_tree_that_keeps_forking_is_killed(supervisor: Supervisor) -> None:
    runner = "import os\nos.write(3, b'.')\nwhile True:\n    if os.fork():\n        os._exit(0)\n"
    session = await python(
        supervisor, f"import os, signal\nif os.fork():\n    signal.pause()\n{runner}"
    )
    await soon(session.report.readexactly(1))
    end = await soon(session.kill(0))
    assert end.receipt["remaining"] == 0


async def test_fifty_sessions_run_at_once(supervisor: Supervisor) -> None:
    async def run(number: int) -> tuple[int | None, bytes]:
        session = await shell(supervisor, f"echo {number}; exit {number}")
        text = await session.stdout.read()
        return (await session.wait()).exit_code, text

    results = await soon(asyncio.gather(*(run(number) for number in range(50))))
    assert results == [(number, f"{number}\n".encode()) for number in range(50)]


async def test_kill_of_one_session_leaves_the_others(supervisor: Supervisor) -> None:
    first, second = [await shell(supervisor, "echo; cat; exec sleep 60") for _ in range(2)]
    await soon(second.stdout.readline())
    await soon(first.kill(0))
    assert not is_gone(second.pid)
    assert (await soon(second.kill(LIMIT))).receipt["how"] == "SIGTERM"


async def test_close_ends_every_session() -> None:
    supervisor = Supervisor()
    session = await python(supervisor, NASTY)
    pids = await read_pids(session.report, NASTY_SIZE)
    watch = Watch([parent_of(session.pid), parent_of(parent_of(session.pid))])
    await soon(supervisor.close())
    assert all(is_gone(pid) for pid in pids)
    await watch.all_end(within=LIMIT)
    assert (await session.wait()).receipt["how"] == "SIGKILL"
    with pytest.raises(SpawnError):
        await supervisor.spawn(["true"], cwd=None, env=ENV)


async def test_cancelled_spawn_leaves_nothing(supervisor: Supervisor) -> None:
    marker = await shell(supervisor, "exec sleep 60")
    zygote = parent_of(parent_of(marker.pid))
    before = open_descriptors()
    for turns in range(25):
        spawn = asyncio.create_task(
            supervisor.spawn(["sleep", "60"], cwd=None, env=ENV, stdin=b"text")
        )
        for _ in range(turns):
            await asyncio.sleep(0)
        spawn.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await (await spawn).kill(0)
    await soon(marker.kill(0))
    await eventually(lambda: not has_children(zygote))
    await asyncio.sleep(0)
    assert open_descriptors() <= before


async def test_worker_lost_during_a_start_leaves_nothing() -> None:
    zygote = await soon(session_module._start_zygote())
    request = {"argv": ["sleep", "60"], "cwd": None, "env": ENV}
    with contextlib.ExitStack() as stack:
        wires = await session_module._send_session_fds(stack, zygote, has_stdin=False)
        assert wires is not None
        assert await asyncio.to_thread(wires.control.recv, 100) == b'{"ready": true}\n'
        wires.control.sendall(json.dumps(request).encode() + b"\n")
        wires.control.close()
        assert await soon(asyncio.to_thread(wires.report.read)) == b""
    zygote.socket.close()
    await soon(zygote.process.wait())


async def start_worker(sessions: int) -> tuple[asyncio.subprocess.Process, list[int]]:
    """A worker process and the pids of the nasty trees it runs."""
    worker = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", WORKER, sys.executable, NASTY, str(NASTY_SIZE), str(sessions)),
        env={**ENV, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=asyncio.subprocess.PIPE,
    )
    assert worker.stdout is not None
    return worker, await read_pids(worker.stdout, NASTY_SIZE * sessions)


@pytest.mark.parametrize("sessions", [1, 10])
async def test_killed_worker_ends_its_process_trees(sessions: int) -> None:
    worker, pids = await start_worker(sessions)
    supervisors = {parent_of(pid) for pid in pids} - set(pids)
    zygote = parent_of(next(iter(supervisors)))
    watch = Watch([*pids, *supervisors, zygote])
    worker.kill()
    await watch.all_end(within=1.0)
    await soon(worker.wait())


async def test_killed_worker_without_zygote_ends_its_process_trees() -> None:
    worker, pids = await start_worker(sessions=1)
    supervisor = next(iter({parent_of(pid) for pid in pids} - set(pids)))
    watch = Watch([*pids, supervisor])
    os.kill(parent_of(supervisor), signal.SIGKILL)
    worker.kill()
    await watch.all_end(within=1.0)
    await soon(worker.wait())


async def test_killed_worker_with_a_stopped_supervisor_ends_its_process_trees() -> None:
    worker, pids = await start_worker(sessions=1)
    supervisor = next(iter({parent_of(pid) for pid in pids} - set(pids)))
    watch = Watch([*pids, supervisor])
    os.kill(supervisor, signal.SIGSTOP)
    worker.kill()
    await watch.all_end(within=1.0)
    await soon(worker.wait())


async def test_killed_zygote_is_replaced(supervisor: Supervisor) -> None:
    session = await python(supervisor, NASTY)
    pids = await read_pids(session.report, NASTY_SIZE)
    os.kill(parent_of(parent_of(session.pid)), signal.SIGKILL)
    second = await shell(supervisor, "exit 4")
    assert (await soon(second.wait())).exit_code == 4
    assert not any(is_gone(pid) for pid in pids)
    end = await soon(session.kill(0))
    assert end.receipt["killed_count"] == NASTY_SIZE
    assert all(is_gone(pid) for pid in pids)


async def test_killed_session_supervisor_ends_its_process_tree(supervisor: Supervisor) -> None:
    other = await shell(supervisor, "exec sleep 60")
    session = await python(supervisor, NASTY)
    pids = await read_pids(session.report, NASTY_SIZE)
    watch = Watch(pids)
    os.kill(parent_of(session.pid), signal.SIGKILL)
    end = await soon(session.wait())
    assert (end.exit_code, end.signal, end.receipt["how"]) == (None, signal.SIGKILL, "lost")
    await watch.all_end(within=1.0)
    assert not is_gone(other.pid)
    assert await soon(session.kill(1)) == end


async def test_sigterm_of_a_service_manager_leaves_the_supervisors(supervisor: Supervisor) -> None:
    session = await shell(supervisor, "exec sleep 60")
    for pid in (parent_of(session.pid), parent_of(parent_of(session.pid))):
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(pid, signum)
    assert (await soon((await shell(supervisor, "exit 4")).wait())).exit_code == 4
    assert (await soon(session.kill(LIMIT))).receipt["how"] == "SIGTERM"


async def test_program_that_does_not_start_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "PROGRAM", Path(os.devnull))
    supervisor = Supervisor()
    with pytest.raises(SpawnError, match="did not start"):
        await soon(supervisor.start())
    await supervisor.close()


def test_sessions_run_under_uvloop() -> None:
    async def scenario(supervisor: Supervisor) -> None:
        text = bytes(1 << 20)
        cat = await soon(supervisor.spawn(["cat"], cwd=None, env=ENV, stdin=text))
        pipes = (cat.stdout, cat.stderr, cat.report)
        assert await soon(asyncio.gather(*(pipe.read() for pipe in pipes))) == [text, b"", b""]
        assert (await soon(cat.wait())).exit_code == 0
        assert cat.is_drained
        nasty = await python(supervisor, NASTY)
        pids = await read_pids(nasty.report, NASTY_SIZE)
        assert (await soon(nasty.kill(0))).receipt["killed_count"] == NASTY_SIZE
        assert all(is_gone(pid) for pid in pids)
        with pytest.raises(SpawnError):
            await soon(supervisor.spawn(["no-such-command"], cwd=None, env=ENV, stdin=text))
        unread = await soon(supervisor.spawn(["true"], cwd=None, env=ENV, stdin=text))
        assert (await soon(unread.wait())).exit_code == 0

    async def main() -> None:
        async with contextlib.AsyncExitStack() as stack:
            supervisor = Supervisor()
            stack.push_async_callback(supervisor.close)
            await scenario(supervisor)

    opened: list[int] = []
    for _ in range(2):  # the first one also opens what uvloop keeps for good
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())
        opened.append(open_descriptors())
    assert opened[0] == opened[1]


def test_process_name_can_have_any_character() -> None:
    process = program.parse_stat("12 (a) R (1) b) S 7 11 10 0")
    assert process == program.Process(12, 7, 11, "a) R (1) b", dead=False)
