"""The blocking forms of the resources of `AsyncClient`.

A method waits for the async method of the same name, where it is documented. A test compares the
signatures.
"""

from collections.abc import Generator, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from tenuto.client.accounts import (
    Access,
    Coordinators,
    CoordinatorStatus,
    Tokens,
    Users,
    Webhooks,
    Workspaces,
)
from tenuto.client.background_loop import BlockingResource
from tenuto.client.flows import Flows, Groups, InboxItems
from tenuto.client.follow import TaskEvent
from tenuto.client.remote.definitions import RemoteDefinitions
from tenuto.client.remote.engine import RemoteSecrets
from tenuto.client.remote.limits import RemotePauses, RemoteRateLimits
from tenuto.client.remote.schedules import Events, RemoteSchedules, RemoteTriggers
from tenuto.client.tasks import ID, Tasks
from tenuto.engine.agents.inbox import InboxItem
from tenuto.engine.flows.definitions import ApplyResult, DefinitionPage, Definitions, DefinitionView
from tenuto.engine.flows.graph import GraphView
from tenuto.engine.flows.views import FlowSummary, FlowView, GroupSummary, GroupView
from tenuto.engine.limits.pauses import Pauses, PauseView
from tenuto.engine.limits.rate_limits import RateLimits, RateLimitView
from tenuto.engine.operations.coordination import RecoverResult
from tenuto.engine.schedules.events import EventView
from tenuto.engine.schedules.schedules import ScheduleChange, SchedulePage, Schedules, ScheduleView
from tenuto.engine.schedules.triggers import TriggerChange, TriggerPage, Triggers, TriggerView
from tenuto.engine.tasks.control import Action, ActionResult
from tenuto.engine.tasks.submit import Submitted
from tenuto.engine.tenancy.secrets import NamedSecrets
from tenuto.engine.tenancy.views import (
    CallerView,
    LoginToken,
    MemberView,
    NewTokenView,
    NewWorkspace,
    TokenView,
    WorkspaceView,
)
from tenuto.engine.views import (
    AttemptView,
    Explanation,
    LogLine,
    SecretView,
    TaskSummary,
    TaskView,
)
from tenuto.engine.webhooks.endpoints import DeliveryPage, DeliveryView, WebhookSecret, WebhookView
from tenuto.manifest.documents import Files
from tenuto.model.flows.definition import Join, Order
from tenuto.model.flows.plan import Spec
from tenuto.model.limits.budgets import Budget
from tenuto.model.limits.pauses import WORKSPACE_SUBJECT, PauseKind
from tenuto.model.limits.rate_limits import RateLimit
from tenuto.model.schedules.schedule import ScheduleSpec
from tenuto.model.tasks.submission import NewTask
from tenuto.model.tenancy.secret_use import Use


class BlockingTasks(BlockingResource[Tasks]):
    """The tasks of a workspace. Methods accept a task id or the beginning of one."""

    def create(self, title: str, **fields: Any) -> TaskView:
        return self._wait(self._resource.create(title, **fields))

    def create_many(self, tasks: Sequence[NewTask | dict[str, Any]]) -> Sequence[Submitted]:
        return self._wait(self._resource.create_many(tasks))

    def get(self, task: ID) -> TaskView:
        return self._wait(self._resource.get(task))

    def list(
        self, *, limit: int | None = None, cursor: UUID | None = None, **where: Any
    ) -> Generator[TaskSummary, None, None]:
        return self._iterate(self._resource.list(limit=limit, cursor=cursor, **where))

    def cancel(self, task: ID, reason: str | None = None) -> TaskView:
        return self._wait(self._resource.cancel(task, reason))

    def pause(self, task: ID, reason: str | None = None) -> TaskView:
        return self._wait(self._resource.pause(task, reason))

    def resume(self, task: ID) -> TaskView:
        return self._wait(self._resource.resume(task))

    def start(self, task: ID) -> TaskView:
        return self._wait(self._resource.start(task))

    def retry(self, task: ID, *, cascade: bool = False) -> TaskView:
        return self._wait(self._resource.retry(task, cascade=cascade))

    def assign(self, task: ID, agent: UUID | None, *, take: bool = False) -> TaskView:
        return self._wait(self._resource.assign(task, agent, take=take))

    def archive(self, task: ID) -> TaskView:
        return self._wait(self._resource.archive(task))

    def rerun(self, task: ID) -> TaskView:
        return self._wait(self._resource.rerun(task))

    def update(self, task: ID, *, version: int | None = None, **changes: Any) -> TaskView:
        return self._wait(self._resource.update(task, version=version, **changes))

    def delete(self, task: ID) -> None:
        return self._wait(self._resource.delete(task))

    def act(
        self, action: Action, *, limit: int = 1000, dry_run: bool = False, **where: Any
    ) -> ActionResult:
        return self._wait(self._resource.act(action, limit=limit, dry_run=dry_run, **where))

    def wait(self, task: ID, timeout: float | None = None) -> TaskView:
        return self._wait(self._resource.wait(task, timeout))

    def follow(self, task: ID) -> Generator[TaskEvent, None, None]:
        return self._iterate(self._resource.follow(task))

    def logs(self, task: ID, level: str = "DEBUG", limit: int = 1000) -> Sequence[LogLine]:
        return self._wait(self._resource.logs(task, level, limit))

    def attempts(self, task: ID) -> Sequence[AttemptView]:
        return self._wait(self._resource.attempts(task))

    def explain(self, task: ID) -> Explanation:
        return self._wait(self._resource.explain(task))


