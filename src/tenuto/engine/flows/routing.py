"""Where a flow goes from a task that is done, and how people are asked on the way."""

from datetime import datetime
from uuid import UUID

import msgspec

from tenuto.engine.flows.plans import PlanCache
from tenuto.engine.flows.rows import context_of, control_of
from tenuto.engine.rows import decode
from tenuto.model.flows.progress import ControlInput, NextStep, is_next_child, step_after
from tenuto.store.protocol import Row, Script, Statement


def next_step(plans: PlanCache, row: Row) -> Script[NextStep | None]:
    """What takes the place of a task; nothing where its slot ends, or the next one has its turn."""
    if row["kind"] in ("agent", "approval") and row["next"] is None:
        return None
    plan = yield from plans.plan(row["flow"])
    seen = yield from _seen(plans, row)
    step = step_after(control_of(row), row["next"], seen)
    context = context_of(row["context"])
    around = context.groups[-1] if context.groups else None
    plain = step is not None and not step.jump and step.foreach is None
    if step is not None and plain and is_next_child(plan, around, row["key"], step.key):
        return None
    return step


def _seen(plans: PlanCache, row: Row) -> Script[ControlInput]:
    """What a control task may look at; without a prompt, its result is its predecessor's."""
    if row["kind"] in ("agent", "approval", "goto"):
        return ControlInput(result=None, task={}, input=None, results={})
    source = row["id"] if row["prompt"] is not None else row["follows"]
    found = yield Statement("outputs", {"ids": [] if source is None else [source]})
    results = yield from plans.results(row["flow"], [row["control"]])
    task = {"id": str(row["id"]), "key": row["key"], "kind": row["kind"]}
    return ControlInput(
        result=decode(found[0]["output"]) if found else None,
        task=task,
        input=decode(row["input"]),
        results=results,
    )


def question(
    item: UUID, row: Row, message: str | None, until: datetime | None, now: datetime
) -> Statement:
    """The statement that puts an approval to people."""
    body = msgspec.json.encode({"message": message, "flow": row["flow"]}).decode()
    return Statement(
        "inbox_put",
        {
            "id": item,
            "workspace": row["workspace"],
            "task": row["id"],
            "kind": "approval",
            "title": message or f"approve {row['key']}",
            "body": body,
            "expires_at": until,
            "now": now,
        },
    )
