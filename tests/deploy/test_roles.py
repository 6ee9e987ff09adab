"""The two logins on a real server: the owner migrates, the programs' login does all the rest."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import asyncpg
import pytest
from tests.cli.orchestrate import Answer, Orchestrate
from tests.deploy.tree import DEPLOY
from tests.services.postgres import PostgresServer

PASSWORD = "it's 100% @secret/"
OWNER = "owner-password"


class Database:
    """A server and database as docs/deploy.md makes them."""

    def __init__(self, server: PostgresServer, home: Path) -> None:
        self._server = server
        self._cli = Orchestrate(home)

    def psql(self, *words: str) -> None:
        command = [str(self._server._binaries / "psql"), "-X", "-q", "-v", "ON_ERROR_STOP=1"]
        environment = {"PATH": os.defpath, "POSTGRES_RUNTIME_PASSWORD": PASSWORD}
        url = self._server.url("postgres")
        subprocess.run([*command, "-d", url, *words], env=environment, check=True)

    def url(self, login: str) -> str:
        return f"postgresql://{login}@127.0.0.1:{urlsplit(self._server.tcp_url('x')).port}/tenuto"

    def run(self, login: str, password: str, *words: str) -> Answer:
        """The answer to a command that is given the password beside the address."""
        return self._cli(*words, TENUTO_DATABASE=self.url(login), PGPASSWORD=password)


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    """A server of its own: roles belong to the whole server."""
    with PostgresServer(fast=True) as server:
        created = Database(server, tmp_path)
        created.psql("-c", f"create role tenuto_owner login createrole password '{OWNER}'")
        created.psql("-c", "create database tenuto owner tenuto_owner")
        answer = created.run("tenuto_owner", OWNER, "db", "migrate")
        assert answer.code == 0, answer.err
        created.psql("-f", str(DEPLOY / "postgres" / "roles.sql"))
        yield created


async def test_membership_in_both_groups_is_enough(database: Database) -> None:
    for words in (
        ["task", "create", "--name", "a", "--prompt", "b"],
        ["task", "list", "--json"],
        ["coordinator", "status", "--json"],
        ["worker", "list", "--json"],
        ["db", "check"],
    ):
        answer = database.run("tenuto_app", PASSWORD, *words)
        assert answer.code == 0, (words, answer.err)


async def test_program_login_cannot_bypass_the_policies(database: Database) -> None:
    connection = await asyncpg.connect(database.url("tenuto_app"), password=PASSWORD)
    try:
        row = await connection.fetchrow(
            "select rolsuper, rolbypassrls, rolcreaterole, rolcreatedb from pg_roles"
            " where rolname = current_user"
        )
        assert set(row) == {False}
        await connection.execute("set role tenuto_runtime")
        assert await connection.fetchval("select count(*) from task") == 0
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await connection.execute("create table t (a int)")
    finally:
        await connection.close()


async def test_groups_can_exist_before_the_first_migration(tmp_path: Path) -> None:
    """As in compose, where the owner is a superuser and the server runs the script first."""
    with PostgresServer(fast=True) as server:
        created = Database(server, tmp_path)
        created.psql("-c", "create database tenuto")
        created.psql("-f", str(DEPLOY / "postgres" / "roles.sql"))
        answer = Orchestrate(tmp_path)("db", "migrate", TENUTO_DATABASE=server.url("tenuto"))
        assert answer.code == 0, answer.err
        answer = created.run("tenuto_app", PASSWORD, "task", "list")
        assert answer.code == 0, answer.err


async def test_doctor_shows_the_database_role(database: Database) -> None:
    answer = database.run("tenuto_app", PASSWORD, "doctor", "--json")
    checks = [check for check in json.loads(answer.out)["checks"] if check["name"] == "role"]
    assert [check["status"] for check in checks] == ["ok", "ok"]
    assert [check["detail"] for check in checks] == [
        "system: acts as tenuto_system, login tenuto_app",
        "tenants: acts as tenuto_runtime, login tenuto_app",
    ]


@pytest.mark.parametrize(
    ("login", "power"),
    [("tenuto_owner", "owns the tables"), ("root", "is a superuser"), ("free", "has BYPASSRLS")],
)
async def test_doctor_warns_of_a_login_with_too_many_rights(
    database: Database, login: str, power: str
) -> None:
    database.psql("-c", f"create role root login superuser password '{OWNER}'")
    database.psql("-c", f"create role free login bypassrls password '{OWNER}'")
    groups = "tenuto_runtime, tenuto_system"
    database.psql("-c", f"revoke {groups} from tenuto_owner")  # who made them may not act as them
    database.psql("-c", f"grant {groups} to free, tenuto_owner")
    answer = database.run(login, OWNER, "doctor", "--json")
    checks = [check for check in json.loads(answer.out)["checks"] if check["name"] == "role"]
    assert [check["status"] for check in checks] == ["warn", "warn"]
    assert all(power in check["detail"] for check in checks)
