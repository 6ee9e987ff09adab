"""The seam between the attempt's pipeline and what really runs."""

from typing import Any, Protocol

from tenuto.model.tasks.commands import Failure
from tenuto.worker.context import Context


class AttemptFailed(Exception):
    """The attempt did not finish; the failure's class decides what follows."""

    def __init__(self, failure: Failure, resume_at: Any = None) -> None:
        super().__init__(failure.message)
        self.failure = failure
        self.resume_at = resume_at


class CannotStart(Exception):
    """The session never began."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class Runtime(Protocol):
    """Runs attempts of one agent."""

    name: str

    def free_sessions(self, busy: int) -> int | None:
        """Sessions that can be started now beside so many; `None` for as many as there are slots.

        Whoever asks is taken to start them, unless it says that there were none.
        """

    def release_reservation(self) -> None:
        """What `room` allowed found nothing to start."""

    async def run(self, context: Context, grace_s: float, receipt: dict[str, Any]) -> Any:
        """The output. When cancelled: end the session, note in `receipt` how, and re-raise."""
