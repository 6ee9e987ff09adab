"""`RemoteEngine`: the same methods, results and errors as `Engine`, over HTTP."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING
from uuid import UUID

import msgspec

from tenuto.client.remote.bodies import change_body, filter_body, filter_params, task_body
from tenuto.client.remote.flows import RemoteFlows, RemoteInbox
from tenuto.client.remote.generated import ComplexityLevelsCalls, EngineCalls
from tenuto.client.remote.http import DEADLINE_S, ServerConnection, path_segment
from tenuto.client.remote.limits import RemotePauses, RemoteRateLimits
from tenuto.client.remote.mailbox import RemoteMailboxes
from tenuto.client.remote.resource import RemoteResource
from tenuto.client.remote.worker import RemoteWorkerEngine
from tenuto.engine.engine import Engine
from tenuto.engine.limits.budgets import UsageStats
from tenuto.engine.tasks.control import Action, ActionResult
from tenuto.engine.tasks.edit import TaskChanges
from tenuto.engine.tasks.submit import Submitted
from tenuto.engine.views import (
    LogLine,
    Page,
    SecretView,
    TaskView,
    WorkerView,
)
from tenuto.model.limits.complexity import ComplexityRules
from tenuto.model.tasks.submission import Filter, NewTask
from tenuto.model.tenancy.secret_use import Use

if TYPE_CHECKING:
    from tenuto.client.remote.definitions import RemoteDefinitions
    from tenuto.client.remote.schedules import RemoteSchedules, RemoteTriggers

BULK_WAIT_S = 300.0
"""Additional seconds for the server to handle many tasks in one request."""


class _SubmitReply(msgspec.Struct):
    tasks: list[Submitted]


class _TaskId(msgspec.Struct):
    id: UUID


class _LogLines(msgspec.Struct):
    lines: list[LogLine]


class _Stats(msgspec.Struct):
    tasks: dict[str, int]
    spending: UsageStats


class RemoteEngine(RemoteWorkerEngine, EngineCalls):
    """The engine of the token's workspace, over HTTP.

    Reads, submits and reports are retried until a response arrives. Control requests (cancel,
    pause, ...) are sent once: if the response is lost, `Unavailable` is raised, and the request
    may or may not have been executed.
    """

    async def submit(self, new: NewTask) -> Submitted:
        """Submits a task. Once this returns, the task is stored, exactly once."""
        return (await self.submit_many([new]))[0]

    async def show_submitted(self, new: NewTask, submitted: Submitted) -> TaskView:
        """Returns a task just submitted, read from the server."""
        del new  # the server answered with the id only
        return await self.show(submitted.id)

    async def submit_many(self, new_tasks: Sequence[NewTask]) -> list[Submitted]:
        """Submits all of the tasks or none; returns one result per task, in order."""
        if not new_tasks:
            return []
        ids = self.clock.new_ids(len(new_tasks))
        bodies = [{"id": id_} | task_body(new) for new, id_ in zip(new_tasks, ids, strict=True)]
        path, body = "agent-tasks/bulk", {"tasks": bodies}
        reply = await self._call(
            _SubmitReply, "POST", path, body, repeatable=True, wait_s=BULK_WAIT_S
        )
        # This call chose the id at random, so a task with that id was created by this call.
        return [
            Submitted(result.id, result.created or result.id == new_id)
            for result, new_id in zip(reply.tasks, ids, strict=True)
        ]

    async def assign(self, task: UUID, agent: UUID | None, *, take: bool = False) -> None:
        """Reserves a task for an agent (`None`: for any); `take` also takes a running task."""
        action = "reassign" if take else "assign"
        await self._call(TaskView, "POST", f"agent-tasks/{task}/{action}", {"agentId": agent})

    async def reprioritise(self, task: UUID, priority: int) -> None:
        """Changes a task's priority, and with it its position in the queue."""
        await self.edit(task, TaskChanges(priority=priority))

    async def edit(self, task: UUID, changes: TaskChanges, version: int | None = None) -> None:
        """Changes fields of a task; raises `Conflict` if `version` is given and outdated."""
        path = f"agent-tasks/{task}"
        await self._call(TaskView, "PATCH", path, change_body(changes), version=version)

    async def rerun(self, task: UUID) -> Submitted:
        """Submits a new task with the same fields, only once even if the response is lost."""
        view = await self._call(TaskView, "POST", f"agent-tasks/{task}/rerun", once=True)
        return Submitted(view.id)

    async def act(
        self,
        action: Action,
        where: Filter,
        *,
        reason: str | None = None,
        limit: int = 1000,
        dry_run: bool = False,
    ) -> ActionResult:
        """Applies an action to the newest `limit` matching tasks; `dry_run` only lists them.

        Returns the changed ids, and the refused ones with reasons.
        """
        body = {
            "action": action,
            "filter": filter_body(where),
            "reason": reason,
            "limit": limit,
            "dryRun": dry_run,
        }
        path = "agent-tasks/actions"
        return await self._call(
            ActionResult, "POST", path, body, repeatable=dry_run, wait_s=BULK_WAIT_S
        )

    async def find(self, text: str) -> UUID:
        """Returns the id that begins with `text`, or `NotFound`; a full id is not looked up."""
        try:
            return UUID(text)
        except ValueError:
            params = {"id": text[:60]}
            return (await self._call(_TaskId, "GET", "agent-tasks/find", params=params)).id

    async def list(
        self, where: Filter | None = None, limit: int = 100, cursor: UUID | None = None
    ) -> Page:
        """Returns a page of tasks, newest first."""
        params = filter_params(where or Filter()) | {"limit": limit, "cursor": cursor}
        return await self._call(Page, "GET", "agent-tasks", params=params)

    async def transcript(
        self, task: UUID, after: tuple[int, int] = (0, -1), limit: int = 1000
    ) -> Sequence[LogLine]:
        """Returns the transcript lines of the task's attempts after (attempt, line number)."""
        offset = None if after[1] < 0 else f"{after[0]}.{after[1]}"
        path, params = f"agent-tasks/{task}/transcript", {"offset": offset, "limit": limit}
        return (await self._call(_LogLines, "GET", path, params=params)).lines

    async def counts(self) -> dict[str, int]:
        """Returns the number of tasks by status."""
        return (await self._call(_Stats, "GET", "stats")).tasks

    async def spending(self) -> UsageStats:
        """Returns the usage of the workspace's attempts, today and in total."""
        return (await self._call(_Stats, "GET", "stats")).spending

    async def drain_worker(self, worker: str) -> None:
        """Requests that a worker claims no more, finishes or releases its tasks, and exits."""
        path = f"workers/{path_segment(worker)}/drain"
        await self._call(WorkerView, "POST", path, repeatable=True)

    @property
    def mailboxes(self) -> RemoteMailboxes:
        """The mailboxes of the workspace's agents."""
        return RemoteMailboxes(self.connection)

    @property
    def complexity(self) -> "RemoteComplexity":
        """The workspace's rules for complexity levels."""
        return RemoteComplexity(self.connection)

    @property
    def gates(self) -> RemotePauses:
        """The workspace's pauses (gates)."""
        return RemotePauses(self.connection)

    @property
    def rate_limits(self) -> RemoteRateLimits:
        """Rate limits of providers, models and accounts, shared by all workers."""
        return RemoteRateLimits(self.connection)

    @property
    def secrets(self) -> "RemoteSecrets":
        """The workspace's named secrets."""
        return RemoteSecrets(self.connection)

    @property
    def flows(self) -> RemoteFlows:
        """The workspace's flows."""
        return RemoteFlows(self.connection)

    @property
    def flow_views(self) -> RemoteFlows:
        """Reads of the workspace's flows and groups."""
        return RemoteFlows(self.connection)

    @property
    def inbox(self) -> RemoteInbox:
        """The inbox: items that wait for an answer by a person."""
        return RemoteInbox(self.connection)

    @property
    def definitions(self) -> "RemoteDefinitions":
        """The workspace's stored task and group definitions."""
        from tenuto.client.remote.definitions import RemoteDefinitions  # noqa: PLC0415  loads YAML only when used

        return RemoteDefinitions(self.connection)

    @property
    def schedules(self) -> "RemoteSchedules":
        """The workspace's schedules."""
        from tenuto.client.remote.schedules import RemoteSchedules  # noqa: PLC0415  loads calendars only when used

        return RemoteSchedules(self.connection)

    @property
    def triggers(self) -> "RemoteTriggers":
        """The workspace's triggers: start definitions after events."""
        from tenuto.client.remote.schedules import RemoteTriggers  # noqa: PLC0415  loads calendars only when used

        return RemoteTriggers(self.connection)


