"""What callers send. Names as in the contract; second names are accepted where listed."""

from datetime import datetime
from typing import Any, Literal
from uuid import UUID

import msgspec

from tenuto.api.routes.flow_bodies import (
    FLAT,
    ApprovalBody,
    ChildRef,
    ControlBody,
    EscalationBody,
    control_of,
    key_of,
    one,
)
from tenuto.engine.tasks.query import Filter
from tenuto.manifest.tasks import KINDS
from tenuto.model import bounds
from tenuto.model.errors import Invalid
from tenuto.model.flows.definition import Join, Kind, Order
from tenuto.model.limits.budgets import Budget, Usage
from tenuto.model.limits.concurrency import Concurrency
from tenuto.model.tasks.commands import Escalation, Failure
from tenuto.model.tasks.retry import ErrorClass, RetryPolicy
from tenuto.model.tasks.submission import Complexity, NewTask, OnFailure
from tenuto.model.tenancy.secret_use import Use


class Written(msgspec.Struct, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """A resource that people write: a name nobody knows is refused."""


class LenientBody(msgspec.Struct, kw_only=True, rename="camel"):
    """What an agent says: a name nobody knows is ignored, so that agents and servers may differ."""


class RetryPolicyBody(Written):
    """When to try again; unset: the defaults."""

    base_s: float | None = None
    multiplier: float | None = None
    cap_s: float | None = None
    jitter: float | None = None


class TaskBody(Written):
    """A task to be. Only a title is required."""

    title: str | None = None
    name: str | None = None
    id: UUID | None = None
    description: str | None = None
    prompt: str | None = None
    system_prompt: str | None = None
    model: str | None = None
    max_turns: int | None = None
    conversation: str | None = None
    task_type: str | None = None
    agent_type: str | None = None
    target_agent_id: UUID | None = None
    agent_id: UUID | None = None
    runtime: str | None = None
    command: list[str] | None = None
    cwd: str | None = None
    env: dict[str, str | dict[str, str]] | None = None
    """Texts, and references to stored secrets."""
    priority: int = 5
    tags: list[str] = []
    task_tags: list[str] = []
    capabilities: list[str] = []
    container: str | None = None
    region: str | None = None
    estimate_minutes: int | None = None
    estimated_duration_minutes: int | None = None
    max_attempts: int | None = None
    max_retries: int | None = None
    attempts: int | None = None
    retry: RetryPolicyBody | None = None
    retry_backoff_seconds: float | None = None
    timeout_s: int | None = None
    timeout_seconds: int | None = None
    queue_ttl_s: int | None = None
    lease_s: int | None = None
    run_at: datetime | None = None
    parent_id: UUID | None = None
    key: str | None = None
    depends_on: list[str] = []
    """Ids of tasks, or keys of tasks in the same request."""
    blocks: list[str] = []
    on_dependency_failure: OnFailure = "fail"
    next: str | ChildRef | None = None
    next_task: str | ChildRef | None = None
    group: str | None = None
    group_id: str | None = None
    kind: Kind | None = None
    control: ControlBody | None = None
    foreach_items: Any = None
    foreach_template_task_id: str | None = None
    foreach_order: Order | None = None
    foreach_join: Join | None = None
    goto_target_task_id: str | None = None
    goto_prompt: str | None = None
    condition: str | None = None
    true_next_task_id: str | None = None
    false_next_task_id: str | None = None
    approval: ApprovalBody | None = None
    complexity: Complexity | None = None
    complexity_level: Complexity | None = None
    escalation: EscalationBody | None = None
    concurrency: Concurrency | None = None
    budget: Budget | None = None
    input: Any = None
    input_context: Any = None
    metadata: dict[str, Any] | None = None
    idempotency_key: str | None = None
    trace_id: str | None = None
    source: str | None = None

    def task(self, key: str | None = None) -> NewTask:
        """What the engine is asked for; `key` is the request's idempotency key."""
        title = one("title", title=self.title, name=self.name)
        if title is None:
            raise Invalid("title is missing", field="title")
        capabilities = list(self.capabilities)
        wanted = (self.metadata or {}).get("requiredCapabilities")
        if isinstance(wanted, list):
            capabilities += [each for each in wanted if isinstance(each, str)]
        return NewTask(
            title=title,
            id=self.id,
            description=self.description,
            prompt=self.prompt,
            system_prompt=self.system_prompt,
            model=self.model,
            max_turns=self.max_turns,
            conversation=self.conversation,
            task_type=self._type(),
            agent_type=self.agent_type,
            target_agent=one("agentId", agentId=self.agent_id, targetAgentId=self.target_agent_id),
            runtime=self.runtime,
            command=self.command,
            cwd=self.cwd,
            env=self.env,
            priority=self.priority,
            tags=self.tags,
            task_tags=self.task_tags,
            capabilities=capabilities,
            container=self.container,
            region=self.region,
            estimate_minutes=one(
                "estimateMinutes",
                estimateMinutes=self.estimate_minutes,
                estimatedDurationMinutes=self.estimated_duration_minutes,
            ),
            max_attempts=self._attempts(),
            retry=self._retry(),
            timeout_s=one("timeoutS", timeoutS=self.timeout_s, timeoutSeconds=self.timeout_seconds),
            queue_ttl_s=self.queue_ttl_s,
            lease_s=self.lease_s,
            run_at=self.run_at,
            parent=self.parent_id,
            input=one("input", input=self.input, inputContext=self.input_context),
            metadata=self.metadata,
            idempotency_key=one("idempotencyKey", idempotencyKey=self.idempotency_key, header=key),
            trace_id=self.trace_id,
            source=self.source,
            key=self.key,
            depends_on=self.depends_on,
            blocks=self.blocks,
            on_dependency_failure=self.on_dependency_failure,
            concurrency=self.concurrency,
            budget=self.budget,
            **self._place(),
        )

    def _place(self) -> dict[str, Any]:
        """Where in a flow the task stands, and what it does there."""
        flat = {name: getattr(self, name) for names in FLAT.values() for name in names}
        help_ = self.escalation
        follows = [None if each is None else key_of(each) for each in (self.next, self.next_task)]
        return {
            "next": one("next", next=follows[0], nextTask=follows[1]),
            "group": one("group", group=self.group, groupId=self.group_id),
            "control": control_of(self.control, self.approval, flat, self.kind),
            "complexity": one(
                "complexity", complexity=self.complexity, complexityLevel=self.complexity_level
            ),
            "escalation": None if help_ is None else Escalation(help_.reason, help_.prompt),
        }

    def _type(self) -> str:
        """The kind of work; a name such as `GotoTask` says what the other fields say as well."""
        named = self.task_type is not None and self.task_type.lower() not in KINDS
        return self.task_type if named and self.task_type is not None else "default"

    def _attempts(self) -> int:
        retries = None if self.max_retries is None else self.max_retries + 1
        given = one(
            "maxAttempts",
            maxAttempts=self.max_attempts,
            attempts=self.attempts,
            maxRetries=retries,
        )
        return 3 if given is None else given

    def _retry(self) -> RetryPolicy | None:
        base = self.retry.base_s if self.retry is not None else None
        base = one("retry.baseS", baseS=base, retryBackoffSeconds=self.retry_backoff_seconds)
        given = {"base_s": base}
        if self.retry is not None:
            for name in ("multiplier", "cap_s", "jitter"):
                given[name] = getattr(self.retry, name)
        known = {name: value for name, value in given.items() if value is not None}
        return RetryPolicy(**known) if known else None


class BulkBody(Written):
    """Many tasks, all or none."""

    tasks: list[TaskBody]


class TaskPatch(Written):
    """What may be changed of a task."""

    title: str | msgspec.UnsetType = msgspec.UNSET
    description: str | msgspec.UnsetType | None = msgspec.UNSET
    metadata: dict[str, Any] | msgspec.UnsetType | None = msgspec.UNSET
    tags: list[str] | msgspec.UnsetType = msgspec.UNSET
    priority: int | msgspec.UnsetType = msgspec.UNSET
    status: Literal["PAUSED", "PENDING"] | msgspec.UnsetType = msgspec.UNSET


class ReasonBody(Written):
    """Why."""

    reason: str | None = None


class FilterBody(Written):
    """Which tasks; everything given must hold."""

    status: list[str] = []
    tags: list[str] = []
    priority: int | None = None
    min_priority: int | None = None
    task_type: str | None = None
    agent_id: UUID | None = None
    parent_id: UUID | None = None
    since: datetime | None = None
    until: datetime | None = None
    text: str | None = None

    def filter(self) -> Filter:
        return Filter(
            status=tuple(self.status),
            tags=tuple(self.tags),
            priority=self.priority,
            min_priority=self.min_priority,
            task_type=self.task_type,
            agent=self.agent_id,
            parent=self.parent_id,
            since=self.since,
            until=self.until,
            text=self.text,
        )


class ActionsBody(Written):
    """One action for every task that a filter picks."""

    filter: FilterBody
    action: Literal["cancel", "retry", "pause", "resume", "archive"]
    limit: int = 1000
    reason: str | None = None
    dry_run: bool = False


class AgentBody(Written):
    """An agent as its owner describes it."""

    name: str
    agent_type: str | None = None
    model: str | None = None
    account: str | None = None
    models: list[str] | None = None
    skills: list[str] = []
    tags: list[str] = []
    task_types: list[str] | None = None
    task_tags: list[str] = []
    capabilities: list[str] = []
    choose_rules: tuple[Literal["superset", "all", "single", "exact"], ...] = ("superset",)
    runtimes: list[str] = []
    accept_commands: bool = False
    region: str | None = None
    max_concurrent: int | None = None
    max_concurrent_tasks: int | None = None
    heartbeat_interval_s: int | None = None
    heartbeat_interval_seconds: int | None = None
    stale_threshold_s: int | None = None
    stale_threshold_seconds: int | None = None
    coordinator_enabled: bool = True
    gateway: str | None = None

    def limit(self, field: str) -> int | None:
        """A number that has two names."""
        second = {
            "max_concurrent": "max_concurrent_tasks",
            "heartbeat_interval_s": "heartbeat_interval_seconds",
            "stale_threshold_s": "stale_threshold_seconds",
        }[field]
        given: int | None = one(field, a=getattr(self, field), b=getattr(self, second))
        if given is not None:
            bounds.number(field, given, 1, bounds.MAX_SECONDS)
        return given


class TerminateBody(Written):
    """How an agent ends: its tasks finish, or are cancelled."""

    reason: str | None = None
    graceful: bool = True


class ClaimBody(LenientBody):
    """What an agent asks for."""

    limit: int = 1
    wait_seconds: float = 0
    worker: str | None = None
    lease_seconds: int | None = None


class AttemptBody(LenientBody):
    """What an attempt says; without an attempt's token it names its attempt and lease itself."""

    attempt: int | None = None
    lease_token: str | None = None


class ProgressBody(AttemptBody):
    """How far the attempt is, and what the next one would need."""

    progress_percent: float | None = None
    current_step: str | None = None
    estimated_completion_at: datetime | None = None
    checkpoint_data: Any = msgspec.UNSET
    checkpoint_seq: int | None = None
    usage: Usage | None = None


class CompleteBody(AttemptBody):
    """The result."""

    output_result: Any = None
    output: Any = None
    summary: str | None = None
    usage: Usage | None = None

    def result(self) -> Any:
        return one("outputResult", outputResult=self.output_result, output=self.output)


class FailBody(AttemptBody, kw_only=True):
    """Why there is no result."""

    error: str
    error_class: ErrorClass = ErrorClass.ERROR
    retryable: bool | None = None
    stack: str | None = None
    exit_code: int | None = None
    escalation: EscalationBody | None = None
    resume_at: datetime | None = None
    usage: Usage | None = None

    def failure(self) -> Failure:
        return Failure(
            message=self.error,
            error_class=self.error_class,
            retryable=self.retryable,
            stack=self.stack,
            exit_code=self.exit_code,
            escalation=None
            if self.escalation is None
            else Escalation(self.escalation.reason, self.escalation.prompt),
        )


class AssignBody(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Whom a task is for; nobody in particular when there is no agent."""

    agent_id: UUID | None


class RetryTaskBody(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """How far a retry reaches."""

    cascade: bool = False


class ParkBody(AttemptBody):
    """What the attempt waits for without a slot."""

    hold: Literal["quota", "input", "children"] = "quota"
    resume_at: datetime | None = None
    wait_until: datetime | None = None
    children: list[str] | None = None
    """Ids or keys of children; `hold: children` without them means all that were made."""
    timeout_seconds: float | None = None
    key: str | None = None
    """The name of a wait with a timeout: its time does not begin anew under the same name."""


class ReleaseBody(AttemptBody):
    """The task goes back unharmed."""


class LineBody(LenientBody):
    """One line of a transcript."""

    number: int
    text: str
    level: str = "INFO"


class TranscriptBody(AttemptBody, kw_only=True):
    """What an attempt printed or logged."""

    lines: list[LineBody]


class HeartbeatBody(AttemptBody):
    """An agent lives, and how its task is."""

    status: str | None = None
    current_task_id: UUID | None = None
    progress_percent: float | None = None
    current_step: str | None = None
    memory_mb: float | None = None
    cpu_percent: float | None = None
    lease_seconds: int | None = None


class LeaseBody(LenientBody):
    """One lease of a worker."""

    task_id: UUID
    attempt: int
    lease_token: str


class WorkerBeatBody(LenientBody):
    """A worker lives, and holds these."""

    leases: list[LeaseBody] = []
    lease_seconds: int | None = None
    host: str = ""
    pid: int = 0
    agents: list[str] = []
    slots: int = 1
    status: Literal["RUNNING", "DRAINING", "STOPPED"] = "RUNNING"


class LoginBody(Written):
    """Who somebody says they are; `workspace` is the id or name of one that they belong to."""

    name: str
    password: str
    workspace: str | None = None


class UserBody(Written):
    """Somebody who shall belong to the workspace."""

    name: str
    password: str
    role: Literal["OWNER", "ADMIN", "MEMBER", "VIEWER"] = "MEMBER"


class PasswordBody(Written):
    """The caller's present password, and the one from now on."""

    password: str
    new_password: str


class UserPatch(Written):
    """What may be changed of a member."""

    role: Literal["OWNER", "ADMIN", "MEMBER", "VIEWER"] | None = None


class TokenBody(Written):
    """A program's key to the workspace."""

    name: str
    role: Literal["OWNER", "ADMIN", "MEMBER", "VIEWER"] = "MEMBER"
    scopes: tuple[Literal["read", "write", "work", "admin"], ...] = ("read", "write", "work")
    expires_at: datetime | None = None


class WorkspaceBody(Written):
    """A tenant to be."""

    name: str


class SecretBody(Written):
    """A value that only running attempts get to see, and who may use it; what is left out stays."""

    value: str | None = None
    use: Use | None = None


class WebhookBody(Written):
    """An endpoint that wants to hear of events."""

    url: str
    events: list[str]
    description: str | None = None


class WebhookPatch(Written):
    """What may be changed of a webhook."""

    url: str | msgspec.UnsetType = msgspec.UNSET
    events: list[str] | msgspec.UnsetType = msgspec.UNSET
    description: str | msgspec.UnsetType | None = msgspec.UNSET
    enabled: bool | msgspec.UnsetType = msgspec.UNSET


class RecoverBody(Written):
    """Whose tasks to look after now."""

    workspace_id: UUID | None = None
