"""Settings: defaults, overridden by `tenuto.toml`, then `TENUTO_*` variables, then flags."""

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
from tenuto.registry import GATEWAYS, scheme_of

_CONNECTION_SETTINGS = ("pooler", "database_runtime", "database_direct")
"""Settings that belong to `database`; a flag that names another database resets them.

Their variables count even if set to nothing: so `up` passes a reset to its workers.
"""
_UPPER_BOUND = 1_000_000_000
_ABOVE_ZERO = (
    *("heartbeat_s", "lease_s", "tick_s", "poll_s", "slots", "transcript_kb", "body_kb"),
    *("connections", "connections_per_address"),
    *("streams_per_token", "streams_per_workspace", "polls_per_token"),
)
_MAXIMA = {
    "port": 65535,
    "max_depth": 100_000,
    "max_children": 100_000,
    "rate_per_s": _UPPER_BOUND,
    "workspaces_per_owner": _UPPER_BOUND,
    "quota_pending": _UPPER_BOUND,
    "quota_running": _UPPER_BOUND,
    "quota_tasks_per_minute": _UPPER_BOUND,
    "grace_s": _UPPER_BOUND,
    "drain_s": _UPPER_BOUND,
}


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an operator can set. Every field can be set as `TENUTO_<NAME>` in the environment."""

    database: str = ""
    """`sqlite:///path` or `postgresql://...`; empty: a SQLite file in the data folder."""
    pooler: str = ""
    """`transaction`: connect to PostgreSQL through PgBouncer 1.21 or newer; empty: no pooler."""
    database_runtime: str = ""
    """With a pooler, the URL for the tenants' login; `database` is then for the system's login."""
    database_direct: str = ""
    """With a pooler, the URL that bypasses it, for hints; empty: programs find work by polling."""
    broker: str = ""
    """Broker for hints: `memory:`, or the URL of an installed one; empty: the database's own."""
    data: str = ""
    """Folder for the embedded database and the encryption keys; empty: the user's data folder."""
    keys: str = ""
    """Encryption keys as `id:base64,...`, the current one first; empty: a file in the folder."""
    host: str = "127.0.0.1"
    """Address that the API listens on."""
    port: int = 8484
    """Port that the API listens on; 0: any free port."""
    body_kb: int = 16384
    """Maximum size of a request body, in kilobytes."""
    connections: int = 1000
    """Maximum connections to the API; fewer if the process may open fewer files."""
    connections_per_address: int = 200
    """Maximum connections from one address (IPv6: one /64); those of `proxies` are not counted."""
    proxies: str = ""
    """Proxies whose `X-Forwarded-For` is trusted: addresses or CIDR, by commas; empty: none."""
    streams_per_token: int = 50
    """Maximum live event streams per token at the same time."""
    streams_per_workspace: int = 500
    """Maximum live event streams per workspace at the same time."""
    polls_per_token: int = 500
    """Maximum claims per token that wait for a task at the same time."""
    rate_per_s: float = 1000.0
    """Maximum requests per second and token, with bursts of twice as many; 0: no limit."""
    workspaces_per_owner: int = 100
    """Maximum workspaces created from one workspace and from those it created; 0: no limit."""
    quota_pending: int = 0
    """Maximum waiting tasks per workspace, whatever its own quota says; 0: no limit."""
    quota_running: int = 0
    """Maximum running tasks per workspace, whatever its own quota says; 0: no limit."""
    quota_tasks_per_minute: int = 0
    """Maximum new tasks per minute and workspace, whatever its own quota says; 0: no limit."""
    heartbeat_s: float = 5.0
    """Seconds between a worker's heartbeats."""
    lease_s: int = 20
    """Seconds that a lease lasts; each heartbeat renews it."""
    tick_s: float = 2.0
    """Seconds between a coordinator's checks for expired leases and due timers."""
    poll_s: float = 1.0
    """Seconds between a worker's polls for tasks when no hint arrives."""
    slots: int = 10
    """Maximum tasks that a worker runs at the same time."""
    grace_s: float = 10.0
    """Seconds between asking a session to stop and killing it."""
    drain_s: float = 10.0
    """Seconds that running tasks have to finish when a worker is asked to stop."""
    task_env: str = ""
    """Environment variables that tasks may set for commands: names or patterns, comma-separated."""
    task_folders: str = ""
    """Folders that tasks may work in, and below, by commas; empty: where the worker was started."""
    transcript_kb: int = 1024
    """Maximum kilobytes of transcript stored per attempt."""
    max_depth: int = 16
    """Maximum depth of subtasks below the first task."""
    max_children: int = 1000
    """Maximum subtasks that all attempts of one task may create."""
    webhook_allow: str = ""
    """Webhook targets allowed though private or without TLS: `host[:port]` or CIDR, by commas."""
    webhook_timeout_s: float = 10.0
    """Seconds that an endpoint has to answer a webhook, including name lookup; at most 30."""
    gateways: str = ""
    """Gateways that start sessions for agents: `name=url`, comma-separated."""
    gateway_token: str = ""
    """Bearer token sent to gateways; empty: none."""
    public_url: str = ""
    """URL at which gateway sessions reach the API; empty: the host and port it listens on."""
    spawn_timeout_s: float = 60.0
    """Seconds that a gateway has to start a session."""
    dispatch_per_s: float = 20.0
    """Maximum tasks per second that a coordinator pushes to gateways."""
    log: str = ""
    """`json`: one JSON object per log record; empty: plain text lines."""
    metrics_token: str = ""
    """Bearer token required to read the API's `/metrics`; empty: none."""
    alert_url: str = ""
    """URL to POST to when the database is down for long, and when it is up again; empty: none."""
    otel: bool = False
    """Send traces as the `OTEL_*` variables say; also on if one of them sets an endpoint."""
    leader: bool = True
    """Coordinators elect a leader, which does the work; off only to prove it is not needed."""

    def data_folder(self) -> Path:
        """Returns `data`, else `tenuto` in the user's data folder; `Invalid` if `~` is unknown."""
        if self.data:
            return expand_home("the setting data", self.data)
        base = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
        return expand_home("XDG_DATA_HOME", base) / "tenuto"

    def allowed_variables(self) -> tuple[str, ...]:
        """Returns the variables that tasks may set, as names and patterns."""
        return tuple(split_commas(self.task_env))

    def allowed_folders(self) -> tuple[Path, ...]:
        """Returns the folders that tasks may work in, by default the current one; or `Invalid`."""
        folders = [
            expand_home("the setting task_folders", folder)
            for folder in split_commas(self.task_folders)
        ]
        return tuple(folders) or (Path(),)

    def gateway_urls(self) -> dict[str, str]:
        """Returns the URLs of the gateways by name."""
        pairs = (part.partition("=") for part in self.gateways.split(",") if part.strip())
        return {name.strip(): url.strip() for name, _, url in pairs}

    def proxy_networks(self) -> list[IPv4Network | IPv6Network]:
        """Returns the proxies whose `X-Forwarded-For` is trusted; or raises `ValueError`."""
        return [ip_network(part.strip()) for part in self.proxies.split(",") if part.strip()]

    def callback_url(self) -> str:
        """Returns the API URL for sessions of gateways: `public_url`, else host and port."""
        return self.public_url.rstrip("/") or f"http://{self.host}:{self.port}"

    def quota_ceiling(self) -> Quota:
        """Returns the limits of every workspace, whatever its own quota says; `None`: no limit."""
        return Quota(
            tasks_per_minute=self.quota_tasks_per_minute or None,
            pending=self.quota_pending or None,
            running=self.quota_running or None,
        )

    def database_url(self) -> str:
        """Returns `database`, else the URL of the SQLite file `tenuto.db` in the data folder."""
        return self.database or f"sqlite:///{self.data_folder() / 'tenuto.db'}"


