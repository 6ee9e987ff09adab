"""PgQueuer on PostgreSQL."""

import asyncio
from collections.abc import Sequence
from typing import Any, ClassVar

import asyncpg
from bench.harness import main, run_async
from bench.peer import Mode, PostgresPeer
from bench.workload import Journal
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver
from pgqueuer.models import Job
from pgqueuer.queries import Queries


class PgQueuerPeer(PostgresPeer):
    """Follows its performance guide: asyncpg, one connection per manager, autovacuum tuned."""

    bulk_size = 1000
    help_command = ("pgq", "--help")
    notes = "durability=durable (its default), pgq autovac applied"
    defaults: ClassVar = {"batch_size": 300, "managers": 1}
    completed_sql = "select count(*) from pgqueuer_log where status = 'successful'"
    clear_sql = "truncate pgqueuer, pgqueuer_log, pgqueuer_statistics"

    async def connect(self) -> None:
        await super().connect()
        self._connection = await asyncpg.connect(self.target)
        self._queries = Queries(AsyncpgDriver(self._connection))
        await self._queries.install()
        await self._queries.optimize_autovacuum()

    async def close(self) -> None:
        await self._connection.close()
        await super().close()

    async def submit(self, payload: str) -> None:
        await self._queries.enqueue("noop", payload.encode())

    async def submit_many(self, payloads: Sequence[str]) -> None:
        size = len(payloads)
        encoded: list[bytes | None] = [payload.encode() for payload in payloads]
        await self._queries.enqueue(["noop"] * size, encoded, [0] * size)

    def run_worker(self, mode: Mode, journal: Journal) -> None:
        if mode is Mode.DRAIN:
            settings = {"batch_size": self.options["batch_size"]}
            run_async(self._run_managers(self.options["managers"], settings, journal))
        else:
            run_async(self._run_managers(1, {}, journal))

    async def _run_managers(
        self, managers: int, settings: dict[str, Any], journal: Journal
    ) -> None:
        await asyncio.gather(*(self._run_manager(settings, journal) for _ in range(managers)))

    async def _run_manager(self, settings: dict[str, Any], journal: Journal) -> None:
        async def noop(job: Job) -> None:
            assert job.payload is not None
            if delay := journal.record_start(job.payload.decode()):
                await asyncio.sleep(delay)

        queue = PgQueuer(AsyncpgDriver(await asyncpg.connect(self.target)))
        queue.entrypoint("noop")(noop)
        await queue.run(**settings)


if __name__ == "__main__":
    main({"pgqueuer": PgQueuerPeer})
