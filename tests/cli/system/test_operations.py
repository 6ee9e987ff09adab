"""Operator commands: doctor, db, coordinator and worker, on both kinds of database."""

import pytest
from tests.cli.orchestrate import Orchestrate

from tenuto.cli.system.doctor import _check_standby
from tenuto.store import schema


def checks(cli: Orchestrate, *words: str) -> dict[str, tuple[str, str]]:
    import json

    reported = json.loads(cli("doctor", "--json", *words).out)["checks"]
    return {check["name"]: (check["status"], check["detail"]) for check in reported}


def test_doctor_describes_an_embedded_database(cli: Orchestrate) -> None:
    cli.ok("task", "create", "--name", "x")
    result = checks(cli)
    names = "python supervision sqlite disk database schema durability clock coordinator workers"
    assert list(result) == names.split()
    assert result["durability"] == (
        "ok",
        "journal=wal, synchronous=FULL: acknowledged writes are durable",
    )
    assert result["coordinator"][0] == result["workers"][0] == "warn"
    assert cli.ok("doctor").startswith("CHECK        STATUS  DETAIL\n")


def test_database_server_is_migrated_by_command(cli: Orchestrate, postgres_url: str) -> None:
    where = ("--database", postgres_url)
    early = cli("task", "list", *where)
    assert (early.code, early.err.endswith("run `orchestrate db migrate` [schema_older]\n")) == (
        3,
        True,
    )
    assert cli("db", "check", *where).code == 3
    assert cli.ok("db", "migrate", *where).startswith("applied 1")
    assert cli.json("db", "migrate", *where)["applied"] == []
    created = cli.ok("run", *where, "--", "true")
    assert cli.json("task", "show", created[:23], *where)["command"] == ["true"]
    assert cli.json("task", "cancel", "--since", "1h", *where)["done"] == [created]
    newest = schema.migrations()[-1].number
    checked = cli.ok("db", "check", *where)
    assert checked.startswith(f"schema {newest} is compatible\n0 mismatches")


def test_doctor_reports_unsafe_settings_of_a_database_server(
    cli: Orchestrate, postgres_url: str
) -> None:
    where = ("--database", postgres_url)
    cli.ok("db", "migrate", *where)
    answer = cli("doctor", *where)
    assert answer.code == 1
    assert "fsync=off is unsafe: " in answer.out
    assert "synchronous_commit=off is unsafe: " in answer.out
    assert "synchronous_standby_names is empty: " in answer.out
    database = checks(cli, *where)["database"][1]
    assert database.startswith("PostgreSQL ")
    assert "standby" not in database


@pytest.mark.parametrize(
    ("names", "commit", "reported"),
    [
        (
            "",
            "on",
            "synchronous_standby_names is empty: acknowledged writes are on one machine only",
        ),
        (
            "ANY 1 (a, b)",
            "on",
            "synchronous_standby_names=ANY 1 (a, b): acknowledged writes are also on",
        ),
        (
            "a",
            "remote_apply",
            "synchronous_standby_names=a: acknowledged writes are also on a standby",
        ),
        ("a", "local", "synchronous_commit=local: acknowledged writes are on one machine only"),
        ("a", "off", "synchronous_commit=off: acknowledged writes are on one machine only"),
    ],
)
def test_doctor_reports_on_how_many_machines_tasks_are_stored(
    names: str, commit: str, reported: str
) -> None:
    [check] = _check_standby({"synchronous_standby_names": names, "synchronous_commit": commit})
    assert (check.name, check.status) == ("durability", "ok")
    assert check.detail.startswith(reported)


def test_doctor_continues_without_the_database(cli: Orchestrate) -> None:
    result = checks(cli, "--database", "postgresql://127.0.0.1:1/none")
    assert result["python"][0] == "ok"
    assert result["database"][0] == "fail"
    assert result["database"][1].endswith("[database_unreachable]")
    assert cli("doctor", "--database", "postgresql://127.0.0.1:1/none").code == 3


def test_status_without_coordinator_and_worker_is_empty(cli: Orchestrate) -> None:
    cli.ok("task", "create", "--name", "x")
    status = cli.json("coordinator", "status")
    assert (status["active"], status["holder"], status["tasks"]["PENDING"]) == (False, None, 1)
    assert (status["cycles"], status["lastCycle"], status["standby"]) == (0, None, [])
    assert cli.ok("coordinator", "status").startswith("leader:  none")
    done = cli.json("coordinator", "recover")
    assert done == {"ok": True, "expired": 0, "promoted": 0, "flowed": 0}
    assert cli.ok("coordinator", "recover").startswith("0 expired leases, 0 due timers")
    assert cli("coordinator", "recover", "--workspace", "nonsense").code == 2
    assert cli.json("coordinator", "logs", "--level", "INFO")["logs"]
    assert cli.json("worker", "list") == {"workers": []}
    assert cli.ok("worker", "list").split() == ["ID", "STATUS", "BUSY", "SEEN", "AGENTS"]
