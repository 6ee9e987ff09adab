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
    """Replaces this process by `python -m module` of .venv-bench, which it builds when needed."""
    python = ENVIRONMENT / "bin" / "python"
    if not python.exists():
        _say(f"creating {ENVIRONMENT.name}")
        venv.create(ENVIRONMENT, with_pip=True)
    _install("peers", ["-r", str(REQUIREMENTS)], REQUIREMENTS)
    try:
        _install("tenuto", ["-e", str(ROOT)], ROOT / "pyproject.toml")
    except subprocess.CalledProcessError:
        _say("this project could not be installed; the others are measured without it")
    sys.stdout.flush()
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    command = [str(python), "-m", module, *arguments]
    os.execve(python, command, {**os.environ, "PYTHONPATH": path})


def _install(what: str, arguments: list[str], source: Path) -> None:
    """Installs unless the same version of `source` was installed before."""
    stamp = ENVIRONMENT / f"{what}.sha256"
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    if stamp.exists() and stamp.read_text() == digest:
        return
    _say(f"installing {what}")
    pip = [str(ENVIRONMENT / "bin" / "python"), "-m", "pip", "install", "--quiet", *arguments]
    subprocess.run(pip, check=True)
    stamp.write_text(digest)


def _say(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr, flush=True)
