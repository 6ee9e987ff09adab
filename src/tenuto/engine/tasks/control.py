"""Control: what people ask of tasks, one by one or by filter."""

from typing import Any, Literal, TypeVar
from uuid import UUID

import msgspec

from tenuto.engine.agents.registry import AgentRegistry
from tenuto.engine.core import Core
from tenuto.engine.flows.advance import Cascade
from tenuto.engine.rows import decode
from tenuto.engine.tasks.query import Filter, TaskQueries
from tenuto.engine.tasks.retry import TaskRetry
from tenuto.engine.tasks.submit import Submitted, TaskSubmitter
from tenuto.engine.tenancy.encryption import TaskSecrets
from tenuto.engine.tenancy.secret_use import check_tasks
from tenuto.model import bounds
from tenuto.model.errors import Conflict, NotFound, TenutoError
from tenuto.model.limits.budgets import Budget
from tenuto.model.limits.concurrency import Concurrency
from tenuto.model.tasks import commands
from tenuto.model.tasks.retry import RetryPolicy
from tenuto.model.tasks.submission import NewTask, requirements
from tenuto.model.tasks.task import LEASED, TERMINAL, Status, TaskChange
from tenuto.model.tasks.user_commands import check_payload_present
from tenuto.model.tenancy.access import Caller
from tenuto.store.protocol import Script, Statement

T = TypeVar("T")
Action = Literal["cancel", "retry", "pause", "resume", "archive"]

_RERUN_FIELDS = (
    "title description prompt system_prompt model max_turns conversation task_type agent_type"
    " target_agent runtime cwd container region priority estimate_minutes max_attempts timeout_s"
    " queue_ttl_s lease_s parent trace_id source complexity"
).split()


class ActionResult(msgspec.Struct, frozen=True):
    """What an action by filter did: the ids it changed, and why others were left."""

    done: list[UUID]
    refused: dict[str, str]


class TaskController:
    """The control family."""

    def __init__(
        self, core: Core, submitting: TaskSubmitter, querying: TaskQueries, sealing: TaskSecrets
    ) -> None:
        self._core = core
        self._sealing = sealing
        self._submitting = submitting
        self._querying = querying

    async def command(
        self, task: UUID, workspace: UUID, command: commands.Command, actor: str | None
    ) -> TaskChange | None:
        """Apply one command of a person to one task."""
        reason = getattr(command, "reason", None)
        if reason is not None:
            bounds.text("reason", reason, bounds.MAX_ERROR)
        if isinstance(command, commands.Retry):
            if await self._is_tied(task, workspace):
                await self.retry(task, workspace, actor, deep=False)
                return None
            await self._restore_lane(task, workspace)
        return await self._core.apply_command(task, command, workspace=workspace, actor=actor)

    async def retry(self, task: UUID, workspace: UUID, actor: str | None, *, deep: bool) -> int:
        """Try an ended task again, and, `deep`, what ended because of it; answers how many."""
        await self._restore_lane(task, workspace)

        def script(cascade: Cascade) -> Script[int]:
            revival = TaskRetry(cascade, workspace, deep=deep)
            yield from revival.retry(task)
            return revival.revived

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
        """Only the agent may take the task; `take` takes it from whoever runs it.

        The attempt that runs has lost its lease, so nothing it says counts any more.
        """
        if agent is not None:
            await AgentRegistry(self._core, workspace).profile(agent)
        new = await self._asked_for(task, workspace)
        needs = requirements(msgspec.structs.replace(new, target_agent=agent), workspace)
        lane = (await self._core.lanes.ensure({needs}))[needs]

        def script(cascade: Cascade) -> Script[None]:
            rows = yield Statement("tasks_locked", {"ids": [task]})
            status = Status(rows[0]["status"])
            if status in TERMINAL:
                raise Conflict(f"cannot assign a task that is {status}")
            if status in LEASED and not take:
                raise Conflict("the task is being run; reassign it to take it away")
            yield from cascade.apply_to_each(
                [task], lambda _: commands.Assign(lane=lane, agent=agent)
            )
            params = {"id": task, "workspace": workspace, "agent": agent}
            yield Statement("assign", params)
            if status in LEASED:
                yield from cascade.apply_to_each([task], lambda _: commands.Expire(seen_dead=True))

        await self._core.run_with_cascade(script, actor)

    async def _is_tied(self, task: UUID, workspace: UUID) -> bool:
        """Whether the task has a flow, a concurrency key, or others that it waits for."""
        rows = await self._core.store.fetch(
            Statement("places", rows={"wanted": [(task, workspace)]})
        )
        if rows and (rows[0]["flow"] is not None or rows[0]["concurrency"] is not None):
            return True
        params = {"task": task, "workspace": workspace}
        return bool(await self._core.store.fetch(Statement("dependencies", params)))

    async def _restore_lane(self, task: UUID, workspace: UUID) -> None:
        """A task that ended long ago may have outlived its lane."""
        new = await self._asked_for(task, workspace)
        await self._core.lanes.ensure({requirements(new, workspace)})

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
        """The same command for every task that the filter picks, newest first, up to `limit`."""
        bounds.number("limit", limit, 1, bounds.MAX_BULK)
        ids = await self._querying.ids(where, workspace, limit)
        if dry_run:
            return ActionResult(ids, {})
        done: list[UUID] = []
        refused: dict[str, str] = {}
        for task in ids:
            try:
                await self.command(task, workspace, command_for(action, reason), actor)
            except TenutoError as error:
                refused[str(task)] = error.message
            else:
                done.append(task)
        return ActionResult(done, refused)

    async def rerun(
        self, task: UUID, workspace: UUID, actor: str | None, caller: Caller | None
    ) -> Submitted:
        """A new task that asks for the same; the old one stays as it is."""
        new = await self._asked_for(task, workspace)
        await self._core.read(check_tasks(workspace, caller, [new]))
        new = await self._sealing.decrypt_request(new, task, workspace)
        return (await self._submitting.many([new], workspace, actor, rerun_of=task))[0]

    async def _asked_for(self, task: UUID, workspace: UUID) -> NewTask:
        """What was asked for when the task was submitted; raises `Conflict` if that is gone."""
        rows = await self._core.store.fetch(Statement("show", {"workspace": workspace, "id": task}))
        if not rows:
            raise NotFound(f"no task {task}")
        row = rows[0]
        check_payload_present(row["current_step"])
        labels = await self._querying.labels([task])
        fields: dict[str, Any] = {name: row[name] for name in _RERUN_FIELDS}
        retry = row["retry"]
        try:
            return NewTask(
                **fields,
                command=decode(row["command"]),
                env=decode(row["env"]),
                input=decode(row["input"]),
                metadata=decode(row["metadata"]),
                retry=None if retry is None else msgspec.json.decode(retry, type=RetryPolicy),
                escalation=_read(row["escalation"], commands.Escalation),
                concurrency=_read(row["concurrency"], Concurrency),
                budget=_read(row["budget"], Budget),
                tags=labels[task].get("label", []),
                task_tags=labels[task].get("tag", []),
                capabilities=labels[task].get("capability", []),
            )
        except msgspec.MsgspecError as error:
            raise Conflict(f"the row of task {task} is unreadable: {error}", "corrupt") from error


def _read(text: str | None, kind: type[T]) -> T | None:
    return None if text is None else msgspec.json.decode(text, type=kind)


def command_for(action: Action, reason: str | None) -> commands.Command:
    """The model's command for an action's name."""
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
