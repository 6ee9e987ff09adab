"""Pieces: what cascades of a flow left to do, each done in a transaction of its own."""

from collections.abc import Callable
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec

from tenuto.engine.agents import subtask_tree
from tenuto.engine.flows import added_children
from tenuto.engine.flows.advance import Cascade
from tenuto.engine.flows.outcomes import FinishedTask
from tenuto.engine.flows.rows import flow_of, group_of
from tenuto.engine.limits import budgets, concurrency
from tenuto.engine.rows import decode
from tenuto.engine.tasks import retry
from tenuto.model.flows.progress import CASCADE, GROUP_OPEN, Flow, FlowStatus
from tenuto.model.limits.budgets import HOLD as BUDGET
from tenuto.model.tasks import commands
from tenuto.model.tasks.commands import Command
from tenuto.model.tasks.task import LEASED, TERMINAL, Status, Task
from tenuto.store.protocol import Row, Script, Statement

_STOPPING_S = 2.0
"""How long until somebody looks again at tasks that are being stopped for a pause."""


def end_flow(cascade: Cascade, flow: Flow, reason: str | None, now: datetime) -> Script[None]:
    """End a flow that has not ended, with all that is open in it. The caller holds its row."""
    done = msgspec.structs.replace(flow, status=FlowStatus.CANCELLED, finished_at=now)
    yield cascade.flow_change(done, "flow_cancelled", message=reason)
    yield from end_roots(cascade, flow)


def end_roots(cascade: Cascade, flow: Flow) -> Script[None]:
    """End what is open at the top of a flow that was cancelled."""
    rows = yield Statement("roots_open", {"flow": flow.id, "most": CASCADE})
    if len(rows) == CASCADE:
        cascade.defer("roots", flow.id, flow.workspace)
    tasks = sorted(row["id"] for row in rows if not row["is_group"])
    if tasks:
        yield from cascade.apply_to_each(
            tasks, lambda _: commands.Cancel(reason="its flow was cancelled")
        )
    yield from cascade.end_groups([row["id"] for row in rows if row["is_group"]], cancel=True)


def _roots(cascade: Cascade, work: Row) -> Script[None]:
    rows = yield Statement("flows_locked", {"ids": [work["subject"]]})
    yield from end_roots(cascade, flow_of(rows[0]))


def _ended(cascade: Cascade, work: Row) -> Script[None]:
    rows = yield Statement("task_state", {"ids": [work["subject"]]})
    ended = [FinishedTask(row["id"], row["workspace"], Status(row["status"])) for row in rows]
    yield from cascade.run([each for each in ended if each.status in TERMINAL])


def _dependents(cascade: Cascade, work: Row) -> Script[None]:
    rows = yield Statement("task_state", {"ids": [work["subject"]]})
    ended = [FinishedTask(row["id"], row["workspace"], Status(row["status"])) for row in rows]
    yield from cascade.notify_dependents([each for each in ended if each.status in TERMINAL])


def _expand(cascade: Cascade, work: Row) -> Script[None]:
    rows = yield Statement("groups_locked", {"ids": [work["subject"]]})
    cascade.grow(group_of(rows[0]))


def _rest(cascade: Cascade, work: Row) -> Script[None]:
    rows = yield Statement("groups_locked", {"ids": [work["subject"]]})
    group = group_of(rows[0])
    if group.status not in GROUP_OPEN:
        cascade.end_rest(group, cancel=decode(work["data"])["cancel"])


def _pause(cascade: Cascade, work: Row) -> Script[None]:
    if (yield from _is_still(work, FlowStatus.PAUSED)):
        yield from _each_open(cascade, work, lambda _: commands.Pause(reason="its flow was paused"))


def _resume(cascade: Cascade, work: Row) -> Script[None]:
    if not (yield from _is_still(work, FlowStatus.RUNNING)):
        return
    stopping: list[UUID] = []

    def resumed(task: Task) -> Command | None:
        if task.status in LEASED and task.pause_requested_at is not None:
            stopping.append(task.id)
        return commands.Resume() if task.status is Status.PAUSED else None

    yield from _each_open(cascade, work, resumed, _unheld)
    if stopping:
        # Their workers have not said yet that they stopped for the pause.
        data = {"of": decode(work["data"])["of"], "tasks": stopping}
        cascade.defer("resume", work["subject"], work["workspace"], data, _STOPPING_S)


def _is_still(work: Row, status: FlowStatus) -> Script[bool]:
    """Whether nobody has said otherwise of the flow or group since."""
    query = "groups_locked" if decode(work["data"])["of"] == "group" else "flows_locked"
    rows = yield Statement(query, {"ids": [work["subject"]]})
    return bool(rows) and rows[0]["status"] == status


def _unheld(task: Task) -> Command | None:
    """For what was made while its flow was paused."""
    if task.hold is None or task.hold.partition(":")[0] != "paused":
        return None
    return commands.ClearHold(hold="act" if task.hold.endswith(":act") else None)


def _each_open(
    cascade: Cascade, work: Row, *choices: Callable[[Task], Command | None]
) -> Script[None]:
    """Commands for every open task of a flow or a group, a bounded number of tasks at a time."""
    data: dict[str, Any] = decode(work["data"])
    if "tasks" in data:
        for choose in choices:
            yield from cascade.apply_to_each(
                [UUID(each) for each in data["tasks"]], choose, acts=True
            )
        return
    query = "group_tasks_open" if data["of"] == "group" else "flow_tasks_open"
    params = {
        "group_id" if data["of"] == "group" else "flow": work["subject"],
        "workspace": work["workspace"],
        "after": None if "after" not in data else UUID(data["after"]),
        "most": CASCADE,
    }
    rows = yield Statement(query, params)
    ids = [row["id"] for row in rows]
    for choose in choices if ids else ():
        yield from cascade.apply_to_each(ids, choose, acts=True)
    if len(ids) == CASCADE:
        again = data | {"after": str(ids[-1])}
        cascade.defer(work["kind"], work["subject"], work["workspace"], again)


PIECES: dict[str, Callable[[Cascade, Row], Script[None]]] = {
    "ended": _ended,
    "dependents": _dependents,
    "expand": _expand,
    "rest": _rest,
    "roots": _roots,
    "pause": _pause,
    "resume": _resume,
    "revive": retry.go_on,
    "again": retry.go_on_from_failed,
    BUDGET: budgets.go_on,
    "turn": concurrency.go_on,
    "supersede": concurrency.go_on_superseding,
    subtask_tree.BELOW: subtask_tree.go_on,
    added_children.ADMIT: added_children.go_on,
}
