"""Renders the chart with Helm and validates it for Kubernetes."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]  # it has no types
import yaml
from tests.deploy.tree import DEPLOY, load

CHART = DEPLOY / "helm" / "tenuto"
HELM = Path(sys.executable).with_name("helm")
OLDEST: str = load("helm/tenuto/Chart.yaml")["kubeVersion"].removeprefix(">=").removesuffix(".0-0")
NEWEST: str = kubernetes_validate.latest_version()
CUSTOM_KINDS = {"ServiceMonitor"}
"""Kinds that Kubernetes does not define itself."""
Refused: type[Exception] = kubernetes_validate.ValidationError
KEYS = f"k1:{'A' * 43}="
SECRETS = {
    "database": "postgresql://tenuto_app:x@db/tenuto",
    "ownerDatabase": "postgresql://tenuto_owner:x@db/tenuto",
    "keys": KEYS,
}

Object = dict[str, Any]


def helm(*words: str, values: Object) -> "subprocess.CompletedProcess[str]":
    """Run Helm on the chart with these values and nothing of the user's own settings."""
    return subprocess.run(
        [HELM, *words, "--values", "-"],
        input=yaml.safe_dump(values),
        env={"PATH": os.defpath, "HOME": "/nonexistent"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def render(values: Object, release: str = "tenuto") -> list[Object]:
    """The objects that an install would make, hooks included."""
    done = helm("template", release, str(CHART), values=values)
    assert done.returncode == 0, done.stderr
    return [item for item in yaml.safe_load_all(done.stdout) if item]


def refusal(values: Object) -> str:
    """Returns Helm's reason to refuse these values."""
    done = helm("template", "tenuto", str(CHART), values=values)
    assert done.returncode != 0, "it was rendered"
    return done.stderr


def check(item: Object, version: str) -> None:
    """Raise `Refused` with what the schemas of that Kubernetes have against an object."""
    kubernetes_validate.validate(item, version, strict=True)


def pods(items: list[Object]) -> Iterator[tuple[Object, Object]]:
    """Each object that makes pods, with the template of them."""
    for item in items:
        if item["kind"] in {"Deployment", "Job"}:
            yield item, item["spec"]["template"]


def containers(items: list[Object]) -> Iterator[Object]:
    for _, template in pods(items):
        yield from template["spec"].get("initContainers", [])
        yield from template["spec"]["containers"]


def of(items: list[Object], kind: str, name: str | None = None) -> Object:
    """The one object of a kind, or of a kind and name."""
    names = {name, None} - {None} or {item["metadata"]["name"] for item in items}
    [result] = [t for t in items if t["kind"] == kind and t["metadata"]["name"] in names]
    return result