class BlockingSecrets(BlockingResource[NamedSecrets | RemoteSecrets]):
    """The named secrets of a workspace."""

    def put(self, name: str, value: str | None = None, use: Use | None = None) -> None:
        return self._wait(self._resource.put(name, value, use))

    def list(self) -> Sequence[SecretView]:
        return self._wait(self._resource.list())

    def delete(self, name: str) -> None:
        return self._wait(self._resource.delete(name))


class BlockingDefinitions(BlockingResource[Definitions | RemoteDefinitions]):
    """The definitions of a workspace."""

    def put(self, spec: Spec, version: int | None = None) -> DefinitionView:
        return self._wait(self._resource.put(spec, version))

    def get(self, key: str) -> DefinitionView:
        return self._wait(self._resource.get(key))

    def page(self, limit: int = 100, cursor: UUID | None = None) -> DefinitionPage:
        return self._wait(self._resource.page(limit, cursor))

    def delete(self, key: str, version: int | None = None) -> None:
        return self._wait(self._resource.delete(key, version))

    def export(self, keys: Sequence[str] = ()) -> str:
        return self._wait(self._resource.export(keys))

    def apply_files(self, files: Files, *, dry_run: bool = False) -> ApplyResult:
        return self._wait(self._resource.apply_files(files, dry_run=dry_run))


class BlockingGates(BlockingResource[Pauses | RemotePauses]):
    """The pauses (gates) of a workspace."""

    def list(self) -> Sequence[PauseView]:
        return self._wait(self._resource.list())

    def close(
        self,
        kind: PauseKind,
        subject: str = WORKSPACE_SUBJECT,
        reason: str | None = None,
        until: datetime | None = None,
    ) -> PauseView:
        return self._wait(self._resource.close(kind, subject, reason, until))

    def open(self, kind: PauseKind, subject: str = WORKSPACE_SUBJECT) -> None:
        return self._wait(self._resource.open(kind, subject))


class BlockingRateLimits(BlockingResource[RateLimits | RemoteRateLimits]):
    """Rate limits of providers, models and accounts, shared by all workers of a workspace."""

    def list(self) -> Sequence[RateLimitView]:
        return self._wait(self._resource.list())

    def put(self, limit: RateLimit) -> RateLimitView:
        return self._wait(self._resource.put(limit))

    def delete(self, name: str) -> None:
        return self._wait(self._resource.delete(name))


class BlockingSchedules(BlockingResource[Schedules | RemoteSchedules]):
    """The schedules of a workspace. Methods accept a schedule's name or id."""

    def create(
        self,
        name: str,
        target: str,
        schedule: ScheduleSpec,
        input: Any = None,  # noqa: A002  public name
    ) -> ScheduleView:
        return self._wait(self._resource.create(name, target, schedule, input))

    def page(
        self, limit: int = 100, cursor: UUID | None = None, name: str | None = None
    ) -> SchedulePage:
        return self._wait(self._resource.page(limit, cursor, name))

    def get(self, schedule: UUID | str) -> ScheduleView:
        return self._wait(self._resource.get(schedule))

    def next(self, schedule: UUID | str, n: int = 5) -> list[datetime]:
        return self._wait(self._resource.next(schedule, n))

    def update(
        self, schedule: UUID | str, change: ScheduleChange, version: int | None = None
    ) -> ScheduleView:
        return self._wait(self._resource.update(schedule, change, version))

    def pause(self, schedule: UUID | str) -> ScheduleView:
        return self._wait(self._resource.pause(schedule))

    def resume(self, schedule: UUID | str) -> ScheduleView:
        return self._wait(self._resource.resume(schedule))

    def delete(self, schedule: UUID | str) -> None:
        return self._wait(self._resource.delete(schedule))


