"""Helpers for tests of the deployment: its files, and the check of command lines."""

import re
import tomllib
from pathlib import Path
from typing import Any

import click
import yaml

from tenuto.cli.root import cli
from tenuto.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
VERSION: str = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
VARIABLES = {f"TENUTO_{name.upper()}" for name in Settings.__struct_fields__} | {
    "TENUTO_KEYS",
    "TENUTO_TOKEN",
    "TENUTO_URL",
}
"""What the programs read from the environment."""
COMMAND_TIMEOUT_S = 30
"""Seconds that a worker may take, after draining and killing, to tell what became of its tasks."""


def load(position: str) -> Any:
    return yaml.safe_load((DEPLOY / position).read_text(encoding="utf-8"))


def seconds(text: str) -> int:
    """A length of time with one unit, as compose and Prometheus write it."""
    result = re.fullmatch(r"(\d+)([smh])", text)
    assert result is not None, text
    return int(result[1]) * {"s": 1, "m": 60, "h": 3600}[result[2]]


def misunderstood(words: list[str]) -> str | None:
    """Returns the reason to refuse a command line, `None` if it is valid."""
    program, *rest = words
    if Path(program).name != "orchestrate":
        return f"{program} is not the program"
    command: click.Command = cli
    while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        result = command.get_command(click.Context(command), rest[0])
        if result is None:
            return f"no command {rest[0]}"
        command, rest = result, rest[1:]
    try:
        command.make_context(program, rest)
    except click.UsageError as error:
        return error.format_message()
    return None
