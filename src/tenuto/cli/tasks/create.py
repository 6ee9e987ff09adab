"""`orchestrate task create`."""

import sys
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

import click

from tenuto.cli.base import GlobalOptions, command
from tenuto.cli.connection import call_engine
from tenuto.cli.parse import (
    absolute_folder,
    limit_options,
    parse_limits,
    parse_seconds,
    parse_time_or_delay,
    read_json,
    read_text,
    resolve_task_ids,
    time_after,
)
from tenuto.cli.tasks.fields import request_options

if TYPE_CHECKING:
    from tenuto.client.remote.engine import AnyEngine
    from tenuto.engine.tasks.submit import Submitted


async def find_agent_id(engine: "AnyEngine", name: str | None) -> UUID | None:
    """Returns the id of the agent with that name or id (else `NotFound`); `None` for `None`."""
    from tenuto.client.agents import Agents

    return None if name is None else (await Agents(engine).get(name)).id


def print_submitted(options: GlobalOptions, submitted: "Submitted") -> None:
    """Prints the id of a stored task; if that fails, raises `Unavailable` with the id."""
    from tenuto.cli.render import print_json
    from tenuto.model.errors import Unavailable

    try:
        print_json(submitted) if options.json else print(submitted.id)
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
@click.option("--name", required=True, metavar="TITLE", help="Title of the task.")
@click.option("--prompt", metavar="TEXT", help="Instructions for the agent.")
@click.option("--prompt-file", metavar="FILE", help="File with the prompt; - is standard input.")
@click.option("--system-prompt", metavar="TEXT", help="System prompt: the agent's role.")
@click.option("--description", metavar="TEXT", help="Text for people; agents do not get it.")
@click.option("--input", "input_", metavar="JSON|@FILE", help="A JSON value for the agent.")
@click.option("--priority", type=int, metavar="N", help="1 (low) to 10 (urgent); default: 5.")
@click.option("--tag", "tags", multiple=True, help="A label to filter by; repeatable.")
@click.option("--task-tag", "task_tags", multiple=True, help="Task tag the agent must have.")
@click.option("--capability", "capabilities", multiple=True, help="Capability the agent must have.")
@click.option("--type", "task_type", help="Task type; selects the handler and the agents.")
@click.option("--agent-type", help="Only agents of this type may run it.")
@click.option("--agent", metavar="NAME", help="Only this agent may run it.")
@click.option("--model", help="Required model.")
@click.option("--cwd", metavar="DIR", help="Working folder.")
@click.option(
    "--timeout",
    "timeout_s",
    type=parse_seconds,
    metavar="TIME",
    help="Maximum run time: 90, 10m, 1h30m.",
)
@click.option(
    "--queue-ttl",
    "queue_ttl_s",
    type=parse_seconds,
    metavar="TIME",
    help="Maximum time to wait for its start.",
)
@click.option("--estimate", "estimate_minutes", type=int, metavar="MIN", help="Expected minutes.")
@click.option(
    "--run-at", type=parse_time_or_delay, metavar="TIME", help="Not before: +10m, or ISO 8601."
)
@click.option("--parent", metavar="ID", help="Parent task: this one becomes its subtask.")
@click.option("--max-attempts", type=int, metavar="N", help="Maximum number of tries; default: 3.")
@click.option("--idempotency-key", metavar="KEY", help="Repeated submits return the same task.")
@request_options
@limit_options
@click.pass_obj
def create(
    options: GlobalOptions,
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
    parse_limits(fields)
    if input_ is not None:
        fields["input"] = read_json("input", input_)
    values = {key: value for key, value in fields.items() if value is not None}
    if "cwd" in values:
        values["cwd"] = absolute_folder(values["cwd"])
    for key in ("tags", "task_tags", "capabilities"):
        values[key] = list(values[key])

    async def submit(engine: "AnyEngine") -> "Submitted":
        await resolve_task_ids(engine, values)
        return await engine.submit(
            NewTask(
                title=name,
                prompt=prompt,
                target_agent=await find_agent_id(engine, agent),
                parent=None if parent is None else await engine.find(parent),
                run_at=time_after(engine.clock.now(), run_at),
                **values,
            )
        )

    print_submitted(options, call_engine(options, submit))
