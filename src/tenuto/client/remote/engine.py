"""An engine behind a server: the same calls, answers and errors as `Engine`, over HTTP."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import UUID

import msgspec

from tenuto.client.remote.bodies import change_body, filter_body, filter_words, task_body
from tenuto.client.remote.flows import RemoteFlows, RemoteInbox
from tenuto.client.remote.http import DEADLINE_S, ApiRequest, ServerConnection, part
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
from tenuto.engine.tasks.query import Filter
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
from tenuto.model.tasks.submission import NewTask
from tenuto.model.tenancy.secret_use import Use

if TYPE_CHECKING:
    from tenuto.client.remote.definitions import RemoteDefinitions
    from tenuto.client.remote.schedules import RemoteSchedules, RemoteTriggers

T = TypeVar("T")
MANY_S = 300.0
"""Seconds more that the server may take for many tasks at once."""


class _Made(msgspec.Struct):
    tasks: list[Submitted]


class _Found(msgspec.Struct):
    id: UUID


class _Lines(msgspec.Struct):
    lines: list[LogLine]


class _Workers(msgspec.Struct):
    workers: list[WorkerView]


class _Counts(msgspec.Struct):
    tasks: dict[str, int]
    spending: UsageStats


class RemoteEngine(RemoteWorkerEngine):
    """What can be done with tasks in the workspace of a token.

    Reads, submits and reports are repeated until they are answered. What a person asks of a task is
    sent once: when the answer is lost, `Unavailable` leaves open whether it was done.
    """

    async def submit(self, new: NewTask) -> Submitted:
        """Accept a task; it is never lost once this returns, and never made twice."""
        return (await self.submit_many([new]))[0]

    async def submit_many(self, news: Sequence[NewTask]) -> list[Submitted]:
        """Accept all of the tasks or none."""
        if not news:
            return []
        fresh = self.clock.new_ids(len(news))
        bodies = [{"id": made} | task_body(new) for new, made in zip(news, fresh, strict=True)]
        ask = self._post("agent-tasks/bulk", {"tasks": bodies}, repeatable=True, wait_s=MANY_S)
        told = (await self.link.ask(_Made, ask)).tasks
        # An id of ours was never there before: whatever bears it was made by this call.
        return [
            Submitted(each.id, each.created or each.id == made)
            for each, made in zip(told, fresh, strict=True)
        ]

    async def cancel(self, task: UUID, reason: str | None = None) -> None:
        """End a task; a running session is killed first."""
        await self._order(task, "cancel", {"reason": reason})

    async def pause(self, task: UUID, reason: str | None = None) -> None:
        """Hold a task; a running session is stopped after a last checkpoint."""
        await self._order(task, "pause", {"reason": reason})

    async def resume(self, task: UUID) -> None:
        """Let a paused task go on."""
        await self._order(task, "resume")

    async def start(self, task: UUID) -> None:
        """Let a task run before the time that it was meant for."""
        await self._order(task, "start")

    async def assign(self, task: UUID, agent: UUID | None, *, take: bool = False) -> None:
        """Let only that agent take a task; `take` takes it from whoever runs it."""
        await self._order(task, "reassign" if take else "assign", {"agentId": agent})

    async def retry(self, task: UUID, *, cascade: bool = False) -> None:
        """Give an ended task all its tries again."""
        await self._order(task, "retry", {"cascade": cascade})

    async def archive(self, task: UUID) -> None:
        """Put an ended task away."""
        await self._order(task, "archive")

    async def reprioritise(self, task: UUID, priority: int) -> None:
        """Change a task's priority, and so its place in the queue."""
        await self.edit(task, TaskChanges(priority=priority))

    async def edit(self, task: UUID, changes: TaskChanges, version: int | None = None) -> None:
        """Change what a task says about itself, if it still has the version."""
        headers = {} if version is None else {"If-Match": f'"{version}"'}
        path = f"{V1}/agent-tasks/{task}"
        body = change_body(changes)
        await self.link.ask(
            TaskView, ApiRequest(method="PATCH", path=path, body=body, headers=headers)
        )

    async def erase(self, task: UUID) -> None:
        """Remove what an ended task carried; row and trail stay."""
        await self.link.ask(
            type(None), ApiRequest(method="DELETE", path=f"{V1}/agent-tasks/{task}")
        )

    async def rerun(self, task: UUID) -> Submitted:
        """A new task that asks for the same, made once though the answer be lost."""
        path = f"{V1}/agent-tasks/{task}/rerun"
        headers = {"Idempotency-Key": str(self.clock.new_id())}
        ask = ApiRequest(method="POST", path=path, headers=headers, repeatable=True)
        return Submitted((await self.link.ask(TaskView, ask)).id)

    async def act(
        self,
        action: Action,
        where: Filter,
        *,
        reason: str | None = None,
        limit: int = 1000,
        dry_run: bool = False,
    ) -> ActionResult:
        """One action for every task a filter picks."""
        body = {
            "action": action,
            "filter": filter_body(where),
            "reason": reason,
            "limit": limit,
            "dryRun": dry_run,
        }
        ask = self._post("agent-tasks/actions", body, repeatable=dry_run, wait_s=MANY_S)
        return await self.link.ask(ActionResult, ask)

    async def find(self, text: str) -> UUID:
        """The task that an id or the beginning of one names."""
        try:
            return UUID(text)
        except ValueError:
            return (await self._get(_Found, "agent-tasks/find", id=text[:60])).id

    async def list(
        self, where: Filter | None = None, limit: int = 100, cursor: UUID | None = None
    ) -> Page:
        """Tasks newest first."""
        words = filter_words(where or Filter())
        return await self._get(Page, "agent-tasks", limit=limit, cursor=cursor, **words)

    async def show(self, task: UUID) -> TaskView:
        """Everything about a task but its history."""
        return await self._get(TaskView, f"agent-tasks/{task}")

    async def attempts(self, task: UUID) -> Sequence[AttemptView]:
        """The task's attempts in order."""
        return await self._get(list[AttemptView], f"agent-tasks/{task}/attempts")

    async def events(self, task: UUID, after: int = 0, limit: int = 1000) -> Sequence[LogLine]:
        """The task's audit trail after a version."""
        path = f"agent-tasks/{task}/trail"
        return (await self._get(_Lines, path, after=after, limit=limit)).lines

    async def transcript(
        self, task: UUID, after: tuple[int, int] = (0, -1), limit: int = 1000
    ) -> Sequence[LogLine]:
        """What the task's attempts printed and logged, after (attempt, line number)."""
        offset = None if after[1] < 0 else f"{after[0]}.{after[1]}"
        path = f"agent-tasks/{task}/transcript"
        return (await self._get(_Lines, path, offset=offset, limit=limit)).lines

    async def logs(self, task: UUID, level: str = "DEBUG", limit: int = 1000) -> Sequence[LogLine]:
        """Audit trail and transcript merged by time."""
        path = f"agent-tasks/{task}/logs"
        return (await self._get(_Lines, path, level=level, limit=limit)).lines

    async def explain(self, task: UUID) -> Explanation:
        """Why the task is not running."""
        return await self._get(Explanation, f"agent-tasks/{task}/explain")

    async def counts(self) -> dict[str, int]:
        """How many tasks there are, by status."""
        return (await self._get(_Counts, "stats")).tasks

    async def spending(self) -> UsageStats:
        """What the workspace's attempts used."""
        return (await self._get(_Counts, "stats")).spending

    async def workers(self) -> Sequence[WorkerView]:
        """The workers that were heard of lately, newest first."""
        return (await self._get(_Workers, "workers")).workers

    async def drain_worker(self, worker: str) -> None:
        """Ask a worker to take no more tasks, finish or give back what it runs, and end."""
        ask = self._post(f"workers/{part(worker)}/drain", repeatable=True)
        await self.link.ask(WorkerView, ask)

    async def terminate_agent(
        self, agent: UUID, reason: str | None = None, *, graceful: bool = True
    ) -> None:
        """Let an agent take no more tasks; unless gracefully, what it runs is cancelled."""
        body = {"reason": reason, "graceful": graceful}
        await self.link.ask(AgentView, self._post(f"agents/{agent}/terminate", body))

    async def explain_agent(self, agent: UUID) -> AgentExplanation:
        """What an agent may take, what waits for it, and why it takes nothing else."""
        return await self._get(AgentExplanation, f"agents/{agent}/explain")

    @property
    def mailboxes(self) -> RemoteMailboxes:
        """What is said to the workspace's agents."""
        return RemoteMailboxes(self.link)

    @property
    def complexity(self) -> "RemoteComplexity":
        """What the workspace says of hard tasks."""
        return RemoteComplexity(self.link)

    @property
    def gates(self) -> RemotePauses:
        """What people hold back."""
        return RemotePauses(self.link)

    @property
    def rate_limits(self) -> RemoteRateLimits:
        """What all workers share of providers, models and accounts."""
        return RemoteRateLimits(self.link)

    @property
    def secrets(self) -> "RemoteSecrets":
        """The workspace's named secrets."""
        return RemoteSecrets(self.link)

    @property
    def flows(self) -> RemoteFlows:
        """The workspace's flows."""
        return RemoteFlows(self.link)

    @property
    def flow_views(self) -> RemoteFlows:
        """The workspace's flows and groups, to look at."""
        return RemoteFlows(self.link)

    @property
    def inbox(self) -> RemoteInbox:
        """What waits for people."""
        return RemoteInbox(self.link)

    async def rerun_flow(self, flow: UUID, *, steps: int | None = None) -> UUID:
        """A new flow of the same plan and input; answers its id."""
        return await self.flows.rerun(flow, steps=steps)

    @property
    def definitions(self) -> "RemoteDefinitions":
        """What may run more than once."""
        from tenuto.client.remote.definitions import RemoteDefinitions  # noqa: PLC0415  YAML only when used

        return RemoteDefinitions(self.link)

    @property
    def schedules(self) -> "RemoteSchedules":
        """What is started by time."""
        from tenuto.client.remote.schedules import RemoteSchedules  # noqa: PLC0415  calendars only when used

        return RemoteSchedules(self.link)

    @property
    def triggers(self) -> "RemoteTriggers":
        """What is started after events."""
        from tenuto.client.remote.schedules import RemoteTriggers  # noqa: PLC0415  as with schedules

        return RemoteTriggers(self.link)

    async def publish(self, name: str, data: Any = None, task: UUID | None = None) -> EventView:
        """Tell the workspace that something happened, once though the answer be lost."""
        headers = {"Idempotency-Key": str(self.clock.new_id())}
        body = {"name": name, "data": data, "taskId": task}
        path = f"{V1}/events"
        ask = ApiRequest(method="POST", path=path, body=body, headers=headers, repeatable=True)
        return await self.link.ask(EventView, ask)

    async def _order(self, task: UUID, what: str, body: Any = msgspec.UNSET) -> None:
        await self.link.ask(TaskView, self._post(f"agent-tasks/{task}/{what}", body))

    async def _get(self, kind: type[T], path: str, **params: Any) -> T:
        ask = ApiRequest(method="GET", path=f"{V1}/{path}", params=params, repeatable=True)
        return await self.link.ask(kind, ask)

    def _post(
        self,
        path: str,
        body: Any = msgspec.UNSET,
        *,
        repeatable: bool = False,
        wait_s: float = 0.0,
    ) -> ApiRequest:
        where = f"{V1}/{path}"
        return ApiRequest(
            method="POST", path=where, body=body, repeatable=repeatable, wait_s=wait_s
        )


