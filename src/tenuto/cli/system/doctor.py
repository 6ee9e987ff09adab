"""`orchestrate doctor`: checks this machine, the database, coordinator and workers."""

import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import click

from tenuto.cli.base import GlobalOptions, command
from tenuto.cli.connection import target

if TYPE_CHECKING:
    from tenuto.client.target import Target
    from tenuto.engine.engine import Engine
    from tenuto.settings import Settings
    from tenuto.store.postgres.roles import Identity
    from tenuto.store.protocol import Store

PR_GET_CHILD_SUBREAPER = 37
LOW_DISK = 1 << 30
MIN_DISK = 100 << 20
MAX_CLOCK_SKEW = timedelta(seconds=2)
MAX_HEARTBEAT_AGE = timedelta(seconds=30)
NETWORK_FILE_SYSTEMS = frozenset("nfs nfs4 cifs smb3 smbfs 9p fuse.sshfs afs".split())
DURABILITY_RISKS = {
    ("journal", "wal"): "a crash can damage the file and readers block writers",
    ("synchronous", "FULL"): "a power cut can lose tasks that were acknowledged",
    ("fsync", "on"): "a crash of the server's machine can lose or damage everything",
    ("synchronous_commit", "on"): "a crash of the server can lose tasks that were acknowledged",
    ("full_page_writes", "on"): "a crash of the server's machine can damage the database",
}
"""(Durability setting, safe value) → the risk of any other value."""
STANDBYS = "synchronous_standby_names"
SAFER_VALUES = {"EXTRA", "remote_apply"}


class Check(NamedTuple):
    """The result of one check."""

    name: str
    status: Literal["ok", "warn", "fail"]
    detail: str


@command("doctor", "orchestrate doctor", "orchestrate doctor --json", "orchestrate doctor --data .")
@click.pass_obj
def doctor(options: GlobalOptions) -> int:
    """Check this machine, the database, the coordinator and the workers.

    The database is checked directly. If commands use a server, a warning says so.

    Exits with 1 if something must be repaired, with 3 if the database cannot be used.
    """
    from tenuto import app
    from tenuto.cli.render import print_json, print_table
    from tenuto.settings import sqlite_path

    command_target = target(options)
    chosen_settings = command_target.settings
    checks = [
        _check_python(),
        _check_supervision(),
        *_check_target(command_target),
        *app.run(_check_sqlite()),
        *_check_disk(chosen_settings),
        *_check_file_modes(chosen_settings),
    ]
    path = sqlite_path(chosen_settings.database_url())
    if path is None or path == ":memory:" or Path(path).exists():
        checks += app.run(_check_database(chosen_settings))
    else:
        checks.append(
            Check("database", "ok", f"{path} does not exist yet; it is created at the first use")
        )
    failed = [check.name for check in checks if check.status == "fail"]
    if options.json:
        print_json({"ok": not failed, "checks": [check._asdict() for check in checks]})
    else:
        print_table(["CHECK", "STATUS", "DETAIL"], checks, wide="DETAIL", fold=True)
    if "database" in failed:
        return 3
    return 1 if failed else 0


def _check_python() -> Check:
    """Reports the Python version and the platform."""
    version = ".".join(map(str, sys.version_info[:3]))
    return Check("python", "ok", f"{version} on {sys.platform}")


def _check_target(command_target: "Target") -> list[Check]:
    """Returns a warning if commands use a server instead of the checked database, else nothing."""
    from tenuto import app

    if command_target.url is None:
        return []
    database = app.display_url(command_target.settings.database_url())
    server = app.display_url(command_target.url)
    detail = f"commands use the server {server}; the other checks are about {database} only"
    return [Check("server", "warn", detail)]


async def _check_sqlite() -> list[Check]:
    """Returns one check, always ok, with the version of SQLite."""
    from tenuto.store.sqlite.store import SqliteStore

    store = SqliteStore(":memory:")
    version = (await store.describe())["database"]
    await store.close()
    return [Check("sqlite", "ok", version.removeprefix("SQLite "))]


def _check_supervision() -> Check:
    """Checks whether a session's whole process tree can be killed on this system."""
    name = "supervision"
    if sys.platform != "linux":
        return Check(name, "warn", "no subreaper: a process that leaves its group may survive")
    import ctypes

    flag = ctypes.c_int()
    if ctypes.CDLL(None).prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(flag), 0, 0, 0) != 0:
        return Check(name, "warn", "the kernel refuses subreapers: stray processes may survive")
    return Check(name, "ok", "Linux subreaper: a session's whole process tree is killed")


def _check_disk(chosen_settings: "Settings") -> list[Check]:
    """Checks the file system of an embedded database: space and type; no checks for others."""
    import shutil

    from tenuto.settings import sqlite_path

    path = sqlite_path(chosen_settings.database_url())
    if path is None or path == ":memory:":
        return []
    folder = Path(path).absolute().parent
    folder = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(folder).free
    status: Literal["ok", "warn", "fail"]
    status = "fail" if free < MIN_DISK else "warn" if free < LOW_DISK else "ok"
    checks = [Check("disk", status, f"{free / (1 << 30):,.1f} GiB free at {folder}")]
    kind = _file_system(folder)
    if kind in NETWORK_FILE_SYSTEMS:
        detail = f"{kind}: SQLite over a network file system can damage the database"
        checks.append(Check("file system", "fail", detail))
    return checks


