"""Starts children that were added to a parallel group before the group started."""

from typing import TYPE_CHECKING
from uuid import UUID

from tenuto.engine.flows.outcomes import turn_command
from tenuto.engine.flows.rows import group_of
from tenuto.engine.rows import decode_json
from tenuto.model.flows.groups import GROUP_OPEN, Group, GroupStatus
from tenuto.model.flows.progress import MAX_CASCADE_ROWS
from tenuto.store.protocol import Row, Script, Statement

if TYPE_CHECKING:
    from tenuto.engine.flows.advance import Cascade

START_ADDED = "admit"
"""The kind of deferred work that starts the rest of more than `MAX_CASCADE_ROWS` children."""


def start_added_children(
    cascade: "Cascade", group: Group, after: UUID | None = None
) -> Script[None]:
    """Starts a group's tasks that wait for their turn: those with an id above `after`, if given.

    Defers those beyond `MAX_CASCADE_ROWS`. The caller has locked the group.
    """
    if cascade.rows_written >= MAX_CASCADE_ROWS:
        cascade.defer(START_ADDED, group.id, group.workspace, {"after": after})
        return
    params = {
        "group_id": group.id,
        "workspace": group.workspace,
        "after": after,
        "most": MAX_CASCADE_ROWS,
    }
    rows = yield Statement("children_waiting_for_turn", params)
    ids = [row["id"] for row in rows]
    if len(ids) == MAX_CASCADE_ROWS:
        cascade.defer(START_ADDED, group.id, group.workspace, {"after": ids[-1]})
    if ids:
        yield from cascade.apply_to_each(ids, turn_command)


def run_deferred(cascade: "Cascade", work: Row) -> Script[None]:
    """Deferred work: starts more of a group's added tasks, if the group runs or is paused."""
    rows = yield Statement("groups_locked", {"ids": [work["subject"]]})
    group = group_of(rows[0])
    after = decode_json(work["data"])["after"]
    if group.status in GROUP_OPEN - {GroupStatus.WAITING}:
        yield from start_added_children(cascade, group, None if after is None else UUID(after))
