"""The engine: a method for each use case. The only writer of the store; a process shares one."""

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
from tenuto.engine.tasks.query import TaskQueries
from tenuto.engine.tasks.report import AttemptReporter, HeartbeatResult, WorkerInfo
from tenuto.engine.tasks.submit import REFUSALS, Submitted, TaskSubmitter
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
    new_task_view,
    worker_view,
)
from tenuto.model.agents.matching import AgentProfile
from tenuto.model.errors import Invalid
from tenuto.model.limits.budgets import Usage
from tenuto.model.tasks import commands
from tenuto.model.tasks.submission import Filter, NewTask
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
    """All use cases of one workspace, on behalf of one actor."""

    def __init__(
        self,
        store: Store,
        wakeups: Wakeups | None = None,
        *,
        workspace: UUID = DEFAULT_WORKSPACE,
        actor: str | None = None,
        key_ring: "Keys" = None,
    ) -> None:
        hints = wakeups or MemoryWakeups()
        self.store = store
        self.core = Core(store.for_workspace(workspace), hints, key_ring)
        self.clock: Clock = self.core.clock
        self.is_store_in_process: bool = self.core.store.mixes
        """True if the store runs in this process, so that its event loop must be yielded often."""
        self.workspace = workspace
        self.actor = actor
        self.caller: Caller | None = None
        """The caller of the request; `None` is a program on the database itself."""
        self.task_secrets = task_secrets = TaskSecrets(self.core)
        self._submitter = TaskSubmitter(self.core, task_secrets)
        self._claimer = TaskClaimer(self.core, task_secrets, workspace)
        self._reporter = AttemptReporter(self.core, self._submitter, task_secrets, workspace)
        self._finisher = AttemptFinisher(self.core, task_secrets, workspace)
        self._waits = AttemptWaits(self.core, self._reporter, task_secrets, workspace)
        self.query = TaskQueries(self.core)
        self._controller = TaskController(self.core, self._submitter, self.query, task_secrets)
        self.system = Core(store, hints, key_ring)
        """The dependencies of duties for all workspaces."""
        self._editor = TaskEditor(self.core)
        self._publisher = EventPublisher(self.core, task_secrets, workspace)
        self.maintenance = TaskMaintenance(self.system)
        self.key_rotator = KeyRotator(self.system)

    @property
    def flows(self) -> Flows:
        """The workspace's flows."""
        return Flows(self.core, self.workspace, self.actor, self.caller)

    @property
    def flow_views(self) -> FlowViews:
        """Reads the workspace's flows and groups."""
        return FlowViews(self.core, self.workspace)

    async def rerun_flow(self, flow: UUID, *, steps: int | None = None) -> UUID:
        """Starts a new flow with the same plan and input, and returns its id."""
        return await self.flows.rerun(flow, await self.flow_views.start_args(flow), steps)

    @property
    def inbox(self) -> Inbox:
        """The approvals, questions and escalations that wait for a person."""
        return Inbox(self.core, self.workspace, self.actor)

    @property
    def complexity(self) -> ComplexityLevels:
        """The workspace's rules for tasks by complexity."""
        return ComplexityLevels(self.core, self.workspace)

    @property
    def gates(self) -> Pauses:
        """The pauses of the workspace."""
        return Pauses(self.core, self.workspace, self.actor)

    @property
    def rate_limits(self) -> RateLimits:
        """The rate limits of providers, models and accounts, shared by all workers."""
        return RateLimits(self.core, self.workspace, self.actor)

    @property
    def secrets(self) -> NamedSecrets:
        """The workspace's named secrets."""
        return NamedSecrets(self.core, self.workspace, self.actor, self.caller)

    @property
    def definitions(self) -> "Definitions":
        """The workspace's definitions of tasks and groups."""
        from tenuto.engine.flows.definitions import Definitions  # noqa: PLC0415  YAML only when used

        return Definitions(self.core, self.workspace, self.flows)

    @property
    def schedules(self) -> "Schedules":
        """The workspace's schedules: flows started by time."""
        from tenuto.engine.schedules.schedules import Schedules  # noqa: PLC0415  calendars only when used

        return Schedules(self.core, self.workspace, self.actor, self.caller)

    @property
    def triggers(self) -> "Triggers":
        """The workspace's triggers: flows started by events."""
        from tenuto.engine.schedules.triggers import Triggers  # noqa: PLC0415  as with schedules

        return Triggers(self.core, self.workspace, self.actor)

    async def publish(self, name: str, data: Any = None, task: UUID | None = None) -> EventView:
        """Publishes an event to the workspace and its triggers; `task` is the task that sent it."""
        return await self._publisher.publish(name, data, task, self.actor)

    async def submit(self, new: NewTask) -> Submitted:
        """Stores a task durably; a repeat with the same id or key returns the existing task."""
        try:
            if self.caller is not None:
                await self.core.read(check_tasks(self.workspace, self.caller, [new]))
            if new.next or new.control or new.group:
                return await self._submit_to_flow([new])
            with tracing.span("submit", new.trace_id):
                return await self._submitter.submit_one(new, self.workspace, self.actor)
        except REFUSALS as error:
            return (await self._submitter.find_repeated([new], self.workspace, error))[0]

    async def show_submitted(self, new: NewTask, submitted: Submitted) -> TaskView:
        """Returns a task just submitted; reads the store only if it may differ from its request."""
        if submitted.at is None:
            return await self.show(submitted.id)
        return new_task_view(new, submitted.id, submitted.at, self.workspace, self.actor)

    async def submit_many(self, new_tasks: Sequence[NewTask]) -> list[Submitted]:
        """Submits all tasks or none; returns one result per task, in order."""
        try:
            if self.caller is not None:
                await self.core.read(check_tasks(self.workspace, self.caller, new_tasks))
            if any(new.next or new.control or new.group for new in new_tasks):
                return [await self._submit_to_flow(new_tasks)]
            trace_id = new_tasks[0].trace_id if len(new_tasks) == 1 else None
            with tracing.span("submit", trace_id):
                return await self._submitter.submit_many(new_tasks, self.workspace, self.actor)
        except REFUSALS as error:
            return await self._submitter.find_repeated(new_tasks, self.workspace, error)

    async def _submit_to_flow(self, new_tasks: Sequence[NewTask]) -> Submitted:
        """Submits one task that starts a flow or joins a group; `Invalid` for several tasks."""
        if len(new_tasks) > 1:
            raise Invalid("submit a task with next, group or control alone", "invalid_value")
        [new] = new_tasks
        with tracing.span("submit", new.trace_id):
            if new.group is None:
                task, created = await self.flows.submit_as_flow(new)
                return Submitted(task, created=created)
            if new.next or new.control or new.depends_on or new.blocks:
                message = "a task with group must not have next, control or dependencies"
                raise Invalid(message, field="group")
            task, created = await self.flows.add_to_group(new.group, new)
            return Submitted(task, created=created)

    async def claim(
        self,
        agent: AgentProfile,
        worker: str,
        n: int = 1,
        lease_s: int = DEFAULT_LEASE_S,
        token: str | None = None,
    ) -> list[ClaimedTask]:
        """Claims up to `n` tasks for an agent; a repeated `token` returns its claim's tasks."""
        started_at = self.clock.now()
        tasks = await self._claimer.claim(agent, worker, n, lease_s, token, caller=self.caller)
        if not tracing.is_on():
            return tasks
        return [self._with_claim_trace(task, started_at) for task in tasks]

    def _with_claim_trace(self, task: ClaimedTask, started_at: datetime) -> ClaimedTask:
        """Records the span of the claim; returns the task with it as trace context for its run."""
        trace_id = tracing.record_span(
            "claim", task.trace_id, started_at, self.clock.now(), task=task.fence.task
        )
        return msgspec.structs.replace(task, trace_id=trace_id)

    async def claimed(self, agent: UUID, token: str) -> list[ClaimedTask]:
        """Returns the tasks that the agent still owns from an earlier claim with this token."""
        return await self._claimer.claimed_by_token(agent, token, self.caller)

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Calls `listener` with each hint; returns the function that ends the subscription."""
        return self.core.wakeups.subscribe(listener)

    async def begin(self, fence: Fence, session_key: str | None = None) -> None:
        """Reports that the session of an ASSIGNED task has started; the task is RUNNING then."""
        await self._report(commands.Begin(fence=fence, session_key=session_key))

    async def heartbeat(
        self, fences: Sequence[Fence], lease_s: int = DEFAULT_LEASE_S
    ) -> HeartbeatResult:
        """Renews a worker's leases; returns lost leases, and cancel and pause requests."""
        return await self._reporter.heartbeat(fences, lease_s)

    async def worker_heartbeat(
        self, info: WorkerInfo, fences: Sequence[Fence], lease_s: int
    ) -> HeartbeatResult:
        """Renews leases like `heartbeat`; `info` is unused here, but registers a remote worker."""
        del info  # `record_worker` registers it, after the requests were passed to the attempts
        return await self.heartbeat(fences, lease_s)

    async def confirm_gone_sessions(
        self, worker: str, host: str, may_run: Callable[[str, UUID], bool]
    ) -> int:
        """Records unconfirmed attempts on this host as gone unless `may_run`; returns how many."""
        return await TaskMaintenance(self.core).confirm_gone_on_host(worker, host, may_run)

    async def progress(
        self,
        fence: Fence,
        percent: float | None = None,
        step: str | None = None,
        finish_at: datetime | None = None,
    ) -> None:
        """Stores the attempt's progress, `None` keeps a value; `Conflict` if the lease is lost."""
        await self._reporter.progress(fence, percent, step, finish_at)

    async def checkpoint(self, fence: Fence, data: Any, seq: int | None = None) -> int:
        """Stores data for the next attempt to continue from; returns the checkpoint's number."""
        return await self._reporter.checkpoint(fence, data, seq)

    async def append(self, fence: Fence, lines: Sequence[Line]) -> None:
        """Adds lines to the attempt's transcript up to a size limit; ignores an outdated fence."""
        await self._reporter.append(fence, lines)

    async def steps(self, task: UUID) -> dict[str, tuple[Any, UUID | None]]:
        """Returns the task's recorded steps by key: a value, or `None` and a subtask's id."""
        return await self._reporter.steps(task)

    async def record_step(self, fence: Fence, key: str, value: Any) -> None:
        """Stores a step's value for later attempts; `Conflict` if the key has another value."""
        await self._reporter.record_step(fence, key, value)

    async def spawn(self, fence: Fence, key: str, new: NewTask) -> UUID:
        """Creates a subtask, once per key, and returns its id."""
        await self.core.read(check_tasks(self.workspace, self.caller, [new]))
        return await self._reporter.spawn(fence, self.workspace, key, new, self.actor)

    async def wait(
        self,
        fence: Fence,
        children: Sequence[UUID | str] | None = None,
        timeout_s: float | None = None,
        key: str | None = None,
    ) -> WaitResult:
        """Returns the subtasks' outcomes; while one is unfinished, parks the task instead."""
        with tracing.span("wait", task=fence.task):
            return await self._waits.wait_for_children(fence, children, timeout_s, key, self.actor)

    async def ask(self, fence: Fence, key: str, question: Question) -> AskResult:
        """Returns a person's answer; if there is none, parks the task and ends the attempt."""
        with tracing.span("ask", task=fence.task):
            return await self._waits.wait_for_people(fence, key, question, self.actor)

    def complete(
        self,
        fence: Fence,
        output: Any = None,
        summary: str | None = None,
        usage: Usage | None = None,
    ) -> Coroutine[Any, Any, None]:
        """Completes the task with its result; `Conflict` if the attempt no longer owns the task."""
        completion = self._finisher.complete(
            fence, self.workspace, output, summary, self.actor, usage
        )
        return tracing.with_span("complete", completion, fence.task)

    async def fail(
        self,
        fence: Fence,
        failure: commands.Failure,
        resume_at: datetime | None = None,
        usage: Usage | None = None,
    ) -> None:
        """Fails the attempt. Its error class decides on a retry; a limit resets at `resume_at`."""
        command = commands.Fail(fence=fence, failure=failure, resume_at=resume_at)
        await self._report(command, usage)

    async def used(self, fence: Fence, usage: Usage) -> None:
        """Adds usage since the last report and enforces budgets; ignores an outdated fence."""
        await UsageRecorder(self.core, self.workspace).used(fence, usage, self.actor)

    async def spending(self) -> UsageStats:
        """Returns the usage of the workspace's attempts, today and in total."""
        return await UsageRecorder(self.core, self.workspace).stats(self.clock.now())

    async def not_started(self, fence: Fence, failure: commands.Failure) -> None:
        """Reports a session that could not be started; it counts no try, up to a limit in a row."""
        await self._report(commands.NotStarted(fence=fence, failure=failure))

    async def time_out(self, fence: Fence, receipt: dict[str, Any] | None = None) -> None:
        """Reports that the session was stopped by its timeout; a retry gets a longer timeout."""
        await self._report(commands.TimedOut(fence=fence, receipt=receipt))

    async def park(
        self,
        fence: Fence,
        hold: str,
        resume_at: datetime | None = None,
        wait_until: datetime | None = None,
    ) -> None:
        """Parks the task with a hold, until `resume_at` if given; the try is not counted."""
        await self._report(
            commands.Park(fence=fence, hold=hold, resume_at=resume_at, wait_until=wait_until)
        )

    async def release(self, fence: Fence) -> None:
        """Releases the task for another claim without counting the try, up to a limit in a row."""
        await self._report(commands.Release(fence=fence))

    async def confirm_cancel(self, fence: Fence, receipt: dict[str, Any]) -> None:
        """Confirms that the session of a cancelled task is gone; the receipt says how."""
        await self._confirm(commands.ConfirmCancel(fence=fence, receipt=receipt), receipt)

    async def confirm_pause(self, fence: Fence, receipt: dict[str, Any]) -> None:
        """Confirms that the session of a paused task is gone."""
        await self._confirm(commands.ConfirmPause(fence=fence, receipt=receipt), receipt)

    async def confirm_gone(self, fence: Fence, receipt: dict[str, Any]) -> None:
        """Confirms that the session of an attempt with an unconfirmed end is gone."""
        redacted = await self._finisher.redact_receipt(fence, receipt)
        await TaskMaintenance(self.core).confirm_gone(
            [(fence.task, fence.attempt)], redacted, self.actor
        )

    async def _confirm(self, command: commands.AttemptCommand, receipt: dict[str, Any]) -> None:
        """Applies a confirmation; records the receipt if the attempt was ended before."""
        if await self._finisher.apply(command, self.actor) is None:
            # The attempt was already ended without a confirmation: the receipt comes late.
            await self.confirm_gone(command.fence, receipt)

    async def _report(self, command: commands.AttemptCommand, usage: Usage | None = None) -> None:
        """Applies an attempt's command within a trace span."""
        with tracing.span(command.name, task=command.fence.task):
            await self._finisher.apply(command, self.actor, usage)

    async def cancel(self, task: UUID, reason: str | None = None) -> None:
        """Cancels a task; a running session is killed first."""
        await self._control(task, commands.Cancel(reason=reason))

    async def pause(self, task: UUID, reason: str | None = None) -> None:
        """Pauses a task; a running session is stopped after a last checkpoint."""
        await self._control(task, commands.Pause(reason=reason))

    async def resume(self, task: UUID) -> None:
        """Resumes a paused task."""
        await self._control(task, commands.Resume())

    async def start(self, task: UUID) -> None:
        """Makes a task PENDING before its start time; `Conflict` if anything else blocks it."""
        await self._control(task, commands.StartNow())

    async def retry(self, task: UUID, *, cascade: bool = False) -> None:
        """Retries a FAILED, DEAD or CANCELLED task; `cascade` also reopens failed dependents."""
        if cascade:
            await self._controller.retry(task, self.workspace, self.actor, with_dependents=True)
        else:
            await self._control(task, commands.Retry())

    async def assign(self, task: UUID, agent: UUID | None, *, take: bool = False) -> None:
        """Restricts a task to `agent` (`None`: any); if it runs, `Conflict` unless `take`."""
        await self._controller.assign(task, self.workspace, agent, self.actor, take=take)

    async def archive(self, task: UUID) -> None:
        """Archives a finished task; raises `Conflict` if it is unfinished or archived."""
        await self._control(task, commands.Archive())

    async def reprioritise(self, task: UUID, priority: int) -> None:
        """Changes the priority and queue position of a task; `Conflict` if the task is finished."""
        if not 1 <= priority <= 10:
            raise Invalid(f"priority must be between 1 and 10, not {priority}")
        await self._control(task, commands.SetPriority(priority=priority))

    async def edit(self, task: UUID, changes: TaskChanges, version: int | None = None) -> None:
        """Changes fields of a task; raises `Conflict` if `version` is given and outdated."""
        await self._editor.edit(task, self.workspace, changes, self.actor, version=version)

    async def erase(self, task: UUID) -> None:
        """Archives a finished task and deletes its payload; its row and audit trail stay."""
        await self._editor.erase(task, self.workspace, self.actor)

    async def _control(self, task: UUID, command: commands.Command) -> None:
        """Applies a user's command to one task of the workspace."""
        await self._controller.command(task, self.workspace, command, self.actor)

    async def rerun(self, task: UUID) -> Submitted:
        """Submits a new task with the same request."""
        return await self._controller.rerun(task, self.workspace, self.actor, self.caller)

    async def act(
        self,
        action: Action,
        where: Filter,
        *,
        reason: str | None = None,
        limit: int = 1000,
        dry_run: bool = False,
    ) -> ActionResult:
        """Applies an action to the newest `limit` matching tasks; `dry_run` only lists them."""
        return await self._controller.act(
            action, where, self.workspace, self.actor, reason=reason, limit=limit, dry_run=dry_run
        )

    async def find(self, text: str) -> UUID:
        """Returns the id of the task whose id begins with `text`; a full id is not looked up."""
        return await self.query.find(text, self.workspace)

    async def list(
        self, where: Filter | None = None, limit: int = 100, cursor: UUID | None = None
    ) -> Page:
        """Returns a page of tasks, newest first."""
        return await self.query.page(where or Filter(), self.workspace, limit, cursor)

    async def show(self, task: UUID) -> TaskView:
        """Returns a task with all its fields, without its history."""
        return await self.query.show(task, self.workspace)

    async def attempts(self, task: UUID) -> Sequence[AttemptView]:
        """Returns the task's attempts in order."""
        return await self.query.attempts(task, self.workspace)

    async def events(self, task: UUID, after: int = 0, limit: int = 1000) -> Sequence[LogLine]:
        """Returns the task's audit events after a version of the task, oldest first."""
        return await self.query.events(task, self.workspace, after, limit)

    async def transcript(
        self, task: UUID, after: tuple[int, int] = (0, -1), limit: int = 1000
    ) -> Sequence[LogLine]:
        """Returns the transcript lines of all attempts, after (attempt, line number)."""
        return await self.query.transcript(task, self.workspace, after, limit)

    async def logs(self, task: UUID, level: str = "DEBUG", limit: int = 1000) -> Sequence[LogLine]:
        """Returns those of the newest events and transcript lines from `level` up, by time."""
        return await self.query.logs(task, self.workspace, level, limit)

    async def explain(self, task: UUID) -> Explanation:
        """Explains why the task is not running."""
        gateways = await Gateways(self.system).states()
        return await self.query.explain(task, self.workspace, gateways)

    async def counts(self) -> dict[str, int]:
        """Returns the number of tasks by status, with 0 for unused statuses."""
        return await self.query.counts(self.workspace)

    async def workers(self) -> Sequence[WorkerView]:
        """Returns the recently seen workers, newest first."""
        return [worker_view(row) for row in await self.query.workers(self.workspace)]

    async def register_agent(self, profile: AgentProfile, *, managed: bool = False) -> AgentProfile:
        """Registers an agent and returns it; settings of a user (`managed`) win over a worker's."""
        return await AgentRegistry(self.core, self.workspace).put(profile, managed=managed)

    async def terminate_agent(
        self, agent: UUID, reason: str | None = None, *, graceful: bool = True
    ) -> None:
        """Stops an agent from claiming tasks; cancels its running tasks unless `graceful`.

        The agent is DRAINING until the last of its tasks has finished, then TERMINATED.
        """
        registry = AgentRegistry(self.core, self.workspace)
        await registry.drain(agent, reason, self.actor)
        if not graceful:
            running = Filter(agent=agent, status=("ASSIGNED", "RUNNING"))
            await self.act("cancel", running, reason=reason or "agent terminated")

    async def explain_agent(self, agent: UUID) -> AgentExplanation:
        """Explains which lanes an agent can claim from, and why it claims nothing else."""
        gateways = await Gateways(self.system).states()
        return await explain_agent(self.core, self.workspace, agent, gateways)

    @property
    def mailboxes(self) -> Mailboxes:
        """The messages to the workspace's agents."""
        return Mailboxes(self.core, self.workspace, self.actor)

    async def drain_worker(self, worker: str) -> None:
        """Requests a worker to claim no more tasks, finish or release its tasks, and exit."""
        await workers.drain(self.core, self.workspace, worker)

    async def record_worker(self, info: WorkerInfo, registered_by: UUID | None = None) -> bool:
        """Records that a worker is alive or exits; returns True if it is requested to exit.

        `registered_by` is the agent whose token sent this: `NotFound` for another agent's worker.
        """
        return await workers.record_heartbeat(self.core, self.workspace, info, registered_by)
