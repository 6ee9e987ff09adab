"""`Worker`: runs handler functions of a program, over HTTP or on a database."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

import msgspec

from tenuto import app
from tenuto.client.client import AsyncClient, Client
from tenuto.client.target import Target, open_engine
from tenuto.model.errors import Invalid
from tenuto.worker.engine_protocol import WorkerEngine
from tenuto.worker.worker import Worker as Process

H = TypeVar("H", bound=Callable[..., Any])
_TASK_TYPE_ATTRIBUTE = "__tenuto_task__"


def task(task_type: str | None = None) -> Callable[[H], H]:
    """Returns a decorator that marks a handler for `Worker.add`; default type: its name."""

    def mark(handler: H) -> H:
        setattr(handler, _TASK_TYPE_ATTRIBUTE, task_type or handler.__name__)
        return handler

    return mark


class Worker:
    """A worker process for one agent that runs tasks by handler functions."""

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
        """Returns a decorator that registers the handler for a type; `None` means all others.

        Raises `Invalid` if the type has a handler already.
        """

        def register(handler: H) -> H:
            if task_type in self._handlers:
                raise Invalid(f"task type {task_type!r} has a handler already; register one only")
            self._handlers[task_type] = handler
            return handler

        return register

    def add(self, *handlers: Callable[..., Any]) -> None:
        """Registers functions that are marked with `@task`; raises `Invalid` for any other."""
        for handler in handlers:
            task_type = getattr(handler, _TASK_TYPE_ATTRIBUTE, None)
            if task_type is None:
                raise Invalid(f"{handler!r} is not a handler; write @task above it")
            self.handles(task_type)(handler)

    def run(self) -> None:
        """Runs tasks until Ctrl-C or SIGTERM, then drains."""

        async def main() -> None:
            await self.serve(app.stop_on_signals())

        app.run(main())

    async def serve(self, stop: asyncio.Event) -> None:
        """Runs tasks until `stop` is set; then finishes or releases the running tasks.

        Raises `Invalid` if the worker has no handlers.
        """
        if not self._handlers:
            raise Invalid("the worker has no handlers; write @worker.handles above a function")
        settings = self._target.settings
        if self._slots is not None:
            settings = msgspec.structs.replace(settings, slots=self._slots)
        async with open_engine(self._target, listen=True) as engine:
            process = Process(engine, settings, connect=self._connect)
            engine.actor = process.id
            await process.host_functions(self._agent, self._handlers, **self._profile)
            await process.run(stop)

    def _connect(self) -> AbstractAsyncContextManager[WorkerEngine]:
        """Returns a context that opens another connection to the worker's server or database."""
        return open_engine(self._target)
