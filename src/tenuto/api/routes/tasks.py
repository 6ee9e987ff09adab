"""Routes for tasks: submit, list, read, change and control them."""

from collections.abc import Sequence
from typing import Annotated, Any
from urllib.parse import parse_qsl
from uuid import UUID

import msgspec
from litestar import Request, Response
from litestar.params import FromPath, FromQuery, HeaderParameter, JSONBody, QueryParameter

from tenuto.api.edge.problems import query_error
from tenuto.api.operation import READ, WRITE, operation
from tenuto.api.routes.bodies import (
    ActionsBody,
    AssignBody,
    ReasonBody,
    RetryTaskBody,
    TaskPatch,
)
from tenuto.api.routes.task_bodies import BulkBody, TaskBody
from tenuto.api.routes.task_filter import with_filter_parameters
from tenuto.api.service import InjectedContext
from tenuto.engine.engine import Engine
from tenuto.engine.tasks.edit import TaskChanges
from tenuto.engine.views import (
    AttemptView,
    Explanation,
    LogLine,
    TaskSummary,
    TaskView,
)
from tenuto.model import bounds
from tenuto.model.errors import Invalid
from tenuto.model.limits.quota import Quota
from tenuto.model.tasks.submission import Filter

Limit = Annotated[int, QueryParameter(ge=1, le=bounds.MAX_PAGE)]
IfMatch = Annotated[str | None, HeaderParameter(name="If-Match", required=False)]
IdempotencyKey = Annotated[
    str | None, HeaderParameter(name="Idempotency-Key", required=False, max_length=100)
]


class TaskPage(msgspec.Struct, frozen=True, rename="camel"):
    """A page of tasks, newest first, and the cursor of the next page."""

    tasks: list[TaskSummary]
    next_cursor: UUID | None = None


class BulkTaskResult(msgspec.Struct, frozen=True):
    """One task of a bulk submit; `created` is false if the task existed already."""

    id: UUID
    created: bool


class BulkResult(msgspec.Struct, frozen=True):
    """The tasks of a bulk submit, in the order of the request."""

    tasks: list[BulkTaskResult]


class ActionResultView(msgspec.Struct, frozen=True, rename="camel"):
    """The tasks that an action changed, and by id the reason why it left others unchanged."""

    done: list[UUID]
    refused: dict[str, str]


class LogPage(msgspec.Struct, frozen=True, rename="camel"):
    """Log lines in order, and the offset of the next page."""

    lines: list[LogLine]
    next_offset: str | None = None


@operation("POST", "/agent-tasks", WRITE)
async def create_task(
    ctx: InjectedContext, data: JSONBody[TaskBody], key: IdempotencyKey = None
) -> Response[TaskView]:
    """Submits a task; the task is stored when the response arrives.

    A request repeated with the same `Idempotency-Key` creates one task only: the status is 201 if
    the task was created, 200 if it existed already.
    """
    await count_submit(ctx, 1)
    new_task = data.new_task(key)
    submitted = await ctx.engine.submit(new_task)
    view = await ctx.engine.show_submitted(new_task, submitted)
    headers = {"Location": f"/api/v1/agent-tasks/{submitted.id}", "ETag": f'"{view.version}"'}
    return Response(view, status_code=201 if submitted.created else 200, headers=headers)


@operation("POST", "/agent-tasks/bulk", WRITE, idempotent=True)
async def create_tasks(
    ctx: InjectedContext, data: JSONBody[BulkBody], key: IdempotencyKey = None
) -> BulkResult:
    """Submits many tasks, all or none.

    A request repeated with the same `Idempotency-Key` submits them once.
    """
    del key  # the guard handles it
    if not data.tasks:
        raise Invalid("tasks is empty; send at least one task", field="tasks")
    new_tasks = [body.new_task() for body in data.tasks]
    await count_submit(ctx, len(new_tasks))
    submitted = await ctx.engine.submit_many(new_tasks)
    return BulkResult([BulkTaskResult(result.id, result.created) for result in submitted])


