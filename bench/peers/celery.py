"""Celery with Redis as broker and result backend."""

import time
from typing import Any, ClassVar

import redis
from bench.harness import main
from bench.peer import Mode, Peer
from bench.workload import Journal
from celery import Celery

BROKER_DB, BACKEND_DB = 0, 1


class CeleryPeer(Peer):
    """Late acknowledgement, results stored, no messages between workers; not in default mode."""

    share = 0.25
    help_command = ("celery", "--help")
    notes = (
        "Redis appendonly, appendfsync everysec (may lose the last second); task_acks_late; "
        "results stored; recovery with its default, early acknowledgement"
    )
    defaults: ClassVar = {"pool": "prefork", "concurrency": 2, "prefetch": 500}

    async def connect(self) -> None:
        self._app, self._noop = self._create_app(None, Mode.DRAIN)
        self._broker = redis.Redis(unix_socket_path=self.target, db=BROKER_DB)
        self._backend = redis.Redis(unix_socket_path=self.target, db=BACKEND_DB)

    async def close(self) -> None:
        self._app.close()

    async def submit(self, payload: str) -> None:
        self._noop.delay(payload)

    async def clear(self) -> None:
        self._broker.flushdb()
        self._backend.flushdb()

    async def count_completed(self) -> int:
        # The backend's database has one key per finished task and no other keys.
        return int(self._backend.dbsize())

    def run_worker(self, mode: Mode, journal: Journal) -> None:
        app, _ = self._create_app(journal, mode)
        command = ["worker", "--loglevel", "CRITICAL"]
        if mode is Mode.DEFAULT:
            command += ["--concurrency", "20"]
        else:
            command += ["--without-gossip", "--without-mingle", "--without-heartbeat"]
            command += ["--pool", self.options["pool"]]
            command += ["--concurrency", str(self.options["concurrency"])]
        app.worker_main(command)

    def _create_app(self, journal: Journal | None, mode: Mode) -> tuple[Any, Any]:
        def noop(payload: str) -> bool:
            assert journal is not None
            if delay := journal.record_start(payload):
                time.sleep(delay)
            return True

        # Only the worker has a result backend: a producer with one subscribes to every result.
        backend = None if journal is None else self._url(BACKEND_DB)
        app = Celery("bench", broker=self._url(BROKER_DB), backend=backend)
        if mode is not Mode.DEFAULT:
            app.conf.task_acks_late = True
            app.conf.worker_prefetch_multiplier = self.options["prefetch"]
        return app, app.task(name="noop")(noop)

    def _url(self, database: int) -> str:
        return f"redis+socket://{self.target}?virtual_host={database}"


if __name__ == "__main__":
    main({"celery": CeleryPeer})
