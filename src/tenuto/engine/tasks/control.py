"""User actions on tasks, for one task or by filter: cancel, retry, pause, assign, rerun."""

from typing import Literal
from uuid import UUID

import msgspec

from tenuto.engine.agents.registry import AgentRegistry
from tenuto.engine.core import Core
from tenuto.engine.flows.advance import Cascade
from tenuto.engine.rows import stored_request
from tenuto.engine.tasks.query import TaskQueries
from tenuto.engine.tasks.retry import TaskRetry
from tenuto.engine.tasks.submit import Submitted, TaskSubmitter
from tenuto.engine.tenancy.encryption import TaskSecrets
from tenuto.engine.tenancy.secret_use import check_tasks
from tenuto.model import bounds
from tenuto.model.errors import Conflict, NotFound, TenutoError
from tenuto.model.tasks import commands
from tenuto.model.tasks.submission import FIELDS, Filter, NewTask, requirements
from tenuto.model.tasks.task import LEASED, TERMINAL, Status, TaskChange
from tenuto.model.tasks.user_commands import check_payload_present
from tenuto.model.tenancy.access import Caller
from tenuto.store.protocol import Script, Statement

Action = Literal["cancel", "retry", "pause", "resume", "archive"]

_LABEL_KINDS = {"tags": "label", "task_tags": "tag", "capabilities": "capability"}
_RERUN_FIELDS = tuple(
    name for name, field in FIELDS.items() if field.rerun and name not in _LABEL_KINDS
)


class ActionResult(msgspec.Struct, frozen=True):
    """The result of an action by filter: the changed ids, and the error message per refused id."""

    done: list[UUID]
    refused: dict[str, str]


