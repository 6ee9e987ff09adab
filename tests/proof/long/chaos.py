"""Chaos: a run under every fault holds, and a run finds each planted fault."""

import os
import signal
import subprocess
from typing import Any

import pytest
from tests.chaos.test_signals import leaves_nothing
from tests.proof.crash.system import ROOT
from tests.proof.planted_chaos import PLANTS
from tests.proof.test_chaos import HURRY, hold
from tests.services.postgres import PostgresServer

from tenuto.chaos.plan import FAULT_INTERVALS_S, OWN_SERVER_FAULTS, ChaosPlan
from tenuto.chaos.report import format_lines, to_json
from tenuto.chaos.run import run_plan

WRONG = {
    "complete_guarded_by_owner": "stale commits accepted",
    "expiry_not_audited": "audit mismatches",
    "reaper_without_a_cap": "tries above the limit|tasks stuck|tasks that ended otherwise",
    "acknowledged_before_the_commit": "acknowledged tasks lost",
}
UNDER: dict[str, dict[str, Any]] = {
    "complete_guarded_by_owner": {
        "faults": ("stop",),
        "target_kinds": ("worker",),
        "mixture": {"long": 1},
        "tasks": 250,
        "rate": 15.0,
    },
    "expiry_not_audited": {
        "faults": ("kill",),
        "target_kinds": ("worker",),
        "mixture": {"long": 1},
    },
    "reaper_without_a_cap": {"faults": ("kill",), "mixture": {"poison": 1, "short": 9}},
    "acknowledged_before_the_commit": {
        "faults": ("kill",),
        "target_kinds": ("client",),
        "mixture": {"short": 1},
    },
}


def test_run_on_a_private_postgres_holds_under_every_fault() -> None:
    plan = ChaosPlan(
        tasks=150, database="postgresql:", seed=5, fault_intervals_s=FAULT_INTERVALS_S | HURRY
    )
    report = run_plan(plan, lambda _: None)
    hold(report)
    assert set(report.faults) == set(OWN_SERVER_FAULTS)
    assert report.verdict.info["leases taken over"] > 0


def test_run_on_the_users_server_uses_its_own_database(postgres: PostgresServer) -> None:
    url = postgres.create_database()
    plan = ChaosPlan(
        tasks=40,
        database=url,
        faults=("cut", "swallow"),
        fault_intervals_s=HURRY,
        mixture={"short": 1},
    )
    report = run_plan(plan, lambda _: None)
    hold(report)
    listed = postgres_names(postgres)
    assert not [name for name in listed if name.startswith("tenuto_chaos")]
    postgres.drop_database(url)


def postgres_names(server: PostgresServer) -> list[str]:
    command = [str(server._binaries / "psql"), "-XAt", "-d", server.url("postgres")]
    asked = [*command, "-c", "select datname from pg_database"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()


def test_run_without_a_planned_fault_is_invalid() -> None:
    plan = ChaosPlan(
        minutes=0.05, faults=("stop",), fault_intervals_s={"stop": 1000.0}, mixture={"short": 1}
    )
    report = run_plan(plan, lambda _: None)
    assert report.verdict.holds
    assert not report.holds
    assert report.missing == ["stop"]
    assert "INVALID: never happened: stop" in format_lines(report)
    assert to_json(report)["holds"] is False


def test_every_planted_fault_is_covered() -> None:
    assert set(PLANTS) == set(WRONG) == set(UNDER)


@pytest.mark.parametrize("name", PLANTS)
def test_planted_chaos_fault_is_detected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    options: dict[str, Any] = {
        "tasks": 60,
        "fault_intervals_s": HURRY,
        "settle_timeout_s": 8.0,
    } | UNDER[name]
    staff = {"worker": 3, "coordinator": 1, "client": 1}
    program = ("tests.proof.planted_chaos", name)
    for seed in (1, 2, 3):  # faults strike by chance: a run may miss what the next one meets
        plan = ChaosPlan(program=program, process_counts=staff, seed=seed, **options)
        if not (report := run_plan(plan, lambda _: None)).holds:
            break
    assert not report.holds
    matches = [kind for kind, cases in report.verdict.violations.items() if cases]
    assert set(matches) & set(WRONG[name].split("|")), "\n".join(format_lines(report))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("ignored", [False, True], ids=["", "in the background of a script"])
def test_signal_leaves_nothing(number: signal.Signals, ignored: bool) -> None:
    leaves_nothing(number, ignored=ignored)
