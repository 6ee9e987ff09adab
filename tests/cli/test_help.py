"""Help: every command teaches with an example and imports nothing that takes time."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from tenuto.cli.base import Command, Group
from tenuto.cli.root import cli as root

# Runs one command line in a process that then tells what it imported.
PROBE = """
import json, sys
from tenuto.cli.main import main
code = main(sys.argv[1:])
print(json.dumps({"code": code, "modules": sorted(sys.modules)}), file=sys.stderr)
"""
SLOW = {"rich", "asyncpg", "uvloop", "msgspec", "asyncio", "sqlite3", "socket", "subprocess"}
FAST_OF_OURS = ("tenuto.cli", "tenuto.model.errors")


def paths(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words that lead to every command, the groups included."""
    yield path
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            result = command.get_command(context, name)
            assert result is not None
            yield from paths(result, (*path, name))


PATHS = list(paths(root))


def probe(*words: str) -> tuple[str, int, set[str]]:
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *words], capture_output=True, text=True, check=True
    )
    reported = json.loads(done.stderr)
    return done.stdout, reported["code"], set(reported["modules"])


def test_documented_commands_exist() -> None:
    names = (
        "up; run; worker; worker list; coordinator; coordinator run; coordinator status; doctor;"
        " task create; task list; task show; task status; task update; task cancel; task retry;"
        " task pause; task resume; task logs; task attempts; task explain; task rerun;"
        " task archive; dlq list; dlq show; dlq requeue; dlq purge; db migrate; db check; bench;"
        " task delete; login; logout; top; completion; agent create; agent list; agent show;"
        " agent update; agent health; agent tasks; agent terminate; agent delete; agent token;"
        " workspace list; workspace create; workspace show; workspace quota; user list;"
        " user create; user update; user delete; token list; token create; token revoke;"
        " webhook list; webhook create; webhook show; webhook update; webhook delete;"
        " webhook deliveries; webhook redeliver; webhook rotate-secret; secret list; secret set;"
        " secret delete; coordinator recover; coordinator logs; apply; validate; export;"
        " definition list; definition show; definition delete; flow start; flow list; flow show;"
        " flow tasks; flow cancel; flow pause; flow resume; flow rerun; group create; group list;"
        " group show; group start; group cancel; group pause; group resume; inbox list;"
        " inbox show; inbox approve; inbox reject; inbox answer; worker drain; agent explain;"
        " agent message; agent messages"
    )
    assert {tuple(name.split()) for name in names.split(";")} <= set(PATHS)


@pytest.mark.parametrize("path", PATHS, ids=" ".join)
def test_help_has_an_example_and_imports_little(path: tuple[str, ...]) -> None:
    out, code, modules = probe(*path, "--help")
    assert code == 0
    assert out.startswith(f"Usage: {' '.join(('orchestrate', *path))} ")
    _, _, examples = out.partition("\nExamples:\n")
    assert f"  {' '.join(('orchestrate', *path))}" in examples
    assert modules & SLOW == set()
    ours = {name for name in modules if name.startswith("tenuto.")}
    assert {n for n in ours if not n.startswith(FAST_OF_OURS) and n != "tenuto.model"} == set()


@pytest.mark.parametrize("path", PATHS, ids=" ".join)
def test_every_option_has_help_and_global_options_are_everywhere(path: tuple[str, ...]) -> None:
    command: click.Command = root
    for name in path:
        assert isinstance(command, click.Group)
        command = command.get_command(click.Context(command), name) or command
    assert isinstance(command, Command | Group)
    assert command.name == (path[-1] if path else "orchestrate")
    options = [param for param in command.params if isinstance(param, click.Option)]
    shared = {"--url", "--token", "--workspace", "--database", "--data", "--json"}
    assert shared <= {name for option in options for name in option.opts}
    assert [option.name for option in options if not option.help] == []


def test_version_needs_no_database() -> None:
    out, code, modules = probe("--version")
    assert (out, code) == ("tenuto 0.1.0\n", 0)
    assert modules & SLOW == set()


@pytest.mark.parametrize("words", [(), ("task",), ("dlq",)])
def test_command_group_alone_prints_its_help(words: tuple[str, ...]) -> None:
    out, code, _ = probe(*words)
    assert code == 2
    assert "Commands:" in out


def test_module_can_be_run_as_a_program() -> None:
    words = [sys.executable, "-m", "tenuto.cli.main", "task", "--help"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("Usage: orchestrate task ")


def test_few_modules_are_loaded_before_interrupts_are_handled() -> None:
    output = subprocess.run(
        [sys.executable, "-c", "import sys, tenuto.cli.main; print('typing' in sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert output.stdout == "False\n"


def test_short_command_imports_no_server_modules(tmp_path: Path) -> None:
    data = str(tmp_path)
    assert probe("task", "create", "--name", "x", "--prompt", "y", "--data", data)[1] == 0
    out, code, modules = probe("task", "list", "--data", data, "--json")
    assert (len(json.loads(out)["tasks"]), code) == (1, 0)
    assert modules & {"prometheus_client", "litestar", "uvicorn", "asyncpg", "http.server"} == set()
