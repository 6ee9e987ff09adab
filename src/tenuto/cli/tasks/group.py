"""`orchestrate task`: the command group."""

import click

from tenuto.cli.base import Group

LAZY = {
    "create": ("tenuto.cli.tasks.create:create", "Submit a task."),
    "list": ("tenuto.cli.tasks.read:list_", "List tasks, newest first."),
    "show": ("tenuto.cli.tasks.read:show", "Show everything about a task."),
    "status": ("tenuto.cli.tasks.read:status", "Show a task's status and progress."),
    "logs": ("tenuto.cli.tasks.read:logs", "Print a task's audit trail and output."),
    "attempts": ("tenuto.cli.tasks.read:attempts", "List a task's attempts."),
    "tree": ("tenuto.cli.tasks.tree:tree", "Show a task with its subtasks."),
    "explain": ("tenuto.cli.tasks.read:explain", "Show why a task is not running."),
    "update": ("tenuto.cli.tasks.control:update", "Change a task's priority, name or tags."),
    "cancel": ("tenuto.cli.tasks.control:cancel", "Cancel tasks; running ones are killed."),
    "retry": ("tenuto.cli.tasks.control:retry", "Retry finished tasks with all tries again."),
    "pause": ("tenuto.cli.tasks.control:pause", "Pause tasks; running ones are stopped."),
    "resume": ("tenuto.cli.tasks.control:resume", "Resume paused tasks."),
    "start": ("tenuto.cli.tasks.control:start", "Start a task before its planned time."),
    "assign": ("tenuto.cli.tasks.control:assign", "Reserve a task for one agent."),
    "reassign": (
        "tenuto.cli.tasks.control:reassign",
        "Move a task, even a running one, to another agent.",
    ),
    "rerun": ("tenuto.cli.tasks.control:rerun", "Submit a copy of a task as a new task."),
    "delete": (
        "tenuto.cli.tasks.control:delete",
        "Delete a finished task's prompt, input and output.",
    ),
    "archive": ("tenuto.cli.tasks.control:archive", "Archive finished tasks."),
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

    A task is named by its id, or by the first characters of it (at least 4) if they are unique.
    """
