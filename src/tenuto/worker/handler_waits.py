"""What a handler gets that waits for its children or for people."""

from collections.abc import Sequence
from hashlib import sha256
from typing import Any
from uuid import UUID

import msgspec

from tenuto.engine.agents.subtasks import Child

Names = Sequence[UUID | str]
ALL = "*"


class Parked(BaseException):
    """Raised in a handler whose task waits now: the attempt is over. Clean up and let it pass."""


class Decision(msgspec.Struct, frozen=True):
    """What a person decided, or what was to be decided when nobody did in time."""

    approved: bool
    by: str | None = None
    comment: str | None = None

    def __bool__(self) -> bool:
        return self.approved


class WaitKeys:
    """Names for a handler's waits: the same in every attempt that makes the same calls."""

    def __init__(self) -> None:
        self._made: dict[str, int] = {}

    def name(self, children: Names | None) -> str:
        """The name of the next wait for these children, or for all."""
        what = ALL if children is None else "\n".join(map(str, children))
        number = self._made[what] = self._made.get(what, 0) + 1
        said = f"{number}\n{what}"
        return sha256(said.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def decision_of(value: Any) -> Decision:
    """The decision as it was recorded."""
    return Decision(value["decision"] == "approved", value.get("by"), value.get("comment"))


__all__ = ["Child", "Decision", "Names", "Parked", "WaitKeys", "decision_of"]
