"""`RemoteEngine`: the same methods, results and errors as `Engine`, over HTTP."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import UUID

import msgspec

from tenuto.client.remote.bodies import change_body, filter_body, filter_params, task_body
from tenuto.client.remote.flows import RemoteFlows, RemoteInbox
from tenuto.client.remote.http import DEADLINE_S, ApiRequest, ServerConnection, path_segment
from tenuto.client.remote.limits import RemotePauses, RemoteRateLimits
from tenuto.client.remote.mailbox import RemoteMailboxes
from tenuto.client.remote.worker import V1, RemoteWorkerEngine
from tenuto.engine.agents.eligibility import AgentExplanation
from tenuto.engine.agents.registry import AgentView
from tenuto.engine.engine import Engine
from tenuto.engine.limits.budgets import UsageStats
from tenuto.engine.schedules.events import EventView
from tenuto.engine.tasks.control import Action, ActionResult
from tenuto.engine.tasks.edit import TaskChanges
from tenuto.engine.tasks.submit import Submitted
from tenuto.engine.views import (
    AttemptView,
    Explanation,
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

T = TypeVar("T")
BULK_WAIT_S = 300.0
"""Additional seconds for the server to handle many tasks in one request."""


class _SubmitReply(msgspec.Struct):
    tasks: list[Submitted]


class _TaskId(msgspec.Struct):
    id: UUID


class _LogLines(msgspec.Struct):
    lines: list[LogLine]


class _WorkerList(msgspec.Struct):
    workers: list[WorkerView]


class _Stats(msgspec.Struct):
    tasks: dict[str, int]
    spending: UsageStats


class RemoteEngine(RemoteWorkerEngine):
    """The engine of the token's workspace, over HTTP.

    Reads, submits and reports are retried until a response arrives. Control requests (cancel,
    pause, ...) are sent once: if the response is lost, `Unavailable` is raised, and the request
    may or may not have been executed.
    """

    async def submit(self, new: NewTask) -> Submitted:
        """Submits a task. Once this returns, the task is stored, exactly once."""
        return (await self.submit_many([new]))[0]

    async def submit_many(self, new_tasks: Sequence[NewTask]) -> list[Submitted]:
        """Submits all of the tasks or none, in one transaction."""
        if not new_tasks:
            return []
        ids = self.clock.new_ids(len(new_tasks))
        bodies = [{"id": id_} | task_body(new) for new, id_ in zip(new_tasks, ids, strict=True)]
        request = self._post(
            "agent-tasks/bulk", {"tasks": bodies}, repeatable=True, wait_s=BULK_WAIT_S
        )
        results = (await self.connection.request(_SubmitReply, request)).tasks
        # This call chose the id at random, so a task with that id was created by this call.
        return [
            Submitted(result.id, result.created or result.id == new_id)
            for result, new_id in zip(results, ids, strict=True)
        ]

    async def cancel(self, task: UUID, reason: str | None = None) -> None:
        """Cancels a task; a running session is killed first."""
        await self._control(task, "cancel", {"reason": reason})

    async def pause(self, task: UUID, reason: str | None = None) -> None:
        """Pauses a task; a running session is stopped after a last checkpoint."""
        await self._control(task, "pause", {"reason": reason})

    async def resume(self, task: UUID) -> None:
        """Resumes a paused task."""
        await self._control(task, "resume")

    async def start(self, task: UUID) -> None:
        """Makes a task run now, before its start time."""
        await self._control(task, "start")

    async def assign(self, task: UUID, agent: UUID | None, *, take: bool = False) -> None:
        """Assigns a task to one agent; `take` takes it away from the agent that runs it."""
        await self._control(task, "reassign" if take else "assign", {"agentId": agent})

    async def retry(self, task: UUID, *, cascade: bool = False) -> None:
        """Retries a finished task with all its tries.

        `cascade` also retries the tasks that ended because of it.
        """
        await self._control(task, "retry", {"cascade": cascade})

    async def archive(self, task: UUID) -> None:
        """Archives a finished task."""
        await self._control(task, "archive")

    async def reprioritise(self, task: UUID, priority: int) -> None:
        """Changes a task's priority, and with it its position in the queue."""
        await self.edit(task, TaskChanges(priority=priority))

    async def edit(self, task: UUID, changes: TaskChanges, version: int | None = None) -> None:
        """Changes fields of a task; raises `Conflict` if it does not have the `version`."""
        headers = {} if version is None else {"If-Match": f'"{version}"'}
        path = f"{V1}/agent-tasks/{task}"
        body = change_body(changes)
        await self.connection.request(
            TaskView, ApiRequest(method="PATCH", path=path, body=body, headers=headers)
        )

    async def erase(self, task: UUID) -> None:
        """Deletes the data of a finished task; its row and audit trail stay."""
        await self.connection.request(
            type(None), ApiRequest(method="DELETE", path=f"{V1}/agent-tasks/{task}")
        )

    async def rerun(self, task: UUID) -> Submitted:
        """Submits a new task with the same fields, only once even if the response is lost."""
        path = f"{V1}/agent-tasks/{task}/rerun"
        headers = {"Idempotency-Key": str(self.clock.new_id())}
        request = ApiRequest(method="POST", path=path, headers=headers, repeatable=True)
        return Submitted((await self.connection.request(TaskView, request)).id)

    async def act(
        self,
        action: Action,
        where: Filter,
        *,
        reason: str | None = None,
        limit: int = 1000,
        dry_run: bool = False,
    ) -> ActionResult:
        """Applies one action to every task that matches the filter."""
        body = {
            "action": action,
            "filter": filter_body(where),
            "reason": reason,
            "limit": limit,
            "dryRun": dry_run,
        }
        request = self._post("agent-tasks/actions", body, repeatable=dry_run, wait_s=BULK_WAIT_S)
        return await self.connection.request(ActionResult, request)

    async def find(self, text: str) -> UUID:
        """Returns the id of the task with this id or beginning of an id."""
        try:
            return UUID(text)
        except ValueError:
            return (await self._get(_TaskId, "agent-tasks/find", id=text[:60])).id

    async def list(
        self, where: Filter | None = None, limit: int = 100, cursor: UUID | None = None
    ) -> Page:
        """Returns a page of tasks, newest first."""
        params = filter_params(where or Filter())
        return await self._get(Page, "agent-tasks", limit=limit, cursor=cursor, **params)

    async def show(self, task: UUID) -> TaskView:
        """Returns a task without its history."""
        return await self._get(TaskView, f"agent-tasks/{task}")

    async def attempts(self, task: UUID) -> Sequence[AttemptView]:
        """Returns the task's attempts in order."""
        return await self._get(list[AttemptView], f"agent-tasks/{task}/attempts")

    async def events(self, task: UUID, after: int = 0, limit: int = 1000) -> Sequence[LogLine]:
        """Returns the task's audit events after version `after`."""
        path = f"agent-tasks/{task}/trail"
        return (await self._get(_LogLines, path, after=after, limit=limit)).lines

    async def transcript(
        self, task: UUID, after: tuple[int, int] = (0, -1), limit: int = 1000
    ) -> Sequence[LogLine]:
        """Returns the transcript lines of the task's attempts after (attempt, line number)."""
        offset = None if after[1] < 0 else f"{after[0]}.{after[1]}"
        path = f"agent-tasks/{task}/transcript"
        return (await self._get(_LogLines, path, offset=offset, limit=limit)).lines

    async def logs(self, task: UUID, level: str = "DEBUG", limit: int = 1000) -> Sequence[LogLine]:
        """Returns the newest lines of audit trail and transcript, merged by time."""
        path = f"agent-tasks/{task}/logs"
        return (await self._get(_LogLines, path, level=level, limit=limit)).lines

    async def explain(self, task: UUID) -> Explanation:
        """Explains why the task is not running."""
        return await self._get(Explanation, f"agent-tasks/{task}/explain")

    async def counts(self) -> dict[str, int]:
        """Returns the number of tasks by status."""
        return (await self._get(_Stats, "stats")).tasks

    async def spending(self) -> UsageStats:
        """Returns the token usage and cost of the workspace's attempts."""
        return (await self._get(_Stats, "stats")).spending

    async def workers(self) -> Sequence[WorkerView]:
        """Returns the workers that were seen recently, newest first."""
        return (await self._get(_WorkerList, "workers")).workers

    async def drain_worker(self, worker: str) -> None:
        """Requests a worker to claim no more tasks, to finish or release its tasks, and to exit."""
        request = self._post(f"workers/{path_segment(worker)}/drain", repeatable=True)
        await self.connection.request(WorkerView, request)

    async def terminate_agent(
        self, agent: UUID, reason: str | None = None, *, graceful: bool = True
    ) -> None:
        """Stops an agent from claiming tasks; unless `graceful`, cancels the tasks it runs."""
        body = {"reason": reason, "graceful": graceful}
        await self.connection.request(AgentView, self._post(f"agents/{agent}/terminate", body))

    async def explain_agent(self, agent: UUID) -> AgentExplanation:
        """Explains which tasks an agent can claim, which wait for it, and why not others."""
        return await self._get(AgentExplanation, f"agents/{agent}/explain")

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

    async def rerun_flow(self, flow: UUID, *, steps: int | None = None) -> UUID:
        """Starts a new flow with the same plan and input; returns its id."""
        return await self.flows.rerun(flow, steps=steps)

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

    async def publish(self, name: str, data: Any = None, task: UUID | None = None) -> EventView:
        """Publishes an event in the workspace, only once even if the response is lost."""
        headers = {"Idempotency-Key": str(self.clock.new_id())}
        body = {"name": name, "data": data, "taskId": task}
        path = f"{V1}/events"
        request = ApiRequest(method="POST", path=path, body=body, headers=headers, repeatable=True)
        return await self.connection.request(EventView, request)

    async def _control(self, task: UUID, action: str, body: Any = msgspec.UNSET) -> None:
        """Sends a control request for a task; it is not retried."""
        await self.connection.request(TaskView, self._post(f"agent-tasks/{task}/{action}", body))

    async def _get(self, response_type: type[T], path: str, **params: Any) -> T:
        """Reads a path and returns the decoded response."""
        request = ApiRequest(method="GET", path=f"{V1}/{path}", params=params, repeatable=True)
        return await self.connection.request(response_type, request)

    def _post(
        self,
        path: str,
        body: Any = msgspec.UNSET,
        *,
        repeatable: bool = False,
        wait_s: float = 0.0,
    ) -> ApiRequest:
        """Returns a POST request; it is not sent yet."""
        full_path = f"{V1}/{path}"
        return ApiRequest(
            method="POST", path=full_path, body=body, repeatable=repeatable, wait_s=wait_s
        )


