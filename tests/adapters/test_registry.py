"""Adapters by name: the built-in ones, and those of packages that others install."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.adapters.outside import imported, install
from tests.cli.orchestrate import WAIT_S, Orchestrate
from tests.waiting import eventually_sync

from tenuto.model.errors import Invalid
from tenuto.registry import BROKERS, GATEWAYS, RUNTIMES, STORES, Registry

ALL = {"broker": BROKERS, "runtime": RUNTIMES, "gateway": GATEWAYS, "database": STORES}


@pytest.mark.parametrize("kind", ALL)
def test_every_built_in_adapter_can_be_loaded(kind: str) -> None:
    registry = ALL[kind]
    assert all(callable(registry.load(name)) for name in registry._built_in)


@pytest.mark.parametrize("kind", ALL)
def test_an_unknown_name_is_refused_with_the_known_ones(kind: str) -> None:
    with pytest.raises(Invalid) as caught:
        ALL[kind].load("nonsense")
    names = ", ".join(sorted(ALL[kind]._built_in))
    assert caught.value.message == f"there is no {kind} 'nonsense'; known: {names}"
    assert caught.value.code == "invalid_value"


def test_installed_adapters_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "hintfile" not in BROKERS
    outside = imported(install(tmp_path), monkeypatch)
    assert "hintfile" in BROKERS
    assert BROKERS.load("hintfile") is outside.FileBroker
    with pytest.raises(Invalid) as caught:
        BROKERS.load("nonsense")
    names = sorted([*BROKERS._built_in, "hintfile"])
    assert caught.value.message.endswith(f"; known: {', '.join(names)}")
    with pytest.raises(Invalid, match="there is no gateway 'hintfile'"):
        GATEWAYS.load("hintfile")


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        ("import nothing_like_it", "ModuleNotFoundError: No module named 'nothing_like_it'"),
        ("raise SystemExit('bye')", "SystemExit: bye"),
        ("", "AttributeError: module 'outside' has no attribute 'Capitals'"),
    ],
)
def test_an_adapter_that_fails_to_load_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, reason: str
) -> None:
    monkeypatch.syspath_prepend(str(install(tmp_path, module)))
    monkeypatch.delitem(sys.modules, "outside", raising=False)
    with pytest.raises(Invalid) as caught:
        RUNTIMES.load("capitals")
    assert caught.value.message == (
        f"cannot load the runtime 'capitals' (outside:Capitals): {reason}"
    )
    assert caught.value.code == "invalid_value"


def test_a_built_in_adapter_hides_an_installed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(install(tmp_path)))
    registry = Registry("broker", {"hintfile": "tenuto.broker.memory:create"}, "tenuto.brokers")
    assert registry.load("hintfile") is BROKERS.load("memory")


def test_a_task_runs_with_an_installed_broker_and_runtime(tmp_path: Path) -> None:
    cli = Orchestrate(tmp_path)
    cli.environment |= {
        "PYTHONPATH": str(install(tmp_path / "site")),
        "TENUTO_BROKER": f"hintfile://{tmp_path}/hints",
        "TENUTO_POLL_S": "1000",
    }
    with (tmp_path / "worker.log").open("wb") as log:
        worker = cli.start("worker", "--runtime", "capitals", stdout=log, stderr=log)

    def read(path: str) -> str:
        return (tmp_path / path).read_text() if (tmp_path / path).exists() else ""

    try:
        eventually_sync(lambda: "hosts local" in read("worker.log"), timeout=WAIT_S)
        create = cli.start("task", "create", "--name", "Greeting", "--prompt", "hello")
        task = create.communicate(timeout=WAIT_S)[0].decode().strip()
        assert create.returncode == 0
        del cli.environment["TENUTO_BROKER"]  # reading needs none
        # The worker does not poll for a long time: it finds the task by the hint in the file.
        done = eventually_sync(
            lambda: (view := cli.json("task", "show", task))["finishedAt"] and view,
            timeout=WAIT_S,
        )
        assert done["status"] == "COMPLETED", done
        assert done["outputResult"] == {"answer": "HELLO"}
        assert " lane:" in read("hints")
    finally:
        worker.terminate()
        assert worker.wait(WAIT_S) == 0, read("worker.log")
    assert "Traceback" not in read("worker.log")


@pytest.mark.parametrize(
    ("words", "environment", "message"),
    [
        (["--runtime", "rust"], {}, "there is no runtime 'rust'; known: command, function"),
        (["--runtime", "function"], {}, "the runtime function needs handlers; use --app"),
        ([], {"TENUTO_BROKER": "carrier:"}, "there is no broker 'carrier'; known: "),
        ([], {"TENUTO_BROKER": "postgresql:"}, "needs a PostgreSQL database"),
    ],
)
def test_a_wrong_choice_is_refused_when_the_worker_starts(
    tmp_path: Path, words: list[str], environment: dict[str, str], message: str
) -> None:
    answer = Orchestrate(tmp_path)("worker", *words, **environment)
    assert answer.code == 2
    assert message in answer.err


def test_help_imports_no_adapter() -> None:
    script = (
        "import sys; from tenuto.cli.main import main\n"
        "try: main(['worker', '--help'])\n"
        "except SystemExit: pass\n"
        "names = ('tenuto.broker', 'tenuto.worker', 'tenuto.store', 'asyncpg', 'sqlite3')\n"
        "print([name for name in sys.modules if name.startswith(names)], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=WAIT_S, check=True
    )
    assert done.stderr.strip() == "[]"
