"""Response objects of tasks, with the names of the REST contract: camelCase in JSON."""

from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import msgspec

from tenuto.model.tasks.submission import NewTask
from tenuto.model.tasks.task import Status
from tenuto.model.tenancy.secret_use import Use
from tenuto.store.protocol import Row

_REST_NAMES = {
    "input": "inputContext",
    "output": "outputResult",
    "checkpoint": "checkpointData",
    "agent": "agentId",
    "parent": "parentId",
    "target_agent": "targetAgentId",
    "flow": "flowId",
}


def _rename(name: str) -> str:
    """Returns a field's name in JSON: its REST name, else camelCase."""
    if name in _REST_NAMES:
        return _REST_NAMES[name]
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)


class TaskSummary(msgspec.Struct, frozen=True, kw_only=True, rename=_rename):
    """A task as a row of a list."""

    id: UUID
    title: str
    status: str
    task_type: str
    key: str | None
    flow: UUID | None
    group_id: UUID | None
    priority: int
    attempt: int
    tries: int
    max_attempts: int
    progress_percent: int | None
    current_step: str | None
    agent: UUID | None
    agent_name: str | None
    last_outcome: str | None
    last_error: str | None
    error_class: str | None
    cancel_requested_at: datetime | None
    next_attempt_at: datetime | None
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    archived_at: datetime | None


class TaskView(TaskSummary, frozen=True, kw_only=True, rename=_rename):
    """A task with all its fields, without its history."""

    workspace: UUID
    description: str | None
    prompt: str | None
    system_prompt: str | None
    model: str | None
    agent_type: str | None
    target_agent: UUID | None
    runtime: str | None
    command: list[str] | None
    cwd: str | None
    container: str | None
    parent: UUID | None
    rerun_of: UUID | None
    waiting_for: str | None
    hold: str | None
    worker: str | None
    session_key: str | None
    lease_until: datetime | None
    timeout_s: int | None
    queue_ttl_s: int | None
    estimate_minutes: int | None
    estimated_completion_at: datetime | None
    pause_requested_at: datetime | None
    run_at: datetime | None
    resume_at: datetime | None
    input: Any
    output: Any
    summary: str | None
    checkpoint: Any
    checkpoint_seq: int
    input_tokens: int
    output_tokens: int
    cost_usd: float
    metadata: dict[str, Any] | None
    retry: Any
    kind: str
    next: str | None
    control: Any
    depends_on: list[UUID]
    on_dependency_failure: str
    complexity: str | None
    escalation: Any
    concurrency: Any
    budget: Any
    idempotency_key: str | None
    trace_id: str | None
    source: str | None
    created_by: str | None
    version: int
    updated_at: datetime
    tags: list[str]
    task_tags: list[str]
    capabilities: list[str]


class AttemptView(msgspec.Struct, frozen=True, kw_only=True, rename=_rename):
    """One attempt; `outcome` is `None` while it runs."""

    attempt: int
    outcome: str | None
    agent: UUID | None
    agent_name: str | None
    worker: str | None
    session_key: str | None
    started_at: datetime | None
    ended_at: datetime | None
    error_class: str | None = None
    message: str | None = None
    stack: str | None = None
    exit_code: int | None = None
    receipt: dict[str, Any] | None = None
    unconfirmed: bool = False
    input_tokens: int = 0
    output_tokens: int = 0
    cost_usd: float = 0.0


class LogLine(msgspec.Struct, frozen=True, kw_only=True, rename=_rename):
    """An event or a line of a transcript, merged by time."""

    at: datetime
    level: str
    source: str
    attempt: int
    text: str
    seq: int
    event: str | None = None
    previous_status: str | None = None
    new_status: str | None = None
    actor: str | None = None
    data: Any = None
    stack_trace: str | None = None


class WorkerView(msgspec.Struct, frozen=True, kw_only=True, rename=_rename):
    """A worker process."""

    id: str
    host: str
    pid: int
    agents: list[str]
    slots: int
    status: str
    running: int
    started_at: datetime
    last_heartbeat: datetime
    drain_requested_at: datetime | None = None


class SecretView(msgspec.Struct, frozen=True, kw_only=True, rename=_rename):
    """The visible fields of a named secret; never its value."""

    name: str
    key_id: str
    created_by: str | None
    created_at: datetime
    updated_at: datetime
    use: Use


class Gate(msgspec.Struct, frozen=True, kw_only=True, rename=_rename):
    """One reason why a task does not run, with its details and the time when it clears."""

    gate: str
    detail: str
    clears_at: datetime | None = None


class Explanation(msgspec.Struct, frozen=True, kw_only=True, rename=_rename):
    """Explains why a task is not running, or states that it is running."""

    id: UUID
    status: str
    summary: str
    gates: list[Gate]
    agents: dict[str, list[str]]
    lane: str | None = None
    """The id of its lane, which `pause` accepts."""


class Page(msgspec.Struct, frozen=True, rename=_rename):
    """One page of a list of tasks, and the cursor of the next page."""

    tasks: list[TaskSummary]
    next_cursor: UUID | None = None


