"""The engine: every use case by name. The only writer of the store; all of a process share one."""

from collections.abc import Callable, Coroutine, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any
from uuid import UUID

import msgspec

from tenuto import tracing
from tenuto.broker.memory import MemoryWakeups
from tenuto.broker.protocol import Listener, Wakeups
from tenuto.clock import Clock
from tenuto.engine.agents import workers
from tenuto.engine.agents.eligibility import AgentExplanation, explain_agent
from tenuto.engine.agents.gateways import Gateways
from tenuto.engine.agents.inbox import Inbox
from tenuto.engine.agents.mailbox import Mailboxes
from tenuto.engine.agents.registry import AgentRegistry
from tenuto.engine.agents.subtasks import AskResult, AttemptWaits, Question, WaitResult
from tenuto.engine.core import Core
from tenuto.engine.flows.start import Flows
from tenuto.engine.flows.views import FlowViews
from tenuto.engine.limits.budgets import UsageRecorder, UsageStats
from tenuto.engine.limits.complexity import ComplexityLevels
from tenuto.engine.limits.pauses import Pauses
from tenuto.engine.limits.rate_limits import RateLimits
from tenuto.engine.schedules.events import EventPublisher, EventView
from tenuto.engine.tasks.claim import ClaimedTask, TaskClaimer
from tenuto.engine.tasks.control import Action, ActionResult, TaskController
from tenuto.engine.tasks.edit import TaskChanges, TaskEditor
from tenuto.engine.tasks.finish import AttemptFinisher
from tenuto.engine.tasks.maintenance import TaskMaintenance
from tenuto.engine.tasks.query import Filter, TaskQueries
from tenuto.engine.tasks.report import AttemptReporter, HeartbeatResult, WorkerInfo
from tenuto.engine.tasks.submit import REFUSED, Submitted, TaskSubmitter
from tenuto.engine.tenancy.encryption import TaskSecrets
from tenuto.engine.tenancy.secret_use import check_tasks
from tenuto.engine.tenancy.secrets import KeyRotator, NamedSecrets
from tenuto.engine.views import (
    AttemptView,
    Explanation,
    LogLine,
    Page,
    TaskView,
    WorkerView,
    worker_of,
)
from tenuto.model.agents.matching import AgentProfile
from tenuto.model.errors import Invalid
from tenuto.model.limits.budgets import Usage
from tenuto.model.tasks import commands
from tenuto.model.tasks.submission import NewTask
from tenuto.model.tasks.task import DEFAULT_LEASE_S, Fence
from tenuto.model.tasks.transcript import Line
from tenuto.model.tenancy.access import Caller
from tenuto.store.protocol import Store

if TYPE_CHECKING:
    from tenuto.engine.core import Keys
    from tenuto.engine.flows.definitions import Definitions
    from tenuto.engine.schedules.schedules import Schedules
    from tenuto.engine.schedules.triggers import Triggers

DEFAULT_WORKSPACE = UUID("00000000-0000-7000-8000-000000000001")


