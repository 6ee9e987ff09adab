"""`orchestrate chaos` that is ended from outside leaves neither processes nor files."""

import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from tests.cli.orchestrate import PATIENCE, PROGRAM
from tests.services.postgres import alive
from tests.waiting import eventually_sync

from tenuto.cli.signals import as_ctrl_c


@pytest.fixture
def place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        yield Path(folder)


def state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _set_signals(*, ignored: bool) -> None:
    """Whatever the tests inherited, as `nohup` has SIGHUP ignored."""
    signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("ignored", [False, True], ids=["", "in the background of a script"])
def test_a_signal_leaves_nothing(place: Path, number: signal.Signals, ignored: bool) -> None:
    running = subprocess.Popen(
        [PROGRAM, "chaos", "--minutes", "5", "--faults", "stop"],
        env={"PATH": os.defpath, "TMPDIR": str(place)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=partial(_set_signals, ignored=ignored),  # noqa: PLW1509  two calls into the kernel
    )

    def children() -> list[int]:
        text = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text()
        return [int(pid) for pid in text.split()]

    try:
        eventually_sync(lambda: any(state_of(pid) == "T" for pid in children()), PATIENCE)
        started = children()
        running.send_signal(number)
        assert running.wait(PATIENCE) == 130
    finally:
        running.kill()
        running.wait()
    eventually_sync(lambda: not any(alive(pid) for pid in started), 20)
    assert [*place.iterdir()] == []


def test_what_is_ignored_stays_so_and_all_is_as_before() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with as_ctrl_c():
            signal.raise_signal(signal.SIGHUP)
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)
