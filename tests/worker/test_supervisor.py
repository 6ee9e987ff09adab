"""Decisions of the supervisor, with a manual clock and a process tree that records signals."""

import os
import signal
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tenuto.worker import supervisor
from tenuto.worker.supervisor import Process, SessionSupervisor, Zygote


class Tree:
    """A tree that lives until it is told otherwise."""

    exact = True

    def __init__(self) -> None:
        self.status: int | None = None
        self.sent: list[int] = []
        self.killed: dict[int, str] = {}

    def signal(self, signum: int) -> None:
        self.sent.append(signum)

    def signal_group(self, signum: int) -> None:
        self.sent.append(signum)


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(supervisor, "time", clock)
    return clock


@pytest.fixture
def tree() -> Tree:
    return Tree()


def session_of(tree: Any) -> SessionSupervisor:
    return SessionSupervisor(tree, SimpleNamespace(is_open=True), -1)  # type: ignore[arg-type]


def press(session: SessionSupervisor, clock: Clock, seconds: float) -> None:
    clock.now += seconds
    session._kill_if_due(clock.now)


@pytest.mark.parametrize(("graces", "ends"), [((5, 60), 5), ((60, 5), 5), ((5,), 5)], ids=str)
def test_shortest_grace_applies(
    tree: Tree, clock: Clock, graces: tuple[float, ...], ends: float
) -> None:
    session = session_of(tree)
    for grace in graces:
        session._request_kill(grace)
    assert tree.sent == [signal.SIGTERM]
    press(session, clock, ends - 0.1)
    assert tree.sent == [signal.SIGTERM]
    press(session, clock, 0.2)
    assert tree.sent == [signal.SIGTERM, signal.SIGKILL]


@pytest.mark.parametrize(
    ("asked", "status", "oom"),
    [
        (None, signal.SIGKILL, True),
        (None, 128 + signal.SIGKILL << 8, True),
        (None, signal.SIGTERM, False),
        (0.0, signal.SIGKILL, False),
        (60.0, signal.SIGKILL, True),
    ],
)
def test_only_a_kill_by_the_kernel_is_out_of_memory(
    tree: Tree,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    asked: float | None,
    status: int,
    oom: bool,
) -> None:
    """The cgroup may count the kill of another process while we kill ours."""
    counted = iter([7, 8])
    monkeypatch.setattr(supervisor, "count_oom_kills", lambda: next(counted))
    session = session_of(tree)
    if asked is not None:
        session._request_kill(asked)
        press(session, clock, 0)
    tree.status = status
    assert session.result(gone=True)["oom"] is oom


def test_leftover_processes_are_not_reported_as_killed_on_request(tree: Tree, clock: Clock) -> None:
    session = session_of(tree)
    tree.status = 0
    session._kill_at = clock.now
    session._request_kill(0.0)
    press(session, clock, 0.1)
    assert tree.sent == [signal.SIGKILL]
    assert session.result(gone=True)["receipt"]["how"] == "exited"


def test_lost_worker_leaves_its_process_trees_no_grace(
    tree: Tree, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = session_of(tree)
    control = SimpleNamespace(is_open=True)

    def receive() -> list[Any]:
        control.is_open = False
        return []

    control.receive = receive
    session._control = control  # type: ignore[assignment]
    monkeypatch.setattr(supervisor, "wait_for", lambda sources, *_: sources)
    session._request_kill(60.0)
    session._wait_and_handle_kills(None)
    press(session, clock, 1)
    assert tree.sent == [signal.SIGTERM, signal.SIGKILL, signal.SIGKILL]


def process(pid: int, group: int, *, dead: bool = False) -> Process:
    return Process(pid, 1, group, f"p{pid}", dead)


def test_processes_are_signalled_by_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that forks meanwhile is hit as well; groups that hold others are spared."""
    sent: list[int] = []

    def send(pid: int, signum: int) -> bool:
        assert signum == signal.SIGKILL
        sent.append(pid)
        return pid != -300

    monkeypatch.setattr(supervisor, "send_signal", send)
    own = os.getpgrp()
    matches = [
        process(100, 100),
        process(101, 100),
        process(200, own),
        process(201, 0),
        process(202, 1),
        process(300, 300),
        process(400, 400, dead=True),
    ]
    reached = supervisor.signal_all(matches, signal.SIGKILL)
    assert sorted(sent) == [-400, -300, -100, 200, 201, 202]
    assert [item.pid for item in reached] == [100, 101, 200, 201, 202]


@pytest.fixture
def zygote(monkeypatch: pytest.MonkeyPatch) -> Iterator[Zygote]:
    monkeypatch.setattr(supervisor, "become_subreaper", lambda: True)
    monkeypatch.setattr(supervisor, "open_child_events", lambda: -1)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Zygote(ours)


def test_stray_processes_are_searched_until_a_second_scan_finds_none(
    zygote: Zygote, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A walk can miss a process whose parent ends meanwhile."""
    walks = iter([[], [process(7, 7)], []])
    killed: list[Process] = []
    monkeypatch.setattr(supervisor, "descendants", lambda exempt: next(walks))
    monkeypatch.setattr(supervisor, "signal_all", lambda processes, _: killed.extend(processes))
    assert zygote._kill_strays_if_due() is None
    zygote._on_worker_gone()
    pauses = []
    while (left := zygote._kill_strays_if_due()) is not None:
        pauses.append(left)
        clock.now += left
    assert [item.pid for item in killed] == [7]
    assert len(pauses) == 2
    assert next(walks, None) is None


def test_only_a_failed_supervisor_leaves_stray_processes(
    zygote: Zygote, monkeypatch: pytest.MonkeyPatch
) -> None:
    zygote._supervisors = {10, 11, 12}
    ended = iter([({10: 0, 99: 9}, False), ({11: 256}, False), ({}, False)])
    monkeypatch.setattr(supervisor, "reap", lambda: next(ended))
    zygote._reap()
    assert (zygote._stray_backoff, zygote._supervisors) == (None, {11, 12})
    zygote._reap()
    assert zygote._stray_backoff is not None
    assert zygote._supervisors == {12}
