"""Runs work that cascades deferred: each `flow_work` row in its own transaction."""

from collections.abc import Callable
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec

from tenuto.engine.agents import subtask_tree
from tenuto.engine.flows import added_children, groups
from tenuto.engine.flows.advance import Cascade
from tenuto.engine.flows.outcomes import FinishedTask
from tenuto.engine.flows.rows import flow_of, group_of
from tenuto.engine.limits import budgets, concurrency
from tenuto.engine.rows import decode_json
from tenuto.engine.tasks import retry
from tenuto.model.flows.groups import GROUP_OPEN
from tenuto.model.flows.progress import MAX_CASCADE_ROWS, Flow, FlowStatus
from tenuto.model.limits.budgets import HOLD as BUDGET
from tenuto.model.tasks import commands
from tenuto.model.tasks.commands import Command
from tenuto.model.tasks.task import LEASED, TERMINAL, Status, Task
from tenuto.store.protocol import Row, Script, Statement

_STOP_POLL_S = 2.0
"""Seconds until tasks that are still being stopped for a pause are checked again."""


def cancel_flow(cascade: Cascade, flow: Flow, reason: str | None, now: datetime) -> Script[None]:
    """Cancels an open, locked flow with its open tasks and groups; defers those over the limit."""
    done = msgspec.structs.replace(flow, status=FlowStatus.CANCELLED, finished_at=now)
    yield from cascade.write_flow(done, "flow_cancelled", message=reason)
    yield from cancel_roots(cascade, flow)


def cancel_roots(cascade: Cascade, flow: Flow) -> Script[None]:
    """Cancels open tasks and groups at the top of a cancelled flow; defers those over the limit."""
    rows = yield Statement("roots_open", {"flow": flow.id, "most": MAX_CASCADE_ROWS})
    if len(rows) == MAX_CASCADE_ROWS:
        cascade.defer("roots", flow.id, flow.workspace)
    tasks = sorted(row["id"] for row in rows if not row["is_group"])
    if tasks:
        yield from cascade.apply_to_each(
            tasks, lambda _: commands.Cancel(reason="its flow was cancelled")
        )
    nested = [row["id"] for row in rows if row["is_group"]]
    yield from groups.stop_groups(cascade, nested, cancel=True)


def _run_roots(cascade: Cascade, work: Row) -> Script[None]:
    """Cancels more of the open tasks and groups at the top of a cancelled flow."""
    rows = yield Statement("flows_locked", {"ids": [work["subject"]]})
    yield from cancel_roots(cascade, flow_of(rows[0]))


def _run_ended(cascade: Cascade, work: Row) -> Script[None]:
    """Runs all follow-ups of a task, if it is still finished."""
    rows = yield Statement("task_statuses", {"ids": [work["subject"]]})
    finished = [FinishedTask(row["id"], row["workspace"], Status(row["status"])) for row in rows]
    yield from cascade.run([task for task in finished if task.status in TERMINAL])


def _run_dependents(cascade: Cascade, work: Row) -> Script[None]:
    """Unblocks, fails or skips more dependents of a task, if it is still finished."""
    rows = yield Statement("task_statuses", {"ids": [work["subject"]]})
    finished = [FinishedTask(row["id"], row["workspace"], Status(row["status"])) for row in rows]
    yield from cascade.notify_dependents([task for task in finished if task.status in TERMINAL])


def _run_expand(cascade: Cascade, work: Row) -> Script[None]:
    """Queues the creation of more children of a group."""
    rows = yield Statement("groups_locked", {"ids": [work["subject"]]})
    cascade.queue_group_children(group_of(rows[0]))


def _run_rest(cascade: Cascade, work: Row) -> Script[None]:
    """Queues more open children of a group to be cancelled or skipped, unless it is open again."""
    rows = yield Statement("groups_locked", {"ids": [work["subject"]]})
    group = group_of(rows[0])
    if group.status not in GROUP_OPEN:
        cascade.queue_stop_of_children(group, cancel=decode_json(work["data"])["cancel"])


