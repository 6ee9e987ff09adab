"""Settings: defaults, then `tenuto.toml`, then `TENUTO_*`, then flags."""

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from tenuto.model.errors import Invalid


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an operator can set. Every field is `TENUTO_<NAME>` in the environment."""

    database: str = ""
    """`sqlite:///path` or `postgresql://...`; empty: a SQLite file in the data folder."""
    data: str = ""
    """Folder for the embedded database; empty: the user's data folder."""
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
    transcript_kb: int = 1024
    """Kilobytes of output kept per attempt."""
    leader: bool = True
    """Whether coordinators elect one that does the work; off only to prove it is not needed."""

    def folder(self) -> Path:
        """The data folder."""
        if self.data:
            return Path(self.data).expanduser()
        base = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
        return Path(base).expanduser() / "tenuto"

    def url(self) -> str:
        """The database's address."""
        return self.database or f"sqlite:///{self.folder() / 'tenuto.db'}"


def load(flags: Mapping[str, Any] | None = None, file: Path | None = None) -> Settings:
    """The settings in force; `Invalid` names the one that is wrong."""
    found: dict[str, Any] = {}
    path = file or Path("tenuto.toml")
    if path.is_file():
        found |= _read(path)
    for name in Settings.__struct_fields__:
        if value := os.environ.get(f"TENUTO_{name.upper()}"):
            found[name] = value
    found |= {name: value for name, value in (flags or {}).items() if value is not None}
    try:
        settings = msgspec.convert(found, Settings, strict=False)
    except msgspec.ValidationError as error:
        raise Invalid(f"a setting is wrong: {error}") from error
    for name in ("heartbeat_s", "lease_s", "tick_s", "poll_s", "slots", "transcript_kb"):
        if not 0 < getattr(settings, name) < 1e9:
            raise Invalid(f"the setting {name} must be above 0, not {getattr(settings, name)}")
    for name in ("grace_s", "drain_s"):
        if not 0 <= getattr(settings, name) < 1e9:
            raise Invalid(f"the setting {name} must not be negative")
    return settings


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise Invalid(f"cannot read {path}: {error}") from error
