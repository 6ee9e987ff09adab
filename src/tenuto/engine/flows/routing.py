"""Finds the successor of a completed task, and asks for approvals."""

from datetime import datetime
from uuid import UUID

import msgspec

from tenuto.engine.flows.plans import PlanCache
from tenuto.engine.flows.rows import context_of, control_of
from tenuto.engine.rows import decode_json
from tenuto.model.flows.definition import Approval
from tenuto.model.flows.progress import ControlInput, NextStep, choose_next_step, is_next_child
from tenuto.model.tasks import commands
from tenuto.model.tasks.commands import Command
from tenuto.store.protocol import Row, Script, Statement


def find_next_step(plans: PlanCache, row: Row) -> Script[NextStep | None]:
    """Returns what runs next in a completed task's slot, or `None`; raises `ControlTaskFailed`.

    `None` if the slot ends, or if the task's `next` is the next child of the sequence anyway.
    """
    if row["kind"] in ("agent", "approval") and row["next"] is None:
        return None
    plan = yield from plans.load_plan(row["flow"])
    control_input = yield from _load_control_input(plans, row)
    step = choose_next_step(control_of(row), row["next"], control_input)
    context = context_of(row["context"])
    parent_key = context.groups[-1] if context.groups else None
    is_plain = step is not None and not step.jump and step.foreach is None
    if step is not None and is_plain and is_next_child(plan, parent_key, row["key"], step.key):
        return None
    return step


def _load_control_input(plans: PlanCache, row: Row) -> Script[ControlInput]:
    """Returns the values that a condition or foreach can read; no values for other tasks.

    The result of a control task without a prompt is that of its predecessor.
    """
    if row["kind"] in ("agent", "approval", "goto"):
        return ControlInput(result=None, task={}, input=None, results={})
    source = row["id"] if row["prompt"] is not None else row["follows"]
    outputs = yield Statement("outputs", {"ids": [] if source is None else [source]})
    results = yield from plans.load_results(row["flow"], [row["control"]])
    task = {"id": str(row["id"]), "key": row["key"], "kind": row["kind"]}
    return ControlInput(
        result=decode_json(outputs[0]["output"]) if outputs else None,
        task=task,
        input=decode_json(row["input"]),
        results=results,
    )


def ask_for_approval(item_id: UUID, row: Row, now: datetime) -> Script[Command]:
    """Creates the inbox item of an approval; returns the command that makes the task wait."""
    control = control_of(row)
    assert isinstance(control, Approval)
    command = commands.AwaitAnswer(
        hold=control.hold(), timeout_s=control.timeout_s, message=control.message
    )
    expires_at = None if control.timeout_s is None else command.until(now)
    yield approval_statement(item_id, row, control.message, expires_at, now)
    return command


def approval_statement(
    item_id: UUID, row: Row, message: str | None, expires_at: datetime | None, now: datetime
) -> Statement:
    """Returns the statement that creates the inbox item of an approval."""
    body = msgspec.json.encode({"message": message, "flow": row["flow"]}).decode()
    return Statement(
        "inbox_put",
        {
            "id": item_id,
            "workspace": row["workspace"],
            "task": row["id"],
            "kind": "approval",
            "title": message or f"approve {row['key']}",
            "body": body,
            "expires_at": expires_at,
            "now": now,
        },
    )
