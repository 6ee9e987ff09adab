"""Publishes custom events of users and programs in a workspace."""

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
    """A published event. `task_id` is the task that published it, if a task did."""

    id: UUID
    name: str
    data: Any
    task_id: UUID | None
    at: datetime


class EventPublisher:
    """Adds custom events to the audit trail of one workspace."""

    def __init__(self, core: Core, secrets: TaskSecrets, workspace: UUID) -> None:
        self._core = core
        self._secrets = secrets
        self._workspace = workspace

    async def publish(
        self, name: str, data: Any, task: UUID | None, actor: str | None
    ) -> EventView:
        """Publishes an event to the workspace and its triggers; returns it. Raises `NotFound`.

        Values under the key `secrets` of the data and the secrets of the task are not stored.
        """
        check_name(name)
        bounds.to_json_text("data", data)
        stored, values = extract_secrets(data)
        redacted = Redactor(values.values()).redact_value(stored)
        if task is not None:
            redacted = (await self._task_redactor(task)).redact_value(redacted)
        text = bounds.to_json_text("data", redacted)
        if text is not None and len(text.encode()) > MAX_DATA:
            message = f"data has {len(text.encode()):,} bytes of JSON, more than {MAX_DATA:,}"
            raise Invalid(message, "too_large", field="data")
        now, event_id = self._core.now(), self._core.clock.new_id()
        params = {"id": event_id, "workspace": self._workspace, "name": name, "data": text}
        params |= {"cause": None if task is None else str(task), "actor": actor, "now": now}

        def script() -> Script[None]:
            yield Statement("event_publish", params)

        await self._core.store.transact_one(script)
        return EventView(id=event_id, name=name, data=redacted, task_id=task, at=now)

    async def _task_redactor(self, task: UUID) -> Redactor:
        """Returns the redactor of all secrets of a task; raises `NotFound` for an unknown task."""
        rows = await self._core.store.fetch(Statement("task_statuses", {"ids": [task]}))
        if not rows or rows[0]["workspace"] != self._workspace:
            raise NotFound(f"no task {task}")
        # No attempt has the number -1, so the secrets of all attempts of the task are read.
        return await self._secrets.redactor(Fence(task, -1, ""))
