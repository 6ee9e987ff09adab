"""The contract of an adapter: what a job queue must offer to be measured.

An adapter is a module `bench/peers/<module>.py` that subclasses `Peer` and ends with
`if __name__ == "__main__": main({"<peer name>": TheClass})`. The harness does all the timing.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, ClassVar

from bench.workload import Journal


class NotMeasurableError(Exception):
    """A peer cannot be measured here; the message says why and goes into the table."""


class Mode(StrEnum):
    """What a worker is started for."""

    DRAIN = "drain"  # the settings with the highest throughput
    LATENCY = "latency"  # the settings with the shortest wait of an idle worker
    DEFAULT = "default"  # as the peer ships, but with room for 20 tasks at a time


class Peer(ABC):
    """One job queue on one store, already empty when the adapter gets it."""

    #: The measures that make sense for it; the harness leaves out the others.
    measures: ClassVar[frozenset[str]] = frozenset(
        {"submit_one", "submit_bulk", "drain_1", "drain_2", "idle_latency", "recovery", "help"}
    )
    #: Part of `--tasks` that is drained. Slow peers take fewer, so that a round stays short.
    share: ClassVar[float] = 1.0
    #: Tasks handed over in one call of `submit_many`; 0 where there is no bulk interface.
    bulk_size: ClassVar[int] = 0
    #: True where an idle worker polls, so that its default settings are measured as well.
    polls: ClassVar[bool] = False
    #: Command line after the interpreter's folder, for example ("pgq", "--help").
    help_command: ClassVar[tuple[str, ...]] = ()
    #: Durability and anything else a reader must know to judge the figures.
    notes: ClassVar[str] = ""
    #: Settings that `--option NAME=VALUE` may change; the values are the best ones found.
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
        """Creates what the peer needs in its store and opens the producer's connection."""

    @abstractmethod
    async def close(self) -> None:
        """Closes the producer's connection."""

    @abstractmethod
    async def submit(self, payload: str) -> None:
        """Returns once this one task is as durable as the peer makes it."""

    async def submit_many(self, payloads: Sequence[str]) -> None:
        """Submits up to `bulk_size` tasks through the peer's bulk interface."""
        raise NotImplementedError

    @abstractmethod
    async def clear(self) -> None:
        """Forgets every task, finished ones included. No worker is running."""

    async def settle(self) -> None:
        """Lets the store catch up after a fill (statistics, vacuum); not timed."""
        return

    @abstractmethod
    async def completed(self) -> int:
        """How many tasks the store itself records as completed, asked of it each time."""

    @abstractmethod
    def work(self, mode: Mode, journal: Journal) -> None:
        """Runs one worker process until it is killed.

        Each task calls `journal.started(payload)` first and then sleeps for as long as that says.
        """


class PostgresPeer(Peer):
    """What all peers on PostgreSQL share: a connection of the harness beside the peer's own."""

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

    async def settle(self) -> None:
        await self.control.execute("vacuum analyze")

    async def completed(self) -> int:
        return int(await self.control.fetchval(self.completed_sql))