_MAX_SHOWN = 200
"""Characters of invalid JSON that are shown."""
_JSON_TYPES = {"command": list[str], "metadata": dict[str, Any]}
_INVALID_TIME = datetime(9000, 1, 1, tzinfo=UTC)
"""Shown instead of an invalid date."""
_JSON_FIELDS = frozenset(
    "input output checkpoint metadata command retry control escalation concurrency budget".split()
)
_SUMMARY_FIELDS = TaskSummary.__struct_fields__
_VIEW_FIELDS = tuple(
    name
    for name in TaskView.__struct_fields__
    if name not in ("tags", "task_tags", "capabilities", "waiting_for", "depends_on")
)


_TIME_FIELDS = frozenset(
    name for name in _VIEW_FIELDS if name.endswith("_at") or name == "lease_until"
)


def worker_view(row: Row) -> WorkerView:
    """Returns the view of a worker's row."""
    return WorkerView(
        id=row["worker_id"],
        host=row["host"],
        pid=row["pid"],
        agents=msgspec.json.decode(row["agents"]),
        slots=row["slots"],
        status=row["status"],
        running=row["running"],
        started_at=row["started_at"],
        last_heartbeat=row["seen_at"],
        drain_requested_at=row["drain_requested_at"],
    )


_REQUEST_FIELDS = tuple(
    name
    for name in NewTask.__struct_fields__
    if name in TaskView.__struct_fields__
    and name
    not in (
        "id retry tags task_tags capabilities depends_on control escalation concurrency budget"
        " input metadata command run_at on_dependency_failure"
    ).split()
)
_COUNTER_FIELDS = (
    "attempt",
    "tries",
    "checkpoint_seq",
    "input_tokens",
    "output_tokens",
)
_INITIAL_VALUES: dict[str, Any] = {
    name: 0 if name in _COUNTER_FIELDS else None
    for name in TaskView.__struct_fields__
    if name not in _REQUEST_FIELDS
    and name
    not in (
        "id workspace status waiting_for retry tags task_tags capabilities created_by created_at"
        " updated_at version kind depends_on escalation concurrency budget input metadata command"
        " run_at on_dependency_failure"
    ).split()
} | {"cost_usd": 0.0}


def task_summary(row: Row) -> TaskSummary:
    """Returns the list entry of a task's row."""
    return TaskSummary(**{name: _view_value(name, row[name]) for name in _SUMMARY_FIELDS})


def new_task_view(
    new: NewTask, task: UUID, at: datetime, workspace: UUID, actor: str | None
) -> TaskView:
    """Returns the view of a new, unchanged task without dependencies, flow or group.

    Needs no query: `at` is the time of its creation.
    """
    is_scheduled = new.run_at is not None and new.run_at > at
    requested = {name: getattr(new, name) for name in _REQUEST_FIELDS}
    return TaskView(
        **requested,
        **_INITIAL_VALUES,
        id=task,
        workspace=workspace,
        status=Status.WAITING.value if is_scheduled else Status.PENDING.value,
        waiting_for="schedule" if is_scheduled else None,
        retry=None if new.retry is None else msgspec.to_builtins(new.retry),
        kind=new.kind,
        depends_on=[],
        on_dependency_failure="fail",
        input=_copy_json(new.input),
        metadata=_copy_json(new.metadata),
        command=None if new.command is None else list(new.command),
        run_at=None if new.run_at is None else new.run_at.astimezone(UTC),
        escalation=None if new.escalation is None else msgspec.to_builtins(new.escalation),
        concurrency=None if new.concurrency is None else msgspec.to_builtins(new.concurrency),
        budget=None if new.budget is None else msgspec.to_builtins(new.budget),
        tags=sorted(set(new.tags)),
        task_tags=sorted(set(new.task_tags)),
        capabilities=sorted(set(new.capabilities)),
        created_by=actor,
        created_at=at,
        updated_at=at,
        version=1,
    )


def _copy_json(value: Any) -> Any:
    """Returns a JSON value as it is read from the store: with lists for tuples."""
    return None if value is None else msgspec.json.decode(msgspec.json.encode(value))


def task_view(
    row: Row, labels: dict[str, list[str]], waiting_for: str | None, needs: list[UUID]
) -> TaskView:
    """Returns the view of a task's row with its tags, hold reason and dependencies."""
    fields = {name: _view_value(name, row[name]) for name in _VIEW_FIELDS}
    fields["on_dependency_failure"] = row["on_dependency_failure"] or "fail"
    if isinstance(fields["control"], dict):
        fields["control"] = {_rename(name): value for name, value in fields["control"].items()}
    return TaskView(
        **fields,
        waiting_for=waiting_for,
        depends_on=needs,
        tags=labels.get("label", []),
        task_tags=labels.get("tag", []),
        capabilities=labels.get("capability", []),
    )


def _view_value(name: str, value: Any) -> Any:
    """Returns a column's value for a view; for an invalid one a far date or a JSON excerpt."""
    if value is None:
        return None
    if name in _TIME_FIELDS:
        return value if isinstance(value, datetime) else _INVALID_TIME
    if name not in _JSON_FIELDS:
        return value
    decoded = decode_or_excerpt(value, _JSON_TYPES.get(name, Any))
    return list(decoded.values()) if name == "command" and isinstance(decoded, dict) else decoded


def decode_or_excerpt(text: Any, json_type: Any = Any) -> Any:
    """Returns stored JSON as a value, or `{"unreadable": excerpt}` if it is not of `json_type`."""
    try:
        return None if text is None else msgspec.json.decode(text, type=json_type)
    except (msgspec.MsgspecError, TypeError):
        return {"unreadable": str(text)[:_MAX_SHOWN]}
