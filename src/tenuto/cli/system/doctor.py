"""`orchestrate doctor`: what is right and wrong with this machine and its database."""

import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import click

from tenuto.cli.base import Globals, command
from tenuto.cli.connection import target

if TYPE_CHECKING:
    from tenuto.client.target import Target
    from tenuto.engine.engine import Engine
    from tenuto.settings import Settings
    from tenuto.store.postgres.roles import Identity
    from tenuto.store.protocol import Store

PR_GET_CHILD_SUBREAPER = 37
LOW_DISK = 1 << 30
NO_DISK = 100 << 20
SKEW = timedelta(seconds=2)
SILENT = timedelta(seconds=30)
NETWORK_FILES = frozenset("nfs nfs4 cifs smb3 smbfs 9p fuse.sshfs afs".split())
UNSAFE = {
    ("journal", "wal"): "a crash can damage the file and readers block writers",
    ("synchronous", "FULL"): "a power cut can lose tasks that were acknowledged",
    ("fsync", "on"): "a crash of the server's machine can lose or damage everything",
    ("synchronous_commit", "on"): "a crash of the server can lose tasks that were acknowledged",
    ("full_page_writes", "on"): "a crash of the server's machine can damage the database",
}
"""Durability settings, the value that is safe, and what any other value risks."""
STANDBYS = "synchronous_standby_names"
SAFER = {"EXTRA", "remote_apply"}


class Check(NamedTuple):
    """One thing that was looked at."""

    name: str
    status: Literal["ok", "warn", "fail"]
    detail: str


@command("doctor", "orchestrate doctor", "orchestrate doctor --json", "orchestrate doctor --data .")
@click.pass_obj
def doctor(given: Globals) -> int:
    """Say what is right and wrong with this machine, the database, coordinator and workers.

    The database is looked at itself; where commands go to a server, that is said.

    Exit code 1 when something has to be repaired, 3 when the database cannot be used.
    """
    from tenuto import app
    from tenuto.cli.render import print_json, print_table

    where = target(given)
    chosen = where.settings
    checks = [
        _python(),
        _supervision(),
        *_server(where),
        *app.run(_sqlite()),
        *_disk(chosen),
        *_modes(chosen),
    ]
    path = app.sqlite_path(chosen.url())
    if path is None or path == ":memory:" or Path(path).exists():
        checks += app.run(_database(chosen))
    else:
        checks.append(Check("database", "ok", f"{path} is not there yet; the first use makes it"))
    failed = [check.name for check in checks if check.status == "fail"]
    if given.json:
        print_json({"ok": not failed, "checks": [check._asdict() for check in checks]})
    else:
        print_table(["CHECK", "STATUS", "DETAIL"], checks, wide="DETAIL", fold=True)
    if "database" in failed:
        return 3
    return 1 if failed else 0


def _python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    return Check("python", "ok", f"{version} on {sys.platform}")


def _server(where: "Target") -> list[Check]:
    """That commands go elsewhere, and which database is looked at nevertheless."""
    from tenuto import app

    if where.url is None:
        return []
    near = app.shown(where.settings.url())
    detail = f"commands go to {app.shown(where.url)}; what follows is about {near} alone"
    return [Check("server", "warn", detail)]


async def _sqlite() -> list[Check]:
    from tenuto.store.sqlite.store import SqliteStore

    store = SqliteStore(":memory:")
    version = (await store.describe())["database"]
    await store.close()
    return [Check("sqlite", "ok", version.removeprefix("SQLite "))]


def _supervision() -> Check:
    name = "supervision"
    if sys.platform != "linux":
        return Check(name, "warn", "no subreaper here: a process that leaves its group may survive")
    import ctypes

    flag = ctypes.c_int()
    if ctypes.CDLL(None).prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(flag), 0, 0, 0) != 0:
        return Check(name, "warn", "the kernel refuses subreapers: stray processes may survive")
    return Check(name, "ok", "Linux subreaper: a session's whole process tree is killed")


def _disk(chosen: "Settings") -> list[Check]:
    """Room and kind of the file system that holds the embedded database."""
    import shutil

    from tenuto import app

    path = app.sqlite_path(chosen.url())
    if path is None or path == ":memory:":
        return []
    folder = Path(path).absolute().parent
    folder = next(place for place in (folder, *folder.parents) if place.exists())
    free = shutil.disk_usage(folder).free
    status: Literal["ok", "warn", "fail"]
    status = "fail" if free < NO_DISK else "warn" if free < LOW_DISK else "ok"
    checks = [Check("disk", status, f"{free / (1 << 30):,.1f} GiB free at {folder}")]
    kind = _file_system(folder)
    if kind in NETWORK_FILES:
        detail = f"{kind}: SQLite over a network file system can damage the database"
        checks.append(Check("file system", "fail", detail))
    return checks


