"""Push: claims tasks for agents whose sessions a gateway spawns. Works across all workspaces.

A push uses the same claim as a pull. Its tasks are ASSIGNED until the gateway reports the session.
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
from tenuto.engine.tenancy.output_redaction import check_report, redact_command
from tenuto.model.agents.lifecycle import STALE_AFTER_S
from tenuto.model.agents.matching import AgentProfile
from tenuto.model.errors import Conflict
from tenuto.model.tasks import commands
from tenuto.model.tasks.commands import Command, Failure
from tenuto.model.tasks.task import GATEWAY_PREFIX, LEASED, Fence, Outcome, Status, Task, token_hash
from tenuto.store.protocol import Row, Rows, Script, Statement

ASSUME_NO_SESSION_AFTER = timedelta(minutes=5)
"""Time after which an ended attempt without a session key is assumed to have no session."""
MAX_BATCH = 100
_REPORTED_OUTCOMES = (Outcome.COMPLETED, Outcome.FAILED, Outcome.PARKED, Outcome.RELEASED)
"""Outcomes that a session reports itself."""


class PushTarget(msgspec.Struct, frozen=True):
    """An agent that tasks can be pushed to. `free` is how many more it can run; `None`: any."""

    agent: AgentProfile
    free: int | None

    @property
    def is_full(self) -> bool:
        """True if the agent can run no more tasks now."""
        return self.free is not None and self.free <= 0


class SessionToKill(msgspec.Struct, frozen=True):
    """A session that a gateway must kill. `session_key` is `None` if it was never reported."""

    task: UUID
    attempt: int
    worker: str
    session_key: str | None

    @property
    def gateway(self) -> str:
        """The name of the session's gateway."""
        return self.worker.removeprefix(GATEWAY_PREFIX)


def lease_seconds(agent: AgentProfile) -> int:
    """Returns the seconds without a heartbeat after which a pushed session counts as lost."""
    return agent.stale_threshold_s or STALE_AFTER_S