class RemoteSecrets:
    """The named secrets of a token's workspace."""

    def __init__(self, link: ServerConnection) -> None:
        self._link = link

    async def put(self, name: str, value: str | None = None, use: Use | None = None) -> None:
        """Keep a value under a name, and who may use it; tasks get it by their next claim.

        What is not given stays as it is.
        """
        path = f"{V1}/secrets/{part(name)}"
        given = {"value": value, "use": use}
        body = {key: each for key, each in given.items() if each is not None}
        await self._link.ask(
            type(None), ApiRequest(method="PUT", path=path, body=body, repeatable=True)
        )

    async def list(self) -> Sequence[SecretView]:
        """The secrets in order of their names, without their values."""
        ask = ApiRequest(method="GET", path=f"{V1}/secrets", repeatable=True)
        return await self._link.ask(list[SecretView], ask)

    async def delete(self, name: str) -> None:
        """Forget a secret; tasks that name it can no longer start."""
        path = f"{V1}/secrets/{part(name)}"
        await self._link.ask(type(None), ApiRequest(method="DELETE", path=path))


class RemoteComplexity:
    """What a token's workspace says of hard tasks."""

    def __init__(self, link: ServerConnection) -> None:
        self._link = link

    async def get(self) -> ComplexityRules:
        """The rules as they are."""
        ask = ApiRequest(method="GET", path=f"{V1}/complexity-levels", repeatable=True)
        return await self._link.ask(ComplexityRules, ask)

    async def set(self, rules: ComplexityRules) -> None:
        """Change the rules; they hold for tasks submitted from now on."""
        path = f"{V1}/complexity-levels"
        ask = ApiRequest(method="PUT", path=path, body=msgspec.to_builtins(rules), repeatable=True)
        await self._link.ask(ComplexityRules, ask)


AnyEngine = Engine | RemoteEngine
"""An engine in this process, or one behind a server."""


@asynccontextmanager
async def reach(
    url: str,
    token: str | None = None,
    workspace: UUID | None = None,
    *,
    deadline_s: float = DEADLINE_S,
) -> AsyncIterator[RemoteEngine]:
    """The engine behind a server; nothing is sent yet."""
    chosen = None if workspace is None else str(workspace)
    link = ServerConnection(url, token, chosen, deadline_s=deadline_s)
    try:
        yield RemoteEngine(link, workspace)
    finally:
        await link.close()
