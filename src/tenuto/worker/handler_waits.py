"""Types for handlers that wait for subtasks or people."""

from collections.abc import Sequence
from hashlib import sha256
from typing import Any
from uuid import UUID

import msgspec

from tenuto.engine.agents.subtasks import Child

Names = Sequence[UUID | str]
ALL = "*"


class Parked(BaseException):
    """Raised in a handler whose task now waits: the attempt is over. Clean up and let it pass."""


class Decision(msgspec.Struct, frozen=True):
    """A person's decision, or the default if nobody decided in time."""

    approved: bool
    by: str | None = None
    comment: str | None = None

    def __bool__(self) -> bool:
        """True if approved, so that `if context.approve(...)` works."""
        return self.approved


class WaitKeys:
    """Generates the keys of waits: the same keys in every attempt that makes the same calls."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def next_key(self, children: Names | None) -> str:
        """Returns the key of the next wait for these children, or for all of them if `None`."""
        target = ALL if children is None else "\n".join(map(str, children))
        number = self._counts[target] = self._counts.get(target, 0) + 1
        text = f"{number}\n{target}"
        return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def parse_decision(value: Any) -> Decision:
    """Converts the stored answer to an approval into a `Decision`."""
    return Decision(value["decision"] == "approved", value.get("by"), value.get("comment"))


__all__ = ["Child", "Decision", "Names", "Parked", "WaitKeys", "parse_decision"]
