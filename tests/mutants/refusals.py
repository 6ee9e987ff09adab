"""Faults created from the source: each `raise` of an error of Tenuto is removed once.

A refusal that can be dropped without a failing test is asserted nowhere, or by a test that would
pass without it. Which tests reach a refusal is measured: they run once under coverage.
`python -m tests.mutants.refusals src/tenuto/engine tests/contract` prints what no test notices.
"""

import argparse
import ast
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import coverage
import msgspec
from tests.mutants.__main__ import plant_all, report
from tests.mutants.faults import ROOT, Fault
from tests.test_tidy import SOURCE

TESTS_EACH = 8
"""Tests that are run for one refusal, of those that reach it."""


def refusals(path: Path) -> Iterator[tuple[int, Fault]]:
    """The line of each `raise` with an error that is made there, and a fault that drops it."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            end = node.end_lineno or node.lineno
            new = " " * node.col_offset + "pass\n"
            first = node.lineno - 1
            while text.count(old := "".join(lines[first:end])) > 1:
                first -= 1
            stored = "".join(lines[first : node.lineno - 1])
            name = path.relative_to(ROOT).as_posix()
            yield node.lineno, Fault(file=name, old=old, new=stored + new, tests=[])


def tests_by_line(targets: list[str]) -> dict[str, dict[int, list[str]]]:
    """For each source file and line the tests that reach it: the given ones run once for this."""
    with tempfile.TemporaryDirectory(prefix="tenuto-reached-") as position:
        data = Path(position) / "data"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        command += ["-p", "tests.mutants.contexts", *targets]
        environment = os.environ | {"TENUTO_REACHED": str(data)}
        subprocess.run(command, cwd=ROOT, env=environment, check=False)
        measured = coverage.CoverageData(str(data))
        measured.read()
        return {
            name: {
                line: sorted(filter(None, tests))
                for line, tests in measured.contexts_by_lineno(name).items()
            }
            for name in measured.measured_files()
        }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.refusals", description=__doc__)
    parser.add_argument("source", help="a folder of the source, or a file")
    parser.add_argument("tests", nargs="+", help="tests that may notice")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="copies of the tree")
    values = parser.parse_args()
    source = ROOT / values.source
    paths = [source] if source.is_file() else sorted(source.rglob("*.py"))
    reached = tests_by_line(values.tests)
    chosen, unreached = [], []
    for path in paths:
        name = path.relative_to(SOURCE).as_posix()
        for line, fault in refusals(path):
            position = f"{name}:{line}"
            if tests := reached.get(str(path), {}).get(line, [])[:TESTS_EACH]:
                chosen.append(("refusals", position, msgspec.structs.replace(fault, tests=tests)))
            else:
                unreached.append(position)
    code = report(plant_all(chosen, min(values.jobs, max(len(chosen), 1)), None))
    for position in unreached:
        sys.stdout.write(f"not reached: {position}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
