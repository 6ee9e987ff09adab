"""The settings of a run: duration, faults, processes, and random numbers from a seed."""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, TypeVar

import msgspec

from tenuto.model.errors import Invalid

T = TypeVar("T")

FAULT_INTERVALS_S = {
    "kill": 2.0,
    "stop": 6.0,
    "crash": 5.0,
    "cut": 7.0,
    "swallow": 5.0,
    "restart": 20.0,
}
"""Every kind of fault, with the average seconds between two faults of that kind."""
ANY_DATABASE_FAULTS = ("kill", "stop", "crash")
POSTGRES_FAULTS = (*ANY_DATABASE_FAULTS, "cut", "swallow")
OWN_SERVER_FAULTS = (*POSTGRES_FAULTS, "restart")
OWN_SERVER = "postgresql:"
"""The address that means: start a private PostgreSQL for the run."""
DEFAULT_MINUTES = 1.0
SHORT_SETTINGS: dict[str, Any] = {
    "heartbeat_s": 0.5,
    "lease_s": 2,
    "tick_s": 0.3,
    "poll_s": 0.3,
    "grace_s": 0.5,
    "drain_s": 1,
    "slots": 24,
}
"""Settings of all processes: short times, so that minutes cover what otherwise takes days."""
PROCESS_COUNTS = {"worker": 3, "commands": 1, "coordinator": 2, "client": 2}
"""Number of processes of each kind."""
SETTLE_TIMEOUT_S = SHORT_SETTINGS["lease_s"] + SHORT_SETTINGS["tick_s"] + 1.0 + 2.5 + 45.0
"""Lease + tick + backoff + run time, and 45 s for a coordinator that lost its database."""
DEFAULT_MIXTURE = {"short": 8, "thread": 3, "saving": 3, "long": 4, "command": 2, "failing": 1}
"""Number of tasks of each kind in a mixture. Poison tasks are added (`client.POISON_EVERY`)."""


class ChaosPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one run."""

    database: str | None = None
    """Address of the database; a SQLite file in the run's folder if `None`."""
    minutes: float | None = None
    """Duration of the faults; used if `tasks` is `None`."""
    tasks: int | None = None
    """Number of tasks that must be acknowledged before the faults end."""
    faults: tuple[str, ...] = ()
    """Kinds of faults; all that the database allows if empty."""
    leader: bool = True
    """False if all coordinators work at once, without an election."""
    seed: int = 1
    rate: float = 20.0
    """Tasks per second that each client submits."""
    process_counts: dict[str, int] = msgspec.field(default_factory=PROCESS_COUNTS.copy)
    """Number of processes of each kind."""
    mixture: dict[str, int] = msgspec.field(default_factory=DEFAULT_MIXTURE.copy)
    """Share of each kind of task."""
    fault_intervals_s: dict[str, float] = msgspec.field(default_factory=FAULT_INTERVALS_S.copy)
    """Average seconds between two faults of each kind."""
    target_kinds: tuple[str, ...] = ("worker", "commands", "coordinator", "client")
    """Kinds of processes that faults kill, stop and crash."""
    settle_timeout_s: float = SETTLE_TIMEOUT_S
    """Seconds without any finished task after which the open tasks count as stuck."""
    program: tuple[str, ...] = ()
    """Arguments between `python -m` and the module; tests use it to plant a bug."""

    def possible_faults(self) -> tuple[str, ...]:
        """Returns the faults that are possible with this kind of database."""
        if self.database is None or self.database.startswith("sqlite:"):
            return ANY_DATABASE_FAULTS
        return OWN_SERVER_FAULTS if self.database == OWN_SERVER else POSTGRES_FAULTS

    def planned_faults(self) -> tuple[str, ...]:
        """Returns the faults that must happen; raises `Invalid` for an impossible one."""
        impossible = [fault for fault in self.faults if fault not in self.possible_faults()]
        if impossible:
            raise Invalid(
                f"fault {', '.join(impossible)} is not possible on this database; use some of"
                f" {', '.join(self.possible_faults())}"
            )
        return self.faults or self.possible_faults()


class SeededRandom:
    """Random numbers determined by a seed and a name: the same ones give the same numbers."""

    def __init__(self, seed: int, name: str) -> None:
        self._name = f"{seed}/{name}"
        self._rolls = 0

    def roll(self) -> float:
        """Returns the next random number, from 0 up to but not including 1."""
        self._rolls += 1
        digest = blake2b(f"{self._name}/{self._rolls}".encode(), digest_size=7).digest()
        return int.from_bytes(digest, "big") / (1 << 56)

    def choose(self, items: Sequence[T]) -> T:
        """Returns a random item."""
        return items[int(self.roll() * len(items))]

    def around(self, value: float) -> float:
        """Returns a random number between 0.5 and 1.5 times the value."""
        return value * (0.5 + self.roll())