def _check_file_modes(chosen_settings: "Settings") -> list[Check]:
    """Returns a warning if others can access data folder, keys, token or database, else []."""
    import shlex

    from tenuto import app, private
    from tenuto.encryption_keys import FILE
    from tenuto.settings import sqlite_path

    keys = app.key_folder(chosen_settings) / FILE
    paths = [chosen_settings.data_folder(), keys, chosen_settings.data_folder() / "token"]
    path = sqlite_path(chosen_settings.database_url())
    if path not in (None, ":memory:"):
        paths += [Path(f"{path}{end}") for end in ("", "-wal", "-shm", "-lock", "-wake")]
    modes = [(private.mode_if_exposed(path), path) for path in dict.fromkeys(paths)]
    exposed = [f"{path} has mode {mode}" for mode, path in modes if mode]
    if not exposed:
        return []
    run = " ".join(shlex.quote(str(path)) for mode, path in modes if mode)
    return [Check("modes", "warn", f"{', '.join(exposed)}; run: chmod go= {run}")]


def _file_system(folder: Path) -> str:
    """Returns the type of the file system that contains the folder; empty if unknown."""
    try:
        mounts = Path("/proc/self/mounts").read_text(errors="replace")
    except OSError:
        return ""
    resolved = folder.resolve()
    fields = (line.split() for line in mounts.splitlines())
    parents = [(len(m[1]), m[2]) for m in fields if resolved.is_relative_to(m[1])]
    return max(parents, default=(0, ""))[1]


async def _check_database(chosen_settings: "Settings") -> list[Check]:
    """Runs all checks that need the database; a failed check if it cannot be opened."""
    from tenuto import app
    from tenuto.engine.engine import Engine
    from tenuto.model.errors import Incompatible, Unavailable

    try:
        store = app.create_configured_store(chosen_settings)
        try:
            await store.open()
            engine = Engine(store)
            roles = await app.connection_identities(engine)
            return [
                *await _check_store(store),
                *_check_roles(roles),
                *await _check_liveness(engine),
            ]
        finally:
            await store.close()
    except (Unavailable, Incompatible) as error:
        return [Check("database", "fail", f"{error.message} [{error.code}]")]


async def _check_store(store: "Store") -> list[Check]:
    """Checks the database's version, schema and durability settings."""
    properties = await store.describe()
    state = await store.schema()
    safe_settings = [
        f"{name}={properties[name]}"
        for name, safe in DURABILITY_RISKS
        if properties.get(name) == safe
    ]
    checks = [
        Check("database", "ok", ", ".join(_format_facts(properties))),
        Check("schema", "ok", f"{state.schema}, compatible with this version"),
    ]
    for (name, safe), risk in DURABILITY_RISKS.items():
        value = properties.get(name)
        if value is not None and value != safe and value not in SAFER_VALUES:
            checks.append(Check("durability", "fail", f"{name}={value} is unsafe: {risk}"))
    if not any(check.name == "durability" for check in checks):
        checks.append(
            Check(
                "durability", "ok", f"{', '.join(safe_settings)}: acknowledged writes are durable"
            )
        )
    return [*checks, *_check_standby(properties)]


def _check_standby(properties: dict[str, str]) -> list[Check]:
    """Reports whether a standby has all acknowledged writes; empty without standby settings."""
    if (names := properties.get(STANDBYS)) is None:
        return []
    commit = properties["synchronous_commit"]
    risk = "acknowledged writes are on one machine only"
    if not names:
        detail = f"{STANDBYS} is empty: {risk}"
    elif commit in ("off", "local"):
        detail = f"synchronous_commit={commit}: {risk}, although {STANDBYS}={names}"
    else:
        detail = f"{STANDBYS}={names}: acknowledged writes are also on a standby"
    return [Check("durability", "ok", detail)]


def _check_roles(identities: "dict[str, Identity]") -> list[Check]:
    """Reports the database role of each kind of connection; warns if its login has more rights."""
    checks = []
    for name, identity in identities.items():
        detail = f"{name}: acts as {identity.role}, login {identity.login}"
        if identity.power:
            detail += (
                f", which {identity.power} and so can bypass row-level security; use a login that"
                " is a member of tenuto_runtime and tenuto_system only"
            )
        checks.append(Check("role", "warn" if identity.power else "ok", detail))
    return checks


def _format_facts(properties: dict[str, str]) -> list[str]:
    """Returns the database's properties as texts, without durability settings."""
    hidden = {STANDBYS, *(name for name, _ in DURABILITY_RISKS)}
    return [
        value if name == "database" else f"{name} {value}"
        for name, value in properties.items()
        if name not in hidden
    ]


async def _check_liveness(engine: "Engine") -> list[Check]:
    """Checks the clock, the coordinator and the workers."""
    from tenuto.cli.render import format_duration
    from tenuto.clock import Clock

    now, local_now = engine.clock.now(), Clock().now()
    skew = abs(now - local_now)
    clock_detail = f"{local_now:%Y-%m-%d %H:%M:%S} UTC, {format_duration(skew)} from the database's"
    leader = await engine.maintenance.leader("coordinator")
    is_led = leader is not None and leader.until > now
    no_leader = "no leader: retries, schedules and expired leases wait; `orchestrate up` starts one"
    workers = [
        row
        for row in await engine.query.workers(engine.workspace)
        if row["status"] == "RUNNING" and now - row["seen_at"] < MAX_HEARTBEAT_AGE
    ]
    slots = sum(row["slots"] for row in workers)
    worker_detail = f"{len(workers)} alive with {slots} slots"
    return [
        Check("clock", "ok" if skew < MAX_CLOCK_SKEW else "warn", clock_detail),
        Check(
            "coordinator",
            "ok" if is_led else "warn",
            f"leader: {leader.holder}" if leader is not None and is_led else no_leader,
        ),
        Check(
            "workers",
            "ok" if workers else "warn",
            worker_detail if workers else "none alive: tasks wait; `orchestrate up` starts one",
        ),
    ]
