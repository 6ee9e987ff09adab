"""What people hold back: which lanes a gate closes, for which agents, and until when."""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Literal, get_args

import msgspec

from tenuto.model import bounds
from tenuto.model.agents.matching import Requirements
from tenuto.model.errors import Invalid

GateKind = Literal["lane", "agent", "type", "workspace"]
KINDS: tuple[GateKind, ...] = get_args(GateKind)
EVERYTHING = "all"
"""The subject of a gate before the whole workspace."""
FOREVER = datetime.max.replace(tzinfo=UTC)
MAX_GATES = 1_000
"""Of a workspace."""


class ClaimPause(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is held back; `until` is none: until somebody lets it go on."""

    kind: GateKind
    subject: str
    reason: str | None = None
    until: datetime | None = None
    created_by: str | None = None

    def holds(self, now: datetime) -> bool:
        return self.until is None or self.until > now

    def blocks_lane(self, lane: int, needs: Requirements) -> bool:
        """Whether nobody may take tasks of the lane while it holds."""
        match self.kind:
            case "lane":
                return self.subject == str(lane)
            case "type":
                return self.subject == needs.task_type
            case "workspace":
                return True
            case "agent":
                return False

    def blocks_agent(self, agent: str) -> bool:
        """Whether the agent of that name may take nothing while it holds."""
        return self.kind == "agent" and self.subject == agent

    @property
    def describe(self) -> str:
        """What people read of it."""
        what = "the workspace" if self.kind == "workspace" else f"{self.kind} {self.subject}"
        by = f" by {self.created_by}" if self.created_by else ""
        why = f": {self.reason}" if self.reason else ""
        return f"{what} was paused{by}{why}"


def check(kind: str, subject: str, reason: str | None) -> None:
    """Raise `Invalid` unless that can be held back for that reason."""
    if kind not in KINDS:
        raise Invalid(f"no gate {kind[:40]!r}; known are {', '.join(KINDS)}", field="kind")
    bounds.text("subject", subject, bounds.MAX_TITLE, empty=False)
    if kind == "workspace" and subject != EVERYTHING:
        raise Invalid(f"the subject of a workspace's gate is {EVERYTHING!r}", field="subject")
    if kind == "lane" and not (subject.isascii() and subject.isdecimal()):
        raise Invalid("a lane is named by its number; `explain` tells it", field="subject")
    if reason is not None:
        bounds.text("reason", reason, bounds.MAX_ERROR)


def closed_until(
    gates: Iterable[ClaimPause], agent: str, lane: int, needs: Requirements
) -> datetime | None:
    """Until when gates keep the agent from the lane; none when none does."""
    found = [
        gate.until or FOREVER
        for gate in gates
        if gate.blocks_agent(agent) or gate.blocks_lane(lane, needs)
    ]
    return max(found, default=None)
