"""Tasks as a program asks for them: make, look, change, control, wait."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any, TypeVar
from uuid import UUID

from tenuto.client.follow import TaskEvent, follow, poll_task
from tenuto.client.remote.engine import AnyEngine
from tenuto.engine.tasks.control import Action, ActionResult
from tenuto.engine.tasks.edit import TaskChanges
from tenuto.engine.tasks.query import Filter
from tenuto.engine.tasks.submit import Submitted
from tenuto.engine.views import AttemptView, Explanation, LogLine, TaskSummary, TaskView
from tenuto.model.errors import Invalid
from tenuto.model.tasks.submission import NewTask

PAGE = 500
ID = UUID | str


class TaskFailed(Exception):
    """A task that was waited for ended, and not with a result."""

    def __init__(self, task: TaskView) -> None:
        self.task = task
        self.status = task.status
        self.error = task.last_error
        said = f": {task.last_error}" if task.last_error else ""
        super().__init__(f"task {task.id} is {task.status}{said}")


class Tasks:
    """The tasks of a workspace. A task is named by its id, or the beginning of it."""

    def __init__(self, engine: AnyEngine) -> None:
        self._engine = engine

    async def create(self, title: str, **fields: Any) -> TaskView:
        """Submit a task; it is never lost once this returns. Fields are those of `NewTask`."""
        made = await self._engine.submit(_known(NewTask, {"title": title, **fields}))
        return await self._engine.show(made.id)

    async def create_many(self, tasks: Sequence[NewTask | dict[str, Any]]) -> Sequence[Submitted]:
        """Submit all of the tasks or none."""
        news = [each if isinstance(each, NewTask) else _known(NewTask, each) for each in tasks]
        return await self._engine.submit_many(news)

    async def get(self, task: ID) -> TaskView:
        """Everything about a task but its history."""
        found = await self._found(task)
        return await self._engine.show(found)

    async def list(
        self, *, limit: int | None = None, cursor: UUID | None = None, **where: Any
    ) -> AsyncGenerator[TaskSummary, None]:
        """Tasks newest first, page after page; what picks them are the fields of `Filter`."""
        chosen, left = _filter(where), limit
        while left is None or left > 0:
            size = PAGE if left is None else min(left, PAGE)
            page = await self._engine.list(chosen, size, cursor)
            for task in page.tasks:
                yield task
            left = None if left is None else left - len(page.tasks)
            if (cursor := page.next_cursor) is None:
                return

    async def cancel(self, task: ID, reason: str | None = None) -> TaskView:
        """End a task; a running session is killed first."""
        found = await self._found(task)
        await self._engine.cancel(found, reason)
        return await self._engine.show(found)

    async def pause(self, task: ID, reason: str | None = None) -> TaskView:
        """Hold a task; a running session is stopped after a last checkpoint."""
        found = await self._found(task)
        await self._engine.pause(found, reason)
        return await self._engine.show(found)

    async def resume(self, task: ID) -> TaskView:
        """Let a paused task go on."""
        found = await self._found(task)
        await self._engine.resume(found)
        return await self._engine.show(found)

    async def start(self, task: ID) -> TaskView:
        """Let a task run before the time that it was meant for."""
        found = await self._found(task)
        await self._engine.start(found)
        return await self._engine.show(found)

    async def retry(self, task: ID, *, cascade: bool = False) -> TaskView:
        """Give an ended task all its tries again; `cascade` revives what ended because of it."""
        found = await self._found(task)
        await self._engine.retry(found, cascade=cascade)
        return await self._engine.show(found)

    async def assign(self, task: ID, agent: UUID | None, *, take: bool = False) -> TaskView:
        """Let only that agent take a task; `take` takes it from whoever runs it."""
        found = await self._found(task)
        await self._engine.assign(found, agent, take=take)
        return await self._engine.show(found)

    async def archive(self, task: ID) -> TaskView:
        """Put an ended task away."""
        found = await self._found(task)
        await self._engine.archive(found)
        return await self._engine.show(found)

    async def rerun(self, task: ID) -> TaskView:
        """A new task that asks for the same."""
        found = await self._found(task)
        return await self._engine.show((await self._engine.rerun(found)).id)

    async def update(self, task: ID, *, version: int | None = None, **changes: Any) -> TaskView:
        """Change `title`, `description`, `metadata`, `tags`, `priority` or `status`."""
        found = await self._found(task)
        if "tags" in changes:
            changes["tags"] = tuple(changes["tags"])
        await self._engine.edit(found, _known(TaskChanges, changes), version)
        return await self._engine.show(found)

    async def delete(self, task: ID) -> None:
        """Remove what an ended task carried; its audit trail stays."""
        found = await self._found(task)
        await self._engine.erase(found)

    async def act(
        self, action: Action, *, limit: int = 1000, dry_run: bool = False, **where: Any
    ) -> ActionResult:
        """One action for every task that the fields of `Filter` pick."""
        reason = where.pop("reason", None)
        return await self._engine.act(
            action, _filter(where), reason=reason, limit=limit, dry_run=dry_run
        )

    async def wait(self, task: ID, timeout: float | None = None) -> TaskView:  # noqa: ASYNC109
        """The task when it is COMPLETED; raises `TaskFailed` for any other end.

        `TimeoutError` when it has not ended after so many seconds.
        """
        found = await self._found(task)
        async with asyncio.timeout(timeout):
            view = await _ending(self._engine, found)
        if view.status != "COMPLETED":
            raise TaskFailed(view)
        return view

    async def follow(self, task: ID) -> AsyncGenerator[TaskEvent, None]:
        """What was said of a task and is said until its end: statuses, progress, log lines."""
        found = await self._found(task)
        async for event in follow(self._engine, found):
            yield event

    async def logs(self, task: ID, level: str = "DEBUG", limit: int = 1000) -> Sequence[LogLine]:
        """The newest lines of audit trail and transcript, merged by time."""
        found = await self._found(task)
        return await self._engine.logs(found, level, limit)

    async def attempts(self, task: ID) -> Sequence[AttemptView]:
        """The attempts in order; one without an outcome is under way."""
        found = await self._found(task)
        return await self._engine.attempts(found)

    async def explain(self, task: ID) -> Explanation:
        """Why the task is not running: every gate, its number, when it clears."""
        found = await self._found(task)
        return await self._engine.explain(found)

    async def _found(self, task: ID) -> UUID:
        return task if isinstance(task, UUID) else await self._engine.find(task)


async def _ending(engine: AnyEngine, task: UUID) -> TaskView:
    async for look in poll_task(engine, task):
        view = look.view
    return view


K = TypeVar("K")


def _known(kind: type[K], fields: dict[str, Any]) -> K:
    """A struct of the fields; `Invalid` names one that it does not have."""
    names: tuple[str, ...] = kind.__struct_fields__  # type: ignore[attr-defined]
    unknown = sorted(set(fields) - set(names))
    if unknown:
        raise Invalid(f"there is no {unknown[0]!r}; known are {', '.join(names)}")
    return kind(**fields)


def _filter(where: dict[str, Any]) -> Filter:
    """A filter; one word stands for a list of it."""
    for name in ("status", "tags"):
        if isinstance(given := where.get(name, ()), str):
            where[name] = (given,)
        else:
            where[name] = tuple(given)
    return _known(Filter, where)
