"""Pauses by operators: which lanes and agents a pause stops, and until when."""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Literal, get_args

import msgspec

from tenuto.model import bounds
from tenuto.model.agents.matching import Requirements
from tenuto.model.errors import Invalid

PauseKind = Literal["lane", "agent", "type", "workspace"]
KINDS: tuple[PauseKind, ...] = get_args(PauseKind)
WORKSPACE_SUBJECT = "all"
"""The subject of a pause of the whole workspace."""
FOREVER = datetime.max.replace(tzinfo=UTC)
MAX_PAUSES = 1_000
"""Per workspace."""


class ClaimPause(msgspec.Struct, frozen=True, kw_only=True):
    """A pause of a lane, an agent, a task type or a workspace; without `until`, until resumed."""

    kind: PauseKind
    subject: str
    reason: str | None = None
    until: datetime | None = None
    created_by: str | None = None

    def is_active(self, now: datetime) -> bool:
        """True if the pause has not ended."""
        return self.until is None or self.until > now

    def blocks_lane(self, lane: int, requirements: Requirements) -> bool:
        """True if the pause stops the lane for all agents; a pause of one agent never does."""
        match self.kind:
            case "lane":
                return self.subject == str(lane)
            case "type":
                return self.subject == requirements.task_type
            case "workspace":
                return True
            case "agent":
                return False

    def blocks_agent(self, agent: str) -> bool:
        """True if this is a pause of the agent with this name; a workspace pause is not."""
        return self.kind == "agent" and self.subject == agent

    @property
    def description(self) -> str:
        """The pause as text for people: its subject, who paused it, and the reason."""
        subject = "the workspace" if self.kind == "workspace" else f"{self.kind} {self.subject}"
        author = f" by {self.created_by}" if self.created_by else ""
        reason = f": {self.reason}" if self.reason else ""
        return f"{subject} was paused{author}{reason}"


def check(kind: str, subject: str, reason: str | None) -> None:
    """Raises `Invalid` unless a pause of this kind can have this subject and reason."""
    if kind not in KINDS:
        raise Invalid(f"kind must be one of {', '.join(KINDS)}, not {kind[:40]!r}", field="kind")
    bounds.check_text("subject", subject, bounds.MAX_TITLE, empty=False)
    if kind == "workspace" and subject != WORKSPACE_SUBJECT:
        raise Invalid(
            f"the subject of a workspace pause must be {WORKSPACE_SUBJECT!r}", field="subject"
        )
    if kind == "lane" and not (subject.isascii() and subject.isdecimal()):
        raise Invalid(
            "the subject of a lane pause must be a lane id;"
            ' "orchestrate task explain" shows the lane of a task',
            field="subject",
        )
    if reason is not None:
        bounds.check_text("reason", reason, bounds.MAX_ERROR)


def latest_pause_end(
    pauses: Iterable[ClaimPause], agent: str, lane: int, requirements: Requirements
) -> datetime | None:
    """Returns the latest end of the pauses that apply, `FOREVER` if open; `None` without pauses."""
    ends = [
        pause.until or FOREVER
        for pause in pauses
        if pause.blocks_agent(agent) or pause.blocks_lane(lane, requirements)
    ]
    return max(ends, default=None)
