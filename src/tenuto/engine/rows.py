"""Between rows and the model: tasks read, changes and new tasks spelled out as rows."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec

from tenuto.model import bounds
from tenuto.model.tasks.commands import Command, Complete, Resolve
from tenuto.model.tasks.submission import NewTask
from tenuto.model.tasks.task import Status, Task, TaskChange, due_at, rank, watch_seconds
from tenuto.store.protocol import Row, Statement

Rows = dict[str, list[tuple[Any, ...]]]
_COMMON_BODY = 9
_COMMON_HOT = 8
"""Columns that most tasks fill; they come first in the rows of the query `submit`."""
_RARE_BODY = 27
_TIMED_HOT = 16
"""Columns before those that say where a task stands among others."""
LANE = 2
STATUS = 3
RANK = 4
UNMET = 17
"""Places of columns in the rows of `hot_row`."""
_STATUSES = {status.value: status for status in Status}
_CHANGED = (
    "id version lane status hold unmet watched rank priority tries free_ends free_mark losses"
    " agent worker session_key lease_until timeout_s watch_s cancel_requested_at pause_requested_at"
    " hung_warned_at run_at resume_at wait_until next_attempt_at due_at last_error error_class"
    " last_outcome updated_at started_at finished_at archived_at"
).split()


_TIMES = tuple(
    name for name in Task.__struct_fields__ if name.endswith(("_at", "lease_until", "wait_until"))
)


class CorruptRow(Exception):
    """A stored row that cannot be understood."""

    def __init__(self, task: UUID, why: str) -> None:
        super().__init__(why)
        self.task = task


def task_of(row: Row) -> Task:
    """The task in a row; raises `CorruptRow` when no task could have been written like that."""
    try:
        fields = {name: row[name] for name in Task.__struct_fields__}
        fields["status"] = _STATUSES[row["status"]]
        task = Task(**fields)
        if task.retry is not None:
            _ = task.policy
        if not isinstance(task.workspace, UUID):
            raise TypeError("workspace is not an id")
        for name in _TIMES:
            if not isinstance(fields[name], datetime | None):
                raise TypeError(f"{name} is beyond the calendar")
    except (KeyError, ValueError, TypeError, msgspec.MsgspecError) as error:
        raise CorruptRow(row["id"], f"unreadable row: {error!r}") from error
    return task


def write_changes(decided: Sequence[tuple[TaskChange, Command]]) -> Statement:
    """The statement that writes decided changes with their events and ended attempts."""
    rows: dict[str, list[tuple[Any, ...]]] = {"changed": [], "ended": [], "noted": [], "result": []}
    for change, command in decided:
        task, event, end = change.task, change.event, change.end
        cells = [getattr(task, name) for name in _CHANGED]
        cells[1] = task.version - 1
        rows["changed"].append(tuple(cells))
        rows["noted"].append(
            (
                task.id,
                task.version,
                task.workspace,
                task.event_xid,
                event.kind,
                event.level,
                event.message,
                event.previous,
                event.new,
                event.attempt,
                event.agent,
                event.actor,
                event.session_key,
                event.stack_trace,
                _json(event.data),
                task.updated_at,
            )
        )
        if end is not None:
            rows["ended"].append(
                (
                    task.id,
                    end.attempt,
                    task.workspace,
                    end.outcome,
                    end.agent,
                    end.worker,
                    end.session_key,
                    end.started_at,
                    end.ended_at,
                    end.error_class,
                    end.message,
                    end.stack,
                    end.exit_code,
                    _json(end.receipt),
                    end.unconfirmed,
                )
            )
        if isinstance(command, Complete | Resolve) and (command.output or command.summary):
            rows["result"].append((task.id, task.workspace, command.output, command.summary))
    return Statement("change", rows=rows)


class FlowPosition(msgspec.Struct, frozen=True, kw_only=True):
    """Where in a flow a task is made."""

    flow: UUID | None = None
    group: UUID | None = None
    slot: int | None = None
    activation: int | None = None
    follows: UUID | None = None
    context: str | None = None


NOWHERE = FlowPosition()


def insert(query: str, rows: Rows, now: datetime) -> Statement:
    """The statement that writes the rows, without the columns that all of them leave empty."""
    params = {
        "now": now,
        "rare": _any_between(rows["body"], _COMMON_BODY, _RARE_BODY),
        "timed": _any_between(rows["hot"], _COMMON_HOT, _TIMED_HOT),
        "placed": _any_between(rows["body"], _RARE_BODY) or _any_between(rows["hot"], _TIMED_HOT),
    }
    return Statement(query, params, rows)


def _any_between(rows: list[tuple[Any, ...]], start: int, end: int | None = None) -> bool | None:
    if len(rows[0]) <= start:
        return None
    nothing = (None,) * len(rows[0][start:end])
    return True if any(row[start:end] != nothing for row in rows) else None


def joined(batch: Sequence[Rows]) -> Rows:
    """The rows of several submits as those of one."""
    if len(batch) == 1:
        return batch[0]
    rows: Rows = {}
    for each in batch:
        for name, more in each.items():
            rows.setdefault(name, []).extend(more)
    for name in ("body", "hot"):
        width = max(len(row) for row in rows[name])
        rows[name] = [row + (None,) * (width - len(row)) for row in rows[name]]
    return rows


def no_rows() -> Rows:
    """The sets of the query `submit`, empty."""
    names = ("body", "hot", "label", "tag", "capability", "sealed", "dependency")
    return {name: [] for name in names}


def add_labels(rows: Rows, new: NewTask, task: UUID, workspace: UUID) -> None:
    """A task's labels, task tags and capabilities."""
    for name, words in (
        ("label", new.tags),
        ("tag", new.task_tags),
        ("capability", new.capabilities),
    ):
        if words:
            rows[name] += [(task, workspace, word) for word in dict.fromkeys(words)]


