"""Settings: defaults, then `tenuto.toml`, then `TENUTO_*`, then flags."""

import os
import re
import tomllib
from collections.abc import Mapping
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from typing import Any

import msgspec

from tenuto.model.errors import Invalid
from tenuto.model.limits.quota import Quota

_WAYS = ("pooler", "database_runtime", "database_direct")
"""How else the setting `database` is reached; a flag that names another database resets them.

A variable that is set although empty counts: `up` so tells its workers what was reset.
"""
_TOO_MUCH = 1_000_000_000
_ABOVE_ZERO = (
    *("heartbeat_s", "lease_s", "tick_s", "poll_s", "slots", "transcript_kb", "body_kb"),
    *("connections", "connections_per_address"),
    *("streams_per_token", "streams_per_workspace", "polls_per_token"),
)
_AT_MOST = {
    "port": 65535,
    "max_depth": 100_000,
    "max_children": 100_000,
    "rate_per_s": _TOO_MUCH,
    "workspaces_per_owner": _TOO_MUCH,
    "quota_pending": _TOO_MUCH,
    "quota_running": _TOO_MUCH,
    "quota_tasks_per_minute": _TOO_MUCH,
    "grace_s": _TOO_MUCH,
    "drain_s": _TOO_MUCH,
}


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an operator can set. Every field is `TENUTO_<NAME>` in the environment."""

    database: str = ""
    """`sqlite:///path` or `postgresql://...`; empty: a SQLite file in the data folder."""
    pooler: str = ""
    """`transaction`: PostgreSQL is reached through PgBouncer 1.21 or newer; empty: no pooler."""
    database_runtime: str = ""
    """With a pooler, the address of the tenants' login; `database` is then the system's."""
    database_direct: str = ""
    """With a pooler, the address past it for hints; empty: programs find work by polling."""
    data: str = ""
    """Folder for the embedded database and the keys; empty: the user's data folder."""
    keys: str = ""
    """Keys of secrets, `id:base64` by commas, the current first; empty: a file in the folder."""
    host: str = "127.0.0.1"
    """Address that the API listens on."""
    port: int = 8484
    """Port that the API listens on; 0: any free one."""
    body_kb: int = 16384
    """Kilobytes that a request's body may have."""
    connections: int = 1000
    """Connections that the API holds, fewer where the process may open fewer files."""
    connections_per_address: int = 200
    """Connections of one address (of IPv6: one /64); those of `proxies` are not counted."""
    proxies: str = ""
    """Proxies whose `X-Forwarded-For` is believed: addresses or CIDR, by commas; empty: none."""
    streams_per_token: int = 50
    """Live event streams that one token may hold at once."""
    streams_per_workspace: int = 500
    """Live event streams that one workspace may hold at once."""
    polls_per_token: int = 500
    """Claims of one token that may wait for a task at once."""
    rate_per_s: float = 1000.0
    """Requests a second that one token may make, twice as many at once; 0: no limit."""
    workspaces_per_owner: int = 100
    """Workspaces that may be made from one workspace and from those it made; 0: any number."""
    quota_pending: int = 0
    """Tasks that may wait in any one workspace, whatever its own quota says; 0: no limit."""
    quota_running: int = 0
    """Tasks that any one workspace may run at once, whatever its own quota says; 0: no limit."""
    quota_tasks_per_minute: int = 0
    """New tasks a minute in any one workspace, whatever its own quota says; 0: no limit."""
    heartbeat_s: float = 5.0
    """Seconds between a worker's heartbeats."""
    lease_s: int = 20
    """Seconds that a claim or heartbeat holds a task."""
    tick_s: float = 2.0
    """Seconds between a coordinator's looks at expired leases and due timers."""
    poll_s: float = 1.0
    """Seconds between a worker's looks for tasks when no hint arrives."""
    slots: int = 10
    """Tasks a worker runs at once."""
    grace_s: float = 10.0
    """Seconds between asking a session to end and killing it."""
    drain_s: float = 10.0
    """Seconds that running tasks get to finish when a worker is asked to stop."""
    task_env: str = ""
    """Variables that tasks may set for a worker's commands: names or patterns, by commas."""
    task_folders: str = ""
    """Folders that tasks may work in, and below, by commas; empty: where the worker was started."""
    transcript_kb: int = 1024
    """Kilobytes of output kept per attempt."""
    max_depth: int = 16
    """Levels of tasks that make tasks below the first one."""
    max_children: int = 1000
    """Tasks that the attempts at one task may make."""
    webhook_allow: str = ""
    """Where webhooks may go though private or without TLS: `host`, `host:port`, CIDR, by commas."""
    webhook_timeout_s: float = 10.0
    """Seconds that an endpoint has to answer a webhook, name lookup included; at most 30."""
    gateways: str = ""
    """Who spawns sessions of agents with that gateway: `name=url` by commas."""
    gateway_token: str = ""
    """What gateways are sent as a bearer token; empty: nothing."""
    public_url: str = ""
    """Where sessions of gateways reach the API; empty: the host and port that it listens on."""
    spawn_timeout_s: float = 60.0
    """Seconds that a gateway has to spawn a session."""
    dispatch_per_s: float = 20.0
    """Tasks a second at most that a coordinator pushes to gateways."""
    log: str = ""
    """`json`: a JSON object per line of the log; empty: lines for people."""
    metrics_token: str = ""
    """What a reader of the API's `/metrics` must send as a bearer token; empty: nothing."""
    alert_url: str = ""
    """Where to POST that the database is down for long, and up again; empty: nowhere."""
    otel: bool = False
    """Whether to send traces as the `OTEL_*` variables say; an endpoint among them will do."""
    leader: bool = True
    """Whether coordinators elect one that does the work; off only to prove it is not needed."""

    def folder(self) -> Path:
        """The data folder."""
        if self.data:
            return expanded("the setting data", self.data)
        base = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
        return expanded("XDG_DATA_HOME", base) / "tenuto"

    def allowed_names(self) -> tuple[str, ...]:
        """The variables that tasks may set, as names and patterns."""
        return tuple(listed(self.task_env))

    def allowed_folders(self) -> tuple[Path, ...]:
        """The folders that tasks may work in; the present one if none is set."""
        named = [expanded("the setting task_folders", each) for each in listed(self.task_folders)]
        return tuple(named) or (Path(),)

    def gateway_urls(self) -> dict[str, str]:
        """Where the gateways are, by name."""
        pairs = (part.partition("=") for part in self.gateways.split(",") if part.strip())
        return {name.strip(): url.strip() for name, _, url in pairs}

    def proxy_networks(self) -> list[IPv4Network | IPv6Network]:
        """The proxies whose word is believed about who asks."""
        return [ip_network(part.strip()) for part in self.proxies.split(",") if part.strip()]

    def callback_url(self) -> str:
        """Where sessions of gateways reach the API."""
        return self.public_url.rstrip("/") or f"http://{self.host}:{self.port}"

    def ceiling(self) -> Quota:
        """What bounds the quota of every workspace."""
        return Quota(
            tasks_per_minute=self.quota_tasks_per_minute or None,
            pending=self.quota_pending or None,
            running=self.quota_running or None,
        )

    def url(self) -> str:
        """The database's address."""
        return self.database or f"sqlite:///{self.folder() / 'tenuto.db'}"


