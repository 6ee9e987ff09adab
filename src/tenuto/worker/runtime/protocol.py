"""The interface between an attempt and the runtime that executes it."""

from typing import Any, Protocol

from tenuto.model.tasks.commands import Failure
from tenuto.worker.context import Context


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

    def free_sessions(self, busy: int) -> int | None:
        """Returns the sessions that can start now while `busy` run; `None`: limited by slots only.

        The call reserves them. Call `release_reservation` if no task was claimed for them.
        """

    def release_reservation(self) -> None:
        """Releases what `free_sessions` reserved, because no task was claimed for it."""

    async def run(self, context: Context, grace_s: float, receipt: dict[str, Any]) -> Any:
        """Runs the attempt and returns its output.

        If cancelled: stops the session, records in `receipt` how, and re-raises.
        """