def hot_row(
    new: NewTask,
    task_id: UUID,
    workspace: UUID,
    lane: int,
    actor: str | None,
    now: datetime,
    *,
    hold: str | None = None,
    unmet: int | None = None,
    watched: bool | None = None,
    wait_until: datetime | None = None,
    awaited: int | None = None,
) -> tuple[Any, ...]:
    """The hot half of a new task."""
    later = new.run_at is not None and new.run_at > now
    waits = later or hold is not None or bool(unmet)
    status = Status.WAITING if waits else Status.PENDING
    base = max(now, new.run_at) if new.run_at is not None else now
    watch_s = watch_seconds(new.timeout_s, new.estimate_minutes)
    timer = None
    if later or new.queue_ttl_s is not None or wait_until is not None:
        timer = due_at(
            Task(
                id=task_id,
                workspace=workspace,
                lane=lane,
                status=status,
                run_at=new.run_at,
                queue_ttl_s=new.queue_ttl_s,
                hold=hold,
                unmet=unmet or 0,
                wait_until=wait_until,
                created_at=now,
                updated_at=now,
            )
        )
    return (
        task_id,
        workspace,
        lane,
        status,
        rank(new.priority, base, new.estimate_minutes),
        new.priority,
        new.max_attempts,
        actor,
        _json(new.retry),
        new.lease_s,
        new.timeout_s,
        watch_s,
        new.queue_ttl_s,
        new.estimate_minutes,
        new.run_at,
        timer,
        hold,
        unmet,
        watched,
        wait_until,
        awaited,
    )


def plain_hot_row(
    new: NewTask, task_id: UUID, workspace: UUID, lane: int, actor: str | None, place: int
) -> tuple[Any, ...]:
    """The same for a plain task that may start at once, without what such a task leaves empty."""
    status = Status.PENDING
    return task_id, workspace, lane, status, place, new.priority, new.max_attempts, actor


def plain_body_row(
    new: NewTask, task_id: UUID, workspace: UUID, actor: str | None
) -> tuple[Any, ...]:
    """The cold half of a plain task, without what such a task leaves empty."""
    return (
        task_id,
        workspace,
        new.title,
        new.task_type,
        new.prompt,
        bounds.json_text("input", new.input),
        bounds.json_text("metadata", new.metadata),
        new.source,
        actor,
    )


def body_row(
    new: NewTask,
    task_id: UUID,
    workspace: UUID,
    print_: str | None,
    actor: str | None,
    rerun_of: UUID | None,
    trace: str | None,
    place: FlowPosition = NOWHERE,
) -> tuple[Any, ...]:
    """The cold half of a new task."""
    return (
        *plain_body_row(new, task_id, workspace, actor),
        new.description,
        new.system_prompt,
        new.model,
        new.max_turns,
        new.conversation,
        new.agent_type,
        new.target_agent,
        new.runtime,
        None if new.command is None else bounds.json_text("command", new.command),
        new.cwd,
        None if new.env is None else bounds.json_text("env", new.env),
        new.container,
        new.region,
        new.parent,
        rerun_of,
        new.idempotency_key,
        print_,
        new.trace_id or trace,
        new.key,
        None if new.control is None else new.kind,
        place.flow,
        place.activation,
        place.group,
        place.slot,
        place.follows,
        new.next,
        place.context,
        _json(new.control),
        new.on_dependency_failure if new.depends_on else None,
        new.complexity,
        _json(new.escalation),
        _json(new.concurrency),
        _json(new.budget),
    )


def _json(value: Any) -> str | None:
    return None if value is None else msgspec.json.encode(value).decode()


def decode(text: str | None) -> Any:
    """The value of JSON that the store keeps."""
    return None if text is None else msgspec.json.decode(text)