class BlockingTriggers(BlockingResource[Triggers | RemoteTriggers]):
    """The triggers of a workspace. Methods accept a trigger's name or id."""

    def create(
        self,
        name: str,
        event: str,
        target: str,
        filter: str | None = None,  # noqa: A002  public name
    ) -> TriggerView:
        return self._wait(self._resource.create(name, event, target, filter))

    def page(
        self, limit: int = 100, cursor: UUID | None = None, name: str | None = None
    ) -> TriggerPage:
        return self._wait(self._resource.page(limit, cursor, name))

    def get(self, trigger: UUID | str) -> TriggerView:
        return self._wait(self._resource.get(trigger))

    def update(
        self, trigger: UUID | str, change: TriggerChange, version: int | None = None
    ) -> TriggerView:
        return self._wait(self._resource.update(trigger, change, version))

    def pause(self, trigger: UUID | str) -> TriggerView:
        return self._wait(self._resource.pause(trigger))

    def resume(self, trigger: UUID | str) -> TriggerView:
        return self._wait(self._resource.resume(trigger))

    def delete(self, trigger: UUID | str) -> None:
        return self._wait(self._resource.delete(trigger))


class BlockingEvents(BlockingResource[Events]):
    """Publishes events in a workspace."""

    def publish(self, name: str, data: Any = None, task: UUID | None = None) -> EventView:
        return self._wait(self._resource.publish(name, data, task))


class BlockingWebhooks(BlockingResource[Webhooks]):
    """The webhook endpoints that receive events."""

    def list(self) -> Generator[WebhookView, None, None]:
        return self._iterate(self._resource.list())

    def get(self, webhook: UUID | str) -> WebhookView:
        return self._wait(self._resource.get(webhook))

    def create(
        self, url: str, events: Sequence[str], description: str | None = None
    ) -> WebhookSecret:
        return self._wait(self._resource.create(url, events, description))

    def update(self, webhook: UUID | str, **fields: Any) -> WebhookView:
        return self._wait(self._resource.update(webhook, **fields))

    def delete(self, webhook: UUID | str) -> None:
        return self._wait(self._resource.delete(webhook))

    def rotate_secret(self, webhook: UUID | str) -> WebhookSecret:
        return self._wait(self._resource.rotate_secret(webhook))

    def deliveries(
        self, webhook: UUID | str, limit: int = 100, cursor: UUID | None = None
    ) -> DeliveryPage:
        return self._wait(self._resource.deliveries(webhook, limit, cursor))

    def redeliver(self, delivery: UUID | str) -> DeliveryView:
        return self._wait(self._resource.redeliver(delivery))


class BlockingFlows(BlockingResource[Flows]):
    """The flows of a workspace. Methods accept a flow id, or a key for its newest flow."""

    def start(
        self,
        key: str,
        input: Any = None,  # noqa: A002
        *,
        steps: int | None = None,
        priority: int | None = None,
    ) -> FlowView:
        return self._wait(self._resource.start(key, input, steps=steps, priority=priority))

    def show(self, flow: ID) -> FlowView:
        return self._wait(self._resource.show(flow))

    def list(
        self,
        *,
        status: str | None = None,
        key: str | None = None,
        limit: int | None = None,
        cursor: UUID | None = None,
    ) -> Generator[FlowSummary, None, None]:
        return self._iterate(
            self._resource.list(status=status, key=key, limit=limit, cursor=cursor)
        )

    def tasks(self, flow: ID) -> Generator[TaskSummary, None, None]:
        return self._iterate(self._resource.tasks(flow))

    def graph(self, flow: ID) -> GraphView:
        return self._wait(self._resource.graph(flow))

    def wait(self, flow: ID, timeout: float | None = None) -> FlowView:
        return self._wait(self._resource.wait(flow, timeout))

    def cancel(self, flow: ID, reason: str | None = None) -> FlowView:
        return self._wait(self._resource.cancel(flow, reason))

    def pause(self, flow: ID) -> FlowView:
        return self._wait(self._resource.pause(flow))

    def resume(self, flow: ID) -> FlowView:
        return self._wait(self._resource.resume(flow))

    def rerun(self, flow: ID, *, from_failed: bool = False, steps: int | None = None) -> FlowView:
        return self._wait(self._resource.rerun(flow, from_failed=from_failed, steps=steps))