async def count_submit(ctx: InjectedContext, count: int) -> None:
    """Counts tasks about to be created; raises `TooMany` above the workspace's rate."""
    lanes = ctx.engine.core.lanes

    async def load_quota() -> Quota:
        # The lanes cache the quota for pending tasks: reloaded here, both are equally fresh.
        await lanes.reload_if_changed(ctx.workspace)
        return await lanes.quota(ctx.workspace)

    await ctx.service.throttle.count_tasks(ctx.workspace, count, load_quota)


@operation("GET", "/agent-tasks", READ)
@with_filter_parameters
async def list_tasks(
    request: Request[Any, Any, Any],
    ctx: InjectedContext,
    where: Filter,
    limit: Limit = 100,
    cursor: FromQuery[UUID | None] = None,
) -> TaskPage:
    """Returns tasks, newest first.

    `status` and `tags` accept several values, separated by commas. `priority>=8` is the same as
    `minPriority=8`.
    """
    min_priority = _min_priority(request, where.min_priority)
    where = msgspec.structs.replace(where, min_priority=min_priority)
    page = await ctx.engine.list(where, limit, cursor)
    return TaskPage(page.tasks, page.next_cursor)


def _min_priority(request: Request[Any, Any, Any], min_priority: int | None) -> int | None:
    """Returns the requested minimum priority: `minPriority=8`, or its short form `priority>=8`."""
    for name, value in parse_qsl(request.scope["query_string"].decode("latin-1")):
        if name == "priority>":
            if not value.isascii() or not value.isdigit() or len(value) > 2:
                raise query_error("priority", "must be a number from 1 to 10")
            return int(value)
    return min_priority


@operation("GET", "/agent-tasks/{task_id:uuid}", READ, remote=Engine.show)
async def get_task(ctx: InjectedContext, task_id: FromPath[UUID]) -> Response[TaskView]:
    """Returns one task with all its fields, without history; the header `ETag` has its version."""
    return _task_response(await ctx.engine.show(task_id))


def _task_response(view: TaskView) -> Response[TaskView]:
    """Returns the response, with the task's version as `ETag`."""
    return Response(view, headers={"ETag": f'"{view.version}"'})


@operation("PATCH", "/agent-tasks/{task_id:uuid}", WRITE)
async def update_task(
    ctx: InjectedContext,
    task_id: FromPath[UUID],
    data: JSONBody[TaskPatch],
    if_match: IfMatch = None,
) -> Response[TaskView]:
    """Changes title, description, metadata, tags or priority of a task; pauses or resumes it.

    With the header `If-Match` the change is refused if the task has another version.
    """
    changes = TaskChanges(
        title=data.title,
        description=data.description,
        metadata=data.metadata,
        tags=data.tags if isinstance(data.tags, msgspec.UnsetType) else tuple(data.tags),
        priority=data.priority,
        status=data.status,
    )
    await ctx.engine.edit(task_id, changes, version_of(if_match))
    return _task_response(await ctx.engine.show(task_id))


def version_of(if_match: str | None) -> int | None:
    """Returns the version in an `If-Match` header; `None` if any is accepted. Raises `Invalid`."""
    if if_match is None or if_match.strip() == "*":
        return None
    text = if_match.strip().removeprefix("W/").strip('"')
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise Invalid("If-Match must be * or an ETag from an earlier response", field="If-Match")
    return int(text)


@operation("DELETE", "/agent-tasks/{task_id:uuid}", WRITE, remote=Engine.erase)
async def delete_task(ctx: InjectedContext, task_id: FromPath[UUID]) -> None:
    """Deletes the input, output and other contents of a finished task; its audit trail stays."""
    await ctx.engine.erase(task_id)


