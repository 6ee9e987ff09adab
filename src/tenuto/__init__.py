"""Durable orchestration for AI agents. See ARCHITECTURE.md for a task's walk through the code."""

TYPE_CHECKING = False
"""As in `typing`, which a command has no time for before it can be interrupted in good order."""
if TYPE_CHECKING:
    from typing import Any

    from tenuto.client.client import AsyncClient as AsyncClient
    from tenuto.client.client import Client as Client
    from tenuto.client.client import FlowFailed as FlowFailed
    from tenuto.client.client import TaskFailed as TaskFailed
    from tenuto.client.worker import Worker as Worker
    from tenuto.client.worker import task as task

__version__ = "0.1.0"

_FOUND_IN = {
    "AsyncClient": "tenuto.client.client",
    "Client": "tenuto.client.client",
    "FlowFailed": "tenuto.client.client",
    "TaskFailed": "tenuto.client.client",
    "Worker": "tenuto.client.worker",
    "task": "tenuto.client.worker",
}


def __getattr__(name: str) -> "Any":
    """What programs import from here, loaded when it is asked for: commands must start fast."""
    if name not in _FOUND_IN:
        raise AttributeError(f"module 'tenuto' has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415

    return getattr(import_module(_FOUND_IN[name]), name)