def _modes(chosen: "Settings") -> list[Check]:
    """That others can look into the data folder or into what programs keep, if they can."""
    import shlex

    from tenuto import app, private
    from tenuto.encryption_keys import FILE

    keys = app.key_folder(chosen) / FILE
    places = [chosen.folder(), keys, chosen.folder() / "token"]
    path = app.sqlite_path(chosen.url())
    if path not in (None, ":memory:"):
        places += [Path(f"{path}{end}") for end in ("", "-wal", "-shm", "-lock", "-wake")]
    found = [(private.exposed(place), place) for place in dict.fromkeys(places)]
    wide = [f"{place} has mode {mode}" for mode, place in found if mode]
    if not wide:
        return []
    run = " ".join(shlex.quote(str(place)) for mode, place in found if mode)
    return [Check("modes", "warn", f"{', '.join(wide)}; run: chmod go= {run}")]


def _file_system(folder: Path) -> str:
    """The kind of file system that a folder is on, where the system tells."""
    try:
        mounts = Path("/proc/self/mounts").read_text(errors="replace")
    except OSError:
        return ""
    here = folder.resolve()
    found = (line.split() for line in mounts.splitlines())
    above = [(len(m[1]), m[2]) for m in found if here.is_relative_to(m[1])]
    return max(above, default=(0, ""))[1]


async def _database(chosen: "Settings") -> list[Check]:
    from tenuto import app
    from tenuto.engine.engine import Engine
    from tenuto.model.errors import Incompatible, Unavailable

    try:
        store = app.configured_store(chosen)
        try:
            await store.open()
            engine = Engine(store)
            roles = await app.identities(engine)
            return [*await _described(store), *_roles(roles), *await _alive(engine)]
        finally:
            await store.close()
    except (Unavailable, Incompatible) as error:
        return [Check("database", "fail", f"{error.message} [{error.code}]")]


async def _described(store: "Store") -> list[Check]:
    described = await store.describe()
    state = await store.schema()
    safe = [f"{name}={described[name]}" for name, good in UNSAFE if described.get(name) == good]
    checks = [
        Check("database", "ok", ", ".join(_facts(described))),
        Check("schema", "ok", f"{state.schema}, fits this program"),
    ]
    for (name, good), risk in UNSAFE.items():
        value = described.get(name)
        if value is not None and value != good and value not in SAFER:
            checks.append(Check("durability", "fail", f"{name}={value} is unsafe: {risk}"))
    if not any(check.name == "durability" for check in checks):
        checks.append(Check("durability", "ok", f"{', '.join(safe)}: what is acknowledged stays"))
    return [*checks, *_standby(described)]


def _standby(described: dict[str, str]) -> list[Check]:
    """Whether a standby has what was acknowledged; nothing where there are no standbys."""
    if (names := described.get(STANDBYS)) is None:
        return []
    commit = described["synchronous_commit"]
    one = "what is acknowledged is on one machine only"
    if not names:
        told = f"{STANDBYS} is empty: {one}"
    elif commit in ("off", "local"):
        told = f"synchronous_commit={commit}: {one}, in spite of {STANDBYS}={names}"
    else:
        told = f"{STANDBYS}={names}: what is acknowledged is on a standby, too"
    return [Check("durability", "ok", told)]


def _roles(found: "dict[str, Identity]") -> list[Check]:
    """Who each kind of connection acts as, and whether its login could be more."""
    checks = []
    for name, each in found.items():
        told = f"{name}: acts as {each.role}, login {each.login}"
        if each.power:
            told += (
                f", which {each.power} and so can step round row-level security; use a login that"
                " is a member of tenuto_runtime and tenuto_system only"
            )
        checks.append(Check("role", "warn" if each.power else "ok", told))
    return checks


def _facts(described: dict[str, str]) -> list[str]:
    settings_ = {STANDBYS, *(name for name, _ in UNSAFE)}
    return [
        value if name == "database" else f"{name} {value}"
        for name, value in described.items()
        if name not in settings_
    ]


async def _alive(engine: "Engine") -> list[Check]:
    """Clock, coordinator and workers."""
    from tenuto.cli.render import span
    from tenuto.clock import Clock

    now, here = engine.clock.now(), Clock().now()
    skew = abs(now - here)
    told = f"{here:%Y-%m-%d %H:%M:%S} UTC, {span(skew)} from the database's"
    leader = await engine.upkeep.leader("coordinator")
    leads = leader is not None and leader.until > now
    nobody = "none leads: retries, schedules and lost leases wait; `orchestrate up` starts one"
    workers = [
        row
        for row in await engine.query.workers(engine.workspace)
        if row["status"] == "RUNNING" and now - row["seen_at"] < SILENT
    ]
    slots = sum(row["slots"] for row in workers)
    busy = f"{len(workers)} alive with {slots} slots"
    return [
        Check("clock", "ok" if skew < SKEW else "warn", told),
        Check(
            "coordinator",
            "ok" if leads else "warn",
            f"{leader.holder} leads" if leader is not None and leads else nobody,
        ),
        Check(
            "workers",
            "ok" if workers else "warn",
            busy if workers else "none alive: tasks wait; `orchestrate up` starts one",
        ),
    ]
