"""Huey on SQLite."""

import logging
import time
from typing import Any, ClassVar

from bench.harness import main
from bench.peer import Mode, Peer
from bench.workload import Journal
from huey import SqliteHuey


class HueyPeer(Peer):
    """SqliteHuey with fsync; the task returns a value, so that its completion is recorded.

    The busy timeout is 60 s: with the default of 5 s, two processes on a slow disk lose results.
    """

    share = 0.5
    is_polling = True
    help_command = ("huey_consumer", "--help")
    notes = "WAL, fsync=True; results stored; a task is deleted before it runs (at most once)"
    defaults: ClassVar = {"workers": 1, "worker_type": "thread", "latency_delay": 0.001}

    async def connect(self) -> None:
        self._huey, self._noop = self._create_huey(None)

    async def close(self) -> None:
        self._huey.storage.close()

    async def submit(self, payload: str) -> None:
        self._noop(payload)

    async def clear(self) -> None:
        self._huey.storage.flush_all()

    async def count_completed(self) -> int:
        return int(self._huey.result_count())

    def run_worker(self, mode: Mode, journal: Journal) -> None:
        logging.disable(logging.WARNING)
        huey, _ = self._create_huey(journal)
        delay = self.options["latency_delay"]
        settings: dict[Mode, dict[str, Any]] = {
            Mode.DRAIN: {
                "workers": self.options["workers"],
                "worker_type": self.options["worker_type"],
            },
            Mode.LATENCY: {"initial_delay": delay, "max_delay": delay, "backoff": 1},
            Mode.DEFAULT: {"workers": 20},
        }
        huey.create_consumer(**settings[mode]).run()

    def _create_huey(self, journal: Journal | None) -> tuple[Any, Any]:
        def noop(payload: str) -> bool:
            assert journal is not None
            if delay := journal.record_start(payload):
                time.sleep(delay)
            return True

        huey = SqliteHuey(filename=self.target, fsync=True, timeout=60)
        return huey, huey.task(name="noop")(noop)


if __name__ == "__main__":
    main({"huey": HueyPeer})
