"""Tasks: make, look, change, control."""

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any
from urllib.parse import parse_qsl
from uuid import UUID

import msgspec
from litestar import Request, Response, delete, get, patch, post
from litestar.params import FromPath, FromQuery, HeaderParameter, JSONBody, QueryParameter

from tenuto.api.edge.problems import bad_query
from tenuto.api.routes.bodies import (
    ActionsBody,
    AssignBody,
    BulkBody,
    ReasonBody,
    RetryTaskBody,
    TaskBody,
    TaskPatch,
)
from tenuto.api.service import InjectedContext
from tenuto.engine.tasks.edit import TaskChanges
from tenuto.engine.tasks.query import Filter
from tenuto.engine.views import (
    AttemptView,
    Explanation,
    LogLine,
    TaskSummary,
    TaskView,
    fresh_view,
)
from tenuto.model import bounds
from tenuto.model.errors import Invalid
from tenuto.model.limits.quota import Quota
from tenuto.model.tasks.submission import NewTask
from tenuto.model.tenancy.secrets import KEY, may_have_secrets

Limit = Annotated[int, QueryParameter(ge=1, le=bounds.MAX_PAGE)]
IfMatch = Annotated[str | None, HeaderParameter(name="If-Match", required=False)]
Key = Annotated[str | None, HeaderParameter(name="Idempotency-Key", required=False, max_length=100)]


class TaskPage(msgspec.Struct, frozen=True, rename="camel"):
    """Tasks newest first, and where the next ones begin."""

    tasks: list[TaskSummary]
    next_cursor: UUID | None = None


class BulkTaskResult(msgspec.Struct, frozen=True):
    """One task of a bulk submit; `created` is false for one that was there already."""

    id: UUID
    created: bool


class BulkResult(msgspec.Struct, frozen=True):
    """What a bulk submit made, in order."""

    tasks: list[BulkTaskResult]


class ActionResultView(msgspec.Struct, frozen=True, rename="camel"):
    """What an action by filter did, and why it left others."""

    done: list[UUID]
    refused: dict[str, str]


class Lines(msgspec.Struct, frozen=True, rename="camel"):
    """Lines in order, and where to go on."""

    lines: list[LogLine]
    next_offset: str | None = None


@post("/agent-tasks")
async def create(
    desk: InjectedContext, data: JSONBody[TaskBody], key: Key = None
) -> Response[TaskView]:
    """Submit a task. It is durable when this answers; repeated with one key, it is one task."""
    await count_submit(desk, 1)
    new = data.task(key)
    made = await desk.engine.submit(new)
    if made.at is None or _may_hold_secrets(new):
        view = await desk.engine.show(made.id)
    else:
        view = fresh_view(new, made.id, made.at, desk.workspace, desk.caller.actor)
    headers = {"Location": f"/api/v1/agent-tasks/{made.id}", "ETag": f'"{view.version}"'}
    return Response(view, status_code=201 if made.created else 200, headers=headers)


def _may_hold_secrets(new: NewTask) -> bool:
    """Whether only the store knows what may be shown of the task."""
    if new.input is None and new.env is None:
        return False
    said = msgspec.json.encode([new.input, new.env]).decode()
    return may_have_secrets(said) or f'"{KEY}"' in said


@post("/agent-tasks/bulk")
async def create_many(
    desk: InjectedContext, data: JSONBody[BulkBody], key: Key = None
) -> BulkResult:
    """Submit many tasks, all or none; repeated with one key, it is one submit."""
    del key  # the guard has seen to it
    if not data.tasks:
        raise Invalid("tasks is empty", field="tasks")
    news = [body.task() for body in data.tasks]
    await count_submit(desk, len(news))
    made = await desk.engine.submit_many(news)
    return BulkResult([BulkTaskResult(each.id, each.created) for each in made])


async def count_submit(desk: InjectedContext, count: int) -> None:
    """Count what is about to be made against the workspace's rate; raises `TooMany` beyond it."""
    lanes = desk.engine.core.lanes

    async def look() -> Quota:
        await lanes.reload_if_changed(
            desk.workspace
        )  # the quota of waiting tasks is believed as long
        return await lanes.quota(desk.workspace)

    await desk.service.rates.submit(desk.workspace, count, look)


