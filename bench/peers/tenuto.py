"""Tenuto on both of its stores, with audit trail, fences and lanes."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any, ClassVar

from bench.harness import main
from bench.peer import Mode, Peer
from bench.workload import Journal

from tenuto import app
from tenuto.client.client import AsyncClient
from tenuto.coordinator.coordinator import Coordinator
from tenuto.model.tasks.submission import NewTask
from tenuto.settings import Settings
from tenuto.worker.worker import Worker

TABLES = ("task", "task_body", "task_output", "attempt", "event", "cursor")


class _Tenuto(Peer):
    """Base of the peers on both stores."""

    bulk_size = 1000
    help_command = ("orchestrate", "--help")
    notes = "audit trail, fences and lanes on; coordinator in the worker's process"
    defaults: ClassVar = {"slots": 2000, "client": 0}

    def url(self) -> str:
        return self.target

    async def connect(self) -> None:
        store = app.create_store(self.url())
        await store.migrate()
        await store.close()
        self._stack = AsyncExitStack()
        self._engine = await self._stack.enter_async_context(
            app.connect(Settings(database=self.url()))
        )
        self._client = AsyncClient(engine=self._engine)

    async def close(self) -> None:
        await self._stack.aclose()

    async def submit(self, payload: str) -> None:
        if self.options["client"]:
            await self._client.tasks.create("noop", task_type="noop", input=payload)
            return
        await self._engine.submit(NewTask(title="noop", task_type="noop", input=payload))

    async def submit_many(self, payloads: Sequence[str]) -> None:
        await self._engine.submit_many(
            [NewTask(title="noop", task_type="noop", input=payload) for payload in payloads]
        )

    async def count_completed(self) -> int:
        return (await self._engine.query.counts(self._engine.workspace))["COMPLETED"]

    def run_worker(self, mode: Mode, journal: Journal) -> None:
        slots = self.options["slots"] if mode is Mode.DRAIN else 20
        app.run(self._run_worker(Settings(database=self.url(), slots=slots), journal))

    async def _run_worker(self, settings: Settings, journal: Journal) -> None:
        async def noop(ctx: Any) -> None:
            if delay := journal.record_start(ctx.input):
                await asyncio.sleep(delay)

        forever = asyncio.Event()
        async with app.connect(settings, listen=True) as engine:
            worker = Worker(engine, settings, connect=lambda: app.connect(settings))
            await worker.host_functions("bench", {"noop": noop})
            coordinator = Coordinator(engine, settings, name=worker.id)
            await asyncio.gather(worker.run(forever), coordinator.run(forever))


class TenutoPostgres(_Tenuto):
    """PostgreSQL, with its default durable settings."""

    async def _execute(self, sql: str) -> None:
        import asyncpg

        connection = await asyncpg.connect(self.target)
        try:
            await connection.execute(sql)
        finally:
            await connection.close()

    async def clear(self) -> None:
        await self._execute(f"truncate {', '.join(TABLES)}")

    async def maintain_store(self) -> None:
        await self._execute("vacuum analyze")


class TenutoSqlite(_Tenuto):
    """SQLite, WAL with synchronous=FULL."""

    defaults: ClassVar = {"slots": 3000, "client": 0}

    def url(self) -> str:
        return f"sqlite:///{self.target}"

    async def clear(self) -> None:
        import sqlite3

        connection = sqlite3.connect(self.target, timeout=30, isolation_level=None)
        for table in TABLES:
            connection.execute(f"delete from {table}")
        connection.execute("pragma wal_checkpoint(truncate)")
        connection.close()


if __name__ == "__main__":
    main({"tenuto-postgres": TenutoPostgres, "tenuto-sqlite": TenutoSqlite})
