"""Request bodies. Some fields have a second name that is accepted, too."""

from datetime import datetime
from typing import Any, Literal
from uuid import UUID

import msgspec

from tenuto.api.routes.flow_bodies import (
    FLAT_FIELDS,
    ApprovalBody,
    ChildRef,
    ControlBody,
    EscalationBody,
    StrictBody,
    control_of,
    key_of,
    single_value,
)
from tenuto.engine.tasks.query import Filter
from tenuto.manifest.tasks import KIND_TASK_TYPES
from tenuto.model import bounds
from tenuto.model.errors import Invalid
from tenuto.model.flows.definition import Join, Kind, Order
from tenuto.model.limits.budgets import Budget, Usage
from tenuto.model.limits.concurrency import Concurrency
from tenuto.model.tasks.commands import Escalation, Failure
from tenuto.model.tasks.retry import ErrorClass, RetryPolicy
from tenuto.model.tasks.submission import Complexity, NewTask, OnFailure
from tenuto.model.tenancy.secret_use import Use


class LenientBody(msgspec.Struct, kw_only=True, rename="camel"):
    """Body from an agent or worker: unknown fields are ignored, so that versions may differ."""


class RetryPolicyBody(StrictBody):
    """Delays between retries; fields that are not set have the defaults."""

    base_s: float | None = None
    multiplier: float | None = None
    cap_s: float | None = None
    jitter: float | None = None


class TaskBody(StrictBody):
    """A task to submit. Only `title` is required."""

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
    """Values are texts, or references to stored secrets."""
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

    def new_task(self, key: str | None = None) -> NewTask:
        """Returns the task to submit; `key` is the header `Idempotency-Key`."""
        title = single_value("title", title=self.title, name=self.name)
        if title is None:
            raise Invalid("title is required", field="title")
        capabilities = list(self.capabilities)
        required = (self.metadata or {}).get("requiredCapabilities")
        if isinstance(required, list):
            capabilities += [name for name in required if isinstance(name, str)]
        return NewTask(
            title=title,
            id=self.id,
            description=self.description,
            prompt=self.prompt,
            system_prompt=self.system_prompt,
            model=self.model,
            max_turns=self.max_turns,
            conversation=self.conversation,
            task_type=self._task_type(),
            agent_type=self.agent_type,
            target_agent=single_value(
                "agentId", agentId=self.agent_id, targetAgentId=self.target_agent_id
            ),
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
            estimate_minutes=single_value(
                "estimateMinutes",
                estimateMinutes=self.estimate_minutes,
                estimatedDurationMinutes=self.estimated_duration_minutes,
            ),
            max_attempts=self._max_attempts(),
            retry=self._retry_policy(),
            timeout_s=single_value(
                "timeoutS", timeoutS=self.timeout_s, timeoutSeconds=self.timeout_seconds
            ),
            queue_ttl_s=self.queue_ttl_s,
            lease_s=self.lease_s,
            run_at=self.run_at,
            parent=self.parent_id,
            input=single_value("input", input=self.input, inputContext=self.input_context),
            metadata=self.metadata,
            idempotency_key=single_value(
                "idempotencyKey", idempotencyKey=self.idempotency_key, header=key
            ),
            trace_id=self.trace_id,
            source=self.source,
            key=self.key,
            depends_on=self.depends_on,
            blocks=self.blocks,
            on_dependency_failure=self.on_dependency_failure,
            concurrency=self.concurrency,
            budget=self.budget,
            **self._flow_fields(),
        )

    def _flow_fields(self) -> dict[str, Any]:
        """Returns the fields about flows: next task, group, control, complexity and escalation."""
        flat = {name: getattr(self, name) for names in FLAT_FIELDS.values() for name in names}
        escalation = self.escalation
        next_keys = [
            None if reference is None else key_of(reference)
            for reference in (self.next, self.next_task)
        ]
        return {
            "next": single_value("next", next=next_keys[0], nextTask=next_keys[1]),
            "group": single_value("group", group=self.group, groupId=self.group_id),
            "control": control_of(self.control, self.approval, flat, self.kind),
            "complexity": single_value(
                "complexity", complexity=self.complexity, complexityLevel=self.complexity_level
            ),
            "escalation": None
            if escalation is None
            else Escalation(escalation.reason, escalation.prompt),
        }

    def _task_type(self) -> str:
        """Returns the task type; names of control tasks such as `GotoTask` become "default".

        Other fields define the control task, so these names add nothing.
        """
        is_type_name = self.task_type is not None and self.task_type.lower() not in KIND_TASK_TYPES
        return self.task_type if is_type_name and self.task_type is not None else "default"

    def _max_attempts(self) -> int:
        retries = None if self.max_retries is None else self.max_retries + 1
        max_attempts = single_value(
            "maxAttempts",
            maxAttempts=self.max_attempts,
            attempts=self.attempts,
            maxRetries=retries,
        )
        return 3 if max_attempts is None else max_attempts

    def _retry_policy(self) -> RetryPolicy | None:
        base = self.retry.base_s if self.retry is not None else None
        base = single_value(
            "retry.baseS", baseS=base, retryBackoffSeconds=self.retry_backoff_seconds
        )
        fields = {"base_s": base}
        if self.retry is not None:
            for name in ("multiplier", "cap_s", "jitter"):
                fields[name] = getattr(self.retry, name)
        values = {name: value for name, value in fields.items() if value is not None}
        return RetryPolicy(**values) if values else None