@operation(
    "POST", "/agent-tasks/{task_id:uuid}/cancel", WRITE, status_code=200, remote=Engine.cancel
)
async def cancel_task(
    ctx: InjectedContext, task_id: FromPath[UUID], data: JSONBody[ReasonBody | None] = None
) -> TaskView:
    """Cancels a task; a running session is killed first."""
    await ctx.engine.cancel(task_id, None if data is None else data.reason)
    return await ctx.engine.show(task_id)


@operation("POST", "/agent-tasks/{task_id:uuid}/pause", WRITE, status_code=200, remote=Engine.pause)
async def pause_task(
    ctx: InjectedContext, task_id: FromPath[UUID], data: JSONBody[ReasonBody | None] = None
) -> TaskView:
    """Pauses a task; a running session is stopped after a last checkpoint."""
    await ctx.engine.pause(task_id, None if data is None else data.reason)
    return await ctx.engine.show(task_id)


@operation(
    "POST", "/agent-tasks/{task_id:uuid}/resume", WRITE, status_code=200, remote=Engine.resume
)
async def resume_task(ctx: InjectedContext, task_id: FromPath[UUID]) -> TaskView:
    """Resumes a paused task."""
    await ctx.engine.resume(task_id)
    return await ctx.engine.show(task_id)


@operation("POST", "/agent-tasks/{task_id:uuid}/retry", WRITE, status_code=200, remote=Engine.retry)
async def retry_task(
    ctx: InjectedContext, task_id: FromPath[UUID], data: JSONBody[RetryTaskBody | None] = None
) -> TaskView:
    """Retries a FAILED, DEAD or CANCELLED task, with all its tries again.

    With `cascade` the tasks that failed or were skipped because of it are reopened, too.
    """
    await ctx.engine.retry(task_id, cascade=data is not None and data.cascade)
    return await ctx.engine.show(task_id)


@operation("POST", "/agent-tasks/{task_id:uuid}/start", WRITE, status_code=200, remote=Engine.start)
async def start_task(ctx: InjectedContext, task_id: FromPath[UUID]) -> TaskView:
    """Starts a task now that is scheduled for a later time."""
    await ctx.engine.start(task_id)
    return await ctx.engine.show(task_id)


@operation("POST", "/agent-tasks/{task_id:uuid}/assign", WRITE, status_code=200)
async def assign_task(
    ctx: InjectedContext, task_id: FromPath[UUID], data: JSONBody[AssignBody]
) -> TaskView:
    """Reserves a task that is not running for one agent; without an agent, for any that matches."""
    await ctx.engine.assign(task_id, data.agent_id)
    return await ctx.engine.show(task_id)


@operation("POST", "/agent-tasks/{task_id:uuid}/reassign", WRITE, status_code=200)
async def reassign_task(
    ctx: InjectedContext, task_id: FromPath[UUID], data: JSONBody[AssignBody]
) -> TaskView:
    """Assigns a task as `assign` does; a running task is taken from the agent that runs it."""
    await ctx.engine.assign(task_id, data.agent_id, take=True)
    return await ctx.engine.show(task_id)


@operation(
    "POST", "/agent-tasks/{task_id:uuid}/archive", WRITE, status_code=200, remote=Engine.archive
)
async def archive_task(ctx: InjectedContext, task_id: FromPath[UUID]) -> TaskView:
    """Archives a finished task."""
    await ctx.engine.archive(task_id)
    return await ctx.engine.show(task_id)


@operation("POST", "/agent-tasks/{task_id:uuid}/rerun", WRITE, idempotent=True)
async def rerun_task(
    ctx: InjectedContext, task_id: FromPath[UUID], key: IdempotencyKey = None
) -> TaskView:
    """Submits a new task with the same request as an existing one.

    A request repeated with the same `Idempotency-Key` creates one task only.
    """
    del key  # the guard handles it
    await count_submit(ctx, 1)
    submitted = await ctx.engine.rerun(task_id)
    return await ctx.engine.show(submitted.id)


