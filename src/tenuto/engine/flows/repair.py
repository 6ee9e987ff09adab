"""Coordinator duties that repair flows: cyclic dependencies and wrong counters."""

import logging
from datetime import timedelta
from functools import partial
from uuid import UUID

import msgspec

from tenuto.engine.core import Core
from tenuto.engine.flows import groups
from tenuto.engine.flows.advance import Cascade
from tenuto.engine.flows.rows import group_of
from tenuto.model.flows.groups import GROUP_OPEN, Group, join_status
from tenuto.model.flows.plan import find_cycle
from tenuto.model.tasks import commands
from tenuto.store.protocol import Row, Script, Statement

log = logging.getLogger("tenuto.engine")

MAX_PAIRS = 20_000
MAX_REPAIRS = 100
SETTLED_AFTER = timedelta(minutes=5)
"""A group's counter is checked only if the group was not changed for this long."""


class FlowRepair:
    """Repairs flows of all workspaces."""

    def __init__(self, core: Core) -> None:
        self._core = core

    async def fail_cycles_once(self, actor: str) -> int:
        """Fails waiting tasks that depend on each other in a cycle; returns how many tasks."""
        rows = await self._core.store.fetch(
            Statement("dependency_pairs_waiting", {"most": MAX_PAIRS})
        )
        edges: dict[str, list[str]] = {}
        for row in rows:
            edges.setdefault(str(row["id"]), []).append(str(row["needs"]))
        failed = 0
        while cycle := find_cycle(edges, lambda task: edges.get(task, ())):
            members = sorted({UUID(task_id) for task_id in cycle})
            failed += await self._core.run_with_cascade(partial(_fail_cycle, members), actor)
            for task_id in cycle:
                edges.pop(task_id, None)
        return failed

    async def recount_once(self, actor: str) -> int:
        """Corrects wrong counts of open children in running groups; returns how many were found.

        Logs each as an error. Leaves out groups changed in the last minutes.
        """
        params = {"before": self._core.now() - SETTLED_AFTER, "most": MAX_REPAIRS}
        rows = await self._core.store.fetch(Statement("groups_miscounted", params))
        for row in rows:
            await self._core.run_with_cascade(partial(_correct_open_count, row), actor)
        return len(rows)


def _fail_cycle(ids: list[UUID], cascade: Cascade) -> Script[int]:
    """Fails the tasks of a cycle; returns how many were changed."""
    command = commands.FailWithoutAttempt(
        code="dependency_cycle", message="cyclic dependencies: " + ", ".join(map(str, ids[:5]))
    )
    return len((yield from cascade.apply_to_each(ids, lambda _: command)))


def _correct_open_count(counted: Row, cascade: Cascade) -> Script[None]:
    """Corrects and logs an `open` count, if unchanged; finishes the group if its join is met."""
    rows = yield Statement("groups_locked", {"ids": [counted["id"]]})
    group: Group = group_of(rows[0])
    if group.status not in GROUP_OPEN or group.open != counted["open"]:
        return  # the group changed since it was read
    log.error("group %s counted %d open children, not %d", group.id, group.open, counted["actual"])
    corrected = msgspec.structs.replace(group, open=counted["actual"])
    message = f"corrected the count of open children from {group.open} to {counted['actual']}"
    yield from cascade.write_group(corrected, "group_recounted", "ERROR", message)
    corrected = msgspec.structs.replace(corrected, version=corrected.version + 1)
    status = join_status(corrected)
    if status is not None:
        yield from groups.finish_group(cascade, corrected, status)