def listed(text: str) -> list[str]:
    """The words that commas part."""
    return [part.strip() for part in text.split(",") if part.strip()]


def expanded(name: str, path: str) -> Path:
    """The path with `~` spelled out; `Invalid` names where it is from when that is nobody's."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise Invalid(f"{name} is wrong: there is no home folder for {path!r}") from error


def load(flags: Mapping[str, Any] | None = None, file: Path | None = None) -> Settings:
    """The settings in force; `Invalid` names the one that is wrong."""
    found = _read(file or Path("tenuto.toml"))
    for name in Settings.__struct_fields__:
        value = os.environ.get(f"TENUTO_{name.upper()}")
        if value or (value is not None and name in _WAYS):
            found[name] = value
    given = {name: value for name, value in (flags or {}).items() if value is not None}
    if "database" in given:
        for name in _WAYS:
            found.pop(name, None)
    found |= given
    try:
        settings = msgspec.convert(found, Settings, strict=False)
    except msgspec.ValidationError as error:
        raise Invalid(f"a setting is wrong: {error}") from error
    _check(settings)
    return settings


def _check(settings: Settings) -> None:
    for name in _ABOVE_ZERO:
        if not 0 < getattr(settings, name) < _TOO_MUCH:
            found = getattr(settings, name)
            raise Invalid(
                f"the setting {name} must be above 0 and below {_TOO_MUCH:,}, not {found}"
            )
    for name, most in _AT_MOST.items():
        if not 0 <= getattr(settings, name) <= most:
            found = getattr(settings, name)
            raise Invalid(f"the setting {name} must be between 0 and {most:,}, not {found}")
    _check_places(settings)
    _check_pooler(settings)
    if settings.log not in ("", "json"):
        raise Invalid(f"the setting log must be json or empty, not {settings.log!r}")
    if settings.alert_url and not settings.alert_url.startswith(("http://", "https://")):
        raise Invalid("the setting alert_url must begin with http:// or https://")
    if not 0 < settings.webhook_timeout_s <= 30:
        raise Invalid("the setting webhook_timeout_s must be above 0 and at most 30")
    try:
        settings.proxy_networks()
    except ValueError as error:
        raise Invalid(f"the setting proxies is wrong: {error}; use addresses or CIDR") from error
    _check_gateways(settings)


def _check_places(settings: Settings) -> None:
    """Refuse what names no place: where to listen, and where to keep things."""
    addresses = ("database", "database_runtime", "database_direct")
    for name in (*addresses, "data", "host", "task_folders"):
        if "\0" in getattr(settings, name):
            raise Invalid(f"the setting {name} holds a NUL character")
    if not _can_be_host(settings.host):  # an empty one would listen everywhere
        raise Invalid("the setting host must be an address or a name; 0.0.0.0 listens everywhere")
    if settings.data or not settings.database:
        settings.folder()
    settings.allowed_folders()


def _check_pooler(settings: Settings) -> None:
    others = {name: getattr(settings, name) for name in ("database_runtime", "database_direct")}
    if settings.pooler not in ("", "transaction"):
        raise Invalid(f"the setting pooler must be transaction or empty, not {settings.pooler!r}")
    if not settings.pooler:
        for name, url in others.items():
            if url:
                raise Invalid(f"the setting {name} is for a pooler; set pooler=transaction, too")
        return
    for name, url in {"database": settings.database, **others}.items():
        needed = name != "database_direct"
        if (url or needed) and not url.startswith(("postgresql://", "postgres://")):
            raise Invalid(f"with pooler=transaction the setting {name} must be postgresql://...")


def _can_be_host(text: str) -> bool:
    try:
        return bool(text.strip() and text.encode("idna"))
    except UnicodeError:
        return False


def _check_gateways(settings: Settings) -> None:
    urls = settings.gateway_urls()
    for name, url in urls.items():
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}", name):
            raise Invalid(f"the setting gateways has no name that can be used: {name!r}")
        if not re.fullmatch(r"https?://[^\s/?#@]+(/[^\s?#]*)?", url):
            raise Invalid(f"the setting gateways has no URL for {name}: use http(s)://host:port")
    if not 1 <= settings.spawn_timeout_s <= 3600:
        raise Invalid("the setting spawn_timeout_s must be between 1 and 3600")
    if not 0 < settings.dispatch_per_s <= 100_000:
        raise Invalid("the setting dispatch_per_s must be above 0 and at most 100,000")
    if urls and not settings.public_url and settings.port == 0:
        raise Invalid("gateways need the setting public_url where the API's port is any free one")


def _read(path: Path) -> dict[str, Any]:
    """What the file sets; nothing when there is none."""
    try:
        return tomllib.loads(path.read_text()) if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise Invalid(f"cannot read {path}: {error}") from error
    except RecursionError as error:
        raise Invalid(f"cannot read {path}: it is nested too deep") from error


def environment_without_settings() -> dict[str, str]:
    """The environment for a child process that is given all its settings."""
    ours = ("TENUTO_", "CRASH_")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}