class BlockingGroups(BlockingResource[Groups]):
    """Group runs of a workspace. Methods accept a group run id, or a key for its newest run."""

    def create(
        self,
        key: str,
        children: Sequence[str] = (),
        *,
        title: str | None = None,
        order: Order = "sequential",
        next: str | None = None,  # noqa: A002
        join: Join = "all_succeeded",
        prompt: str | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> DefinitionView:
        return self._wait(
            self._resource.create(
                key,
                children,
                title=title,
                order=order,
                next=next,
                join=join,
                prompt=prompt,
                metadata=metadata,
            )
        )

    def start(
        self,
        key: str,
        input: Any = None,  # noqa: A002
        *,
        steps: int | None = None,
        priority: int | None = None,
    ) -> FlowView:
        return self._wait(self._resource.start(key, input, steps=steps, priority=priority))

    def show(self, group: ID) -> GroupView:
        return self._wait(self._resource.show(group))

    def list(
        self,
        *,
        status: str | None = None,
        key: str | None = None,
        flow: UUID | None = None,
        limit: int | None = None,
        cursor: UUID | None = None,
    ) -> Generator[GroupSummary, None, None]:
        return self._iterate(
            self._resource.list(status=status, key=key, flow=flow, limit=limit, cursor=cursor)
        )

    def graph(self, group: ID) -> GraphView:
        return self._wait(self._resource.graph(group))

    def wait(self, group: ID, timeout: float | None = None) -> GroupView:
        return self._wait(self._resource.wait(group, timeout))

    def cancel(self, group: ID, reason: str | None = None) -> GroupView:
        return self._wait(self._resource.cancel(group, reason))

    def pause(self, group: ID) -> GroupView:
        return self._wait(self._resource.pause(group))

    def resume(self, group: ID) -> GroupView:
        return self._wait(self._resource.resume(group))


class BlockingInbox(BlockingResource[InboxItems]):
    """The inbox: items that wait for an answer by a person."""

    def list(
        self, status: str | None = "OPEN", *, limit: int | None = None, cursor: UUID | None = None
    ) -> Generator[InboxItem, None, None]:
        return self._iterate(self._resource.list(status, limit=limit, cursor=cursor))

    def show(self, item: ID) -> InboxItem:
        return self._wait(self._resource.show(item))

    def approve(
        self, item: ID, comment: str | None = None, budget: Budget | None = None
    ) -> InboxItem:
        return self._wait(self._resource.approve(item, comment, budget))

    def reject(self, item: ID, comment: str | None = None) -> InboxItem:
        return self._wait(self._resource.reject(item, comment))

    def answer(self, item: ID, comment: str) -> InboxItem:
        return self._wait(self._resource.answer(item, comment))


class BlockingTokens(BlockingResource[Tokens]):
    """API tokens of the workspace."""

    def list(self) -> Sequence[TokenView]:
        return self._wait(self._resource.list())

    def create(self, name: str, **fields: Any) -> NewTokenView:
        return self._wait(self._resource.create(name, **fields))

    def revoke(self, token: UUID | str) -> None:
        return self._wait(self._resource.revoke(token))


class BlockingUsers(BlockingResource[Users]):
    """The users of the workspace."""

    def list(self) -> Sequence[MemberView]:
        return self._wait(self._resource.list())

    def create(self, name: str, password: str, role: str = "MEMBER") -> MemberView:
        return self._wait(self._resource.create(name, password, role))

    def update(self, user: UUID | str, role: str) -> MemberView:
        return self._wait(self._resource.update(user, role))

    def delete(self, user: UUID | str) -> None:
        return self._wait(self._resource.delete(user))


class BlockingWorkspaces(BlockingResource[Workspaces]):
    """The workspaces (tenants) that the caller is a member of."""

    def list(self) -> Sequence[WorkspaceView]:
        return self._wait(self._resource.list())

    def get(self, workspace: UUID | str) -> WorkspaceView:
        return self._wait(self._resource.get(workspace))

    def create(self, name: str) -> NewWorkspace:
        return self._wait(self._resource.create(name))

    def quota(self, workspace: UUID | str, **limits: int | None) -> WorkspaceView:
        return self._wait(self._resource.quota(workspace, **limits))


class BlockingCoordinators(BlockingResource[Coordinators]):
    """The coordinator: the process that repairs and promotes tasks."""

    def status(self) -> CoordinatorStatus:
        return self._wait(self._resource.status())

    def recover(self, workspace: UUID | None = None) -> RecoverResult:
        return self._wait(self._resource.recover(workspace))

    def logs(
        self, level: str = "WARN", limit: int = 100, workspace: UUID | None = None
    ) -> Sequence[LogLine]:
        return self._wait(self._resource.logs(level, limit, workspace))


class BlockingAccess(BlockingResource[Access]):
    """Logins of users, and the caller's own identity."""

    def login(self, name: str, password: str, workspace: str | None = None) -> LoginToken:
        return self._wait(self._resource.login(name, password, workspace))

    def logout(self) -> None:
        return self._wait(self._resource.logout())

    def change_password(self, password: str, new_password: str) -> None:
        return self._wait(self._resource.change_password(password, new_password))

    def me(self) -> CallerView:
        return self._wait(self._resource.me())
