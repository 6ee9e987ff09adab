"""`client.tasks`: creates, reads, changes, controls and waits for tasks."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, TypeVar
from uuid import UUID

from tenuto.client.follow import TaskEvent, follow, poll_task
from tenuto.client.paging import iterate_pages
from tenuto.client.remote.engine import AnyEngine
from tenuto.engine.tasks.control import Action, ActionResult
from tenuto.engine.tasks.edit import TaskChanges
from tenuto.engine.tasks.submit import Submitted
from tenuto.engine.views import AttemptView, Explanation, LogLine, TaskSummary, TaskView
from tenuto.model.errors import Invalid
from tenuto.model.tasks.submission import Filter, NewTask

ID = UUID | str


class TaskFailed(Exception):
    """The task that `wait` waited for did not end as COMPLETED."""

    def __init__(self, task: TaskView) -> None:
        self.task = task
        self.status = task.status
        self.error = task.last_error
        suffix = f": {task.last_error}" if task.last_error else ""
        super().__init__(f"task {task.id} is {task.status}{suffix}")


class Tasks:
    """The tasks of a workspace. Methods accept a task id or the beginning of one."""

    def __init__(self, engine: AnyEngine) -> None:
        self._engine = engine

    async def create(self, title: str, **fields: Any) -> TaskView:
        """Submits a task and returns it; it is stored once this returns.

        `fields` are those of `NewTask`.
        """
        new = _build_struct(NewTask, {"title": title, **fields})
        return await self._engine.show_submitted(new, await self._engine.submit(new))

    async def create_many(self, tasks: Sequence[NewTask | dict[str, Any]]) -> Sequence[Submitted]:
        """Submits all of the tasks or none; returns one result per task, in order."""
        new_tasks = [
            task if isinstance(task, NewTask) else _build_struct(NewTask, task) for task in tasks
        ]
        return await self._engine.submit_many(new_tasks)

    async def get(self, task: ID) -> TaskView:
        """Returns a task without its history; raises `NotFound`."""
        task_id = await self._resolve_id(task)
        return await self._engine.show(task_id)

    async def list(
        self, *, limit: int | None = None, cursor: UUID | None = None, **where: Any
    ) -> AsyncGenerator[TaskSummary, None]:
        """Yields tasks, newest first, page by page; `where` takes the fields of `Filter`."""
        selection = _build_filter(where)
        async for task in iterate_pages(
            lambda size, after: self._engine.list(selection, size, after),
            lambda page: page.tasks,
            limit,
            cursor,
        ):
            yield task

    async def cancel(self, task: ID, reason: str | None = None) -> TaskView:
        """Cancels a task and returns it; a running session is killed first."""
        return await self._change(task, lambda id_: self._engine.cancel(id_, reason))

    async def pause(self, task: ID, reason: str | None = None) -> TaskView:
        """Pauses a task and returns it; a running session is stopped after a last checkpoint."""
        return await self._change(task, lambda id_: self._engine.pause(id_, reason))

    async def resume(self, task: ID) -> TaskView:
        """Resumes a paused task and returns it."""
        return await self._change(task, self._engine.resume)

    async def start(self, task: ID) -> TaskView:
        """Makes a task claimable before its start time, and returns it."""
        return await self._change(task, self._engine.start)

    async def retry(self, task: ID, *, cascade: bool = False) -> TaskView:
        """Retries a FAILED, DEAD or CANCELLED task (else `Conflict`) with all tries; returns it.

        `cascade` also retries the tasks that ended because of it.
        """
        return await self._change(task, lambda id_: self._engine.retry(id_, cascade=cascade))

    async def assign(self, task: ID, agent: UUID | None, *, take: bool = False) -> TaskView:
        """Reserves a task for an agent (`None`: for any); `take` also takes a running task.

        Returns the task. Raises `Conflict` for a running task without `take`.
        """
        return await self._change(task, lambda id_: self._engine.assign(id_, agent, take=take))

    async def archive(self, task: ID) -> TaskView:
        """Archives a finished task and returns it; `Conflict` if it is unfinished or archived."""
        return await self._change(task, self._engine.archive)

    async def rerun(self, task: ID) -> TaskView:
        """Submits a new task with the same fields and returns the new task."""
        task_id = await self._resolve_id(task)
        return await self._engine.show((await self._engine.rerun(task_id)).id)

    async def update(self, task: ID, *, version: int | None = None, **changes: Any) -> TaskView:
        """Changes fields of a task and returns it; `Conflict` if it no longer has the `version`.

        The fields are `title`, `description`, `metadata`, `tags`, `priority` and `status`.
        """
        if "tags" in changes:
            changes["tags"] = tuple(changes["tags"])
        return await self._change(
            task, lambda id_: self._engine.edit(id_, _build_struct(TaskChanges, changes), version)
        )

    async def delete(self, task: ID) -> None:
        """Deletes the data of a finished task; its row and audit trail stay."""
        task_id = await self._resolve_id(task)
        await self._engine.erase(task_id)

    async def act(
        self, action: Action, *, limit: int = 1000, dry_run: bool = False, **where: Any
    ) -> ActionResult:
        """Applies an action to the newest `limit` matching tasks; `dry_run` only lists them.

        `where` takes the fields of `Filter`. Returns the changed ids, and the refused ones with
        reasons.
        """
        reason = where.pop("reason", None)
        return await self._engine.act(
            action, _build_filter(where), reason=reason, limit=limit, dry_run=dry_run
        )

    async def wait(self, task: ID, timeout: float | None = None) -> TaskView:  # noqa: ASYNC109
        """Waits until the task finishes and returns it.

        Raises `TaskFailed` if its status is not COMPLETED, `TimeoutError` after `timeout` seconds.
        """
        task_id = await self._resolve_id(task)
        async with asyncio.timeout(timeout):
            view = await _wait_until_finished(self._engine, task_id)
        if view.status != "COMPLETED":
            raise TaskFailed(view)
        return view

    async def follow(self, task: ID) -> AsyncGenerator[TaskEvent, None]:
        """Yields past and future events of a task until its end: statuses, progress, log lines."""
        task_id = await self._resolve_id(task)
        async for event in follow(self._engine, task_id):
            yield event

    async def logs(self, task: ID, level: str = "DEBUG", limit: int = 1000) -> Sequence[LogLine]:
        """Returns the newest lines of audit trail and transcript from `level` up, oldest first."""
        task_id = await self._resolve_id(task)
        return await self._engine.logs(task_id, level, limit)

    async def attempts(self, task: ID) -> Sequence[AttemptView]:
        """Returns the attempts in order; one without an outcome is still running."""
        task_id = await self._resolve_id(task)
        return await self._engine.attempts(task_id)

    async def explain(self, task: ID) -> Explanation:
        """Explains why the task is not running: every gate, its numbers, and when it clears."""
        task_id = await self._resolve_id(task)
        return await self._engine.explain(task_id)

    async def _change(self, task: ID, command: Callable[[UUID], Awaitable[object]]) -> TaskView:
        """Runs a command on a task, by its id, and returns the task."""
        task_id = await self._resolve_id(task)
        await command(task_id)
        return await self._engine.show(task_id)

    async def _resolve_id(self, task: ID) -> UUID:
        """Returns a task's id from an id, its text, or the beginning of it; raises `NotFound`."""
        return task if isinstance(task, UUID) else await self._engine.find(task)


async def _wait_until_finished(engine: AnyEngine, task: UUID) -> TaskView:
    """Polls the task until it has finished, and returns it, whatever its status."""
    async for snapshot in poll_task(engine, task):
        view = snapshot.view
    return view


K = TypeVar("K")


def _build_struct(struct_type: type[K], fields: dict[str, Any]) -> K:
    """Returns a struct with the fields; raises `Invalid` for an unknown field name."""
    names: tuple[str, ...] = struct_type.__struct_fields__  # type: ignore[attr-defined]
    unknown = sorted(set(fields) - set(names))
    if unknown:
        raise Invalid(f"unknown field {unknown[0]!r}; fields are {', '.join(names)}")
    return struct_type(**fields)


def _build_filter(where: dict[str, Any]) -> Filter:
    """Returns a `Filter`; `status` and `tags` may be one text. `Invalid` for an unknown field."""
    for name in ("status", "tags"):
        if isinstance(value := where.get(name, ()), str):
            where[name] = (value,)
        else:
            where[name] = tuple(value)
    return _build_struct(Filter, where)