@get("/agent-tasks")
async def find(
    request: Request[Any, Any, Any],
    desk: InjectedContext,
    limit: Limit = 100,
    cursor: FromQuery[UUID | None] = None,
    status: FromQuery[str | None] = None,
    tags: FromQuery[str | None] = None,
    priority: FromQuery[int | None] = None,
    min_priority: Annotated[int | None, QueryParameter(name="minPriority", ge=1, le=10)] = None,
    task_type: Annotated[str | None, QueryParameter(name="taskType")] = None,
    agent_id: Annotated[UUID | None, QueryParameter(name="agentId")] = None,
    parent_id: Annotated[UUID | None, QueryParameter(name="parentId")] = None,
    since: FromQuery[datetime | None] = None,
    until: FromQuery[datetime | None] = None,
    text: Annotated[str | None, QueryParameter(max_length=bounds.MAX_TITLE)] = None,
) -> TaskPage:
    """Tasks newest first. `status` and `tags` take several, by commas; also `priority>=8`."""
    where = Filter(
        status=_words(status),
        tags=_words(tags),
        min_priority=_least(request, min_priority),
        task_type=task_type,
        agent=agent_id,
        parent=parent_id,
        since=since,
        until=until,
        text=text,
        priority=priority,
    )
    page = await desk.engine.list(where, limit, cursor)
    return TaskPage(page.tasks, page.next_cursor)


def _words(text: str | None) -> tuple[str, ...]:
    return tuple(word for word in (text or "").split(",") if word)


def _least(request: Request[Any, Any, Any], given: int | None) -> int | None:
    """The lowest priority asked for: `minPriority=8`, or `priority>=8` as people write it."""
    for name, value in parse_qsl(request.scope["query_string"].decode("latin-1")):
        if name == "priority>":
            if not value.isascii() or not value.isdigit() or len(value) > 2:
                raise bad_query("priority", "must be a number")
            return int(value)
    return given


@get("/agent-tasks/{task_id:uuid}")
async def show(desk: InjectedContext, task_id: FromPath[UUID]) -> Response[TaskView]:
    """One task with everything about it but its history."""
    return _shown(await desk.engine.show(task_id))


def _shown(view: TaskView) -> Response[TaskView]:
    return Response(view, headers={"ETag": f'"{view.version}"'})


@patch("/agent-tasks/{task_id:uuid}")
async def change(
    desk: InjectedContext,
    task_id: FromPath[UUID],
    data: JSONBody[TaskPatch],
    if_match: IfMatch = None,
) -> Response[TaskView]:
    """Change what a task says about itself, its priority, or hold it and let it go."""
    changes = TaskChanges(
        title=data.title,
        description=data.description,
        metadata=data.metadata,
        tags=data.tags if isinstance(data.tags, msgspec.UnsetType) else tuple(data.tags),
        priority=data.priority,
        status=data.status,
    )
    await desk.engine.edit(task_id, changes, version_of(if_match))
    return _shown(await desk.engine.show(task_id))


def version_of(if_match: str | None) -> int | None:
    """The version that an `If-Match` header names; `None` for any."""
    if if_match is None or if_match.strip() == "*":
        return None
    text = if_match.strip().removeprefix("W/").strip('"')
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise Invalid("If-Match is not an ETag of ours", field="If-Match")
    return int(text)


@delete("/agent-tasks/{task_id:uuid}")
async def erase(desk: InjectedContext, task_id: FromPath[UUID]) -> None:
    """Remove what an ended task carried; its audit trail stays."""
    await desk.engine.erase(task_id)


@post("/agent-tasks/{task_id:uuid}/cancel", status_code=200)
async def cancel(
    desk: InjectedContext, task_id: FromPath[UUID], data: JSONBody[ReasonBody | None] = None
) -> TaskView:
    """End a task; a running session is killed first."""
    await desk.engine.cancel(task_id, None if data is None else data.reason)
    return await desk.engine.show(task_id)


@post("/agent-tasks/{task_id:uuid}/pause", status_code=200)
async def pause(
    desk: InjectedContext, task_id: FromPath[UUID], data: JSONBody[ReasonBody | None] = None
) -> TaskView:
    """Hold a task; a running session is stopped after a last checkpoint."""
    await desk.engine.pause(task_id, None if data is None else data.reason)
    return await desk.engine.show(task_id)


@post("/agent-tasks/{task_id:uuid}/resume", status_code=200)
async def resume(desk: InjectedContext, task_id: FromPath[UUID]) -> TaskView:
    """Let a paused task go on."""
    await desk.engine.resume(task_id)
    return await desk.engine.show(task_id)


@post("/agent-tasks/{task_id:uuid}/retry", status_code=200)
async def retry(
    desk: InjectedContext, task_id: FromPath[UUID], data: JSONBody[RetryTaskBody | None] = None
) -> TaskView:
    """Give an ended task all its tries again; `cascade` revives what ended because of it."""
    await desk.engine.retry(task_id, cascade=data is not None and data.cascade)
    return await desk.engine.show(task_id)


@post("/agent-tasks/{task_id:uuid}/start", status_code=200)
async def start(desk: InjectedContext, task_id: FromPath[UUID]) -> TaskView:
    """Let a task run before the time that it was meant for."""
    await desk.engine.start(task_id)
    return await desk.engine.show(task_id)


