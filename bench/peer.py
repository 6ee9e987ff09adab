"""The contract of an adapter: what a job queue must offer to be measured.

An adapter is a module `bench/peers/<module>.py` that subclasses `Peer` and ends with
`if __name__ == "__main__": main({"<peer name>": TheClass})`. All timing is in the harness.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, ClassVar

from bench.workload import Journal


class NotMeasurableError(Exception):
    """A peer cannot be measured on this machine; the tables show the message."""


class Mode(StrEnum):
    """The purpose of a worker, which selects its settings."""

    DRAIN = "drain"  # the settings with the highest throughput
    LATENCY = "latency"  # the settings with the lowest latency of an idle worker
    DEFAULT = "default"  # the peer's defaults, but up to 20 tasks at a time


class Peer(ABC):
    """A job queue on a store, which is empty when the adapter is created."""

    #: The measures that apply to this peer; the harness skips the others.
    measures: ClassVar[frozenset[str]] = frozenset(
        {"submit_one", "submit_bulk", "drain_1", "drain_2", "idle_latency", "recovery", "help"}
    )
    #: Part of `--tasks` that is drained; below 1 for slow peers, so that a round stays short.
    share: ClassVar[float] = 1.0
    #: Number of tasks in one call of `submit_many`; 0 if there is no bulk interface.
    bulk_size: ClassVar[int] = 0
    #: True if an idle worker polls: its latency is then also measured with default settings.
    is_polling: ClassVar[bool] = False
    #: Program in the interpreter's folder and its arguments, for example ("pgq", "--help").
    help_command: ClassVar[tuple[str, ...]] = ()
    #: Durability and other facts that affect the figures.
    notes: ClassVar[str] = ""
    #: Settings that `--option NAME=VALUE` can change, with the best values that were tried.
    defaults: ClassVar[Mapping[str, int | float | str]] = {}

    def __init__(self, target: str, options: Mapping[str, str]) -> None:
        self.target = target
        unknown = set(options) - set(self.defaults)
        if unknown:
            raise NotMeasurableError(f"unknown options: {', '.join(sorted(unknown))}")
        self.options: dict[str, Any] = {
            name: type(value)(options.get(name, value)) for name, value in self.defaults.items()
        }

    @abstractmethod
    async def connect(self) -> None:
        """Creates the peer's schema in the store and opens the producer's connection."""

    @abstractmethod
    async def close(self) -> None:
        """Closes the producer's connection."""

    @abstractmethod
    async def submit(self, payload: str) -> None:
        """Submits one task; returns when the task is as durable as the peer makes it."""

    async def submit_many(self, payloads: Sequence[str]) -> None:
        """Submits up to `bulk_size` tasks through the peer's bulk interface."""
        raise NotImplementedError

    @abstractmethod
    async def clear(self) -> None:
        """Deletes all tasks, also finished ones. Call while no worker runs."""

    async def maintain_store(self) -> None:
        """Updates the statistics of the store and vacuums it after a fill; not timed."""
        return

    @abstractmethod
    async def count_completed(self) -> int:
        """Returns the number of tasks that the store records as completed; caches nothing."""

    @abstractmethod
    def run_worker(self, mode: Mode, journal: Journal) -> None:
        """Runs one worker process until it is killed.

        Each task first calls `journal.record_start(payload)`, then sleeps for the seconds returned.
        """


class PostgresPeer(Peer):
    """Base of the peers on PostgreSQL; has a connection for the harness beside the peer's own."""

    #: Counts the tasks recorded as completed.
    completed_sql: ClassVar[str]
    #: Empties every table of the peer that grows with tasks.
    clear_sql: ClassVar[str]

    async def connect(self) -> None:
        import asyncpg

        self.control = await asyncpg.connect(self.target)

    async def close(self) -> None:
        await self.control.close()

    async def clear(self) -> None:
        await self.control.execute(self.clear_sql)

    async def maintain_store(self) -> None:
        await self.control.execute("vacuum analyze")

    async def count_completed(self) -> int:
        return int(await self.control.fetchval(self.completed_sql))
