"""A client of a run: hands in tasks under keys and tells the recorder what was acknowledged.

    python -m tenuto.chaos.client NAME SEED RATE MIXTURE

Whatever happens to it, its successor of the same name goes on with the first key that was not
acknowledged: a submit whose answer was lost is repeated, and must not make a second task.
"""

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tenuto import app
from tenuto.chaos.handlers import COMMAND
from tenuto.chaos.plan import SeededRandom
from tenuto.chaos.recorder import FILE, Recorder, note
from tenuto.engine.engine import Engine
from tenuto.model.errors import Unavailable
from tenuto.model.tasks.retry import RetryPolicy
from tenuto.model.tasks.submission import NewTask
from tenuto.periodic import wait_first_event
from tenuto.settings import load

SOON = RetryPolicy(base_s=0.1, cap_s=1.0)
MOST = 8
TRIES = 100
FEW = 2
"""Tries of a task that cannot succeed."""
POISON_EVERY = 400
AGAIN_S = 0.2


def kind_of(key: str) -> str:
    """What a task does, by its key."""
    return key.rpartition(".")[2]


class Client:
    """One client's tasks, in an order that its seed decides."""

    def __init__(self, name: str, seed: int, mixture: dict[str, int]) -> None:
        self._name = name
        self._seed = seed
        self._kinds = [kind for kind, share in mixture.items() for _ in range(share)]

    def task(self, number: int) -> NewTask:
        """The task of that number, the same however often it is asked for."""
        kind = SeededRandom(self._seed, f"{self._name}/{number}").choose(self._kinds)
        if number % POISON_EVERY == POISON_EVERY // 10:
            kind = "poison"
        doomed = kind in ("failing", "poison")
        return NewTask(
            title=kind,
            task_type="default" if kind == "command" else kind,
            command=["sh", "-c", COMMAND, "sh", os.environ[FILE]] if kind == "command" else None,
            max_attempts=FEW if doomed else TRIES,
            retry=SOON,
            idempotency_key=f"{self._name}.{number}.{kind}",
        )

    def next(self, record: Recorder) -> int:
        """The number after the last that was acknowledged."""
        ours = [key.split(".") for key in record.acknowledged]
        return max((int(number) + 1 for name, number, _ in ours if name == self._name), default=0)


async def submit(engine: Engine, news: Sequence[NewTask], stop: asyncio.Event) -> bool:
    """Hand in tasks until they are acknowledged or nobody wants them any more."""
    while not stop.is_set():
        try:
            made = await engine.submit_many(news)
        except Unavailable:
            await wait_first_event([stop], AGAIN_S, engine.clock)
            continue
        note(*(f"ack {new.idempotency_key} {one.id}" for new, one in zip(news, made, strict=True)))
        return True
    return False


async def main(name: str, seed: str, rate: str, mixture: str) -> None:
    stop = app.stop_on_signals()
    client = Client(name, int(seed), msgspec.json.decode(mixture, type=dict[str, int]))
    number = client.next(Recorder(Path(os.environ[FILE])).read())
    async with app.connect(load(), actor=name) as engine:
        while not stop.is_set():
            count = 1 + number % MOST
            if await submit(engine, [client.task(number + i) for i in range(count)], stop):
                number += count
            await wait_first_event([stop], count / float(rate), engine.clock)


if __name__ == "__main__":
    app.run(main(*sys.argv[1:]))
