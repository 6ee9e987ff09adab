"""`orchestrate task`: the group."""

import click

from tenuto.cli.base import Group

LAZY = {
    "create": ("tenuto.cli.tasks.create:create", "Submit a task."),
    "list": ("tenuto.cli.tasks.read:list_", "List tasks, newest first."),
    "show": ("tenuto.cli.tasks.read:show", "Show everything about a task."),
    "status": ("tenuto.cli.tasks.read:status", "Show how a task is doing."),
    "logs": ("tenuto.cli.tasks.read:logs", "Print a task's audit trail and output."),
    "attempts": ("tenuto.cli.tasks.read:attempts", "List the tries at a task."),
    "tree": ("tenuto.cli.tasks.tree:tree", "Show a task with the tasks that it made."),
    "explain": ("tenuto.cli.tasks.read:explain", "Say why a task is not running."),
    "update": ("tenuto.cli.tasks.control:update", "Change a task's priority and words."),
    "cancel": ("tenuto.cli.tasks.control:cancel", "End tasks; running ones are killed."),
    "retry": ("tenuto.cli.tasks.control:retry", "Give ended tasks all their tries again."),
    "pause": ("tenuto.cli.tasks.control:pause", "Hold tasks; running ones are stopped."),
    "resume": ("tenuto.cli.tasks.control:resume", "Let paused tasks go on."),
    "start": ("tenuto.cli.tasks.control:start", "Let a task run before its time."),
    "assign": ("tenuto.cli.tasks.control:assign", "Let only one agent take a task."),
    "reassign": ("tenuto.cli.tasks.control:reassign", "Take a task from whoever runs it."),
    "rerun": ("tenuto.cli.tasks.control:rerun", "Submit the same task again as a new one."),
    "delete": ("tenuto.cli.tasks.control:delete", "Remove what an ended task carried."),
    "archive": ("tenuto.cli.tasks.control:archive", "Put ended tasks away."),
}


@click.group(
    "task",
    cls=Group,
    lazy=LAZY,
    examples=(
        'orchestrate task create --name "Nightly report" --prompt "Summarise the log"',
        "orchestrate task status --id 0198c0de --follow",
        "orchestrate task cancel --tag nightly --since 1h --dry-run",
    ),
)
def task() -> None:
    """Create, watch and control tasks.

    A task is named by its id or by an unambiguous beginning of it.
    """
