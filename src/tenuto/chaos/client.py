"""A client of a run: submits tasks with idempotency keys and records the acknowledged ones.

    python -m tenuto.chaos.client NAME SEED RATE MIXTURE

If it is killed, its successor of the same name continues with the first key that was not
acknowledged: a submit whose response was lost is repeated, and must not create a second task.
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
from tenuto.chaos.recorder import RECORD_VARIABLE, Recorder, append_lines
from tenuto.engine.engine import Engine
from tenuto.model.errors import Unavailable
from tenuto.model.tasks.retry import RetryPolicy
from tenuto.model.tasks.submission import NewTask
from tenuto.periodic import wait_first_event
from tenuto.settings import load

QUICK_RETRY = RetryPolicy(base_s=0.1, cap_s=1.0)
MAX_BATCH = 8
MAX_ATTEMPTS = 100
FAILING_MAX_ATTEMPTS = 2
"""Maximum tries of a task that always fails."""
POISON_EVERY = 400
RETRY_S = 0.2


def kind_of(key: str) -> str:
    """Returns the kind of a task from its idempotency key."""
    return key.rpartition(".")[2]


class Client:
    """One client's tasks, in an order determined by its seed."""

    def __init__(self, name: str, seed: int, mixture: dict[str, int]) -> None:
        self._name = name
        self._seed = seed
        self._kinds = [kind for kind, share in mixture.items() for _ in range(share)]

    def task(self, number: int) -> NewTask:
        """Builds the task with this number; the same number gives the same task."""
        kind = SeededRandom(self._seed, f"{self._name}/{number}").choose(self._kinds)
        if number % POISON_EVERY == POISON_EVERY // 10:
            kind = "poison"
        must_fail = kind in ("failing", "poison")
        return NewTask(
            title=kind,
            task_type="default" if kind == "command" else kind,
            command=["sh", "-c", COMMAND, "sh", os.environ[RECORD_VARIABLE]]
            if kind == "command"
            else None,
            max_attempts=FAILING_MAX_ATTEMPTS if must_fail else MAX_ATTEMPTS,
            retry=QUICK_RETRY,
            idempotency_key=f"{self._name}.{number}.{kind}",
        )

    def next_number(self, record: Recorder) -> int:
        """Returns the number after this client's last acknowledged task; 0 if there is none."""
        keys = [key.split(".") for key in record.acknowledged]
        return max((int(number) + 1 for name, number, _ in keys if name == self._name), default=0)


async def submit_and_record(
    engine: Engine, new_tasks: Sequence[NewTask], stop: asyncio.Event
) -> bool:
    """Submits tasks, again after outages, and records their ids; False if stopped before that."""
    while not stop.is_set():
        try:
            submitted = await engine.submit_many(new_tasks)
        except Unavailable:
            await wait_first_event([stop], RETRY_S, engine.clock)
            continue
        append_lines(
            *(
                f"ack {new.idempotency_key} {task.id}"
                for new, task in zip(new_tasks, submitted, strict=True)
            )
        )
        return True
    return False


async def main(name: str, seed: str, rate: str, mixture: str) -> None:
    """Submits tasks at `rate` per second until stopped; the arguments are those of the command."""
    stop = app.stop_on_signals()
    client = Client(name, int(seed), msgspec.json.decode(mixture, type=dict[str, int]))
    number = client.next_number(Recorder(Path(os.environ[RECORD_VARIABLE])).read())
    async with app.connect(load(), actor=name) as engine:
        while not stop.is_set():
            count = 1 + number % MAX_BATCH
            if await submit_and_record(
                engine, [client.task(number + i) for i in range(count)], stop
            ):
                number += count
            await wait_first_event([stop], count / float(rate), engine.clock)


if __name__ == "__main__":
    app.run(main(*sys.argv[1:]))
