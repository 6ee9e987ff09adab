"""Builds .venv-bench, with the peers and this project in it. Standard library only."""

import hashlib
import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = ROOT / ".venv-bench"
REQUIREMENTS = ROOT / "bench" / "requirements.txt"


def run_in_environment(module: str, arguments: list[str]) -> None:
    """Builds .venv-bench if needed and replaces this process by its `python -m module`."""
    python = ENVIRONMENT / "bin" / "python"
    if not python.exists():
        _log(f"creating {ENVIRONMENT.name}")
        venv.create(ENVIRONMENT, with_pip=True)
    _install("peers", ["-r", str(REQUIREMENTS)], REQUIREMENTS)
    try:
        _install("tenuto", ["-e", str(ROOT)], ROOT / "pyproject.toml")
    except subprocess.CalledProcessError:
        _log("cannot install this project; measuring only the other peers")
    sys.stdout.flush()
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    command = [str(python), "-m", module, *arguments]
    os.execve(python, command, {**os.environ, "PYTHONPATH": path})


def _install(name: str, arguments: list[str], source: Path) -> None:
    """Runs `pip install` with the arguments, unless `source` is unchanged since the last run."""
    stamp = ENVIRONMENT / f"{name}.sha256"
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    if stamp.exists() and stamp.read_text() == digest:
        return
    _log(f"installing {name}")
    pip = [str(ENVIRONMENT / "bin" / "python"), "-m", "pip", "install", "--quiet", *arguments]
    subprocess.run(pip, check=True)
    stamp.write_text(digest)


def _log(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr, flush=True)
