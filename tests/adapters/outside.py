"""The package of docs/adapters.md, as installed: a module and the metadata of a distribution."""

import importlib
import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "adapters.md"


def block(language: str) -> str:
    matches = re.search(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert matches is not None
    return matches[1]


def install(site: Path, module: str | None = None) -> Path:
    """Installs the package into a folder, with another text for its module if one is given."""
    info = site / "outside-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
    groups = tomllib.loads(block("toml"))["project"]["entry-points"]
    sections = [
        "\n".join([f"[{group}]", *(f"{name} = {path}" for name, path in points.items())])
        for group, points in groups.items()
    ]
    (info / "entry_points.txt").write_text("\n\n".join(sections) + "\n")
    (site / "outside.py").write_text(block("python") if module is None else module)
    return site


def imported(site: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Makes the installed package visible to this process, and imports it."""
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.delitem(sys.modules, "outside", raising=False)
    return importlib.import_module("outside")
