"""A copy of the tree, with an environment of its own, into which faults are planted."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from tests.mutants.faults import ROOT, Fault, planted

TEST_S = 60
"""Seconds for one test: a fault may make it wait for what never comes."""
LIMIT_S = 600
"""Seconds after which a fault that makes tests wait for ever counts as noticed."""
_PASSED, _NONE_CHOSEN = 0, 5
"""How pytest ends where no test fails."""


def make_copy(folder: Path, tests: str | None = None) -> None:
    """Write what git tracks, and an environment whose `tenuto` is that of the copy.

    The tests are those of the revision `tests`, if one is named.
    """
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        check=True,
        capture_output=True,
        text=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (source := ROOT / name).is_file():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
    if tests is not None:
        shutil.rmtree(folder / "tests")
        _extract(folder, tests)
    _make_environment(folder)


def _extract(folder: Path, revision: str) -> None:
    """Write the tests of a revision; raises `CalledProcessError` if git does not know it."""
    archive = ["git", "-C", str(ROOT), "archive", revision, "tests"]
    packed = subprocess.run(archive, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "-C", str(folder)], input=packed, check=True)


def _make_environment(folder: Path) -> None:
    """An environment beside the one that runs this, which it borrows all packages from."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / ".venv"], check=True)
    scripts = folder / ".venv" / "bin"
    packages = sysconfig.get_path("purelib", vars={"base": str(folder / ".venv")})
    borrowed = [item for item in sys.path if Path(item).name == "site-packages"]
    lines = [str(folder / "src"), *borrowed]
    Path(packages, "tenuto.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")
    program = Path(sys.executable).with_name("orchestrate").read_text(encoding="utf-8")
    _, _, rest = program.partition("\n")
    (scripts / "orchestrate").write_text(f"#!{scripts / 'python'}\n{rest}", encoding="utf-8")
    (scripts / "orchestrate").chmod(0o755)


def check_tests(folder: Path, fault: Fault, *, earlier: bool) -> None:
    """Raise `RuntimeError` unless the fault's tests pass without it; `earlier` ones may be none."""
    tests = _present(folder, fault)
    code, reported = _run_tests(folder, fault, tests) if tests else (_PASSED, "")
    if code != _PASSED and not (earlier and code == _NONE_CHOSEN):
        subject = "choose nothing" if code == _NONE_CHOSEN else "fail without it"
        raise RuntimeError(f"its tests {subject}: {' '.join(tests)} {fault.only}\n{reported}")


def is_noticed(folder: Path, fault: Fault) -> bool:
    """True if the fault's tests fail with it, or never end."""
    path = folder / fault.file
    text = path.read_text(encoding="utf-8")
    path.write_text(planted(fault, text), encoding="utf-8")
    try:
        tests = _present(folder, fault)
        code, _ = _run_tests(folder, fault, tests) if tests else (_PASSED, "")
        # Whatever else they end with: without the fault they passed.
        return code not in (_PASSED, _NONE_CHOSEN)
    finally:
        path.write_text(text, encoding="utf-8")


def _present(folder: Path, fault: Fault) -> list[str]:
    """The fault's tests that are there: a revision of the tests may lack some."""
    return [test for test in fault.tests if (folder / test.partition("::")[0]).exists()]


def _run_tests(folder: Path, fault: Fault, tests: list[str]) -> tuple[int, str]:
    """Runs these tests; returns pytest's exit code and the end of its output."""
    command = [str(folder / ".venv" / "bin" / "python"), "-m", "pytest", "-q", "-x"]
    command += ["-p", "no:cacheprovider", "-p", "no:randomly", f"--timeout={TEST_S}", *tests]
    command += ["-k", fault.only] if fault.only else []
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 1, f"not over after {LIMIT_S} s"
    return done.returncode, (done.stdout + done.stderr)[-2000:]
