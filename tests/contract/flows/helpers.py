"""Helpers for tests of flows: short definitions, and agents that finish every claimable task."""

from collections.abc import Callable
from typing import Any
from uuid import UUID

import msgspec

from tenuto.engine.engine import Engine
from tenuto.engine.tasks.claim import ClaimedTask
from tenuto.model.agents.matching import AgentProfile
from tenuto.model.errors import Conflict
from tenuto.model.flows.definition import GroupSpec
from tenuto.model.flows.plan import Plan, Spec, build_plan
from tenuto.model.tasks.commands import Failure
from tenuto.model.tasks.submission import NewTask

WORKER = "host:1:worker"
Handler = Callable[[ClaimedTask], Any]


class Wrong(Exception):
    """A handler's way to fail its task for good."""


def task(key: str, **fields: Any) -> NewTask:
    return NewTask(title=key, key=key, **fields)


def group(key: str, *children: str, **fields: Any) -> GroupSpec:
    return GroupSpec(title=key, key=key, children=children, **fields)


def plan(root: str, *specs: Spec) -> Plan:
    existing = {spec.key or "": spec for spec in specs}
    return build_plan(root, existing.get)


async def start(engine: Engine, root: str, *specs: Spec, **options: Any) -> UUID:
    return await engine.flows.start_plan(plan(root, *specs), **options)


async def worked(
    engine: Engine, agent: AgentProfile, handler: Handler | None = None, maximum: int = 10_000
) -> list[str]:
    """Claim and finish until nothing is left; answers the keys in the order they were finished."""
    done: list[str] = []
    while len(done) < maximum:
        flowed = await engine.flows.run_deferred_once()
        claimed = await engine.claim(agent, WORKER, min(50, maximum - len(done)))
        if not claimed and not flowed:
            break
        for work in claimed:
            try:
                await _finish(engine, work, handler)
            except Conflict:  # only a cancel can have come in between
                await engine.confirm_cancel(work.fence, {"state": "killed"})
            done.append(work.key or work.title)
    return done


async def _finish(engine: Engine, work: ClaimedTask, handler: Handler | None) -> None:
    try:
        output = handler(work) if handler else {"key": work.key}
    except Wrong as error:
        failure = Failure(message=str(error), retryable=False)
        await engine.fail(work.fence, failure)
    else:
        await engine.complete(work.fence, output)


async def statuses(engine: Engine, flow: UUID) -> dict[str, list[str]]:
    """The statuses of what was made in a flow, by key."""
    from tenuto.store.protocol import Statement

    params = {"flow": flow, "workspace": engine.workspace, "most": 100_000}
    rows = await engine.core.store.fetch(Statement("flow_nodes", params))
    result: dict[str, list[str]] = {}
    for row in rows:
        result.setdefault(row["key"], []).append(row["status"])
    return result


async def flow_status(engine: Engine, flow: UUID) -> str:
    from tenuto.store.protocol import Statement

    params = {"id": flow, "workspace": engine.workspace}
    rows = await engine.core.store.fetch(Statement("flow_show", params))
    return str(rows[0]["status"])


def dumps(value: Any) -> str:
    return msgspec.json.encode(value).decode()
