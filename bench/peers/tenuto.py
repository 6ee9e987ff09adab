"""Tenuto itself, on both of its stores.

To be filled in when the engine exists. Each class needs, as every adapter (see bench/peer.py):

- `connect`: migrate the empty database at `self.target`, open the producer (group commit on, as
  shipped). `target` is a PostgreSQL URL with the socket's folder as `host`, or an SQLite file.
- `submit`: one task of type "noop" whose input holds the 200 characters of `payload`; returns when
  it is committed. `submit_many`: up to `bulk_size` of them through the bulk submit.
- `completed`: `select count(*)` of the tasks with status COMPLETED, asked of the store.
- `clear`: empties all that grows with tasks (tasks, payloads, attempts, events). PostgreSQL:
  `clear_sql` and `completed_sql` are enough.
- `work(mode, journal)`: one worker process, with the coordinator's duties as shipped, until it is
  killed. The function runtime's handler is

      async def noop(ctx):
          if delay := journal.started(ctx.input["payload"]):
              await asyncio.sleep(delay)

  DRAIN: the slots and batch size that drain fastest. LATENCY and DEFAULT: what ships; DEFAULT with
  20 slots. Audit trail, fences and lanes stay on in all of them.
- `help_command = ("orchestrate", "--help")`.
"""

from collections.abc import Mapping
from typing import ClassVar

from bench.harness import main
from bench.peer import Mode, NotMeasurableError, Peer
from bench.workload import Journal


class _Tenuto(Peer):
    """What both stores share."""

    bulk_size = 1000
    help_command = ("orchestrate", "--help")
    notes = "audit trail, fences and lanes on"
    defaults: ClassVar = {"slots": 200}

    def __init__(self, target: str, options: Mapping[str, str]) -> None:
        super().__init__(target, options)
        raise NotMeasurableError("the adapter is not written yet")

    async def connect(self) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError

    async def submit(self, payload: str) -> None:
        raise NotImplementedError

    async def clear(self) -> None:
        raise NotImplementedError

    async def completed(self) -> int:
        raise NotImplementedError

    def work(self, mode: Mode, journal: Journal) -> None:
        raise NotImplementedError


class TenutoPostgres(_Tenuto):
    """PostgreSQL, with its default durable settings."""


class TenutoSqlite(_Tenuto):
    """SQLite, WAL with synchronous=FULL."""


if __name__ == "__main__":
    main({"tenuto-postgres": TenutoPostgres, "tenuto-sqlite": TenutoSqlite})
