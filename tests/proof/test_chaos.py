"""`orchestrate chaos`: short runs hold, and faults that never struck are reported.

Longer ones by hand: `orchestrate chaos --minutes 10 --database postgresql:`.
"""

import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.proof.crash.system import PROGRAM
from tests.services.postgres import alive
from tests.waiting import eventually_sync

from tenuto.chaos.faults import POINTS as STRUCK
from tenuto.chaos.plan import ChaosPlan, SeededRandom
from tenuto.chaos.recorder import Recorder
from tenuto.chaos.report import Report, format_lines
from tenuto.chaos.run import run_plan
from tenuto.crash_points import POINTS
from tenuto.model.errors import Invalid

HURRY = {"kill": 1.5, "stop": 1.0, "crash": 2.0, "cut": 2.0, "swallow": 1.0, "restart": 4.0}
NONE_OF = "acknowledged tasks lost|tasks made twice|stale commits accepted|illegal transitions"


def hold(report: Report) -> None:
    assert report.holds, "\n".join(format_lines(report))
    assert set(NONE_OF.split("|")) < set(report.verdict.violations)
    # A client that is killed between the commit and its note leaves a task that nobody heard of.
    assert 0 < report.verdict.info["acknowledged"] <= report.verdict.info["tasks"]


def chaos(*words: str) -> subprocess.CompletedProcess[str]:
    command = [str(PROGRAM), "chaos", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def test_run_on_sqlite_holds_without_a_leader() -> None:
    done = chaos("--tasks", "150", "--no-leader", "--seed", "3", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    reported: dict[str, Any] = msgspec.json.decode(done.stdout)
    assert reported["holds"]
    assert reported["leader"] is False
    assert reported["verdict"]["told"]["acknowledged"] >= 150
    assert set(reported["verdict"]["breaches"].values()) == {0}
    assert min(reported["faults"][kind] for kind in ("kill", "stop", "crash")) > 0
    assert "acknowledged" in done.stderr


def test_impossible_fault_is_refused() -> None:
    with pytest.raises(Invalid, match="restart"):
        run_plan(ChaosPlan(faults=("restart",)), lambda _: None)
    refused = chaos("--faults", "flood")
    assert refused.returncode == 2
    assert "fault flood is not possible" in refused.stderr


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder with a short name: sockets of one with a long name would be elsewhere."""
    with tempfile.TemporaryDirectory(prefix="proof-") as folder:
        yield Path(folder)


def test_ctrl_c_leaves_nothing(short_folder: Path) -> None:
    running = subprocess.Popen(
        [str(PROGRAM), "chaos", "--minutes", "5"],
        env={"PATH": "/usr/bin:/bin", "TMPDIR": str(short_folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )

    def children() -> list[int]:
        text = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text()
        return [int(pid) for pid in text.split()]

    def busy() -> bool:
        records = [*short_folder.glob("tenuto-chaos-*/record")]
        return bool(records and records[0].stat().st_size)

    try:
        eventually_sync(busy, 60)
        started = children()
        assert started
        running.send_signal(signal.SIGINT)
        assert running.wait(60) == 130
    finally:
        running.kill()
        running.communicate()
    eventually_sync(lambda: not any(alive(pid) for pid in started), 20)
    assert [*short_folder.iterdir()] == []


def test_recorder_keeps_whole_lines_and_contradictions(tmp_path: Path) -> None:
    path = tmp_path / "record"
    path.write_text("ack c.1.short A\nstart A 1 0\nsave A 1 2\nstart A 2 1\nend A 2\nack c.1.sh")
    record = Recorder(path).read()
    assert record.acknowledged == {"c.1.short": "A"}
    assert record.starts["A"] == 2
    assert record.ended == {("A", 2)}
    assert record.lost_checkpoints == ["A"]
    with path.open("a") as file:
        file.write("ort B\n")
    assert record.read().conflicting_ids == ["c.1.short"]


def test_late_start_of_a_zombie_is_no_lost_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "record"
    path.write_text("save T 1 1\nstart T 3 1\nsave T 3 2\nstart T 2 1\nstart T 4 2\n")
    assert Recorder(path).read().lost_checkpoints == []
    path.write_text("save T 1 1\nstart T 3 1\nsave T 3 2\nstart T 4 1\n")
    assert Recorder(path).read().lost_checkpoints == ["T"]


def test_seed_determines_the_random_numbers() -> None:
    first, second = SeededRandom(7, "kill"), SeededRandom(7, "kill")
    rolls = [first.roll() for _ in range(100)]
    assert rolls == [second.roll() for _ in range(100)]
    assert rolls != [SeededRandom(8, "kill").roll() for _ in range(100)]
    assert len(set(rolls)) == 100
    assert all(0 <= roll < 1 for roll in rolls)


def test_crash_points_have_the_names_of_the_program() -> None:
    assert {point for points in STRUCK.values() for point in points} <= POINTS
