"""A client that submits tasks and prints what was acknowledged, the second with a crash armed.

    python -m tests.proof.crash.submitter TASK POINT

TASK is a task as JSON; without a POINT nothing crashes.
"""

import sys

import msgspec

from tenuto import app, crash_points
from tenuto.model.tasks.submission import NewTask
from tenuto.settings import load


async def main(task: str, point: str = "") -> None:
    new = msgspec.json.decode(task, type=NewTask)
    async with app.connect(load(), actor="submitter") as engine:
        before = msgspec.structs.replace(new, idempotency_key=None)
        sys.stdout.write(f"{(await engine.submit(before)).id}\n")
        sys.stdout.flush()
        crash_points._CRASH_AT = point or None
        sys.stdout.write(f"{(await engine.submit(new)).id}\n")


app.run(main(*sys.argv[1:]))
