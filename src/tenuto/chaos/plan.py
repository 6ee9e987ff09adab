"""What a run is to do: how long, with which faults, and the chance that a seed decides."""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, TypeVar

import msgspec

from tenuto.model.errors import Invalid

T = TypeVar("T")

EVERY_S = {
    "kill": 2.0,
    "stop": 6.0,
    "crash": 5.0,
    "cut": 7.0,
    "swallow": 5.0,
    "restart": 20.0,
}
"""Every kind of fault, with the seconds between two of them, more or less."""
ANYWHERE = ("kill", "stop", "crash")
ON_POSTGRES = (*ANYWHERE, "cut", "swallow")
ON_OWN_SERVER = (*ON_POSTGRES, "restart")
OWN_SERVER = "postgresql:"
"""The address that stands for a private PostgreSQL of the run's own."""
MINUTES = 1.0
SHORT: dict[str, Any] = {
    "heartbeat_s": 0.5,
    "lease_s": 2,
    "tick_s": 0.3,
    "poll_s": 0.3,
    "grace_s": 0.5,
    "drain_s": 1,
    "slots": 24,
}
"""The settings of all processes: short times, so that minutes see what else takes days."""
STAFF = {"worker": 3, "commands": 1, "coordinator": 2, "client": 2}
"""How many processes of each kind there are."""
REST_S = SHORT["lease_s"] + SHORT["tick_s"] + 1.0 + 2.5 + 45.0
"""Lease, tick, backoff, run, and slack for a coordinator that waits for a database it lost."""
USUAL = {"short": 8, "thread": 3, "saving": 3, "long": 4, "command": 2, "failing": 1}
"""How many tasks of each kind are in a mixture; one poison is added to many of those."""


class ChaosPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    database: str | None = None
    minutes: float | None = None
    tasks: int | None = None
    faults: tuple[str, ...] = ()
    leader: bool = True
    seed: int = 1
    rate: float = 20.0
    """Tasks a second that each client hands in."""
    staff: dict[str, int] = msgspec.field(default_factory=STAFF.copy)
    mixture: dict[str, int] = msgspec.field(default_factory=USUAL.copy)
    every_s: dict[str, float] = msgspec.field(default_factory=EVERY_S.copy)
    victims: tuple[str, ...] = ("worker", "commands", "coordinator", "client")
    rest_s: float = REST_S
    """Seconds without an end of any task after which what is left is stuck."""
    program: tuple[str, ...] = ()
    """What stands between `python -m` and the module to run; for deployments with a fault."""

    def possible(self) -> tuple[str, ...]:
        """The faults that this kind of database can have."""
        if self.database is None or self.database.startswith("sqlite:"):
            return ANYWHERE
        return ON_OWN_SERVER if self.database == OWN_SERVER else ON_POSTGRES

    def planned(self) -> tuple[str, ...]:
        """The faults that must happen; `Invalid` for one that cannot."""
        wrong = [each for each in self.faults if each not in self.possible()]
        if wrong:
            raise Invalid(
                f"no fault {', '.join(wrong)} on this database; there are"
                f" {', '.join(self.possible())}"
            )
        return self.faults or self.possible()


class SeededRandom:
    """Chance that a seed and a name decide: the same ones, the same rolls."""

    def __init__(self, seed: int, name: str) -> None:
        self._name = f"{seed}/{name}"
        self._rolls = 0

    def roll(self) -> float:
        """A number from 0 up to 1."""
        self._rolls += 1
        digest = blake2b(f"{self._name}/{self._rolls}".encode(), digest_size=7).digest()
        return int.from_bytes(digest, "big") / (1 << 56)

    def choose(self, things: Sequence[T]) -> T:
        return things[int(self.roll() * len(things))]

    def around(self, value: float) -> float:
        """A number from half to one and a half of the value."""
        return value * (0.5 + self.roll())