@operation("POST", "/agent-tasks/actions", WRITE, idempotent=True, status_code=200)
async def act_on_tasks(
    ctx: InjectedContext, data: JSONBody[ActionsBody], key: IdempotencyKey = None
) -> ActionResultView:
    """Applies one action to all tasks that match a filter, up to `limit`.

    With `dryRun` nothing is changed. A request repeated with the same `Idempotency-Key` acts once.
    """
    del key  # the guard handles it
    result = await ctx.engine.act(
        data.action,
        data.filter.to_filter(),
        reason=data.reason,
        limit=data.limit,
        dry_run=data.dry_run,
    )
    return ActionResultView(result.done, result.refused)


@operation("GET", "/agent-tasks/{task_id:uuid}/logs", READ, remote=Engine.logs)
async def list_task_logs(
    ctx: InjectedContext,
    task_id: FromPath[UUID],
    level: FromQuery[str] = "DEBUG",
    limit: Limit = 100,
) -> LogPage:
    """Returns the newest lines of the task's audit trail and transcript, merged by time."""
    return LogPage(list(await ctx.engine.logs(task_id, level, limit)))


@operation("GET", "/agent-tasks/{task_id:uuid}/attempts", READ, remote=Engine.attempts)
async def list_task_attempts(
    ctx: InjectedContext, task_id: FromPath[UUID]
) -> Sequence[AttemptView]:
    """Returns the task's attempts in order; one without an outcome is still running."""
    return await ctx.engine.attempts(task_id)


@operation("GET", "/agent-tasks/{task_id:uuid}/transcript", READ)
async def get_task_transcript(
    ctx: InjectedContext,
    task_id: FromPath[UUID],
    offset: Annotated[str | None, QueryParameter(max_length=40)] = None,
    limit: Limit = 100,
) -> LogPage:
    """Returns the lines that attempts printed and logged, after an offset.

    `offset` is the `nextOffset` of an earlier response; without it the first lines are returned.
    """
    after = _parse_offset(offset)
    lines = await ctx.engine.query.transcript(task_id, ctx.workspace, after, limit)
    next_offset = f"{lines[-1].attempt}.{lines[-1].seq}" if lines else offset
    return LogPage(lines, next_offset)


def _parse_offset(text: str | None) -> tuple[int, int]:
    """Returns (attempt, line) of a `nextOffset`; for `None` the position before the first line."""
    if text is None:
        return (0, -1)
    attempt, _, line = text.partition(".")
    if not (attempt.isascii() and attempt.isdigit() and line.isascii() and line.isdigit()):
        raise query_error("offset", "must be the nextOffset of an earlier response")
    if len(text) > 30:
        raise query_error("offset", "must be the nextOffset of an earlier response")
    return (int(attempt), int(line))


@operation("GET", "/agent-tasks/{task_id:uuid}/explain", READ, remote=Engine.explain)
async def explain_task(ctx: InjectedContext, task_id: FromPath[UUID]) -> Explanation:
    """Explains why the task is not running: each gate, its value and when it opens."""
    return await ctx.engine.explain(task_id)


@operation("GET", "/dead-letters", READ)
async def list_dead_letters(
    ctx: InjectedContext, limit: Limit = 100, cursor: FromQuery[UUID | None] = None
) -> TaskPage:
    """Returns the tasks in status DEAD, which used up all their tries, newest first."""
    page = await ctx.engine.list(Filter(status=("DEAD",)), limit, cursor)
    return TaskPage(page.tasks, page.next_cursor)


@operation("POST", "/dead-letters/{task_id:uuid}/requeue", WRITE, status_code=200)
async def requeue_dead_letter(ctx: InjectedContext, task_id: FromPath[UUID]) -> TaskView:
    """Queues a DEAD task again, with all its tries."""
    await ctx.engine.retry(task_id)
    return await ctx.engine.show(task_id)
