"""`orchestrate complexity`: where the lines between easy and hard tasks are."""

from typing import TYPE_CHECKING, Any

import click

from tenuto.cli.base import Globals, command, group
from tenuto.cli.connection import call
from tenuto.cli.output import Columns, print_one

if TYPE_CHECKING:
    from tenuto.client.remote.engine import AnyEngine
    from tenuto.model.limits.complexity import ComplexityRules

_RULES: Columns = {
    "Low up to": lambda rules: f"{rules.low_minutes} min",
    "Middle up to": lambda rules: f"{rules.middle_minutes} min",
    "Hard": lambda rules: f"more than {rules.middle_minutes} min",
    "ExtremHard": lambda rules: "without an estimate",  # noqa: ARG005  a column of its own
    "policy": lambda rules: rules.policy,
}


@group("complexity", "orchestrate complexity list", "orchestrate complexity set --policy require")
def complexity() -> None:
    """Say what makes a task hard, and what hard tasks require."""


@command("list", "orchestrate complexity list")
@click.pass_obj
def list_(given: Globals) -> None:
    """Show the levels and the policy."""
    print_one(given, call(given, lambda engine: engine.complexity.get()), _RULES)


@command("set", "orchestrate complexity set --low 30 --middle 60 --policy require")
@click.option("--low", "low_minutes", type=click.IntRange(1), metavar="MIN", help="Low up to this.")
@click.option(
    "--middle", "middle_minutes", type=click.IntRange(1), metavar="MIN", help="Middle up to this."
)
@click.option(
    "--policy",
    type=click.Choice(["require", "warn", "off"]),
    help="Whether hard tasks go only to agents with the capability call_subagent.",
)
@click.pass_obj
def set_(given: Globals, /, **said: Any) -> None:
    """Change the levels or the policy, for tasks submitted from now on."""
    import msgspec

    changes = {name: value for name, value in said.items() if value is not None}

    async def change(engine: "AnyEngine") -> "ComplexityRules":
        rules = msgspec.structs.replace(await engine.complexity.get(), **changes)
        await engine.complexity.set(rules)
        return rules

    print_one(given, call(given, change), _RULES)


complexity.add_command(list_)
complexity.add_command(set_)
