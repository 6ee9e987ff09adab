"""Generated sequences: hundreds of random plans and commands do what their interpreters say.

They are the tests of `tests/contract/generated` with more examples. The examples differ from run
to run, except with `CI` set: a rare old fault must not stop a change that has nothing to do with
it. A failure prints the variable and the seed that repeat it.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = {
    "test_random_plans.py": ("TENUTO_PLANS", 150),
    "test_random_concurrency.py": ("TENUTO_KEYS", 40),
    "test_random_dependencies.py": ("TENUTO_WAITS", 40),
    "test_random_budgets.py": ("TENUTO_BUDGETS", 60),
    "test_both_databases.py": ("TENUTO_EXAMPLES", 100),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_random_sequences_match_their_interpreters(name: str) -> None:
    variable, number = EXAMPLES[name]
    command = [sys.executable, "-m", "pytest", "-q", "-n", str(os.cpu_count() or 1)]
    done = subprocess.run(
        [*command, "--timeout=0", f"tests/contract/generated/{name}"],
        cwd=ROOT,
        env={variable: str(number)} | dict(os.environ),
        check=False,
    )
    assert done.returncode == 0, f"{variable}={number} pytest tests/contract/generated/{name}"
