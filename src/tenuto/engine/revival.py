"""Retry: an ended task is tried again, and with it what ended because of it.

A slot of a group or flow that ended badly is open again; a group that failed for it runs again, and
what never had its turn waits for it again. So whatever waits for the join gets it once, in the end.
"""

from collections.abc import Sequence
from uuid import UUID

import msgspec

from tenuto.engine.cascade import Cascade
from tenuto.engine.flow_rows import flow_of, group_of, is_by_engine
from tenuto.model import commands
from tenuto.model.errors import Conflict
from tenuto.model.flow import (
    CASCADE,
    FLOW_OPEN,
    GROUP_OPEN,
    FlowStatus,
    Group,
    GroupStatus,
)
from tenuto.model.task import Status, Task
from tenuto.store.protocol import Row, Script, Statement

_RETRIED = frozenset({Status.FAILED, Status.DEAD, Status.CANCELLED})
_REVIVED = frozenset({Status.FAILED, Status.SKIPPED})


class Revival:
    """One retry within a cascade's transaction. Its methods are scripts."""

    def __init__(self, cascade: Cascade, workspace: UUID, *, deep: bool) -> None:
        self._cascade = cascade
        self._workspace = workspace
        self._deep = deep
        self.revived = 0

    def retry(self, task: UUID) -> Script[None]:
        """Give an ended task its tries again; deep, also what ended because of it."""
        counts = yield from self._reopen_slot(task)
        waited = yield Statement("waited_for", {"ids": [task]})
        by_engine = yield from self._is_control(task)

        def again(found: Task) -> commands.Command | None:
            if found.status not in _RETRIED:
                return None
            if by_engine:
                return commands.Revive(hold="act")
            return commands.Retry(watched=counts or bool(waited) or self._deep)

        changed = yield from self._cascade.each([task], again, acts=True, ended=True)
        if not changed:
            raise Conflict("only a task that failed, died or was cancelled can be retried")
        self.revived += 1
        if self._deep:
            yield from self._victims([task])

    def _is_control(self, task: UUID) -> Script[bool]:
        rows = yield Statement("places", rows={"wanted": [(task, self._workspace)]})
        return bool(rows) and is_by_engine(rows[0])

    def victims(self, tasks: Sequence[UUID]) -> Script[None]:
        """Go on reviving what ended because of these."""
        yield from self._victims(list(tasks))

    def _victims(self, causes: list[UUID]) -> Script[None]:
        while causes:
            if self._cascade.spent >= CASCADE:
                for cause in causes:
                    self._cascade.later("revive", cause, self._workspace)
                return
            params = {"ids": sorted(causes), "most": CASCADE}
            rows = yield Statement("victims", params)
            if len(rows) == CASCADE:
                for cause in causes:
                    self._cascade.later("revive", cause, self._workspace)
            pairs = sorted({(row["id"], row["needs"]) for row in rows})
            if not pairs:
                return
            yield Statement("dependency_reopen", rows={"pair": pairs})
            causes = sorted({task for task, _ in pairs})
            for task in causes:
                yield from self._reopen_slot(task)
            unmet = yield Statement("unmet", {"ids": causes})
            left = {row["id"]: row["n"] for row in unmet}
            yield from self._revive(causes, left)

    def _revive(self, ids: list[UUID], unmet: dict[UUID, int]) -> Script[None]:
        def again(task: Task) -> commands.Command | None:
            if task.status not in _REVIVED:
                return None
            hold = task.hold if task.hold in ("act", "turn", "turn:act") else None
            return commands.Revive(hold=hold, unmet=unmet.get(task.id, 0))

        changed = yield from self._cascade.each(ids, again, ended=True)
        self.revived += len(changed)

    # Where the task stands.

    def _reopen_slot(self, task: UUID) -> Script[bool]:
        """Count the task's slot as open again; false when its end will matter to nobody."""
        rows = yield Statement("places", rows={"wanted": [(task, self._workspace)]})
        if not rows or rows[0]["flow"] is None:
            return False
        row = rows[0]
        if row["group_id"] is None:
            return (yield from self._reopen_flow(row["flow"]))
        return (yield from self._reopen_group(row["group_id"], row["slot"]))

    def _reopen_group(self, group_id: UUID, slot: int) -> Script[bool]:
        rows = yield Statement("groups_locked", {"ids": [group_id]})
        group = group_of(rows[0])
        if group.status in GROUP_OPEN:
            yield self._cascade.group_change(_with_slot(group))
            return True
        if not self._deep or group.status is GroupStatus.COMPLETED:
            return False
        if not (yield from self._reopen_above(group)):
            return False
        again = msgspec.structs.replace(
            _with_slot(group),
            status=GroupStatus.RUNNING,
            finished_at=None,
            turn=slot if group.kind == "sequential" else None,
        )
        yield self._cascade.group_change(again, "group_reopened")
        if again.made < again.total:
            self._cascade.later("expand", group.id, group.workspace)
        yield from self._revive_turns(group)
        return True

    def _reopen_above(self, group: Group) -> Script[bool]:
        if group.parent is None:
            return (yield from self._reopen_flow(group.flow))
        return (yield from self._reopen_group(group.parent, group.slot))

    def _revive_turns(self, group: Group) -> Script[None]:
        params = {"parent": group.id, "workspace": group.workspace, "most": 10 * CASCADE}
        rows = yield Statement("skipped_in_turn", params)
        tasks = sorted(row["id"] for row in rows if not row["is_group"])
        if tasks:
            yield from self._revive(tasks, {})
        groups = sorted(row["id"] for row in rows if row["is_group"])
        if groups:
            found = yield Statement("groups_locked", {"ids": groups})
            for row in found:
                waiting = msgspec.structs.replace(
                    group_of(row), status=GroupStatus.WAITING, finished_at=None
                )
                yield self._cascade.group_change(waiting, "group_reopened")

    def _reopen_flow(self, flow_id: UUID) -> Script[bool]:
        rows = yield Statement("flows_locked", {"ids": [flow_id]})
        flow = flow_of(rows[0])
        after = msgspec.structs.replace(flow, open=flow.open + 1, failed=max(flow.failed - 1, 0))
        if flow.status in FLOW_OPEN:
            yield self._cascade.flow_change(after)
            return True
        if not self._deep or flow.status is FlowStatus.COMPLETED:
            return False
        again = msgspec.structs.replace(after, status=FlowStatus.RUNNING, finished_at=None)
        yield self._cascade.flow_change(again, "flow_reopened")
        return True


def _with_slot(group: Group) -> Group:
    return msgspec.structs.replace(group, open=group.open + 1, failed=max(group.failed - 1, 0))


def go_on(cascade: Cascade, work: Row) -> Script[None]:
    """A piece of work: revive what is left of what ended because of a task."""
    rows = yield Statement("task_state", {"ids": [work["subject"]]})
    if rows and Status(rows[0]["status"]) in _REVIVED:
        return  # it has failed again meanwhile
    yield from Revival(cascade, work["workspace"], deep=True).victims([work["subject"]])
