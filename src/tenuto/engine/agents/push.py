"""Dispatch: tasks pushed to agents whose sessions a gateway spawns. Belongs to no tenant.

Push is the same claim as pull; its tasks are ASSIGNED until the gateway has told the session.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any
from uuid import UUID

import msgspec

from tenuto.engine.agents.gateways import Gateways
from tenuto.engine.core import Core
from tenuto.engine.flows.advance import Cascade
from tenuto.engine.tasks.claim import ClaimedTask, TaskClaimer
from tenuto.engine.tasks.maintenance import TaskMaintenance
from tenuto.engine.tenancy.encryption import TaskSecrets
from tenuto.engine.tenancy.output_redaction import check_report, redacted
from tenuto.model.agents.lifecycle import STALE_AFTER_S
from tenuto.model.agents.matching import AgentProfile
from tenuto.model.errors import Conflict
from tenuto.model.tasks import commands
from tenuto.model.tasks.commands import Command, Failure
from tenuto.model.tasks.decide import token_hash
from tenuto.model.tasks.task import GATEWAY, LEASED, Fence, Outcome, Status, Task
from tenuto.store.protocol import Row, Rows, Script, Statement

UNKNOWN_AFTER = timedelta(minutes=5)
"""When an ended attempt whose session nobody knows is taken to have none."""
BATCH = 100
_BY_SESSION = (Outcome.COMPLETED, Outcome.FAILED, Outcome.PARKED, Outcome.RELEASED)
"""Ends that a session tells itself."""


class PushTarget(msgspec.Struct, frozen=True):
    """An agent that tasks can be pushed to, and how many more it may hold."""

    agent: AgentProfile
    free: int | None

    @property
    def is_full(self) -> bool:
        return self.free is not None and self.free <= 0


class SessionToKill(msgspec.Struct, frozen=True):
    """A session at a gateway that is to be killed; without a key, one that nobody knows."""

    task: UUID
    attempt: int
    worker: str
    session_key: str | None

    @property
    def gateway(self) -> str:
        return self.worker.removeprefix(GATEWAY)


def lease_of(agent: AgentProfile) -> int:
    """Seconds of silence after which a pushed session counts as lost."""
    return agent.stale_threshold_s or STALE_AFTER_S


class PushSessions:
    """The dispatch family, for all workspaces."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._sealing = TaskSecrets(core)
        self._claiming = TaskClaimer(core, self._sealing)
        self._upkeep = TaskMaintenance(core)
        self.gateways = Gateways(core)

    @property
    def core(self) -> Core:
        return self._core

    async def targets(self, gateways: Iterable[str]) -> list[PushTarget]:
        """The agents that these gateways spawn sessions for."""
        wanted = Statement("push_agents", {"names": sorted(gateways)})
        found = []
        for row in await self._core.store.fetch(wanted):
            agent = _agent(row)
            most = row["max_concurrent"]
            free = None if most is None else most - row["load"]
            if agent is not None and agent.coordinator_enabled:
                found.append(PushTarget(agent, free))
        return found

    async def busy_lanes(self, workspaces: Iterable[UUID]) -> set[int]:
        """The lanes in which something waits; what is known of lanes is brought up to date."""
        spaces = sorted(set(workspaces))
        for workspace in spaces:
            await self._core.lanes.reload_if_changed(workspace)
        rows = await self._core.store.fetch(Statement("push_lanes", {"workspaces": spaces}))
        return {row["lane"] for row in rows}

    async def lanes_of(self, agent: AgentProfile) -> set[int]:
        """The open lanes that the agent may take from."""
        return set((await self._core.lanes.eligible(agent, self._core.now())).lanes)

    async def claim(self, agent: AgentProfile, n: int, lease_s: int) -> list[ClaimedTask]:
        """Up to n tasks for the agent, ASSIGNED while its gateway is asked for their sessions."""
        worker = f"{GATEWAY}{agent.gateway}"
        return await self._claiming.claim(agent, worker, n, lease_s, status=Status.ASSIGNED)

    async def descriptions(self, works: Sequence[ClaimedTask]) -> dict[UUID, str | None]:
        """What works of one workspace are described as."""
        params = {"workspace": works[0].workspace, "ids": [work.fence.task for work in works]}
        rows = await self._core.store.fetch(Statement("push_words", params))
        return {row["id"]: row["description"] for row in rows}

    async def record_session(
        self, fence: Fence, session_key: str, lease_s: int, actor: str
    ) -> bool:
        """Note the session that the gateway spawned; False when the attempt is over already."""
        begin = commands.Begin(fence=fence, session_key=session_key, lease_s=lease_s)
        check_report(begin)
        begin = redacted(begin, await self._sealing.redactor(fence))
        try:
            await self._core.apply_command(fence.task, begin, actor=actor)
        except Conflict:
            return await self._noted(fence, begin.session_key, lease_s)
        return True

    async def _noted(self, fence: Fence, session_key: str | None, lease_s: int) -> bool:
        """The session has reported before its gateway did, or is to stop: only its key is new."""
        params = {
            "id": fence.task,
            "attempt": fence.attempt,
            "token": token_hash(fence.token),
            "session_key": session_key,
            "lease_s": lease_s,
            "now": self._core.now(),
        }
        return bool(await self._write(Statement("session_note", params)))

    async def reported(self, fence: Fence) -> bool:
        """Whether the session itself has ended the attempt, before its gateway told of it."""
        rows = await self._core.store.fetch(Statement("push_status", {"id": fence.task}))
        return bool(rows) and (rows[0]["attempt"], rows[0]["last_outcome"]) in [
            (fence.attempt, outcome) for outcome in _BY_SESSION
        ]

    async def not_started(self, fence: Fence, failure: Failure, actor: str) -> None:
        """The gateway spawned nothing. A session that has reported meanwhile goes on."""
        command = commands.NotStarted(fence=fence, failure=failure)
        command = redacted(command, await self._sealing.redactor(fence))
        rows = await self._core.store.fetch(Statement("push_status", {"id": fence.task}))
        if not rows or rows[0]["status"] != Status.ASSIGNED:
            return
        with suppress(Conflict):
            await self._core.apply_command(fence.task, command, actor=actor)
            self._sealing.forget(fence)
            return
        # It was asked to stop before it began.
        gone = SessionToKill(fence.task, fence.attempt, "", None)
        await self.confirm_killed(gone, {"state": "not_started", "how": failure.message}, actor)

    async def release(self, fence: Fence, actor: str) -> None:
        """Give a task back unharmed for which nothing was asked of a gateway."""
        with suppress(Conflict):
            await self._core.apply_command(fence.task, commands.Release(fence=fence), actor=actor)

    async def stopping(self, gateways: Iterable[str], grace_s: float) -> list[SessionToKill]:
        """Sessions that somebody asked to stop; those to be paused have had their grace."""
        params = {
            "workers": _workers(gateways),
            "paused_before": self._core.now() - timedelta(seconds=grace_s),
            "most": BATCH,
        }
        return _left(await self._core.store.fetch(Statement("push_stopping", params)))

    async def sessions_to_kill(self, gateways: Iterable[str]) -> list[SessionToKill]:
        """Sessions of ended attempts that gateways may still run."""
        params = {
            "workers": _workers(gateways),
            "before": self._core.now() - UNKNOWN_AFTER,
            "most": BATCH,
        }
        return _left(await self._core.store.fetch(Statement("push_left", params)))

    async def confirm_killed(
        self, gone: SessionToKill, receipt: dict[str, Any], actor: str
    ) -> None:
        """The session is gone: end what was asked to stop, or confirm what was given up.

        Guarded by task and attempt: whoever killed the session need not have spawned it.
        """

        def choose(task: Task) -> Command | None:
            asked = task.cancel_requested_at or task.pause_requested_at
            if task.attempt != gone.attempt or task.status not in LEASED or asked is None:
                return None
            return commands.Expire(receipt=receipt)

        def script(cascade: Cascade) -> Script[bool]:
            return bool((yield from cascade.apply_to_each([gone.task], choose)))

        if not await self._core.run_with_cascade(script, actor):
            await self._upkeep.confirm_gone([(gone.task, gone.attempt)], receipt, actor)

    async def _write(self, statement: Statement) -> Rows:
        def script() -> Script[Rows]:
            rows: Rows = yield statement
            return rows

        return await self._core.store.once(script)


def _agent(row: Row) -> AgentProfile | None:
    try:
        profile = msgspec.json.decode(row["profile"], type=AgentProfile)
    except (ValueError, msgspec.MsgspecError):
        return None
    return msgspec.structs.replace(profile, id=row["id"], version=row["version"], means=None)


def _workers(gateways: Iterable[str]) -> list[str]:
    return sorted(f"{GATEWAY}{name}" for name in gateways)


def _left(rows: Iterable[Row]) -> list[SessionToKill]:
    return [
        SessionToKill(row["id"], row["attempt"], row["worker"], row["session_key"]) for row in rows
    ]
