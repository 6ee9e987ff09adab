"""`orchestrate chaos` that is ended from outside leaves neither processes nor files."""

import os
import signal
import subprocess
import tempfile
from functools import partial
from pathlib import Path

import pytest
from tests.cli.orchestrate import PROGRAM, WAIT_S
from tests.services.postgres import alive
from tests.waiting import eventually_sync

from tenuto.cli.signals import terminate_like_ctrl_c


def state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _set_signals(*, ignored: bool) -> None:
    """Resets signals that the tests inherited as ignored, for example SIGHUP by `nohup`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def test_signal_leaves_no_process_and_no_file() -> None:
    """`make proof AREA=chaos` tries another signal, and one in the background of a script."""
    leaves_nothing(signal.SIGTERM, ignored=False)


def leaves_nothing(number: signal.Signals, *, ignored: bool) -> None:
    """Run a chaos run that the signal ends, with SIGINT `ignored` as by a script or not."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        _end_by(number, Path(folder), ignored=ignored)


def _end_by(number: signal.Signals, position: Path, *, ignored: bool) -> None:
    running = subprocess.Popen(
        [PROGRAM, "chaos", "--minutes", "5", "--faults", "stop"],
        env={"PATH": os.defpath, "TMPDIR": str(position)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=partial(_set_signals, ignored=ignored),  # noqa: PLW1509  two calls into the kernel
    )

    def children() -> list[int]:
        text = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text()
        return [int(pid) for pid in text.split()]

    try:
        eventually_sync(lambda: any(state_of(pid) == "T" for pid in children()), WAIT_S)
        started = children()
        running.send_signal(number)
        assert running.wait(WAIT_S) == 130
    finally:
        running.kill()
        running.wait()
    eventually_sync(lambda: not any(alive(pid) for pid in started), 20)
    assert [*position.iterdir()] == []


def test_ignored_signal_stays_ignored_and_handlers_are_restored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with terminate_like_ctrl_c():
            signal.raise_signal(signal.SIGHUP)
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)
