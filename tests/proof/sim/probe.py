"""Looks at the database now and then while a run is under way."""

import asyncio
from typing import Any

from tests.proof.sim.actors import Scene
from tests.proof.sim.recorder import Handling

from tenuto.model.tasks.task import LEASED

EVERY_S = 1.7


class Probe:
    """What must hold at any time, and between any two looks."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._before: dict[str, tuple[Any, ...]] = {}
        self._overtaken: dict[int, float] = {}
        self.healed_at: float | None = None

    async def run(self) -> None:
        while True:
            self.look()
            await asyncio.sleep(EVERY_S)

    def look(self) -> None:
        rows = self._scene.database.rows(
            "select id, status, version, attempt, tries, max_attempts, lease_until,"
            " checkpoint_seq, agent from task"
        )
        now = {row[0]: row for row in rows}
        for row in rows:
            self._row(row)
            if (before := self._before.get(row[0])) is not None:
                self._between(before, row)
        for task in self._before.keys() - now.keys():
            self._scene.recorder.wrong("I1", f"{task} vanished")
        self._before = now
        self._capacity(rows)
        self._sessions(now)

    def _row(self, row: tuple[Any, ...]) -> None:
        task, status, _, _, tries, maximum, lease, *_ = row
        if (lease is not None) != (status in LEASED):
            self._scene.recorder.wrong("I7", f"{task} is {status}, its lease {lease}")
        if status in ("PENDING", "RETRY_WAIT") and tries >= maximum:
            self._scene.recorder.wrong("I15", f"{task} is queued though no try is left")

    def _between(self, before: tuple[Any, ...], row: tuple[Any, ...]) -> None:
        for name, index in {"version": 2, "attempt": 3, "checkpoint_seq": 7}.items():
            if row[index] < before[index]:
                self._scene.recorder.wrong("I3", f"{row[0]}: {name} went back")
        if before[1] == "COMPLETED" and row[1] != "COMPLETED":
            self._scene.recorder.wrong("I12", f"{row[0]} was COMPLETED, is {row[1]}")

    def _capacity(self, rows: list[tuple[Any, ...]]) -> None:
        maximum = self._scene.plan.max_concurrent
        agents = [row[8] for row in rows if row[1] in LEASED]
        for agent in set(agents) if maximum is not None else ():
            if agents.count(agent) > (maximum or 0):
                self._scene.recorder.wrong("I7", f"agent {agent} has {agents.count(agent)}")

    def _sessions(self, now: dict[str, tuple[Any, ...]]) -> None:
        """Once healed, no handler goes on for long after its attempt is over."""
        settings = self._scene.plan.settings
        timeout_s = settings.heartbeat_s + settings.grace_s + 8
        for item in self._scene.recorder.handling:
            if item.process.state != "running" or self._current(item, now):
                continue
            since = self._overtaken.setdefault(id(item), self._scene.loop.time())
            if self.healed_at is None:
                continue
            if self._scene.loop.time() - max(since, self.healed_at) > timeout_s:
                subject = f"attempt {item.attempt} of {item.task} on {item.process.name}"
                self._scene.recorder.wrong("zombie", f"{subject} runs on")
                self._overtaken[id(item)] = float("inf")

    def _current(self, handling: Handling, now: dict[str, tuple[Any, ...]]) -> bool:
        row = now[str(handling.task)]
        return row[1] in LEASED and row[3] == handling.attempt
