"""What a coordinator finds wrong with flows, and mends: circles, and counts that drifted."""

import logging
from datetime import timedelta
from functools import partial
from uuid import UUID

import msgspec

from tenuto.engine.core import Core
from tenuto.engine.flows.advance import Cascade
from tenuto.engine.flows.rows import group_of
from tenuto.model.flows.plan import find_cycle
from tenuto.model.flows.progress import GROUP_OPEN, Group, join_status
from tenuto.model.tasks import commands
from tenuto.store.protocol import Row, Script, Statement

log = logging.getLogger("tenuto.engine")

PAIRS = 20_000
ADRIFT = 100
SETTLED_AFTER = timedelta(minutes=5)
"""How long nothing must have changed in a group before its count is doubted."""


class FlowRepair:
    """The upkeep of flows. Each `*_once` answers how many rows it mended."""

    def __init__(self, core: Core) -> None:
        self._core = core

    async def cycles_once(self, actor: str) -> int:
        """Fail tasks that wait for each other in a circle, should there ever be any."""
        rows = await self._core.store.fetch(Statement("waiting_pairs", {"most": PAIRS}))
        edges: dict[str, list[str]] = {}
        for row in rows:
            edges.setdefault(str(row["id"]), []).append(str(row["needs"]))
        failed = 0
        while circle := find_cycle(edges, lambda task: edges.get(task, ())):
            members = sorted({UUID(each) for each in circle})
            failed += await self._core.run_with_cascade(partial(_fail_circle, members), actor)
            for each in circle:
                edges.pop(each, None)
        return failed

    async def recount_once(self, actor: str) -> int:
        """Set right what a group thinks is open in it. A repair is a fault of ours: it is told."""
        params = {"before": self._core.now() - SETTLED_AFTER, "most": ADRIFT}
        rows = await self._core.store.fetch(Statement("groups_adrift", params))
        for row in rows:
            await self._core.run_with_cascade(partial(_recounted, row), actor)
        return len(rows)


def _fail_circle(ids: list[UUID], cascade: Cascade) -> Script[int]:
    refuse = commands.FailWithoutAttempt(
        code="dependency_cycle", message="waits in a circle: " + ", ".join(map(str, ids[:5]))
    )
    return len((yield from cascade.apply_to_each(ids, lambda _: refuse)))


def _recounted(found: Row, cascade: Cascade) -> Script[None]:
    rows = yield Statement("groups_locked", {"ids": [found["id"]]})
    group: Group = group_of(rows[0])
    if group.status not in GROUP_OPEN or group.open != found["open"]:
        return  # it has moved on
    log.error("group %s counted %d open children, not %d", group.id, group.open, found["actual"])
    right = msgspec.structs.replace(group, open=found["actual"])
    why = f"counted {group.open} open children where there are {found['actual']}"
    yield cascade.group_change(right, "group_recounted", "ERROR", why)
    right = msgspec.structs.replace(right, version=right.version + 1)
    status = join_status(right)
    if status is not None:
        yield from cascade.finish(right, status)
