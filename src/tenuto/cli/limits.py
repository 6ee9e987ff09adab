"""`orchestrate pause`, `resume` and `limit`: what keeps tasks from being claimed."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from tenuto.cli.base import F, Globals, command, group
from tenuto.cli.connection import ask
from tenuto.cli.output import Columns, in_future, print_done, print_one, tell_list

if TYPE_CHECKING:
    from tenuto.model.limits.pauses import GateKind

_GATE: Columns = {
    "KIND": lambda gate: gate.kind,
    "SUBJECT": lambda gate: gate.subject,
    "UNTIL": lambda gate: gate.until,
    "BY": lambda gate: gate.created_by,
    "SINCE": lambda gate: gate.created_at,
    "REASON": lambda gate: gate.reason,
}
_LIMIT: Columns = {
    "NAME": lambda limit: limit.name,
    "PROVIDER": lambda limit: limit.provider,
    "MODEL": lambda limit: limit.model,
    "ACCOUNT": lambda limit: limit.account,
    "REQUESTS": lambda limit: _share(limit.requests_left, limit.requests_per_minute),
    "TOKENS": lambda limit: _share(limit.tokens_left, limit.tokens_per_minute),
    "NEXT": lambda limit: limit.next_at,
}


def _share(left: int | None, most: int | None) -> str:
    return "" if most is None else f"{left:,} of {most:,}"


def _subject(function: F) -> F:
    """Adds the ways of saying what is meant; `_meant` reads them."""
    options: tuple[Callable[[F], F], ...] = (
        click.option("--lane", metavar="N", help="A lane by its number; `explain` tells it."),
        click.option("--agent", metavar="NAME", help="An agent."),
        click.option("--type", "task_type", metavar="T", help="A type of task, also later ones."),
        click.option(
            "--workspace",
            "everything",
            is_flag=True,
            help="The whole workspace. Another one than yours: name it before the command.",
        ),
    )
    for option in reversed(options):
        function = option(function)
    return function


def _subject_from_options(said: dict[str, Any]) -> "tuple[GateKind, str] | None":
    """The one thing that was named, taken out of what was said; none when nothing was."""
    from tenuto.model.limits.pauses import EVERYTHING

    lane, agent = said.pop("lane"), said.pop("agent")
    task_type, everything = said.pop("task_type"), said.pop("everything")
    found: list[tuple[GateKind, str]] = []
    if lane is not None:
        found.append(("lane", lane))
    if agent is not None:
        found.append(("agent", agent))
    if task_type is not None:
        found.append(("type", task_type))
    if everything:
        found.append(("workspace", EVERYTHING))
    if len(found) > 1:
        raise click.UsageError("name one of --lane, --agent, --type and --workspace")
    return found[0] if found else None


@command(
    "pause",
    "orchestrate pause --type deploy --reason 'release freeze' --until +2h",
    "orchestrate pause --agent claude-1",
    "orchestrate pause --workspace",
    "orchestrate pause",
)
@_subject
@click.option("--reason", metavar="TEXT", help="Why, for everybody who asks.")
@click.option("--until", metavar="TIME", help="Go on by itself then: +2h, or 2026-01-31T09:00.")
@click.pass_obj
def pause(given: Globals, /, reason: str | None, until: str | None, **said: Any) -> None:
    """Let nobody claim tasks of a lane, an agent, a type or the whole workspace.

    From then on nothing more is claimed there. What runs goes on; `task pause` stops a task.
    Without a name, what is paused is listed.
    """
    meant = _subject_from_options(said)
    if meant is None:
        if reason is not None or until is not None:
            raise click.UsageError("name one of --lane, --agent, --type and --workspace")
        found = ask(given, lambda client: client.gates.list())
        tell_list(given, "gates", found, _GATE, wide="REASON")
        return
    end = None if until is None else in_future(until)
    made = ask(given, lambda client: client.gates.close(*meant, reason, end))
    print_one(given, made, {name.lower(): show for name, show in _GATE.items()})


@command(
    "resume",
    "orchestrate resume --type deploy",
    "orchestrate resume --agent claude-1",
    "orchestrate resume --workspace",
)
@_subject
@click.pass_obj
def resume(given: Globals, /, **said: Any) -> None:
    """Let what was paused go on, at once."""
    meant = _subject_from_options(said)
    if meant is None:
        raise click.UsageError("name one of --lane, --agent, --type and --workspace")
    ask(given, lambda client: client.gates.open(*meant))
    print_done(given, f"resumed {' '.join(meant)}", kind=meant[0], subject=meant[1])


@group(
    "limit",
    "orchestrate limit list",
    "orchestrate limit set claude --provider anthropic --requests-per-minute 50",
)
def limit() -> None:
    """Limit requests and tokens a minute, over all workers."""


@command(
    "set",
    "orchestrate limit set claude --provider anthropic --requests-per-minute 50",
    "orchestrate limit set opus --provider anthropic --model claude-opus --account team-a"
    " --requests-per-minute 10 --tokens-per-minute 200000",
)
@click.argument("name")
@click.option("--provider", metavar="P", help="What stands before the slash of a model's name.")
@click.option("--model", metavar="M", help="One model; else any.")
@click.option("--account", metavar="A", help="Agents of one account; else any.")
@click.option(
    "--requests-per-minute", type=click.IntRange(1), metavar="N", help="Claims in any 60 seconds."
)
@click.option(
    "--tokens-per-minute", type=click.IntRange(1), metavar="N", help="Tokens, as attempts report."
)
@click.pass_obj
def set_(given: Globals, /, name: str, **said: Any) -> None:
    """Keep a limit under a name, in place of any other of that name.

    A claim of a task counts as one request. The model is the task's, or else its agent's.
    """
    from tenuto.model.limits.rate_limits import RateLimit

    wanted = RateLimit(name=name, **said)
    made = ask(given, lambda client: client.rate_limits.put(wanted))
    print_one(given, made, {name.lower(): show for name, show in _LIMIT.items()})


@command("list", "orchestrate limit list")
@click.pass_obj
def list_(given: Globals) -> None:
    """List the limits with what is left of them now."""
    found = ask(given, lambda client: client.rate_limits.list())
    tell_list(given, "rateLimits", found, _LIMIT, wide="NAME")


@command("delete", "orchestrate limit delete claude")
@click.argument("name")
@click.pass_obj
def delete(given: Globals, name: str) -> None:
    """Forget a limit."""
    ask(given, lambda client: client.rate_limits.delete(name))
    print_done(given, f"deleted {name}", name=name)


for _each in (set_, list_, delete):
    limit.add_command(_each)
