"""Stores pauses: operators stop claims for a lane, agent, task type or the whole workspace."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec

from tenuto.broker.protocol import ALL_TOPICS
from tenuto.engine.core import Core
from tenuto.model import bounds
from tenuto.model.errors import Invalid, NotFound
from tenuto.model.limits import pauses
from tenuto.model.limits.pauses import MAX_PAUSES, WORKSPACE_SUBJECT, ClaimPause, PauseKind
from tenuto.store.protocol import Row, Script, Statement


class PauseView(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A pause. `subject` is a lane id, an agent name, a task type, or `all` (workspace)."""

    kind: PauseKind
    subject: str
    reason: str | None
    until: datetime | None
    created_by: str | None
    created_at: datetime


class Pauses:
    """The pauses of one workspace, on behalf of one actor."""

    def __init__(self, core: Core, workspace: UUID, actor: str | None) -> None:
        self._core = core
        self._workspace = workspace
        self._actor = actor

    async def list(self) -> Sequence[PauseView]:
        """Returns the pauses that have not ended, ordered by kind and subject."""
        rows = await self._core.store.fetch(Statement("pauses", {"workspace": self._workspace}))
        now = self._core.now()
        return [_view(row) for row in rows if row["until"] is None or row["until"] > now]

    async def close(
        self,
        kind: PauseKind,
        subject: str = WORKSPACE_SUBJECT,
        reason: str | None = None,
        until: datetime | None = None,
    ) -> PauseView:
        """Creates or replaces a pause: no more claims, running tasks continue. Raises `NotFound`.

        `NotFound`: no such lane or agent. `Invalid`: end time in the past, or too many pauses.
        """
        pauses.check(kind, subject, reason)
        now = self._core.now()
        bounds.check_instant("until", until)
        if until is not None and until <= now:
            text = f"until must be in the future, not {until.isoformat()}"
            raise Invalid(text, field="until")
        await self._check_subject(kind, subject)
        view = PauseView(
            kind=kind,
            subject=subject,
            reason=reason,
            until=until,
            created_by=self._actor,
            created_at=now,
        )
        params = {"reason": reason, "until": until, "most": MAX_PAUSES}
        if not await self._execute("pause_put", view, now, params):
            text = f"the workspace already has {MAX_PAUSES:,} pauses, the limit; resume some first"
            raise Invalid(text, "too_large")
        return view

    async def open(self, kind: PauseKind, subject: str = WORKSPACE_SUBJECT) -> None:
        """Deletes a pause and wakes all workers; raises `NotFound` if there is none."""
        pauses.check(kind, subject, None)
        pause = ClaimPause(kind=kind, subject=subject)
        if not await self._execute("pause_delete", pause, self._core.now(), {}):
            text = f'{kind} {subject} is not paused; "orchestrate pause" lists all pauses'
            raise NotFound(text)
        self._core.wakeups.notify({ALL_TOPICS})

    async def _execute(
        self,
        query: str,
        pause: ClaimPause | PauseView,
        now: datetime,
        extra_params: Mapping[str, Any],
    ) -> bool:
        """Runs the query with its audit event and reloads the cache; true if a row was changed."""
        subject_fields = {"kind": pause.kind, "subject": pause.subject}
        event_data = subject_fields | {"reason": pause.reason, "until": pause.until}
        params = {
            **extra_params,
            **subject_fields,
            "workspace": self._workspace,
            "actor": self._actor,
            "now": now,
            "id": self._core.clock.new_id(),
            "message": f"{pause.kind} {pause.subject}",
            "data": msgspec.json.encode(event_data).decode(),
        }

        def script() -> Script[bool]:
            rows = yield Statement(query, params)
            return bool(rows)

        applied = await self._core.store.transact_one(script)
        # Other processes see the change at their next claim; this one sees it before.
        await self._core.lanes.reload_if_changed(self._workspace)
        return applied

    async def _check_subject(self, kind: PauseKind, subject: str) -> None:
        """Raises `NotFound` for an unknown lane or agent: a misspelled pause would stop nothing."""
        if kind == "lane":
            lanes = await self._core.lanes.all(self._workspace)
            if all(str(lane.id) != subject for lane in lanes):
                raise NotFound(f"no lane with the id {subject}")
        elif kind == "agent":
            params = {"workspace": self._workspace}
            agents = await self._core.store.fetch(Statement("agents", params))
            if all(agent["name"] != subject for agent in agents):
                raise NotFound(f"no agent {subject!r}")


def _view(row: Row) -> PauseView:
    """Returns the pause in a row as shown to users."""
    return PauseView(
        kind=row["kind"],
        subject=row["name"],
        reason=row["reason"],
        until=row["until"],
        created_by=row["created_by"],
        created_at=row["created_at"],
    )
