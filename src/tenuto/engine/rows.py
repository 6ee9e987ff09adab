"""Maps rows to model objects and back: parses tasks, builds rows of changes and new tasks."""

from collections.abc import Iterable, Sequence
from datetime import datetime
from operator import attrgetter, itemgetter
from typing import Any
from uuid import UUID

import msgspec

from tenuto.model import bounds
from tenuto.model.tasks.commands import Command, Complete, Resolve
from tenuto.model.tasks.submission import FIELDS, NewTask
from tenuto.model.tasks.task import Status, Task, TaskChange, next_due_at, rank, watch_seconds
from tenuto.store.protocol import Row, Statement
from tenuto.store.task_columns import COLUMNS, columns_of_rows, is_json

Rows = dict[str, list[tuple[Any, ...]]]


class _RowBuilder:
    """The columns of the rows `body` or `hot` in order, and the quickest ways to read them."""

    def __init__(self, name: str, *first: str) -> None:
        self.columns = (*first, *(column.name for column in columns_of_rows(name)))
        self.requested = tuple(name for name in self.columns if name in FIELDS and name != "id")
        self.json_columns = tuple(name for name in self.requested if name in _JSON_FIELDS)
        self.read_request = attrgetter(*self.requested)
        self.pick = itemgetter(*self.columns)


_JSON_FIELDS = {
    name: msgspec.json.Decoder(field.type) for name, field in FIELDS.items() if is_json(field)
}
"""The fields of a request that are stored as JSON, with their decoders."""
_BODY = _RowBuilder("body", "task", "workspace", "created_by")
_HOT = _RowBuilder("hot", "id", "workspace", "actor")
"""The rows of the query `submit`."""
_COMMON_BODY_END = 3 + len(COLUMNS["body"])
_RARE_BODY_END = _COMMON_BODY_END + len(COLUMNS["body.rare"])
_COMMON_HOT_END = 3 + len(COLUMNS["hot"])
_TIMED_HOT_END = _COMMON_HOT_END + len(COLUMNS["hot.timed"])
"""The first columns are those that most tasks fill."""
INPUT_COLUMN = _BODY.columns.index("input")
ENV_COLUMN = _BODY.columns.index("env")
"""Column indexes in the rows of `body_row`."""
LANE_COLUMN = _HOT.columns.index("lane")
STATUS_COLUMN = _HOT.columns.index("status")
RANK_COLUMN = _HOT.columns.index("rank")
RUN_AT_COLUMN = _HOT.columns.index("run_at")
HOLD_COLUMN = _HOT.columns.index("hold")
UNMET_COLUMN = _HOT.columns.index("unmet")
"""Column indexes in the rows of `hot_row`."""
_STATUSES = {status.value: status for status in Status}
_CHANGED_COLUMNS = (
    "id version lane status hold unmet watched rank priority tries free_ends free_mark losses"
    " agent worker session_key lease_until timeout_s watch_s cancel_requested_at pause_requested_at"
    " hung_warned_at run_at resume_at wait_until next_attempt_at due_at last_error error_class"
    " last_outcome updated_at started_at finished_at archived_at"
).split()


_TIME_FIELDS = tuple(
    name for name in Task.__struct_fields__ if name.endswith(("_at", "lease_until", "wait_until"))
)


class CorruptRow(Exception):
    """A stored row with invalid values."""

    def __init__(self, task: UUID, reason: str) -> None:
        super().__init__(reason)
        self.task = task


def parse_task(row: Row) -> Task:
    """Returns the task in a row; raises `CorruptRow` if the row has impossible values."""
    try:
        fields = {name: row[name] for name in Task.__struct_fields__}
        fields["status"] = _STATUSES[row["status"]]
        task = Task(**fields)
        if task.retry is not None:
            _ = task.policy
        if not isinstance(task.workspace, UUID):
            raise TypeError("workspace is not an id")
        for name in _TIME_FIELDS:
            if not isinstance(fields[name], datetime | None):
                raise TypeError(f"{name} is not a valid date")
    except (KeyError, ValueError, TypeError, msgspec.MsgspecError) as error:
        raise CorruptRow(row["id"], f"invalid row: {error!r}") from error
    return task


def changes_statement(decided: Sequence[tuple[TaskChange, Command]]) -> Statement:
    """Returns the statement that writes changes, with their events, ended attempts and results.

    It skips a task whose row no longer has the version that the change was decided on.
    """
    rows: dict[str, list[tuple[Any, ...]]] = {"changed": [], "ended": [], "noted": [], "result": []}
    for change, command in decided:
        task, event, end = change.task, change.event, change.end
        cells = [getattr(task, name) for name in _CHANGED_COLUMNS]
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
                _encode_json(event.data),
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
                    _encode_json(end.receipt),
                    end.unconfirmed,
                )
            )
        if isinstance(command, Complete | Resolve) and (command.output or command.summary):
            rows["result"].append((task.id, task.workspace, command.output, command.summary))
    return Statement("tasks_update", rows=rows)


class FlowPosition(msgspec.Struct, frozen=True, kw_only=True):
    """The position of a new task in its flow."""

    flow: UUID | None = None
    group: UUID | None = None
    slot: int | None = None
    activation: int | None = None
    follows: UUID | None = None
    context: str | None = None


NO_POSITION = FlowPosition()


def insert_statement(query: str, rows: Rows, now: datetime) -> Statement:
    """Returns the insert statement for the rows, without columns that are empty in all rows."""
    params = {
        "now": now,
        "rare": _any_filled(rows["body"], _COMMON_BODY_END, _RARE_BODY_END),
        "timed": _any_filled(rows["hot"], _COMMON_HOT_END, _TIMED_HOT_END),
        "placed": _any_filled(rows["body"], _RARE_BODY_END)
        or _any_filled(rows["hot"], _TIMED_HOT_END),
    }
    return Statement(query, params, rows)


