"""Procrastinate on PostgreSQL."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, ClassVar

from bench.harness import main, run_async
from bench.peer import Mode, PostgresPeer
from bench.workload import Journal
from procrastinate import App, PsycopgConnector


class ProcrastinatePeer(PostgresPeer):
    """One worker with concurrent coroutines, LISTEN/NOTIFY on, finished jobs kept (its default)."""

    share = 0.2
    bulk_size = 1000
    help_command = ("procrastinate", "--help")
    notes = "delete_jobs=never (its default)"
    defaults: ClassVar = {"concurrency": 20, "pool": 3}
    completed_sql = "select count(*) from procrastinate_jobs where status = 'succeeded'"
    clear_sql = "truncate procrastinate_jobs, procrastinate_events cascade"

    async def connect(self) -> None:
        await super().connect()
        self._app, self._noop = self._create_app(None)
        await self._app.open_async()
        await self._app.schema_manager.apply_schema_async()

    async def close(self) -> None:
        await self._app.close_async()
        await super().close()

    async def submit(self, payload: str) -> None:
        await self._noop.defer_async(payload=payload)

    async def submit_many(self, payloads: Sequence[str]) -> None:
        await self._noop.batch_defer_async(*({"payload": payload} for payload in payloads))

    def run_worker(self, mode: Mode, journal: Journal) -> None:
        concurrency = 20 if mode is Mode.DEFAULT else self.options["concurrency"]
        run_async(self._run_worker(concurrency, journal))

    async def _run_worker(self, concurrency: int, journal: Journal) -> None:
        app, _ = self._create_app(journal)
        async with app.open_async():
            await app.run_worker_async(concurrency=concurrency)

    def _create_app(self, journal: Journal | None) -> tuple[Any, Any]:
        async def noop(payload: str) -> None:
            assert journal is not None
            if delay := journal.record_start(payload):
                await asyncio.sleep(delay)

        logging.disable(logging.WARNING)  # it warns of an app in the main module
        size = self.options["pool"]
        app = App(connector=PsycopgConnector(conninfo=self.target, min_size=size, max_size=size))
        return app, app.task(name="noop")(noop)


if __name__ == "__main__":
    main({"procrastinate": ProcrastinatePeer})
