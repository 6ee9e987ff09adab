"""A client that starts a flow once, whatever happens to it.

    python -m tests.proof.crash.starter PLAN

PLAN is a flow's plan as JSON. However often this is run, there is one flow.
"""

import sys

import msgspec

from tenuto import app
from tenuto.model.flows.plan import Plan
from tenuto.settings import load


async def main(plan: str) -> None:
    async with app.connect(load(), actor="starter") as engine:
        created = msgspec.json.decode(plan, type=Plan)
        await engine.flows.start_plan(created, fire_key="once")


app.run(main(*sys.argv[1:]))
