"""The compose file and its image: closed without secrets, hardened, in the right order."""

import json
import re
from typing import Any

import pytest
from tests.deploy.tree import (
    COMMAND_TIMEOUT_S,
    DEPLOY,
    ROOT,
    VARIABLES,
    VERSION,
    load,
    misunderstood,
    seconds,
)

COMPOSE = load("compose.yaml")
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
PROGRAMS = [name for name in SERVICES if name != "postgres"]
LASTING = [name for name in SERVICES if name != "migrate"]
TEXT = (DEPLOY / "compose.yaml").read_text()
VARIABLE = re.compile(r"\$\{(\w+)(:[-?])?([^}]*)\}")
SECRET = re.compile("PASSWORD|KEYS|TOKEN")
EXAMPLE = dict(re.findall(r"^(\w+)=(.*)$", (DEPLOY / ".env.example").read_text(), re.MULTILINE))
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()


def test_compose_services_equal_the_documented_ones() -> None:
    assert set(SERVICES) == {"postgres", "migrate", "api", "coordinator", "worker"}


def test_compose_requires_the_secrets() -> None:
    used = VARIABLE.findall(TEXT)
    required = {name for name, mode, message in used if mode == ":?" and message}
    assert required == {"POSTGRES_PASSWORD", "POSTGRES_RUNTIME_PASSWORD", "TENUTO_KEYS"}
    assert {name for name, mode, _ in used if SECRET.search(name) and mode != ":?"} == set()
    assert {name for name, mode, _ in used if not mode} == set()


def test_example_environment_lists_every_variable_and_no_secret() -> None:
    assert set(EXAMPLE) == {name for name, _, _ in VARIABLE.findall(TEXT)}
    assert {name: value for name, value in EXAMPLE.items() if SECRET.search(name) and value} == {}
    defaults = {name: default for name, mode, default in VARIABLE.findall(TEXT) if mode == ":-"}
    assert {name: EXAMPLE[name] for name in defaults} == defaults


@pytest.mark.parametrize("name", SERVICES)
def test_compose_service_has_minimal_rights(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", service["user"])
    assert not {"privileged", "cap_add", "network_mode", "pid", "ipc"} & set(service)


@pytest.mark.parametrize("name", SERVICES)
def test_image_has_a_tag(name: str) -> None:
    _, _, tag = SERVICES[name]["image"].partition(":")
    assert tag
    assert tag != "latest"
    assert name == "postgres" or tag == VERSION


@pytest.mark.parametrize("name", LASTING)
def test_long_running_service_has_a_health_check_and_restarts(name: str) -> None:
    service = SERVICES[name]
    assert service["restart"] == "unless-stopped"
    assert service["healthcheck"]["test"][0] == "CMD"
    assert seconds(service["stop_grace_period"]) > 30


def test_api_health_check_uses_readiness() -> None:
    assert "/health/ready" in SERVICES["api"]["healthcheck"]["test"][-1]


@pytest.mark.parametrize("name", PROGRAMS)
def test_compose_commands_are_valid(name: str) -> None:
    plain = [VARIABLE.sub(r"\3", word) for word in SERVICES[name]["command"]]
    assert misunderstood(plain) is None
    check = SERVICES[name].get("healthcheck", {"test": ["CMD", "python"]})["test"][1:]
    assert check[0] == "python" or misunderstood(check) is None


def test_migration_runs_before_the_other_services() -> None:
    assert SERVICES["migrate"]["depends_on"] == {"postgres": {"condition": "service_healthy"}}
    assert SERVICES["migrate"]["restart"] == "no"
    for name in ("api", "coordinator", "worker"):
        needs = SERVICES[name]["depends_on"]
        assert needs["migrate"] == {"condition": "service_completed_successfully"}


def test_only_the_migration_logs_in_as_owner() -> None:
    owner = "${POSTGRES_PASSWORD"
    assert SERVICES["migrate"]["environment"]["PGPASSWORD"].startswith(owner)
    assert "TENUTO_KEYS" not in SERVICES["migrate"]["environment"]
    for name in ("api", "coordinator", "worker"):
        environment = SERVICES[name]["environment"]
        assert "//tenuto_app@" in environment["TENUTO_DATABASE"]
        assert not any(owner in value for value in environment.values())


@pytest.mark.parametrize("name", PROGRAMS)
def test_compose_variables_are_settings_of_the_program(name: str) -> None:
    assert set(SERVICES[name]["environment"]) - {"PGPASSWORD"} <= VARIABLES


def test_compose_worker_has_time_to_drain() -> None:
    worker = SERVICES["worker"]
    drain, grace = (int(worker["environment"][f"TENUTO_{name}_S"]) for name in ("DRAIN", "GRACE"))
    assert seconds(worker["stop_grace_period"]) > drain + grace + COMMAND_TIMEOUT_S


def test_database_is_reachable_only_inside() -> None:
    assert SERVICES["postgres"]["networks"] == ["database"]
    assert COMPOSE["networks"]["database"] == {"internal": True}
    assert {name for name, service in SERVICES.items() if "ports" in service} == {"api"}
    assert EXAMPLE["API_PUBLISH"].startswith("127.0.0.1:")


def test_volumes_are_declared_and_mounted_files_exist() -> None:
    sources = [v.split(":")[0] for item in SERVICES.values() for v in item.get("volumes", [])]
    files = {source for source in sources if source.startswith(".")}
    assert files
    assert all((DEPLOY / file).is_file() for file in files)
    assert set(sources) - files == set(COMPOSE["volumes"])


def instructions(name: str) -> list[str]:
    lines = DOCKERFILE.replace("\\\n", " ").splitlines()
    return [line.removeprefix(name).strip() for line in lines if line.startswith(f"{name} ")]


def test_image_runs_as_the_expected_user() -> None:
    [user] = instructions("USER")
    assert {SERVICES[name]["user"] for name in PROGRAMS} == {user}
    [account] = [line for line in instructions("RUN") if "useradd" in line]
    assert f"--uid {user.partition(':')[0]}" in account


def test_image_entry_point_has_no_shell() -> None:
    [command] = instructions("CMD")
    assert misunderstood(json.loads(command)) is None
    assert not instructions("ENTRYPOINT")


def test_image_copies_existing_files() -> None:
    bases = {base.partition(" AS ")[0] for base in instructions("FROM")}
    assert bases == {"python:3.12-slim-bookworm"}
    copied = [line.split()[:-1] for line in instructions("COPY") if not line.startswith("--from")]
    names = {name for line in copied for name in line}
    assert all((ROOT / name).exists() for name in names)
    seen = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    assert {line.removeprefix("!") for line in seen if line.startswith("!")} == names