class TaskController:
    """Applies user actions to tasks."""

    def __init__(
        self, core: Core, submitter: TaskSubmitter, queries: TaskQueries, task_secrets: TaskSecrets
    ) -> None:
        self._core = core
        self._task_secrets = task_secrets
        self._submitter = submitter
        self._queries = queries

    async def command(
        self, task: UUID, workspace: UUID, command: commands.Command, actor: str | None
    ) -> TaskChange | None:
        """Applies a user's command to one task; returns the change, `None` for some retries.

        Returns `None` for a retry of a task with a flow, concurrency key or dependencies.
        """
        reason = getattr(command, "reason", None)
        if reason is not None:
            bounds.check_text("reason", reason, bounds.MAX_ERROR)
        if isinstance(command, commands.Retry):
            if await self._needs_cascade(task, workspace):
                await self.retry(task, workspace, actor, with_dependents=False)
                return None
            await self._restore_lane(task, workspace)
        return await self._core.apply_command(task, command, workspace=workspace, actor=actor)

    async def retry(
        self, task: UUID, workspace: UUID, actor: str | None, *, with_dependents: bool
    ) -> int:
        """Retries a FAILED, DEAD or CANCELLED task, else `Conflict`; returns the number reopened.

        With `with_dependents`, also reopens tasks that failed or were skipped because of the task.
        """
        await self._restore_lane(task, workspace)

        def script(cascade: Cascade) -> Script[int]:
            task_retry = TaskRetry(cascade, workspace, with_dependents=with_dependents)
            yield from task_retry.retry(task)
            return task_retry.reopened

        return await self._core.run_with_cascade(script, actor)

    async def assign(
        self,
        task: UUID,
        workspace: UUID,
        agent: UUID | None,
        actor: str | None,
        *,
        take: bool = False,
    ) -> None:
        """Restricts the task to `agent` (`None`: any); `take` ends its lease, else `Conflict`.

        With `take`, a running attempt loses its lease at once, so its later reports are refused.
        Raises `Conflict` for a finished task, too.
        """
        if agent is not None:
            await AgentRegistry(self._core, workspace).profile(agent)
        request = await self._load_request(task, workspace)
        required = requirements(msgspec.structs.replace(request, target_agent=agent), workspace)
        lane = (await self._core.lanes.ensure({required}))[required]

        def script(cascade: Cascade) -> Script[None]:
            rows = yield Statement("tasks_locked", {"ids": [task]})
            status = Status(rows[0]["status"])
            if status in TERMINAL:
                raise Conflict(f"task {task} is {status} and cannot be assigned")
            if status in LEASED and not take:
                text = f'task {task} is {status}; use "orchestrate task reassign" to move it'
                raise Conflict(text)
            yield from cascade.apply_to_each(
                [task], lambda _: commands.Assign(lane=lane, agent=agent)
            )
            params = {"id": task, "workspace": workspace, "agent": agent}
            yield Statement("assign", params)
            if status in LEASED:
                yield from cascade.apply_to_each([task], lambda _: commands.Expire(seen_dead=True))

        await self._core.run_with_cascade(script, actor)

    async def _needs_cascade(self, task: UUID, workspace: UUID) -> bool:
        """True if the task has a flow, a concurrency key or dependencies."""
        rows = await self._core.store.fetch(
            Statement("flow_positions", rows={"wanted": [(task, workspace)]})
        )
        if rows and (rows[0]["flow"] is not None or rows[0]["concurrency"] is not None):
            return True
        params = {"task": task, "workspace": workspace}
        return bool(await self._core.store.fetch(Statement("dependencies", params)))

    async def _restore_lane(self, task: UUID, workspace: UUID) -> None:
        """Creates the task's lane again if the lane was pruned after the task finished."""
        request = await self._load_request(task, workspace)
        await self._core.lanes.ensure({requirements(request, workspace)})

    async def act(
        self,
        action: Action,
        where: Filter,
        workspace: UUID,
        actor: str | None,
        *,
        reason: str | None = None,
        limit: int = 1000,
        dry_run: bool = False,
    ) -> ActionResult:
        """Applies an action to up to `limit` matching tasks, newest first; collects refusals by id.

        With `dry_run`, returns the ids of the matching tasks and changes nothing.
        """
        bounds.check_number("limit", limit, 1, bounds.MAX_BULK)
        ids = await self._queries.ids(where, workspace, limit)
        if dry_run:
            return ActionResult(ids, {})
        changed: list[UUID] = []
        refused: dict[str, str] = {}
        for task in ids:
            try:
                await self.command(task, workspace, command_for(action, reason), actor)
            except TenutoError as error:
                refused[str(task)] = error.message
            else:
                changed.append(task)
        return ActionResult(changed, refused)

    async def rerun(
        self, task: UUID, workspace: UUID, actor: str | None, caller: Caller | None
    ) -> Submitted:
        """Submits a new task with the same request; the old task stays unchanged."""
        request = await self._load_request(task, workspace)
        await self._core.read(check_tasks(workspace, caller, [request]))
        request = await self._task_secrets.decrypt_request(request, task, workspace)
        return (await self._submitter.submit_many([request], workspace, actor, rerun_of=task))[0]

    async def _load_request(self, task: UUID, workspace: UUID) -> NewTask:
        """Returns the request fields that a rerun repeats; `NotFound`, or `Conflict` if deleted."""
        rows = await self._core.store.fetch(
            Statement("task_show", {"workspace": workspace, "id": task})
        )
        if not rows:
            raise NotFound(f"no task {task}")
        row = rows[0]
        check_payload_present(row["current_step"])
        labels = await self._queries.labels([task])
        try:
            fields = stored_request(row, _RERUN_FIELDS)
            fields |= {name: labels[task].get(kind, []) for name, kind in _LABEL_KINDS.items()}
            return NewTask(**fields)
        except msgspec.MsgspecError as error:
            raise Conflict(f"task {task} has an invalid row: {error}", "corrupt") from error


def command_for(action: Action, reason: str | None) -> commands.Command:
    """Returns the command for an action's name."""
    match action:
        case "cancel":
            return commands.Cancel(reason=reason)
        case "pause":
            return commands.Pause(reason=reason)
        case "resume":
            return commands.Resume()
        case "retry":
            return commands.Retry()
        case "archive":
            return commands.Archive()