class RemoteSecrets(RemoteResource):
    """The named secrets of the token's workspace."""

    async def put(self, name: str, value: str | None = None, use: Use | None = None) -> None:
        """Stores a secret's value and the rules for its use; tasks get it with their next claim.

        An argument that is `None` keeps the stored one.
        """
        fields = {"value": value, "use": use}
        body = {key: item for key, item in fields.items() if item is not None}
        await self._call(type(None), "PUT", f"secrets/{path_segment(name)}", body)

    async def list(self) -> Sequence[SecretView]:
        """Returns the secrets by name, without their values."""
        return await self._call(list[SecretView], "GET", "secrets")

    async def delete(self, name: str) -> None:
        """Deletes a secret; tasks that name it fail to start. Raises `NotFound`."""
        await self._call(type(None), "DELETE", f"secrets/{path_segment(name)}")


class RemoteComplexity(ComplexityLevelsCalls):
    """The rules for complexity levels of the token's workspace."""

    async def set(self, rules: ComplexityRules) -> None:
        """Replaces the rules; they apply to tasks submitted from now on."""
        await self._call(ComplexityRules, "PUT", "complexity-levels", rules)


AnyEngine = Engine | RemoteEngine
"""An engine in this process, or a remote one over HTTP."""


@asynccontextmanager
async def connect_to_server(
    url: str,
    token: str | None = None,
    workspace: UUID | None = None,
    *,
    deadline_s: float = DEADLINE_S,
) -> AsyncIterator[RemoteEngine]:
    """Opens the engine of a server; no request is sent yet."""
    workspace_id = None if workspace is None else str(workspace)
    connection = ServerConnection(url, token, workspace_id, deadline_s=deadline_s)
    try:
        yield RemoteEngine(connection, workspace)
    finally:
        await connection.close()
