"""A worker as a program writes it: handlers by decorator, over HTTP or on a database itself."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

import msgspec

from tenuto import app
from tenuto.client.client import AsyncClient, Client
from tenuto.client.target import Target, opened
from tenuto.model.errors import Invalid
from tenuto.worker.engine_protocol import WorkerEngine
from tenuto.worker.worker import Worker as Process

H = TypeVar("H", bound=Callable[..., Any])
_MARK = "__tenuto_task__"


def task(task_type: str | None = None) -> Callable[[H], H]:
    """Marks a function as the handler of a type of task, its own name if none is given."""

    def mark(handler: H) -> H:
        setattr(handler, _MARK, task_type or handler.__name__)
        return handler

    return mark


class Worker:
    """Works as one agent, with the handlers that it is given."""

    def __init__(
        self,
        client: Client | AsyncClient | str | None = None,
        agent: str = "local",
        *,
        task_tags: Sequence[str] = (),
        capabilities: Sequence[str] = (),
        agent_type: str | None = None,
        max_concurrent: int | None = None,
        slots: int | None = None,
    ) -> None:
        if not isinstance(client, Client | AsyncClient):
            client = AsyncClient(client)
        self._target: Target = client.target
        self._agent = agent
        self._profile: dict[str, Any] = {
            "task_tags": task_tags,
            "capabilities": capabilities,
            "agent_type": agent_type,
            "max_concurrent": max_concurrent,
        }
        self._slots = slots
        self._handlers: dict[str | None, Callable[..., Any]] = {}

    def handles(self, task_type: str | None = None) -> Callable[[H], H]:
        """Gives a function the tasks of a type; without one, those that no other function takes."""

        def keep(handler: H) -> H:
            if task_type in self._handlers:
                raise Invalid(f"two handlers for tasks of type {task_type!r}")
            self._handlers[task_type] = handler
            return handler

        return keep

    def add(self, *handlers: Callable[..., Any]) -> None:
        """Take in functions that `task` has marked."""
        for handler in handlers:
            marked = getattr(handler, _MARK, None)
            if marked is None:
                raise Invalid(f"{handler!r} is not marked: write @task above it")
            self.handles(marked)(handler)

    def run(self) -> None:
        """Work until Ctrl-C or SIGTERM, which drain."""

        async def main() -> None:
            await self.serve(app.stop_on_signals())

        app.run(main())

    async def serve(self, stop: asyncio.Event) -> None:
        """Work until `stop`; then finish or give back what is running."""
        if not self._handlers:
            raise Invalid("the worker has no handlers: write @worker.handles above a function")
        settings = self._target.settings
        if self._slots is not None:
            settings = msgspec.structs.replace(settings, slots=self._slots)
        async with opened(self._target, listen=True) as engine:
            process = Process(engine, settings, connect=self._connect)
            engine.actor = process.id
            await process.host_functions(self._agent, self._handlers, **self._profile)
            await process.run(stop)

    def _connect(self) -> AbstractAsyncContextManager[WorkerEngine]:
        return opened(self._target)
