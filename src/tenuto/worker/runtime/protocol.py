"""The interface between an attempt and the runtime that executes it."""

from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from tenuto.model.tasks.commands import Failure
from tenuto.settings import Settings
from tenuto.worker.context import Context
from tenuto.worker.session import Supervisor

Handler = Callable[[Any], Any]


class AttemptFailed(Exception):
    """The attempt failed; the failure's error class decides about a retry.

    `resume_at`: the time before which a retry makes no sense, if known.
    """

    def __init__(self, failure: Failure, resume_at: Any = None) -> None:
        super().__init__(failure.message)
        self.failure = failure
        self.resume_at = resume_at


class CannotStart(Exception):
    """The session could not be started."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class Runtime(Protocol):
    """Runs attempts of one agent."""

    name: str
    """The name by which tasks require it."""

    task_types: tuple[str, ...] | None
    """The task types that it can run; `None`: all."""

    def free_sessions(self, busy: int) -> int | None:
        """Returns how many sessions can start beside `busy`; may reserve them. `None`: no limit.

        Call `release_reservation` if no task was claimed for what it reserved.
        """

    def release_reservation(self) -> None:
        """Releases what `free_sessions` reserved, because no task was claimed for it."""

    async def run(self, context: Context, grace_s: float, receipt: dict[str, Any]) -> Any:
        """Runs the attempt and returns its output; raises `AttemptFailed` or `CannotStart`.

        If cancelled: stops the session, records in `receipt` how, and re-raises.
        """


class RuntimeContext(msgspec.Struct, frozen=True):
    """What a runtime is created with."""

    settings: Settings
    supervisor: Supervisor
    """Starts and kills sessions of programs."""
    command: tuple[str, ...] | None = None
    """The agent's command line (`--command`)."""
    handlers: dict[str | None, Handler] | None = None
    """The agent's handlers (`--app`) by task type; the one under `None` runs every other type."""
