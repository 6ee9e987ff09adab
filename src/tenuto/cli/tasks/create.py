"""`orchestrate task create`."""

import sys
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

import click

from tenuto.cli.base import Globals, command
from tenuto.cli.connection import call
from tenuto.cli.parse import (
    after,
    ahead,
    bound_options,
    folder,
    place_options,
    read_bounds,
    read_json,
    read_place,
    read_text,
    seconds,
)

if TYPE_CHECKING:
    from tenuto.client.remote.engine import AnyEngine
    from tenuto.engine.tasks.submit import Submitted


async def agent_id(engine: "AnyEngine", name: str | None) -> UUID | None:
    """The id of the agent with that name or id."""
    from tenuto.client.agents import Agents

    return None if name is None else (await Agents(engine).get(name)).id


def print_submitted(given: Globals, submitted: "Submitted") -> None:
    """Print the id of a task that is stored; `Unavailable` names it where that cannot be."""
    from tenuto.cli.render import print_json
    from tenuto.model.errors import Unavailable

    try:
        print_json(submitted) if given.json else print(submitted.id)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise Unavailable(
            f"task {submitted.id} is stored, but the output cannot be written: {error.strerror}",
            "storage_full",
        ) from error


@command(
    "create",
    'orchestrate task create --name "Fix types" --prompt "Fix the strict errors" --priority 8',
    "orchestrate task create --name Report --prompt-file ask.md --run-at +10m --tag nightly",
    "orchestrate task create --name Import --type import --input @rows.json --max-attempts 5",
    "orchestrate task create --name Deploy --prompt 'Ship it' --depends-on 0198c0de-5b1c",
    "orchestrate task create --name Deploy --prompt 'Ship it' --concurrency-key deploy",
    "orchestrate task create --name Research --prompt 'Look into it' --budget-usd 5",
)
@click.option("--name", required=True, metavar="TITLE", help="What the task is called.")
@click.option("--prompt", metavar="TEXT", help="What the agent is asked to do.")
@click.option("--prompt-file", metavar="FILE", help="The same from a file; - is standard input.")
@click.option("--system-prompt", metavar="TEXT", help="What the agent is told about its role.")
@click.option("--description", metavar="TEXT", help="For people; no agent reads it.")
@click.option("--input", "input_", metavar="JSON|@FILE", help="A JSON value for the agent.")
@click.option("--priority", type=int, metavar="N", help="1 (low) to 10 (urgent); 5 if not given.")
@click.option("--tag", "tags", multiple=True, help="A label to filter by; repeatable.")
@click.option("--task-tag", "task_tags", multiple=True, help="A tag the agent must have.")
@click.option("--capability", "capabilities", multiple=True, help="What the agent must be able to.")
@click.option("--type", "task_type", help="The kind of work; agents may be made for some kinds.")
@click.option("--agent-type", help="The kind of agent that must take it.")
@click.option("--agent", metavar="NAME", help="The one agent that must take it.")
@click.option("--model", help="The model that must be used.")
@click.option("--cwd", metavar="DIR", help="The folder to work in.")
@click.option(
    "--timeout", "timeout_s", type=seconds, metavar="TIME", help="Longest run: 90, 10m, 1h30m."
)
@click.option(
    "--queue-ttl", "queue_ttl_s", type=seconds, metavar="TIME", help="Longest wait for its start."
)
@click.option("--estimate", "estimate_minutes", type=int, metavar="MIN", help="Expected minutes.")
@click.option("--run-at", type=ahead, metavar="TIME", help="Not before: +10m, or ISO 8601.")
@click.option("--parent", metavar="ID", help="The task this is a part of.")
@click.option("--max-attempts", type=int, metavar="N", help="Tries in all; 3 if not given.")
@click.option("--idempotency-key", metavar="KEY", help="A repeated submit gives the same task.")
@place_options
@bound_options
@click.pass_obj
def create(
    given: Globals,
    /,
    name: str,
    prompt: str | None,
    prompt_file: str | None,
    input_: str | None,
    agent: str | None,
    parent: str | None,
    run_at: datetime | timedelta | None,
    **fields: Any,
) -> None:
    """Submit a task and print its id."""
    from tenuto.model.tasks.submission import NewTask

    if prompt is not None and prompt_file is not None:
        raise click.UsageError("give either --prompt or --prompt-file")
    if prompt_file is not None:
        prompt = read_text("prompt", prompt_file)
    read_bounds(fields)
    if input_ is not None:
        fields["input"] = read_json("input", input_)
    told = {key: value for key, value in fields.items() if value is not None}
    if "cwd" in told:
        told["cwd"] = folder(told["cwd"])
    for key in ("tags", "task_tags", "capabilities"):
        told[key] = list(told[key])

    async def submit(engine: "AnyEngine") -> "Submitted":
        await read_place(engine, told)
        return await engine.submit(
            NewTask(
                title=name,
                prompt=prompt,
                target_agent=await agent_id(engine, agent),
                parent=None if parent is None else await engine.find(parent),
                run_at=after(engine.clock.now(), run_at),
                **told,
            )
        )

    print_submitted(given, call(given, submit))
