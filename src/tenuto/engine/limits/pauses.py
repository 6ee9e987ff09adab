"""Gates: what people hold back, and let go on."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec

from tenuto.broker.protocol import EVERYTHING as EVERYBODY
from tenuto.engine.core import Core
from tenuto.model import bounds
from tenuto.model.errors import Invalid, NotFound
from tenuto.model.limits import pauses
from tenuto.model.limits.pauses import EVERYTHING, MAX_GATES, ClaimPause, GateKind
from tenuto.store.protocol import Row, Script, Statement


class PauseView(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Something that is held back. `subject`: a lane's number, an agent's name, a type, or all."""

    kind: GateKind
    subject: str
    reason: str | None
    until: datetime | None
    created_by: str | None
    created_at: datetime


class Pauses:
    """The gates of one workspace, on behalf of one actor."""

    def __init__(self, core: Core, workspace: UUID, actor: str | None) -> None:
        self._core = core
        self._workspace = workspace
        self._actor = actor

    async def list(self) -> Sequence[PauseView]:
        """What is held back now, by kind and subject."""
        rows = await self._core.store.fetch(Statement("gates", {"workspace": self._workspace}))
        now = self._core.now()
        return [_view(row) for row in rows if row["until"] is None or row["until"] > now]

    async def close(
        self,
        kind: GateKind,
        subject: str = EVERYTHING,
        reason: str | None = None,
        until: datetime | None = None,
    ) -> PauseView:
        """Let nobody claim what is meant, from now on; what runs goes on.

        Done again it changes the reason and the time.
        """
        pauses.check(kind, subject, reason)
        now = self._core.now()
        bounds.instant("until", until)
        if until is not None and until <= now:
            raise Invalid("until is in the past", field="until")
        await self._check_subject(kind, subject)
        made = PauseView(
            kind=kind,
            subject=subject,
            reason=reason,
            until=until,
            created_by=self._actor,
            created_at=now,
        )
        params = {"reason": reason, "until": until, "most": MAX_GATES}
        if not await self._write("gate_put", made, now, params):
            raise Invalid(f"the workspace has {MAX_GATES:,} gates already", "too_large")
        return made

    async def open(self, kind: GateKind, subject: str = EVERYTHING) -> None:
        """Let what was held back go on; workers look at once."""
        pauses.check(kind, subject, None)
        gate = ClaimPause(kind=kind, subject=subject)
        if not await self._write("gate_drop", gate, self._core.now(), {}):
            raise NotFound("that is not paused")
        self._core.wakeups.announce({EVERYBODY})

    async def _write(
        self, query: str, gate: ClaimPause | PauseView, now: datetime, more: Mapping[str, Any]
    ) -> bool:
        what = {"kind": gate.kind, "subject": gate.subject}
        told = what | {"reason": gate.reason, "until": gate.until}
        params = {
            **more,
            **what,
            "workspace": self._workspace,
            "actor": self._actor,
            "now": now,
            "id": self._core.clock.new_id(),
            "message": f"{gate.kind} {gate.subject}",
            "data": msgspec.json.encode(told).decode(),
        }

        def script() -> Script[bool]:
            rows = yield Statement(query, params)
            return bool(rows)

        done = await self._core.store.once(script)
        # Others hear of it by their next claim; this process need not make one in vain.
        await self._core.lanes.reload_if_changed(self._workspace)
        return done

    async def _check_subject(self, kind: GateKind, subject: str) -> None:
        """Refuse what is not there: a slip of the pen would hold nothing back."""
        if kind == "lane":
            lanes = await self._core.lanes.all(self._workspace)
            if all(str(lane.id) != subject for lane in lanes):
                raise NotFound(f"no lane {subject}")
        elif kind == "agent":
            params = {"workspace": self._workspace}
            agents = await self._core.store.fetch(Statement("agents", params))
            if all(agent["name"] != subject for agent in agents):
                raise NotFound(f"no agent {subject!r}")


def _view(row: Row) -> PauseView:
    return PauseView(
        kind=row["kind"],
        subject=row["name"],
        reason=row["reason"],
        until=row["until"],
        created_by=row["created_by"],
        created_at=row["created_at"],
    )