class Engine:
    """What can be done with tasks in one workspace, on behalf of one actor."""

    def __init__(
        self,
        store: Store,
        wakeups: Wakeups | None = None,
        *,
        workspace: UUID = DEFAULT_WORKSPACE,
        actor: str | None = None,
        vault: "Keys" = None,
    ) -> None:
        hints = wakeups or MemoryWakeups()
        self.store = store
        self.core = Core(store.within(workspace), hints, vault)
        self.workspace = workspace
        self.actor = actor
        self.caller: Caller | None = None
        """Whose request it is; none is a program on the database itself."""
        self.sealing = sealing = TaskSecrets(self.core)
        self._submitting = TaskSubmitter(self.core, sealing)
        self._claiming = TaskClaimer(self.core, sealing, workspace)
        self._reporting = AttemptReporter(self.core, self._submitting, sealing, workspace)
        self._ending = AttemptFinisher(self.core, sealing, workspace)
        self._waiting = AttemptWaits(self.core, self._reporting, sealing, workspace)
        self.query = TaskQueries(self.core)
        self._controlling = TaskController(self.core, self._submitting, self.query, sealing)
        self.system = Core(store, hints, vault)
        """The means of duties that belong to no tenant."""
        self._editing = TaskEditor(self.core)
        self._publishing = EventPublisher(self.core, sealing, workspace)
        self.upkeep = TaskMaintenance(self.system)
        self.rotating = KeyRotator(self.system)

    @property
    def clock(self) -> Clock:
        return self.core.clock

    @property
    def within(self) -> bool:
        """Whether the store works within this process, and has to be heard often."""
        return self.core.store.mixes

    @property
    def flows(self) -> Flows:
        """The workspace's flows."""
        return Flows(self.core, self.workspace, self.actor, self.caller)

    @property
    def flow_views(self) -> FlowViews:
        """The workspace's flows and groups, to look at."""
        return FlowViews(self.core, self.workspace)

    async def rerun_flow(self, flow: UUID, *, steps: int | None = None) -> UUID:
        """A new flow of the same plan and input; answers its id."""
        return await self.flows.rerun(flow, await self.flow_views.origin(flow), steps)

    @property
    def inbox(self) -> Inbox:
        """What waits for people."""
        return Inbox(self.core, self.workspace, self.actor)

    @property
    def complexity(self) -> ComplexityLevels:
        """What the workspace says of hard tasks."""
        return ComplexityLevels(self.core, self.workspace)

    @property
    def gates(self) -> Pauses:
        """What people hold back."""
        return Pauses(self.core, self.workspace, self.actor)

    @property
    def rate_limits(self) -> RateLimits:
        """What all workers share of providers, models and accounts."""
        return RateLimits(self.core, self.workspace, self.actor)

    @property
    def secrets(self) -> NamedSecrets:
        """The workspace's named secrets."""
        return NamedSecrets(self.core, self.workspace, self.actor, self.caller)

    @property
    def definitions(self) -> "Definitions":
        """What may run more than once."""
        from tenuto.engine.flows.definitions import Definitions  # noqa: PLC0415  YAML only when used

        return Definitions(self.core, self.workspace, self.flows)

    @property
    def schedules(self) -> "Schedules":
        """What is started by time."""
        from tenuto.engine.schedules.schedules import Schedules  # noqa: PLC0415  calendars only when used

        return Schedules(self.core, self.workspace, self.actor, self.caller)

    @property
    def triggers(self) -> "Triggers":
        """What is started after events."""
        from tenuto.engine.schedules.triggers import Triggers  # noqa: PLC0415  as with schedules

        return Triggers(self.core, self.workspace, self.actor)

    async def publish(self, name: str, data: Any = None, task: UUID | None = None) -> EventView:
        """Tell the workspace, and its triggers, that something happened; perhaps by a task."""
        return await self._publishing.publish(name, data, task, self.actor)

    async def submit(self, new: NewTask) -> Submitted:
        """Accept a task; it is never lost once this returns."""
        try:
            if self.caller is not None:
                await self.core.read(check_tasks(self.workspace, self.caller, [new]))
            if new.next or new.control or new.group:
                return await self._placed([new])
            with tracing.span("submit", new.trace_id):
                return await self._submitting.one(new, self.workspace, self.actor)
        except REFUSED as error:
            return (await self._submitting.repeated([new], self.workspace, error))[0]

    async def submit_many(self, news: Sequence[NewTask]) -> list[Submitted]:
        """Accept all of the tasks or none."""
        try:
            if self.caller is not None:
                await self.core.read(check_tasks(self.workspace, self.caller, news))
            if any(new.next or new.control or new.group for new in news):
                return [await self._placed(news)]
            with tracing.span("submit", news[0].trace_id if len(news) == 1 else None):
                return await self._submitting.many(news, self.workspace, self.actor)
        except REFUSED as error:
            return await self._submitting.repeated(news, self.workspace, error)

    async def _placed(self, news: Sequence[NewTask]) -> Submitted:
        """Accept a task that is part of something larger."""
        if len(news) > 1:
            raise Invalid("a task with next, group or control is submitted alone", "invalid_value")
        [new] = news
        with tracing.span("submit", new.trace_id):
            if new.group is None:
                task, created = await self.flows.submit_as_flow(new)
                return Submitted(task, created=created)
            if new.next or new.control or new.depends_on or new.blocks:
                text = "a task that joins a group has no next, control or dependencies of its own"
                raise Invalid(text, field="group")
            task, created = await self.flows.join(new.group, new)
            return Submitted(task, created=created)

    async def claim(
        self,
        agent: AgentProfile,
        worker: str,
        n: int = 1,
        lease_s: int = DEFAULT_LEASE_S,
        token: str | None = None,
    ) -> list[ClaimedTask]:
        """Take up to n tasks for an agent; `token` is that of a caller who may ask again."""
        begun = self.clock.now()
        works = await self._claiming.claim(agent, worker, n, lease_s, token, caller=self.caller)
        return [self._traced(work, begun) for work in works] if tracing.is_on() else works

    def _traced(self, work: ClaimedTask, begun: datetime) -> ClaimedTask:
        """The work with its claim's place in the trace, where its run goes on."""
        place = tracing.record_span(
            "claim", work.trace_id, begun, self.clock.now(), task=work.fence.task
        )
        return msgspec.structs.replace(work, trace_id=place)

    async def claimed(self, agent: UUID, token: str) -> list[ClaimedTask]:
        """What an earlier claim took with that token and still holds."""
        return await self._claiming.claimed_by_token(agent, token, self.caller)

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call `listener` with each hint; answers what ends it."""
        return self.core.wakeups.subscribe(listener)

    async def begin(self, fence: Fence, session_key: str | None = None) -> None:
        """The session of an assigned task has begun."""
        await self._report(commands.Begin(fence=fence, session_key=session_key))

    async def heartbeat(
        self, fences: Sequence[Fence], lease_s: int = DEFAULT_LEASE_S
    ) -> HeartbeatResult:
        """Renew all of a worker's leases; says which are lost and what is asked of the rest."""
        return await self._reporting.heartbeat(fences, lease_s)

    async def worker_heartbeat(
        self, who: WorkerInfo, fences: Sequence[Fence], lease_s: int
    ) -> HeartbeatResult:
        """Renew a worker's leases. From afar the same request says that the worker lives."""
        del who  # `present` says it, after what is asked of the attempts was passed on
        return await self.heartbeat(fences, lease_s)

    async def confirm_gone_sessions(
        self, worker: str, host: str, runs: Callable[[str, UUID], bool]
    ) -> int:
        """Confirm the unconfirmed ends of a worker and its host of which nothing runs any more."""
        return await TaskMaintenance(self.core).sweep_once(worker, host, runs)

    async def progress(
        self,
        fence: Fence,
        percent: float | None = None,
        step: str | None = None,
        finish_at: datetime | None = None,
    ) -> None:
        """Say how far the attempt is."""
        await self._reporting.progress(fence, percent, step, finish_at)

    async def checkpoint(self, fence: Fence, data: Any, seq: int | None = None) -> int:
        """Keep what the next attempt needs to go on; answers the checkpoint's number."""
        return await self._reporting.checkpoint(fence, data, seq)

    async def append(self, fence: Fence, lines: Sequence[Line]) -> None:
        """Add lines to the attempt's transcript."""
        await self._reporting.append(fence, lines)

    async def steps(self, task: UUID) -> dict[str, tuple[Any, UUID | None]]:
        """What the task's attempts recorded by key."""
        return await self._reporting.steps(task)

    async def record_step(self, fence: Fence, key: str, value: Any) -> None:
        """Record a step's value for every later attempt."""
        await self._reporting.record_step(fence, key, value)

    async def spawn(self, fence: Fence, key: str, new: NewTask) -> UUID:
        """Make a child task, once per key."""
        await self.core.read(check_tasks(self.workspace, self.caller, [new]))
        return await self._reporting.spawn(fence, self.workspace, key, new, self.actor)

    async def wait(
        self,
        fence: Fence,
        children: Sequence[UUID | str] | None = None,
        timeout_s: float | None = None,
        key: str | None = None,
    ) -> WaitResult:
        """How the children ended; while one has not, the task waits and the attempt is over."""
        with tracing.span("wait", task=fence.task):
            return await self._waiting.wait_for_children(
                fence, children, timeout_s, key, self.actor
            )

    async def ask(self, fence: Fence, key: str, question: Question) -> AskResult:
        """What people answered; until they have, the task waits and the attempt is over."""
        with tracing.span("ask", task=fence.task):
            return await self._waiting.wait_for_people(fence, key, question, self.actor)

    def complete(
        self,
        fence: Fence,
        output: Any = None,
        summary: str | None = None,
        usage: Usage | None = None,
    ) -> Coroutine[Any, Any, None]:
        """Finish the task with its result."""
        told = self._ending.complete(fence, self.workspace, output, summary, self.actor, usage)
        return tracing.spanned("complete", told, fence.task)

    async def fail(
        self,
        fence: Fence,
        failure: commands.Failure,
        resume_at: datetime | None = None,
        usage: Usage | None = None,
    ) -> None:
        """End the attempt without a result; the error class decides what follows."""
        command = commands.Fail(fence=fence, failure=failure, resume_at=resume_at)
        await self._report(command, usage)

    async def used(self, fence: Fence, usage: Usage) -> None:
        """Count what an attempt used since its last report."""
        await UsageRecorder(self.core, self.workspace).used(fence, usage, self.actor)

    async def spending(self) -> UsageStats:
        """What the workspace's attempts used."""
        return await UsageRecorder(self.core, self.workspace).stats(self.clock.now())

    async def not_started(self, fence: Fence, failure: commands.Failure) -> None:
        """The session could not be started; the try is given back."""
        await self._report(commands.NotStarted(fence=fence, failure=failure))

    async def time_out(self, fence: Fence, receipt: dict[str, Any] | None = None) -> None:
        """The session was ended because it ran too long."""
        await self._report(commands.TimedOut(fence=fence, receipt=receipt))

    async def park(
        self,
        fence: Fence,
        hold: str,
        resume_at: datetime | None = None,
        wait_until: datetime | None = None,
    ) -> None:
        """Give the slot up until a time that is given; the try is given back."""
        await self._report(
            commands.Park(fence=fence, hold=hold, resume_at=resume_at, wait_until=wait_until)
        )

    async def release(self, fence: Fence) -> None:
        """Give the task back unharmed; the try is given back."""
        await self._report(commands.Release(fence=fence))

    async def confirm_cancel(self, fence: Fence, receipt: dict[str, Any]) -> None:
        """The session that was to be cancelled is gone; the receipt says how."""
        await self._confirm(commands.ConfirmCancel(fence=fence, receipt=receipt), receipt)

    async def confirm_pause(self, fence: Fence, receipt: dict[str, Any]) -> None:
        """The session that was to be paused is gone."""
        await self._confirm(commands.ConfirmPause(fence=fence, receipt=receipt), receipt)

    async def confirm_gone(self, fence: Fence, receipt: dict[str, Any]) -> None:
        """The session of an attempt that was given up is gone after all."""
        told = await self._ending.receipt(fence, receipt)
        await TaskMaintenance(self.core).confirm_gone(
            [(fence.task, fence.attempt)], told, self.actor
        )

    async def _confirm(self, command: commands.AttemptCommand, receipt: dict[str, Any]) -> None:
        if await self._ending.order(command, self.actor) is None:
            # Somebody gave the session up before it could answer: the receipt comes late.
            await self.confirm_gone(command.fence, receipt)

    async def _report(self, command: commands.AttemptCommand, usage: Usage | None = None) -> None:
        with tracing.span(command.name, task=command.fence.task):
            await self._ending.order(command, self.actor, usage)

    async def cancel(self, task: UUID, reason: str | None = None) -> None:
        """End a task; a running session is killed first."""
        await self._control(task, commands.Cancel(reason=reason))

    async def pause(self, task: UUID, reason: str | None = None) -> None:
        """Hold a task; a running session is stopped after a last checkpoint."""
        await self._control(task, commands.Pause(reason=reason))

    async def resume(self, task: UUID) -> None:
        """Let a paused task go on."""
        await self._control(task, commands.Resume())

    async def start(self, task: UUID) -> None:
        """Let a task run before the time that it was meant for."""
        await self._control(task, commands.StartNow())

    async def retry(self, task: UUID, *, cascade: bool = False) -> None:
        """Give an ended task all its tries again; `cascade` revives what ended because of it."""
        if cascade:
            await self._controlling.retry(task, self.workspace, self.actor, deep=True)
        else:
            await self._control(task, commands.Retry())

    async def assign(self, task: UUID, agent: UUID | None, *, take: bool = False) -> None:
        """Let only that agent take a task; `take` takes it from whoever runs it."""
        await self._controlling.assign(task, self.workspace, agent, self.actor, take=take)

    async def archive(self, task: UUID) -> None:
        """Put an ended task away."""
        await self._control(task, commands.Archive())

    async def reprioritise(self, task: UUID, priority: int) -> None:
        """Change a task's priority, and so its place in the queue."""
        if not 1 <= priority <= 10:
            raise Invalid(f"priority must be between 1 and 10, not {priority}")
        await self._control(task, commands.SetPriority(priority=priority))

    async def edit(self, task: UUID, changes: TaskChanges, version: int | None = None) -> None:
        """Change what a task says about itself, if it still has the version."""
        await self._editing.edit(task, self.workspace, changes, self.actor, version=version)

    async def erase(self, task: UUID) -> None:
        """Remove what an ended task carried; row and trail stay."""
        await self._editing.erase(task, self.workspace, self.actor)

    async def _control(self, task: UUID, command: commands.Command) -> None:
        await self._controlling.command(task, self.workspace, command, self.actor)

    async def rerun(self, task: UUID) -> Submitted:
        """A new task that asks for the same."""
        return await self._controlling.rerun(task, self.workspace, self.actor, self.caller)

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
        return await self._controlling.act(
            action, where, self.workspace, self.actor, reason=reason, limit=limit, dry_run=dry_run
        )

    async def find(self, text: str) -> UUID:
        """The task that an id or the beginning of one names."""
        return await self.query.find(text, self.workspace)

    async def list(
        self, where: Filter | None = None, limit: int = 100, cursor: UUID | None = None
    ) -> Page:
        """Tasks newest first."""
        return await self.query.page(where or Filter(), self.workspace, limit, cursor)

    async def show(self, task: UUID) -> TaskView:
        """Everything about a task but its history."""
        return await self.query.show(task, self.workspace)

    async def attempts(self, task: UUID) -> Sequence[AttemptView]:
        """The task's attempts in order."""
        return await self.query.attempts(task, self.workspace)

    async def events(self, task: UUID, after: int = 0, limit: int = 1000) -> Sequence[LogLine]:
        """The task's audit trail after a version."""
        return await self.query.events(task, self.workspace, after, limit)

    async def transcript(
        self, task: UUID, after: tuple[int, int] = (0, -1), limit: int = 1000
    ) -> Sequence[LogLine]:
        """What the task's attempts printed and logged, after (attempt, line number)."""
        return await self.query.transcript(task, self.workspace, after, limit)

    async def logs(self, task: UUID, level: str = "DEBUG", limit: int = 1000) -> Sequence[LogLine]:
        """Audit trail and transcript merged by time."""
        return await self.query.logs(task, self.workspace, level, limit)

    async def explain(self, task: UUID) -> Explanation:
        """Why the task is not running."""
        gateways = await Gateways(self.system).states()
        return await self.query.explain(task, self.workspace, gateways)

    async def counts(self) -> dict[str, int]:
        """How many tasks there are, by status."""
        return await self.query.counts(self.workspace)

    async def workers(self) -> Sequence[WorkerView]:
        """The workers that were heard of lately, newest first."""
        return [worker_of(row) for row in await self.query.workers(self.workspace)]

    async def register_agent(self, profile: AgentProfile, *, managed: bool = False) -> AgentProfile:
        """Make an agent known; answers it as it is kept.

        What people have said of it (`managed`) holds, whatever its worker brings.
        """
        return await AgentRegistry(self.core, self.workspace).put(profile, managed=managed)

    async def terminate_agent(
        self, agent: UUID, reason: str | None = None, *, graceful: bool = True
    ) -> None:
        """Let an agent take no more tasks; unless gracefully, what it runs is cancelled.

        It is TERMINATED when the last of its tasks has ended, DRAINING until then.
        """
        registry = AgentRegistry(self.core, self.workspace)
        await registry.end(agent, reason, self.actor)
        if not graceful:
            running = Filter(agent=agent, status=("ASSIGNED", "RUNNING"))
            await self.act("cancel", running, reason=reason or "agent terminated")

    async def explain_agent(self, agent: UUID) -> AgentExplanation:
        """What an agent may take, what waits for it, and why it takes nothing else."""
        gateways = await Gateways(self.system).states()
        return await explain_agent(self.core, self.workspace, agent, gateways)

    @property
    def mailboxes(self) -> Mailboxes:
        """What is said to the workspace's agents."""
        return Mailboxes(self.core, self.workspace, self.actor)

    async def drain_worker(self, worker: str) -> None:
        """Ask a worker to take no more tasks, finish or give back what it runs, and end."""
        await workers.drain(self.core, self.workspace, worker)

    async def record_worker(self, who: WorkerInfo) -> bool:
        """Note in the registry that a worker lives, or that it is going; whether it is to end."""
        return await self.worker_beat(
            who.worker, who.host, who.pid, who.agents, who.slots, who.status
        )

    async def worker_beat(
        self,
        worker: str,
        host: str,
        pid: int,
        agents: Sequence[str],
        slots: int,
        status: str,
        registered_by: UUID | None = None,
    ) -> bool:
        """A worker says that it lives, or that it is going; answers whether it is asked to end.

        `registered_by` is the agent whose own token says so: `NotFound` for a worker of others.
        """
        who = WorkerInfo(worker, host, pid, list(agents), slots, status)
        return await workers.beat(self.core, self.workspace, who, registered_by)