class PushSessions:
    """Claims tasks for push agents and stores their sessions, in all workspaces."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._secrets = TaskSecrets(core)
        self._claimer = TaskClaimer(core, self._secrets)
        self._maintenance = TaskMaintenance(core)
        self.gateways = Gateways(core)

    @property
    def core(self) -> Core:
        return self._core

    async def targets(self, gateways: Iterable[str]) -> list[PushTarget]:
        """Returns the gateways' agents that accept pushes, also full ones, but no draining ones."""
        statement = Statement("push_agents", {"names": sorted(gateways)})
        targets = []
        for row in await self._core.store.fetch(statement):
            agent = _profile_of(row)
            maximum = row["max_concurrent"]
            free = None if maximum is None else maximum - row["load"]
            if agent is not None and agent.coordinator_enabled:
                targets.append(PushTarget(agent, free))
        return targets

    async def lanes_with_tasks(self, workspaces: Iterable[UUID]) -> set[int]:
        """Returns the ids of lanes with pending tasks; first reloads an outdated lane cache."""
        distinct = sorted(set(workspaces))
        for workspace in distinct:
            await self._core.lanes.reload_if_changed(workspace)
        rows = await self._core.store.fetch(Statement("push_lanes", {"workspaces": distinct}))
        return {row["lane"] for row in rows}

    async def open_lanes(self, agent: AgentProfile) -> set[int]:
        """Returns ids of the agent's open lanes; `Forbidden` if it is draining or terminated."""
        return set((await self._core.lanes.open_lanes(agent, self._core.now())).lanes)

    async def claim(self, agent: AgentProfile, n: int, lease_s: int) -> list[ClaimedTask]:
        """Claims and returns up to `n` tasks, ASSIGNED until the gateway has spawned sessions."""
        worker = f"{GATEWAY_PREFIX}{agent.gateway}"
        return await self._claimer.claim(agent, worker, n, lease_s, status=Status.ASSIGNED)

    async def descriptions(self, tasks: Sequence[ClaimedTask]) -> dict[UUID, str | None]:
        """Returns the descriptions (`None`: none given) of tasks of one workspace, by task id."""
        params = {"workspace": tasks[0].workspace, "ids": [task.fence.task for task in tasks]}
        rows = await self._core.store.fetch(Statement("push_descriptions", params))
        return {row["id"]: row["description"] for row in rows}

    async def record_session(
        self, fence: Fence, session_key: str, lease_s: int, actor: str
    ) -> bool:
        """Makes the task RUNNING in the spawned session; false if the attempt has ended already."""
        begin = commands.Begin(fence=fence, session_key=session_key, lease_s=lease_s)
        check_report(begin)
        begin = redact_command(begin, await self._secrets.redactor(fence))
        try:
            await self._core.apply_command(fence.task, begin, actor=actor)
        except Conflict:
            return await self._store_session_key(fence, begin.session_key, lease_s)
        return True

    async def _store_session_key(self, fence: Fence, session_key: str | None, lease_s: int) -> bool:
        """Stores only the session key and renews the lease; false if the attempt has ended.

        The session reported before its gateway did, or must stop.
        """
        params = {
            "id": fence.task,
            "attempt": fence.attempt,
            "token": token_hash(fence.token),
            "session_key": session_key,
            "lease_s": lease_s,
            "now": self._core.now(),
        }
        return bool(await self._write(Statement("session_record", params)))

    async def has_reported_end(self, fence: Fence) -> bool:
        """True if the session ended the attempt itself, before its gateway reported it."""
        rows = await self._core.store.fetch(Statement("push_status", {"id": fence.task}))
        return bool(rows) and (rows[0]["attempt"], rows[0]["last_outcome"]) in [
            (fence.attempt, outcome) for outcome in _REPORTED_OUTCOMES
        ]

    async def record_not_started(self, fence: Fence, failure: Failure, actor: str) -> None:
        """Ends an ASSIGNED attempt without a session: as no try, or as the requested stop."""
        command = commands.NotStarted(fence=fence, failure=failure)
        command = redact_command(command, await self._secrets.redactor(fence))
        rows = await self._core.store.fetch(Statement("push_status", {"id": fence.task}))
        if not rows or rows[0]["status"] != Status.ASSIGNED:
            return
        with suppress(Conflict):
            await self._core.apply_command(fence.task, command, actor=actor)
            self._core.known_attempts.evict(fence.task)
            return
        # A stop was requested before the session started.
        session = SessionToKill(fence.task, fence.attempt, "", None)
        await self.confirm_killed(session, {"state": "not_started", "how": failure.message}, actor)

    async def release(self, fence: Fence, actor: str) -> None:
        """Releases a task that no gateway was called for, if the lease is valid; counts no try."""
        with suppress(Conflict):
            await self._core.apply_command(fence.task, commands.Release(fence=fence), actor=actor)

    async def sessions_to_stop(
        self, gateways: Iterable[str], grace_s: float
    ) -> list[SessionToKill]:
        """Returns sessions to stop: cancelled ones, and paused ones after their grace period."""
        params = {
            "workers": _gateway_workers(gateways),
            "paused_before": self._core.now() - timedelta(seconds=grace_s),
            "most": MAX_BATCH,
        }
        return _sessions_of(
            await self._core.store.fetch(Statement("push_sessions_stopping", params))
        )

    async def sessions_to_kill(self, gateways: Iterable[str]) -> list[SessionToKill]:
        """Returns sessions of ended attempts that gateways could still run."""
        params = {
            "workers": _gateway_workers(gateways),
            "before": self._core.now() - ASSUME_NO_SESSION_AFTER,
            "most": MAX_BATCH,
        }
        return _sessions_of(
            await self._core.store.fetch(Statement("push_sessions_to_kill", params))
        )

    async def confirm_killed(
        self, session: SessionToKill, receipt: dict[str, Any], actor: str
    ) -> None:
        """Records that a session is gone: ends a stopped attempt, or confirms an expired one's end.

        The write checks task and attempt, and no lease token: the process that killed the session
        need not be the one that spawned it.
        """

        def choose(task: Task) -> Command | None:
            """Returns the command that ends this attempt if it was asked to stop, else `None`."""
            stop_requested_at = task.cancel_requested_at or task.pause_requested_at
            if (
                task.attempt != session.attempt
                or task.status not in LEASED
                or stop_requested_at is None
            ):
                return None
            return commands.Expire(receipt=receipt)

        def script(cascade: Cascade) -> Script[bool]:
            return bool((yield from cascade.apply_to_each([session.task], choose)))

        if not await self._core.run_with_cascade(script, actor):
            await self._maintenance.confirm_gone([(session.task, session.attempt)], receipt, actor)

    async def _write(self, statement: Statement) -> Rows:
        """Runs one statement in a transaction; returns its rows."""

        def script() -> Script[Rows]:
            rows: Rows = yield statement
            return rows

        return await self._core.store.transact_one(script)


def _profile_of(row: Row) -> AgentProfile | None:
    """Returns the agent's profile, or `None` if its row is invalid."""
    try:
        profile = msgspec.json.decode(row["profile"], type=AgentProfile)
    except (ValueError, msgspec.MsgspecError):
        return None
    return msgspec.structs.replace(profile, id=row["id"], version=row["version"], means=None)


def _gateway_workers(gateways: Iterable[str]) -> list[str]:
    """Returns the worker ids under which the gateways hold leases."""
    return sorted(f"{GATEWAY_PREFIX}{name}" for name in gateways)


def _sessions_of(rows: Iterable[Row]) -> list[SessionToKill]:
    """Returns the sessions in rows."""
    return [
        SessionToKill(row["id"], row["attempt"], row["worker"], row["session_key"]) for row in rows
    ]
