"""The locks of the image: whole, at versions that the project allows, each package with hashes."""

import re
import tomllib
from collections.abc import Iterator
from importlib.metadata import requires
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tests.deploy.tree import DEPLOY, ROOT

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
OF = {
    "requirements.lock": PROJECT["project"]["dependencies"],
    "build.lock": PROJECT["build-system"]["requires"],
}
LINUX = {"sys_platform": "linux", "platform_system": "Linux", "os_name": "posix"}
ENTRY = re.compile(r"([a-z0-9-]+)==([\w.]+)( ; [^\\]+?)?((?: --hash=sha256:[0-9a-f]{64})+)")
RENEW = "run `make lock`"


def entries(name: str) -> Iterator[str]:
    """The entries of a lock, each on one line; comments are left out."""
    text = re.sub(r"^ *#.*\n", "", (DEPLOY / name).read_text(), flags=re.MULTILINE)
    return (re.sub(r" +", " ", line) for line in text.replace("\\\n", " ").splitlines())


def locked(name: str) -> dict[str, str]:
    """The versions by package."""
    matches = [ENTRY.fullmatch(line.rstrip()) for line in entries(name)]
    return {item[1]: item[2] for item in matches if item is not None}


def requirements(
    lines: list[str], extras: frozenset[str] = frozenset({""})
) -> Iterator[Requirement]:
    """The requirements that hold on Linux for some extra or none."""
    for item in map(Requirement, lines):
        if item.marker is None or any(
            item.marker.evaluate({**LINUX, "extra": extra}) for extra in extras
        ):
            yield item


@pytest.mark.parametrize("name", OF)
def test_every_locked_package_has_a_version_and_hashes(name: str) -> None:
    lines = list(entries(name))
    assert [line for line in lines if not ENTRY.fullmatch(line.rstrip())] == []
    assert len(lines) == len(locked(name)) > len(OF[name])


@pytest.mark.parametrize("name", OF)
def test_lock_names_no_host(name: str) -> None:
    assert not re.search(r"://|--(index|extra|find|trusted)|@ ", (DEPLOY / name).read_text())


@pytest.mark.parametrize("name", OF)
def test_project_dependencies_are_locked_at_allowed_versions(name: str) -> None:
    versions = locked(name)
    for item in requirements(OF[name]):
        version = versions.get(canonicalize_name(item.name))
        assert version is not None, f"{item} is not in {name}: {RENEW}"
        assert item.specifier.contains(version), f"{item} does not allow {version}: {RENEW}"


def test_transitive_dependencies_are_locked() -> None:
    versions, waiting = locked("requirements.lock"), list(requirements(OF["requirements.lock"]))
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        requirement = waiting.pop()
        name, extras = canonicalize_name(requirement.name), frozenset({"", *requirement.extras})
        assert name in versions, f"{requirement} is not in requirements.lock: {RENEW}"
        if (name, extras) not in seen:
            seen.add((name, extras))
            waiting += requirements(requires(requirement.name) or [], extras)
    assert {name for name, _ in seen} > {
        canonicalize_name(item.name) for item in requirements(OF["requirements.lock"])
    }


def test_image_installs_only_locked_packages() -> None:
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
    installs = re.findall(r"pip (?:install|wheel)[^&\n]*", text)
    assert len(installs) == 4
    assert all("--require-hashes" in install or "--no-deps" in install for install in installs)
    assert all(
        "--no-index" in install or "--no-build-isolation" in install
        for install in installs
        if "--no-deps" in install
    )