def sqlite_path(url: str) -> str | None:
    """Returns the file of a SQLite URL, `None` for another; `Invalid` if it names no file.

    `sqlite:///t.db` is relative to the current folder, `sqlite:////var/t.db` is absolute.
    """
    if not url.startswith("sqlite:"):
        return None
    file = url.removeprefix("sqlite:///")
    if file == url or not file.strip("/"):
        raise Invalid(f"{url!r} names no file; use sqlite:///path", "database_invalid")
    return file


def split_commas(text: str) -> list[str]:
    """Returns the non-empty parts of a comma-separated text, without spaces around them."""
    return [part.strip() for part in text.split(",") if part.strip()]


def expand_home(name: str, path: str) -> Path:
    """Returns the path with `~` expanded; `Invalid`, with `name`, if there is no home folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise Invalid(
            f"{name} {path!r} is invalid: there is no such home folder; give a full path"
        ) from error


def load(flags: Mapping[str, Any] | None = None, file: Path | None = None) -> Settings:
    """Returns the settings of `file` (default `tenuto.toml`), environment, flags; or `Invalid`."""
    values = _read_file(file or Path("tenuto.toml"))
    for name in Settings.__struct_fields__:
        value = os.environ.get(f"TENUTO_{name.upper()}")
        if value or (value is not None and name in _CONNECTION_SETTINGS):
            values[name] = value
    flag_values = {name: value for name, value in (flags or {}).items() if value is not None}
    if "database" in flag_values:
        for name in _CONNECTION_SETTINGS:
            values.pop(name, None)
    values |= flag_values
    try:
        settings = msgspec.convert(values, Settings, strict=False)
    except msgspec.ValidationError as error:
        raise Invalid(f"invalid setting: {error}") from error
    _check(settings)
    return settings


def _check(settings: Settings) -> None:
    """Raises `Invalid` if a setting, or a combination of settings, is invalid."""
    for name in _ABOVE_ZERO:
        if not 0 < getattr(settings, name) < _UPPER_BOUND:
            value = getattr(settings, name)
            raise Invalid(
                f"the setting {name} must be above 0 and below {_UPPER_BOUND:,}, not {value}"
            )
    for name, maximum in _MAXIMA.items():
        if not 0 <= getattr(settings, name) <= maximum:
            value = getattr(settings, name)
            raise Invalid(f"the setting {name} must be between 0 and {maximum:,}, not {value}")
    _check_addresses_and_folders(settings)
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
        raise Invalid(f"invalid setting proxies: {error}; use addresses or CIDR") from error
    _check_gateways(settings)


def _check_addresses_and_folders(settings: Settings) -> None:
    """Raises `Invalid` for an invalid host or folder, or a NUL character in an address."""
    addresses = ("database", "database_runtime", "database_direct", "broker")
    for name in (*addresses, "data", "host", "task_folders"):
        if "\0" in getattr(settings, name):
            raise Invalid(f"the setting {name} contains a NUL character")
    if not _can_be_host(settings.host):  # an empty host would listen everywhere
        raise Invalid("the setting host must be an address or a name; 0.0.0.0 listens everywhere")
    if settings.data or not settings.database:
        settings.data_folder()
    settings.allowed_folders()


def _check_pooler(settings: Settings) -> None:
    """Raises `Invalid` if the settings of the pooler do not fit together."""
    others = {name: getattr(settings, name) for name in ("database_runtime", "database_direct")}
    if settings.pooler not in ("", "transaction"):
        raise Invalid(f"the setting pooler must be transaction or empty, not {settings.pooler!r}")
    if not settings.pooler:
        for name, url in others.items():
            if url:
                raise Invalid(f"the setting {name} needs a pooler; also set pooler=transaction")
        return
    for name, url in {"database": settings.database, **others}.items():
        is_required = name != "database_direct"
        if (url or is_required) and not url.startswith(("postgresql://", "postgres://")):
            raise Invalid(f"with pooler=transaction the setting {name} must be postgresql://...")


def _can_be_host(text: str) -> bool:
    """True if the text can be a host name or address."""
    try:
        return bool(text.strip() and text.encode("idna"))
    except UnicodeError:
        return False


def _check_gateways(settings: Settings) -> None:
    """Raises `Invalid` if a setting for gateways is invalid."""
    urls = settings.gateway_urls()
    for name, url in urls.items():
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}", name):
            raise Invalid(f"the setting gateways has an invalid name: {name!r}")
        is_url = re.fullmatch(r"[a-z][a-z0-9+.-]*://[^\s/?#@]+(/[^\s?#]*)?", url)
        if not is_url or scheme_of(url) not in GATEWAYS:
            raise Invalid(f"the setting gateways has no URL for {name}: use http(s)://host:port")
    if not 1 <= settings.spawn_timeout_s <= 3600:
        raise Invalid("the setting spawn_timeout_s must be between 1 and 3600")
    if not 0 < settings.dispatch_per_s <= 100_000:
        raise Invalid("the setting dispatch_per_s must be above 0 and at most 100,000")
    if urls and not settings.public_url and settings.port == 0:
        raise Invalid("gateways need the setting public_url if the setting port is 0")


def _read_file(path: Path) -> dict[str, Any]:
    """Returns the settings in the file, empty if there is no file; `Invalid` if it is not TOML."""
    try:
        return tomllib.loads(path.read_text()) if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise Invalid(f"cannot read {path}: {error}") from error
    except RecursionError as error:
        raise Invalid(f"cannot read {path}: it is nested too deeply") from error


def environment_without_settings() -> dict[str, str]:
    """Returns the environment without our variables, for a child that gets explicit settings."""
    prefixes = ("TENUTO_", "CRASH_")
    return {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