def _any_filled(rows: list[tuple[Any, ...]], start: int, end: int | None = None) -> bool | None:
    """Returns True if a row has a value in the columns from `start` to `end`, else `None`."""
    if len(rows[0]) <= start:
        return None
    empty = (None,) * len(rows[0][start:end])
    return True if any(row[start:end] != empty for row in rows) else None


def merge_rows(batch: Sequence[Rows]) -> Rows:
    """Returns the rows of several submits as the rows of one submit."""
    if len(batch) == 1:
        return batch[0]
    rows: Rows = {}
    for submit in batch:
        for name, added in submit.items():
            rows.setdefault(name, []).extend(added)
    for name in ("body", "hot"):
        width = max(len(row) for row in rows[name])
        rows[name] = [row + (None,) * (width - len(row)) for row in rows[name]]
    return rows


def empty_rows() -> Rows:
    """Returns the row sets of the query `submit`, all empty."""
    names = ("body", "hot", "label", "tag", "capability", "sealed", "dependency")
    return {name: [] for name in names}


def add_labels(rows: Rows, new: NewTask, task: UUID, workspace: UUID) -> None:
    """Adds rows of the task's tags, task tags and capabilities to `rows`."""
    for name, values in (
        ("label", new.tags),
        ("tag", new.task_tags),
        ("capability", new.capabilities),
    ):
        if values:
            rows[name] += [(task, workspace, value) for value in dict.fromkeys(values)]


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
    waiter_count: int | None = None,
) -> tuple[Any, ...]:
    """Returns a row of table `task`: WAITING by `hold`, `unmet` or later `run_at`, else PENDING.

    Dependencies and a concurrency key of `new` count only through the arguments.
    """
    is_scheduled = new.run_at is not None and new.run_at > now
    is_waiting = is_scheduled or hold is not None or bool(unmet)
    status = Status.WAITING if is_waiting else Status.PENDING
    rank_time = max(now, new.run_at) if new.run_at is not None else now
    watch_s = watch_seconds(new.timeout_s, new.estimate_minutes)
    timer = None
    if is_scheduled or new.queue_ttl_s is not None or wait_until is not None:
        timer = next_due_at(
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
    values = {
        "id": task_id,
        "workspace": workspace,
        "actor": actor,
        "lane": lane,
        "status": status,
        "rank": rank(new.priority, rank_time, new.estimate_minutes),
        "watch_s": watch_s,
        "due_at": timer,
        "hold": hold,
        "unmet": unmet,
        "watched": watched,
        "wait_until": wait_until,
        "awaited": waiter_count,
    }
    return _build_row(new, values, _HOT)


def plain_hot_row(
    new: NewTask, task_id: UUID, workspace: UUID, lane: int, actor: str | None, row_rank: int
) -> tuple[Any, ...]:
    """Returns the hot row of a plain task that can start at once, without its empty columns."""
    status = Status.PENDING
    return task_id, workspace, actor, lane, status, row_rank, new.priority, new.max_attempts


def plain_body_row(
    new: NewTask, task_id: UUID, workspace: UUID, actor: str | None
) -> tuple[Any, ...]:
    """Returns the body row of a plain task, without its empty columns."""
    return (
        task_id,
        workspace,
        actor,
        new.title,
        new.prompt,
        new.task_type,
        bounds.to_json_text("input", new.input),
        bounds.to_json_text("metadata", new.metadata),
        new.source,
    )


def body_row(
    new: NewTask,
    task_id: UUID,
    workspace: UUID,
    fingerprint: str | None,
    actor: str | None,
    rerun_of: UUID | None,
    trace_id: str | None,
    position: FlowPosition = NO_POSITION,
) -> tuple[Any, ...]:
    """Returns the row of a new task's rarely updated columns (table `task_body`)."""
    values = {
        "task": task_id,
        "workspace": workspace,
        "created_by": actor,
        "rerun_of": rerun_of,
        "fingerprint": fingerprint,
        "trace_id": new.trace_id or trace_id,
        "kind": None if new.control is None else new.kind,
        "flow": position.flow,
        "activation": position.activation,
        "group_id": position.group,
        "slot": position.slot,
        "follows": position.follows,
        "context": position.context,
        "on_dependency_failure": new.on_dependency_failure if new.depends_on else None,
    }
    return _build_row(new, values, _BODY)


def _build_row(new: NewTask, values: dict[str, Any], builder: _RowBuilder) -> tuple[Any, ...]:
    """Returns a row: the `values` by column name, and the request's fields for the others."""
    cells = dict(zip(builder.requested, builder.read_request(new), strict=True))
    for name in builder.json_columns:
        if (value := cells[name]) is not None:
            is_struct = isinstance(value, msgspec.Struct)
            cells[name] = _encode_json(value) if is_struct else bounds.to_json_text(name, value)
    cells |= values
    row: tuple[Any, ...] = builder.pick(cells)
    return row


def stored_request(row: Row, names: Iterable[str]) -> dict[str, Any]:
    """Returns these request fields of a `task_show` row; raises `MsgspecError` for invalid JSON."""
    return {
        name: _JSON_FIELDS[name].decode(row[name])
        if name in _JSON_FIELDS and row[name] is not None
        else row[name]
        for name in names
    }


def _encode_json(value: Any) -> str | None:
    """Returns the value as JSON text; `None` for `None`."""
    return None if value is None else msgspec.json.encode(value).decode()


def decode_json(text: str | None) -> Any:
    """Returns the value of stored JSON, `None` for `None`; raises `MsgspecError` if invalid."""
    return None if text is None else msgspec.json.decode(text)
