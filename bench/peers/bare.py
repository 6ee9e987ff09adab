"""Plain inserts into the stores: an upper limit for queues with the same durability."""

import sqlite3
from collections.abc import Sequence
from typing import ClassVar

from bench.harness import main
from bench.peer import Mode, Peer, PostgresPeer
from bench.workload import Journal

_INSERT_ONLY = frozenset({"submit_one", "submit_bulk"})


class BareSqlite(Peer):
    """One insert per commit in WAL mode with synchronous=FULL; in bulk, one commit per 1,000."""

    measures = _INSERT_ONLY
    bulk_size = 1000
    notes = "WAL, synchronous=FULL; submit is one insert and one commit"
    defaults: ClassVar = {}

    async def connect(self) -> None:
        self._connection = sqlite3.connect(self.target, isolation_level=None)
        self._connection.execute("pragma journal_mode = wal")
        self._connection.execute("pragma synchronous = full")
        self._connection.execute("create table task (id integer primary key, payload text)")

    async def close(self) -> None:
        self._connection.close()

    async def submit(self, payload: str) -> None:
        self._connection.execute("insert into task (payload) values (?)", (payload,))

    async def submit_many(self, payloads: Sequence[str]) -> None:
        rows = [(payload,) for payload in payloads]
        self._connection.execute("begin immediate")
        self._connection.executemany("insert into task (payload) values (?)", rows)
        self._connection.execute("commit")

    async def clear(self) -> None:
        self._connection.execute("delete from task")

    async def count_completed(self) -> int:
        raise NotImplementedError

    def run_worker(self, mode: Mode, journal: Journal) -> None:
        raise NotImplementedError


class BarePostgres(PostgresPeer):
    """One autocommitted insert over asyncpg; in bulk, COPY."""

    measures = _INSERT_ONLY
    bulk_size = 1000
    notes = "submit is one autocommitted insert over asyncpg; bulk is COPY"
    clear_sql = "truncate task"

    async def connect(self) -> None:
        await super().connect()
        sql = "create table task (id bigserial primary key, payload text not null)"
        await self.control.execute(sql)

    async def submit(self, payload: str) -> None:
        await self.control.execute("insert into task (payload) values ($1)", payload)

    async def submit_many(self, payloads: Sequence[str]) -> None:
        rows = [(payload,) for payload in payloads]
        await self.control.copy_records_to_table("task", records=rows, columns=["payload"])

    def run_worker(self, mode: Mode, journal: Journal) -> None:
        raise NotImplementedError


if __name__ == "__main__":
    main({"bare-sqlite": BareSqlite, "bare-postgres": BarePostgres})