@post("/agent-tasks/{task_id:uuid}/assign", status_code=200)
async def assign(
    desk: InjectedContext, task_id: FromPath[UUID], data: JSONBody[AssignBody]
) -> TaskView:
    """Let only one agent take a task that nobody runs; with none, whoever fits."""
    await desk.engine.assign(task_id, data.agent_id)
    return await desk.engine.show(task_id)


@post("/agent-tasks/{task_id:uuid}/reassign", status_code=200)
async def reassign(
    desk: InjectedContext, task_id: FromPath[UUID], data: JSONBody[AssignBody]
) -> TaskView:
    """The same for one that may be running: it is taken from whoever runs it."""
    await desk.engine.assign(task_id, data.agent_id, take=True)
    return await desk.engine.show(task_id)


@post("/agent-tasks/{task_id:uuid}/archive", status_code=200)
async def archive(desk: InjectedContext, task_id: FromPath[UUID]) -> TaskView:
    """Put an ended task away."""
    await desk.engine.archive(task_id)
    return await desk.engine.show(task_id)


@post("/agent-tasks/{task_id:uuid}/rerun")
async def rerun(desk: InjectedContext, task_id: FromPath[UUID], key: Key = None) -> TaskView:
    """A new task that asks for the same; repeated with one key, it is one task."""
    del key  # the guard has seen to it
    await count_submit(desk, 1)
    made = await desk.engine.rerun(task_id)
    return await desk.engine.show(made.id)


@post("/agent-tasks/actions", status_code=200)
async def act(
    desk: InjectedContext, data: JSONBody[ActionsBody], key: Key = None
) -> ActionResultView:
    """One action for every task that a filter picks; repeated with one key, it is one action."""
    del key  # the guard has seen to it
    result = await desk.engine.act(
        data.action,
        data.filter.filter(),
        reason=data.reason,
        limit=data.limit,
        dry_run=data.dry_run,
    )
    return ActionResultView(result.done, result.refused)


@get("/agent-tasks/{task_id:uuid}/logs")
async def logs(
    desk: InjectedContext,
    task_id: FromPath[UUID],
    level: FromQuery[str] = "DEBUG",
    limit: Limit = 100,
) -> Lines:
    """The newest lines of audit trail and transcript, merged by time."""
    return Lines(list(await desk.engine.logs(task_id, level, limit)))


@get("/agent-tasks/{task_id:uuid}/attempts")
async def attempts(desk: InjectedContext, task_id: FromPath[UUID]) -> Sequence[AttemptView]:
    """The attempts in order; one without an outcome is under way."""
    return await desk.engine.attempts(task_id)


@get("/agent-tasks/{task_id:uuid}/transcript")
async def transcript(
    desk: InjectedContext,
    task_id: FromPath[UUID],
    offset: Annotated[str | None, QueryParameter(max_length=40)] = None,
    limit: Limit = 100,
) -> Lines:
    """What the attempts printed and logged, on from an offset that an earlier answer gave."""
    after = _offset(offset)
    found = await desk.engine.query.transcript(task_id, desk.workspace, after, limit)
    last = f"{found[-1].attempt}.{found[-1].seq}" if found else offset
    return Lines(found, last)


def _offset(text: str | None) -> tuple[int, int]:
    if text is None:
        return (0, -1)
    attempt, _, line = text.partition(".")
    if not (attempt.isascii() and attempt.isdigit() and line.isascii() and line.isdigit()):
        raise bad_query("offset", "is not one that we gave")
    if len(text) > 30:
        raise bad_query("offset", "is not one that we gave")
    return (int(attempt), int(line))


@get("/agent-tasks/{task_id:uuid}/explain")
async def explain(desk: InjectedContext, task_id: FromPath[UUID]) -> Explanation:
    """Why the task is not running: every gate, its number, when it clears."""
    return await desk.engine.explain(task_id)


@get("/dead-letters")
async def dead_letters(
    desk: InjectedContext, limit: Limit = 100, cursor: FromQuery[UUID | None] = None
) -> TaskPage:
    """Tasks that used up their tries, newest first."""
    page = await desk.engine.list(Filter(status=("DEAD",)), limit, cursor)
    return TaskPage(page.tasks, page.next_cursor)


@post("/dead-letters/{task_id:uuid}/requeue", status_code=200)
async def requeue(desk: InjectedContext, task_id: FromPath[UUID]) -> TaskView:
    """Give a dead task all its tries again."""
    await desk.engine.retry(task_id)
    return await desk.engine.show(task_id)


HANDLERS = [
    create,
    create_many,
    find,
    show,
    change,
    erase,
    cancel,
    pause,
    resume,
    retry,
    assign,
    reassign,
    start,
    archive,
    rerun,
    act,
    logs,
    attempts,
    transcript,
    explain,
    dead_letters,
    requeue,
]
