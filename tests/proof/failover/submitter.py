"""A client that hands in single tasks at a steady rate, each under a key, until it is told.

    python -m tests.proof.failover.submitter COUNT RATE

It writes every acknowledgement with its time to the recorder.
"""

import asyncio
import sys

from tenuto import app
from tenuto.chaos.client import QUICK_RETRY
from tenuto.chaos.recorder import append_lines
from tenuto.engine.engine import Engine
from tenuto.model.errors import Unavailable
from tenuto.model.tasks.submission import NewTask
from tenuto.periodic import wait_first_event
from tenuto.settings import load

LANES = 8
"""Submits that are under way at once."""
AGAIN_S = 0.2
TRIES = 20
ONCE_EVERY = 4
"""Of so many tasks one may be tried once: it dies of a claim that comes to nothing."""


def task(number: int) -> NewTask:
    """The task of that number: most are short; each 20th is long, each 20th saves checkpoints.

    A quarter, all of them short, have one attempt.
    """
    kind = {0: "long", 10: "saving"}.get(number % 20, "short")
    return NewTask(
        title=kind,
        task_type=kind,
        max_attempts=1 if number % ONCE_EVERY == 1 else TRIES,
        retry=QUICK_RETRY,
        idempotency_key=f"submitter.{number}.{kind}",
    )


async def submit(engine: Engine, new: NewTask) -> None:
    """Hand in a task until it is acknowledged."""
    while True:
        try:
            submitted = await engine.submit(new)
        except Unavailable:
            await wait_first_event([], AGAIN_S, engine.clock)
            continue
        append_lines(f"ack {new.idempotency_key} {submitted.id}", f"at {engine.clock.elapsed()}")
        return


async def lane(engine: Engine, first: int, count: int, rate: float) -> None:
    """Submit every task of one lane, never faster than its share of the rate."""
    due = engine.clock.elapsed() + first / rate
    for number in range(first, count, LANES):
        await wait_first_event([], max(0.0, due - engine.clock.elapsed()), engine.clock)
        await submit(engine, task(number))
        due = max(due + LANES / rate, engine.clock.elapsed())


async def main(count: str, rate: str) -> None:
    async with app.connect(load(), actor="submitter") as engine:
        lanes = [lane(engine, first, int(count), float(rate)) for first in range(LANES)]
        await asyncio.gather(*lanes)


if __name__ == "__main__":
    app.run(main(*sys.argv[1:]))
