"""Request bodies. Some fields have a second name that is accepted, too."""

from datetime import datetime
from typing import Any, Literal
from uuid import UUID

import msgspec

from tenuto.api.routes.flow_bodies import (
    EscalationBody,
    StrictBody,
    single_value,
)
from tenuto.api.routes.task_filter import FilterBody
from tenuto.model import bounds
from tenuto.model.limits.budgets import Usage
from tenuto.model.tasks.commands import Escalation, Failure
from tenuto.model.tasks.retry import ErrorClass
from tenuto.model.tenancy.secret_use import Use


class LenientBody(msgspec.Struct, kw_only=True, rename="camel"):
    """Body from an agent or worker: unknown fields are ignored, so that versions may differ."""


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
        """Returns the checked value of a field with two names; raises `Invalid` if they differ."""
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
        """Returns the output under either name, or `None`; raises `Invalid` if they differ."""
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