def _run_pause(cascade: Cascade, work: Row) -> Script[None]:
    """Pauses open tasks of a flow or group, if it is still paused; defers those over the limit."""
    if (yield from _lock_if_status(work, FlowStatus.PAUSED)):
        yield from _apply_to_open_tasks(
            cascade, work, lambda _: commands.Pause(reason="its flow was paused")
        )


def _run_resume(cascade: Cascade, work: Row) -> Script[None]:
    """Resumes tasks of a flow or group, if it runs; checks later those that are still pausing."""
    if not (yield from _lock_if_status(work, FlowStatus.RUNNING)):
        return
    stopping: list[UUID] = []

    def resume_command(task: Task) -> Command | None:
        """Returns the command for a paused task; adds one that is still pausing to `stopping`."""
        if task.status in LEASED and task.pause_requested_at is not None:
            stopping.append(task.id)
        return commands.Resume() if task.status is Status.PAUSED else None

    yield from _apply_to_open_tasks(cascade, work, resume_command, _clear_pause_command)
    if stopping:
        # Their workers have not reported yet that they stopped for the pause.
        data = {"of": decode_json(work["data"])["of"], "tasks": stopping}
        cascade.defer("resume", work["subject"], work["workspace"], data, _STOP_POLL_S)


def _lock_if_status(work: Row, status: FlowStatus) -> Script[bool]:
    """Locks the flow or group of the work; returns `True` if it still has the status."""
    query = "groups_locked" if decode_json(work["data"])["of"] == "group" else "flows_locked"
    rows = yield Statement(query, {"ids": [work["subject"]]})
    return bool(rows) and rows[0]["status"] == status


def _clear_pause_command(task: Task) -> Command | None:
    """Returns the command that ends a task's `paused` hold but keeps `act`; `None` without it."""
    if task.hold is None or task.hold.partition(":")[0] != "paused":
        return None
    return commands.ClearHold(hold="act" if task.hold.endswith(":act") else None)


def _apply_to_open_tasks(
    cascade: Cascade, work: Row, *choose_commands: Callable[[Task], Command | None]
) -> Script[None]:
    """Applies commands to open tasks of the work's flow or group, or only to those the work names.

    After `MAX_CASCADE_ROWS` tasks, defers the others.
    """
    data: dict[str, Any] = decode_json(work["data"])
    if "tasks" in data:
        for choose in choose_commands:
            yield from cascade.apply_to_each(
                [UUID(task_id) for task_id in data["tasks"]], choose, queue_controls=True
            )
        return
    query = "group_tasks_open" if data["of"] == "group" else "flow_tasks_open"
    params = {
        "group_id" if data["of"] == "group" else "flow": work["subject"],
        "workspace": work["workspace"],
        "after": None if "after" not in data else UUID(data["after"]),
        "most": MAX_CASCADE_ROWS,
    }
    rows = yield Statement(query, params)
    ids = [row["id"] for row in rows]
    for choose in choose_commands if ids else ():
        yield from cascade.apply_to_each(ids, choose, queue_controls=True)
    if len(ids) == MAX_CASCADE_ROWS:
        next_data = data | {"after": str(ids[-1])}
        cascade.defer(work["kind"], work["subject"], work["workspace"], next_data)


RUNNERS: dict[str, Callable[[Cascade, Row], Script[None]]] = {
    "ended": _run_ended,
    "dependents": _run_dependents,
    "expand": _run_expand,
    "rest": _run_rest,
    "roots": _run_roots,
    "pause": _run_pause,
    "resume": _run_resume,
    "revive": retry.run_retry_dependents_work,
    "again": retry.run_retry_failed_work,
    BUDGET: budgets.run_deferred,
    "turn": concurrency.run_deferred_grants,
    "supersede": concurrency.run_deferred_supersede,
    subtask_tree.CANCEL_BELOW: subtask_tree.continue_cancel,
    added_children.START_ADDED: added_children.run_deferred,
}
"""The function that runs each kind of deferred work."""