class RemoteSecrets:
    """The named secrets of the token's workspace."""

    def __init__(self, connection: ServerConnection) -> None:
        self._connection = connection

    async def put(self, name: str, value: str | None = None, use: Use | None = None) -> None:
        """Stores a secret's value and the rules for its use; tasks get it with their next claim.

        An argument that is `None` keeps the stored one.
        """
        path = f"{V1}/secrets/{path_segment(name)}"
        fields = {"value": value, "use": use}
        body = {key: item for key, item in fields.items() if item is not None}
        await self._connection.request(
            type(None), ApiRequest(method="PUT", path=path, body=body, repeatable=True)
        )

    async def list(self) -> Sequence[SecretView]:
        """Returns the secrets by name, without their values."""
        request = ApiRequest(method="GET", path=f"{V1}/secrets", repeatable=True)
        return await self._connection.request(list[SecretView], request)

    async def delete(self, name: str) -> None:
        """Deletes a secret; tasks that refer to it can no longer start."""
        path = f"{V1}/secrets/{path_segment(name)}"
        await self._connection.request(type(None), ApiRequest(method="DELETE", path=path))


class RemoteComplexity:
    """The rules for complexity levels of the token's workspace."""

    def __init__(self, connection: ServerConnection) -> None:
        self._connection = connection

    async def get(self) -> ComplexityRules:
        """Returns the current rules."""
        request = ApiRequest(method="GET", path=f"{V1}/complexity-levels", repeatable=True)
        return await self._connection.request(ComplexityRules, request)

    async def set(self, rules: ComplexityRules) -> None:
        """Replaces the rules; they apply to tasks submitted from now on."""
        path = f"{V1}/complexity-levels"
        request = ApiRequest(
            method="PUT", path=path, body=msgspec.to_builtins(rules), repeatable=True
        )
        await self._connection.request(ComplexityRules, request)


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
