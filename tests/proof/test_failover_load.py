"""What judges a failover, on outcomes made up; the failovers are in long/failover.py."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.proof.failover.load import LONGEST_GAP_S, TASKS, Outcome, TimedRecord, Witness
from tests.proof.failover.submitter import task
from tests.services import network, patroni
from tests.services.postgres import PostgresServer
from tests.services.standby import frozen
from tests.waiting import eventually

from tenuto.chaos.checker import Verdict

KINDS = ("acknowledged tasks lost", "tasks made twice", "stale commits accepted", "tasks stuck")
FINE = Outcome(
    Verdict(
        {kind: [] for kind in KINDS},
        {"tasks": TASKS, "executions doubled": 3, "leases taken over": 5},
    ),
    TASKS,
    2.04,
    0,
    [],
)


def test_gap_is_the_longest_time_between_two_acknowledgements(tmp_path: Path) -> None:
    path = tmp_path / "record"
    path.write_text("ack s.0.short A\nat 10.0\nack s.1.short B\nat 31.5\nack s.2.short C\nat 12\n")
    record = TimedRecord(path)
    record.read()
    assert len(record.acknowledged) == 3
    assert record.gap() == 19.5


def test_outcome_is_a_row_of_the_table() -> None:
    FINE.check()
    assert (
        FINE.line("dies", 16.24) == f"| dies | {TASKS:,} | 16.2 s | 2.0 s | 0 | 0 | 0 | 3 | 0 | 5 |"
    )


@pytest.mark.parametrize(
    "change",
    [
        {"gap_s": LONGEST_GAP_S + 0.1},
        {"acknowledged": TASKS - 1},
        {"never_ran": 1},
        {"ended": ["worker-0.log: exit 1"]},
        {"verdict": Verdict({KINDS[0]: ["submitter.7.short"]}, {"tasks": TASKS})},
        {"verdict": Verdict({}, {"tasks": TASKS + 1})},
    ],
)
def test_outcome_with_an_error_fails(change: dict[str, Any]) -> None:
    with pytest.raises(AssertionError):
        msgspec.structs.replace(FINE, **change).check()


def test_outage_without_standbys_stops_acknowledgements() -> None:
    for gap_s, fine in ((39.0, False), (44.0, True), (40 + LONGEST_GAP_S + 1, False)):
        with nullcontext() if fine else pytest.raises(AssertionError):
            msgspec.structs.replace(FINE, gap_s=gap_s).check(40.0)


def test_task_number_always_gives_the_same_task() -> None:
    assert [task(20), task(10), task(3)] == [task(20), task(10), task(3)]
    assert [task(n).task_type for n in (20, 10, 3)] == ["long", "saving", "short"]
    assert [task(n).max_attempts for n in (20, 10, 3, 5)] == [20, 20, 20, 1]


async def test_witness_of_a_frozen_machine_is_cut_and_continues() -> None:
    with PostgresServer(fast=True) as server:
        async with Witness(server.url("postgres")).watch() as witness:
            await eventually(lambda: witness._acknowledged)
            assert witness.refused == 0
            with frozen(server):
                await eventually(lambda: witness.refused > 0)
            existing = len(witness._acknowledged)
            await eventually(lambda: len(witness._acknowledged) > existing)
        assert await witness.lost(server.url("postgres")) == set()


@pytest.mark.parametrize(("leader_s", "fine"), [(None, True), (12.0, False)])
async def test_witness_that_was_never_refused_is_invalid(
    leader_s: float | None, fine: bool
) -> None:
    witness = Witness("")
    for refused in (0, 1):
        witness.refused = refused
        with nullcontext() if fine or refused else pytest.raises(AssertionError):
            witness.check(leader_s)


def test_missing_package_is_named(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"AREA=failover` installs.*etcd-server"):
        patroni.packages(tmp_path)


def test_missing_ip_command_names_its_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="install the package iproute2"):
        network.ip("netns", "list")
