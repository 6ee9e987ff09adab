"""The systemd units: valid keys and commands, and workers that drain."""

import re
import shlex
from collections import defaultdict
from pathlib import Path

import pytest
from tests.deploy.tree import COMMAND_TIMEOUT_S, DEPLOY, VARIABLES, misunderstood

UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
KNOWN = {
    "Unit": {"After", "Description", "StartLimitIntervalSec", "Wants"},
    "Service": {
        "CapabilityBoundingSet",
        "DynamicUser",
        "Environment",
        "EnvironmentFile",
        "ExecStart",
        "Group",
        "KillMode",
        "LockPersonality",
        "NoNewPrivileges",
        "OOMPolicy",
        "PrivateDevices",
        "PrivateTmp",
        "ProtectClock",
        "ProtectControlGroups",
        "ProtectHome",
        "ProtectHostname",
        "ProtectKernelLogs",
        "ProtectKernelModules",
        "ProtectKernelTunables",
        "ProtectProc",
        "ProtectSystem",
        "RemoveIPC",
        "Restart",
        "RestartSec",
        "RestrictAddressFamilies",
        "RestrictNamespaces",
        "RestrictRealtime",
        "RestrictSUIDSGID",
        "StateDirectory",
        "StateDirectoryMode",
        "SystemCallArchitectures",
        "SystemCallErrorNumber",
        "SystemCallFilter",
        "TimeoutStopSec",
        "Type",
        "UMask",
        "User",
        "WorkingDirectory",
    },
    "Install": {"WantedBy"},
}
REPEATABLE = {"EnvironmentFile", "SystemCallFilter"}
HARDENED = {
    "CapabilityBoundingSet": "",
    "NoNewPrivileges": "yes",
    "PrivateDevices": "yes",
    "PrivateTmp": "yes",
    "ProtectControlGroups": "yes",
    "ProtectHome": "yes",
    "ProtectKernelModules": "yes",
    "ProtectKernelTunables": "yes",
    "ProtectSystem": "strict",
    "RestrictSUIDSGID": "yes",
    "SystemCallArchitectures": "native",
    "UMask": "0077",
}

Unit = dict[str, dict[str, list[str]]]


def parse(text: str) -> Unit:
    """Sections of keys, each with its values in order."""
    unit: Unit = {}
    section: dict[str, list[str]] | None = None
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        if header := re.fullmatch(r"\[(\w+)\]", line):
            assert header[1] not in unit, f"[{header[1]}] twice"
            section = unit[header[1]] = defaultdict(list)
            continue
        name, equals, value = line.partition("=")
        assert equals, line
        assert section is not None, f"{line} is in no section"
        section[name].append(value)
    return unit


def read(path: Path) -> Unit:
    return parse(path.read_text(encoding="utf-8"))


def one(unit: Unit, name: str) -> str:
    [value] = unit["Service"][name]
    return value


def test_every_program_has_a_unit() -> None:
    names = {path.name for path in UNITS}
    assert names == {"tenuto-api.service", "tenuto-coordinator.service", "tenuto-worker@.service"}


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_every_unit_key_is_valid(path: Path) -> None:
    unit = read(path)
    assert list(unit) == list(KNOWN)
    for section, keys in unit.items():
        assert set(keys) <= KNOWN[section]
        repeated = {name for name, values in keys.items() if len(values) > 1}
        assert repeated <= REPEATABLE


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_unit_command_is_valid(path: Path) -> None:
    words = shlex.split(one(read(path), "ExecStart"))
    assert words[0].startswith("/")
    assert misunderstood(words) is None


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_unit_is_hardened(path: Path) -> None:
    service = read(path)["Service"]
    assert {name: service[name] for name in HARDENED} == {k: [v] for k, v in HARDENED.items()}
    assert ("DynamicUser" in service) != ("User" in service)
    assert service.get("User") != ["root"]


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_unit_has_its_own_folder(path: Path) -> None:
    unit = read(path)
    assert one(unit, "StateDirectoryMode") == "0700"
    assert one(unit, "WorkingDirectory") == f"%S/{one(unit, 'StateDirectory')}"


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_unit_restarts_without_a_limit(path: Path) -> None:
    unit = read(path)
    assert one(unit, "Restart") == "always"
    assert unit["Unit"]["StartLimitIntervalSec"] == ["0"]


def test_worker_unit_drains_and_stops_its_processes() -> None:
    unit = read(DEPLOY / "systemd" / "tenuto-worker@.service")
    assert one(unit, "KillMode") == "mixed"
    assert one(unit, "OOMPolicy") == "continue"
    values = dict(pair.split("=") for pair in one(unit, "Environment").split())
    drain, grace = (int(values[f"TENUTO_{name}_S"]) for name in ("DRAIN", "GRACE"))
    assert int(one(unit, "TimeoutStopSec")) > drain + grace + COMMAND_TIMEOUT_S


def test_unit_variables_are_settings_and_secrets_are_empty() -> None:
    values = {
        pair.partition("=")[0]
        for path in UNITS
        for line in read(path)["Service"].get("Environment", [])
        for pair in line.split()
    }
    text = (DEPLOY / "systemd" / "tenuto.env.example").read_text()
    example = dict(re.findall(r"^(?:# )?([A-Z_]+)=(.*)$", text, re.MULTILINE))
    assert (values | set(example)) - {"PGPASSWORD"} <= VARIABLES
    assert {example[name] for name in ("PGPASSWORD", "TENUTO_KEYS", "TENUTO_TOKEN")} == {""}
    for path in UNITS:
        assert "/etc/tenuto/tenuto.env" in read(path)["Service"]["EnvironmentFile"]


@pytest.mark.parametrize(
    "text", ["Type=exec", "[Unit]\nnonsense", "[Unit]\n[Service]\n[Unit]"], ids=repr
)
def test_file_that_is_not_a_unit_is_refused(text: str) -> None:
    with pytest.raises(AssertionError):
        parse(text)
