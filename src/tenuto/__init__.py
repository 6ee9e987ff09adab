"""Durable orchestration for AI agents. ARCHITECTURE.md shows the way of a task through the code."""

TYPE_CHECKING = False
"""As in `typing`, which takes too long to import: a command must react to Ctrl+C at once."""
if TYPE_CHECKING:
    from typing import Any

    from tenuto.broker.protocol import BrokerContext as BrokerContext
    from tenuto.broker.protocol import Wakeups as Wakeups
    from tenuto.client.client import AsyncClient as AsyncClient
    from tenuto.client.client import Client as Client
    from tenuto.client.client import FlowFailed as FlowFailed
    from tenuto.client.client import TaskFailed as TaskFailed
    from tenuto.client.worker import Worker as Worker
    from tenuto.client.worker import task as task
    from tenuto.model.limits.budgets import Budget as Budget
    from tenuto.model.limits.concurrency import Concurrency as Concurrency
    from tenuto.model.schedules.schedule import ScheduleSpec as ScheduleSpec
    from tenuto.model.tasks.commands import Failure as Failure
    from tenuto.model.tasks.retry import ErrorClass as ErrorClass
    from tenuto.model.tasks.retry import RetryPolicy as RetryPolicy
    from tenuto.model.tasks.submission import NewTask as NewTask
    from tenuto.worker.context import Context as Context
    from tenuto.worker.context import SyncContext as SyncContext
    from tenuto.worker.runtime.protocol import AttemptFailed as AttemptFailed
    from tenuto.worker.runtime.protocol import Runtime as Runtime
    from tenuto.worker.runtime.protocol import RuntimeContext as RuntimeContext

__version__ = "0.1.0"

_MODULES = {
    "AsyncClient": "tenuto.client.client",
    "AttemptFailed": "tenuto.worker.runtime.protocol",
    "BrokerContext": "tenuto.broker.protocol",
    "Budget": "tenuto.model.limits.budgets",
    "Client": "tenuto.client.client",
    "Concurrency": "tenuto.model.limits.concurrency",
    "Context": "tenuto.worker.context",
    "ErrorClass": "tenuto.model.tasks.retry",
    "Failure": "tenuto.model.tasks.commands",
    "FlowFailed": "tenuto.client.client",
    "NewTask": "tenuto.model.tasks.submission",
    "RetryPolicy": "tenuto.model.tasks.retry",
    "Runtime": "tenuto.worker.runtime.protocol",
    "RuntimeContext": "tenuto.worker.runtime.protocol",
    "ScheduleSpec": "tenuto.model.schedules.schedule",
    "SyncContext": "tenuto.worker.context",
    "TaskFailed": "tenuto.client.client",
    "Wakeups": "tenuto.broker.protocol",
    "Worker": "tenuto.client.worker",
    "task": "tenuto.client.worker",
}


def __getattr__(name: str) -> "Any":
    """Imports and returns a public name, only when it is used; `AttributeError` for other names."""
    if name not in _MODULES:
        raise AttributeError(f"module 'tenuto' has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415

    return getattr(import_module(_MODULES[name]), name)
