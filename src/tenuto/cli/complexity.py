"""`orchestrate complexity`: complexity levels of tasks, by estimated minutes."""

from typing import TYPE_CHECKING, Any

import click

from tenuto.cli.base import GlobalOptions, command, group
from tenuto.cli.connection import call_engine
from tenuto.cli.output import Columns, print_one

if TYPE_CHECKING:
    from tenuto.client.remote.engine import AnyEngine
    from tenuto.model.limits.complexity import ComplexityRules

_RULES: Columns = {
    "Low up to": lambda rules: f"{rules.low_minutes} min",
    "Middle up to": lambda rules: f"{rules.middle_minutes} min",
    "Hard": lambda rules: f"more than {rules.middle_minutes} min",
    "ExtremHard": lambda rules: "without an estimate",  # noqa: ARG005  same value for all rules
    "policy": lambda rules: rules.policy,
}


@group("complexity", "orchestrate complexity list", "orchestrate complexity set --policy require")
def complexity() -> None:
    """Show or set complexity levels and the rule for hard tasks."""


@command("list", "orchestrate complexity list")
@click.pass_obj
def list_(options: GlobalOptions) -> None:
    """Show the complexity levels and the policy."""
    print_one(options, call_engine(options, lambda engine: engine.complexity.get()), _RULES)


@command("set", "orchestrate complexity set --low 30 --middle 60 --policy require")
@click.option(
    "--low", "low_minutes", type=click.IntRange(1), metavar="MIN", help="Low up to this estimate."
)
@click.option(
    "--middle",
    "middle_minutes",
    type=click.IntRange(1),
    metavar="MIN",
    help="Middle up to this estimate.",
)
@click.option(
    "--policy",
    type=click.Choice(["require", "warn", "off"]),
    help="Hard tasks: require the capability call_subagent, only warn, or neither.",
)
@click.pass_obj
def set_(options: GlobalOptions, /, **values: Any) -> None:
    """Change the levels or the policy; applies to tasks submitted from now on."""
    import msgspec

    changes = {name: value for name, value in values.items() if value is not None}

    async def change_rules(engine: "AnyEngine") -> "ComplexityRules":
        rules = msgspec.structs.replace(await engine.complexity.get(), **changes)
        await engine.complexity.set(rules)
        return rules

    print_one(options, call_engine(options, change_rules), _RULES)


complexity.add_command(list_)
complexity.add_command(set_)
