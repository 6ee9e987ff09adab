"""Publishing: events that people and programs tell a workspace of."""

from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec

from tenuto.engine.core import Core
from tenuto.engine.tenancy.encryption import TaskSecrets
from tenuto.model import bounds
from tenuto.model.errors import Invalid, NotFound
from tenuto.model.schedules.event_names import MAX_DATA, check_name
from tenuto.model.tasks.task import Fence
from tenuto.model.tenancy.redact import Redactor
from tenuto.model.tenancy.secrets import extract_secrets
from tenuto.store.protocol import Script, Statement


class EventView(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """An event that was published. `task_id` is the task on whose behalf, if any."""

    id: UUID
    name: str
    data: Any
    task_id: UUID | None
    at: datetime


class EventPublisher:
    """Adds events to the trail of one workspace."""

    def __init__(self, core: Core, sealing: TaskSecrets, workspace: UUID) -> None:
        self._core = core
        self._sealing = sealing
        self._workspace = workspace

    async def publish(
        self, name: str, data: Any, task: UUID | None, actor: str | None
    ) -> EventView:
        """Tell the workspace, and its triggers, that something happened.

        Neither what stands under `secrets` in the data is stored, nor the secrets of the task.
        """
        check_name(name)
        bounds.json_text("data", data)
        stored, values = extract_secrets(data)
        told = Redactor(values.values()).value(stored)
        if task is not None:
            told = (await self._redactor(task)).value(told)
        text = bounds.json_text("data", told)
        if text is not None and len(text.encode()) > MAX_DATA:
            most = f"at most {MAX_DATA:,} are accepted"
            raise Invalid(f"data is too many bytes of JSON; {most}", "too_large", field="data")
        now, made = self._core.now(), self._core.clock.new_id()
        params = {"id": made, "workspace": self._workspace, "name": name, "data": text}
        params |= {"cause": None if task is None else str(task), "actor": actor, "now": now}

        def script() -> Script[None]:
            yield Statement("event_publish", params)

        await self._core.store.once(script)
        return EventView(id=made, name=name, data=told, task_id=task, at=now)

    async def _redactor(self, task: UUID) -> Redactor:
        rows = await self._core.store.fetch(Statement("task_state", {"ids": [task]}))
        if not rows or rows[0]["workspace"] != self._workspace:
            raise NotFound(f"no task {task}")
        # No attempt has the number, so that all secrets of the task are looked up.
        return await self._sealing.redactor(Fence(task, -1, ""))