class BulkBody(StrictBody):
    """Tasks to submit, all or none."""

    tasks: list[TaskBody]


class TaskPatch(StrictBody):
    """Changes of a task; fields that are not set stay as they are."""

    title: str | msgspec.UnsetType = msgspec.UNSET
    description: str | msgspec.UnsetType | None = msgspec.UNSET
    metadata: dict[str, Any] | msgspec.UnsetType | None = msgspec.UNSET
    tags: list[str] | msgspec.UnsetType = msgspec.UNSET
    priority: int | msgspec.UnsetType = msgspec.UNSET
    status: Literal["PAUSED", "PENDING"] | msgspec.UnsetType = msgspec.UNSET


class ReasonBody(StrictBody):
    """The reason of a request, for the audit trail."""

    reason: str | None = None


class FilterBody(StrictBody):
    """A filter of tasks; a task matches if it meets all fields that are set."""

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

    def to_filter(self) -> Filter:
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


class ActionsBody(StrictBody):
    """An action for all tasks that match a filter."""

    filter: FilterBody
    action: Literal["cancel", "retry", "pause", "resume", "archive"]
    limit: int = 1000
    reason: str | None = None
    dry_run: bool = False


class AgentBody(StrictBody):
    """An agent's profile."""

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

    def number_of(self, field: str) -> int | None:
        """Returns the value of a field that has two names; raises `Invalid` if they differ."""
        other_names = {
            "max_concurrent": "max_concurrent_tasks",
            "heartbeat_interval_s": "heartbeat_interval_seconds",
            "stale_threshold_s": "stale_threshold_seconds",
        }[field]
        value: int | None = single_value(
            field, a=getattr(self, field), b=getattr(self, other_names)
        )
        if value is not None:
            bounds.check_number(field, value, 1, bounds.MAX_SECONDS)
        return value


class TerminateBody(StrictBody):
    """How to terminate an agent: with `graceful` its tasks finish, otherwise they are cancelled."""

    reason: str | None = None
    graceful: bool = True


class ClaimBody(LenientBody):
    """A claim of an agent."""

    limit: int = 1
    wait_seconds: float = 0
    worker: str | None = None
    lease_seconds: int | None = None


class AttemptBody(LenientBody):
    """A report of an attempt; without its token, `attempt` and `leaseToken` are required."""

    attempt: int | None = None
    lease_token: str | None = None


