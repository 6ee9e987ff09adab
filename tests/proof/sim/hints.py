"""Hints that get lost, come twice, come late and in any order, or stop altogether."""

import asyncio
from collections.abc import Callable, Iterable

from tests.proof.sim.loop import Process
from tests.proof.sim.plan import Faults

from tenuto.broker.protocol import Listener


class Broker:
    """What lies between the processes."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._listeners: list[tuple[Process, Listener]] = []
        self._wiped = 0

    def wipe(self) -> None:
        """Lose everything that is under way."""
        self._wiped += 1

    def send(self, topic: str) -> None:
        faults, plan = self._faults, self._faults.plan
        if plan.hints_off:
            faults.happened["hints off"] += 1
            return
        for process, listener in self._listeners:
            if faults.happens(plan.hint_drop, "hint dropped"):
                continue
            self._deliver(process, listener, topic)
            if faults.happens(plan.hint_double, "hint doubled"):
                self._deliver(process, listener, topic)

    def _deliver(self, process: Process, listener: Listener, topic: str) -> None:
        delay = self._faults.rng.random() * self._faults.plan.latency
        if self._faults.happens(0.1, "hint delayed"):
            delay += self._faults.rng.random() * 5
        sent = self._wiped
        asyncio.get_running_loop().call_later(
            delay, lambda: listener(topic) if self._wiped == sent else None, context=process.context
        )

    def add(self, process: Process, listener: Listener) -> Callable[[], None]:
        entry = (process, listener)
        self._listeners.append(entry)
        return lambda: self._listeners.remove(entry) if entry in self._listeners else None


class SimWakeups:
    """One process's ear and mouth."""

    def __init__(self, broker: Broker, process: Process) -> None:
        self._broker = broker
        self._process = process

    async def open(self) -> None:
        pass

    async def close(self) -> None:
        pass

    def notify(self, topics: Iterable[str]) -> None:
        if self._process.state == "running":
            for topic in sorted(topics):
                self._broker.send(topic)

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        return self._broker.add(self._process, listener)
