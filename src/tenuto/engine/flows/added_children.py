"""Those that joined a parallel group before its turn, and have theirs with it."""

from typing import TYPE_CHECKING
from uuid import UUID

from tenuto.engine.flows.outcomes import start_on_turn
from tenuto.engine.flows.rows import group_of
from tenuto.engine.rows import decode
from tenuto.model.flows.progress import CASCADE, GROUP_OPEN, Group, GroupStatus
from tenuto.store.protocol import Row, Script, Statement

if TYPE_CHECKING:
    from tenuto.engine.flows.advance import Cascade

ADMIT = "admit"
"""The kind of work that is left where too many have joined."""


def start_added_children(
    cascade: "Cascade", group: Group, after: UUID | None = None
) -> Script[None]:
    """Let the group's tasks run that wait for their turn, beyond a bound later, by id `after` one.

    The caller holds the group.
    """
    if cascade.spent >= CASCADE:
        cascade.defer(ADMIT, group.id, group.workspace, {"after": after})
        return
    params = {"group_id": group.id, "workspace": group.workspace, "after": after, "most": CASCADE}
    rows = yield Statement("waiting_in_turn", params)
    ids = [row["id"] for row in rows]
    if len(ids) == CASCADE:
        cascade.defer(ADMIT, group.id, group.workspace, {"after": ids[-1]})
    if ids:
        yield from cascade.apply_to_each(ids, start_on_turn)


def go_on(cascade: "Cascade", work: Row) -> Script[None]:
    """A piece of work: let more of a group's tasks run, unless it has ended or waits itself."""
    rows = yield Statement("groups_locked", {"ids": [work["subject"]]})
    group = group_of(rows[0])
    after = decode(work["data"])["after"]
    if group.status in GROUP_OPEN - {GroupStatus.WAITING}:
        yield from start_added_children(cascade, group, None if after is None else UUID(after))