class ProgressBody(AttemptBody):
    """Progress and usage of an attempt, and a checkpoint for the next one."""

    progress_percent: float | None = None
    current_step: str | None = None
    estimated_completion_at: datetime | None = None
    checkpoint_data: Any = msgspec.UNSET
    checkpoint_seq: int | None = None
    usage: Usage | None = None


class CompleteBody(AttemptBody):
    """The result of a task."""

    output_result: Any = None
    output: Any = None
    summary: str | None = None
    usage: Usage | None = None

    def result(self) -> Any:
        return single_value("outputResult", outputResult=self.output_result, output=self.output)


class FailBody(AttemptBody, kw_only=True):
    """The failure of an attempt."""

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
    """The agent that a task is assigned to; `null` for any agent that matches."""

    agent_id: UUID | None


class RetryTaskBody(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Options of a retry; `cascade` also reopens tasks that ended because of the task."""

    cascade: bool = False


class ParkBody(AttemptBody):
    """What a parked task waits for."""

    hold: Literal["quota", "input", "children"] = "quota"
    resume_at: datetime | None = None
    wait_until: datetime | None = None
    children: list[str] | None = None
    """Ids or keys of subtasks; with `hold: children` and no list, all subtasks of the task."""
    timeout_seconds: float | None = None
    key: str | None = None
    """The name of a wait with a timeout; a repeated wait of the same name keeps its deadline."""


class ReleaseBody(AttemptBody):
    """Releases a task."""


class LineBody(LenientBody):
    """One line of a transcript."""

    number: int
    text: str
    level: str = "INFO"


class TranscriptBody(AttemptBody, kw_only=True):
    """Lines that an attempt printed or logged."""

    lines: list[LineBody]


class HeartbeatBody(AttemptBody):
    """A heartbeat of an agent, with the progress of its task."""

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


class WorkerHeartbeatBody(LenientBody):
    """A heartbeat of a worker, with the leases that it holds."""

    leases: list[LeaseBody] = []
    lease_seconds: int | None = None
    host: str = ""
    pid: int = 0
    agents: list[str] = []
    slots: int = 1
    status: Literal["RUNNING", "DRAINING", "STOPPED"] = "RUNNING"


class LoginBody(StrictBody):
    """Name and password of a user; `workspace` is the id or name of a workspace of the user."""

    name: str
    password: str
    workspace: str | None = None


class UserBody(StrictBody):
    """A user to create in the workspace."""

    name: str
    password: str
    role: Literal["OWNER", "ADMIN", "MEMBER", "VIEWER"] = "MEMBER"


class PasswordBody(StrictBody):
    """The caller's current password, and the new one."""

    password: str
    new_password: str


class UserPatch(StrictBody):
    """Changes of a user in the workspace."""

    role: Literal["OWNER", "ADMIN", "MEMBER", "VIEWER"] | None = None


class TokenBody(StrictBody):
    """A token to create for a program."""

    name: str
    role: Literal["OWNER", "ADMIN", "MEMBER", "VIEWER"] = "MEMBER"
    scopes: tuple[Literal["read", "write", "work", "admin"], ...] = ("read", "write", "work")
    expires_at: datetime | None = None


class WorkspaceBody(StrictBody):
    """A workspace to create."""

    name: str


class SecretBody(StrictBody):
    """A secret's value, and who may use it; fields that are left out stay as they are."""

    value: str | None = None
    use: Use | None = None


class WebhookBody(StrictBody):
    """A webhook to create: a URL and the events that it gets."""

    url: str
    events: list[str]
    description: str | None = None


class WebhookPatch(StrictBody):
    """Changes of a webhook; fields that are not set stay as they are."""

    url: str | msgspec.UnsetType = msgspec.UNSET
    events: list[str] | msgspec.UnsetType = msgspec.UNSET
    description: str | msgspec.UnsetType | None = msgspec.UNSET
    enabled: bool | msgspec.UnsetType = msgspec.UNSET


class RecoverBody(StrictBody):
    """The workspace to recover; the caller's own if it is left out."""

    workspace_id: UUID | None = None
