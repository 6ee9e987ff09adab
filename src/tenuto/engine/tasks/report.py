"""Renews leases by heartbeats; stores the progress, checkpoints, log lines and steps of attempts.

Every write presents its fence. The task's secrets are redacted before anything is stored, both
for local workers and for reports over the network.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID, uuid5

import msgspec

from tenuto.engine.core import Core
from tenuto.engine.flows.advance import Cascade
from tenuto.engine.limits.budgets import fence_params
from tenuto.engine.limits.concurrency import check_ancestors
from tenuto.engine.rows import CorruptRow, decode_json, parse_task
from tenuto.engine.tasks.submit import TaskSubmitter, submit_script
from tenuto.engine.tenancy.encryption import TaskSecrets, redact_child
from tenuto.engine.tenancy.output_redaction import check_key, check_progress
from tenuto.model import bounds
from tenuto.model.errors import Conflict, Invalid, NotFound
from tenuto.model.tasks.submission import NewTask, check
from tenuto.model.tasks.task import (
    DEFAULT_LEASE_S,
    LEASE_LOST,
    LEASED,
    Fence,
    Task,
    check_fence,
    token_hash,
)
from tenuto.model.tasks.transcript import Line, fit_lines
from tenuto.store.batching import Answers, WriteKind
from tenuto.store.protocol import Row, Rows, Script, Statement


class LeaseStatus(msgspec.Struct, frozen=True):
    """The heartbeat's reply for one lease that is still held."""

    lease_until: datetime
    cancel: bool
    pause: bool
    hung: bool
    begun: bool = True
    """True if the start of the session was reported."""


class HeartbeatResult(msgspec.Struct, frozen=True):
    """The reply to a worker's heartbeat: its leases by task, and the fences of lost leases."""

    held: dict[UUID, LeaseStatus]
    lost: list[Fence]


class WorkerInfo(msgspec.Struct):
    """A worker's identity and capacity, as listed by `orchestrate worker list`."""

    worker: str
    host: str
    pid: int
    agents: list[str] = []
    slots: int = 0
    status: str = "RUNNING"


class AttemptReporter:
    """Stores the reports of one workspace's attempts."""

    def __init__(
        self, core: Core, submitter: TaskSubmitter, task_secrets: TaskSecrets, workspace: UUID
    ) -> None:
        self._core = core
        self._workspace = workspace
        self._task_secrets = task_secrets
        self._submitter = submitter
        self._progress_kind = WriteKind("progress", self._progress_script, one_statement=True)

    async def heartbeat(
        self, fences: Sequence[Fence], lease_s: int = DEFAULT_LEASE_S
    ) -> HeartbeatResult:
        """Renews leases of current fences; returns their statuses, and the other fences as lost."""
        bounds.check_number("lease_s", lease_s, 1, bounds.MAX_LEASE_S)
        valid = [fence for fence in fences if fence.is_possible()]
        if not valid:
            return HeartbeatResult({}, list(fences))
        rows = sorted((f.task, f.attempt, token_hash(f.token)) for f in valid)

        def script() -> Script[Rows]:
            statuses: Rows = yield Statement(
                "heartbeat", self._params() | {"lease_s": lease_s}, {"lease": rows}
            )
            return statuses

        held_rows = await self._core.store.transact_one(script)
        statuses = {row["id"]: _lease_status(row) for row in held_rows}
        owned = {(row["id"], row["attempt"]) for row in held_rows}
        return HeartbeatResult(
            statuses, [fence for fence in fences if (fence.task, fence.attempt) not in owned]
        )

    async def progress(
        self, fence: Fence, percent: float | None, step: str | None, finish_at: datetime | None
    ) -> None:
        """Stores progress in whole percent, `None` keeps a value; `Conflict` for a lost lease."""
        check_fence(fence)
        check_progress(percent, step, finish_at)
        if percent is not None:
            percent = round(percent)
        if step is not None:
            step = (await self._task_secrets.redactor(fence)).redact_text(step)
        item = (fence, percent, step, finish_at)
        if not await self._core.batcher.submit(self._progress_kind, item, key=fence.task.int):
            raise Conflict(f"attempt {fence.attempt} no longer owns the task", LEASE_LOST)

    def _progress_script(self, items: list[Any]) -> Script[Answers]:
        """Stores progress of several attempts; returns for each if its fence was current."""
        rows = sorted(
            (fence.task, fence.attempt, token_hash(fence.token), percent, step, finish_at)
            for fence, percent, step, finish_at in items
        )
        updated = yield Statement("progress", self._params(), {"report": rows})
        stored = {row["id"] for row in updated}
        return [item[0].task in stored for item in items]

    def _params(self) -> dict[str, Any]:
        """Returns the `workspace` and `now` parameters of the heartbeat and progress queries."""
        return {"workspace": self._workspace, "now": self._core.now()}

    async def checkpoint(self, fence: Fence, data: Any, seq: int | None = None) -> int:
        """Replaces the checkpoint, returns its number; `Conflict` if `seq` is below the stored one.

        Without `seq` the number is the next one. An attempt that repeats its own number changes
        nothing; another attempt with that number gets `Conflict` (`checkpoint_stale`), too.
        """
        check_fence(fence)
        if seq is not None:
            bounds.check_number("seq", seq, 0, bounds.MAX_COUNT)
        redactor = await self._task_secrets.redactor(fence)
        text = redactor.redact_json(bounds.to_json_text("checkpoint", data)) or "null"

        def script() -> Script[int]:
            task = yield from self.lock_owned_task(fence, allow_pausing=True)
            number = task.checkpoint_seq + 1 if seq is None else seq
            if number < task.checkpoint_seq:
                raise Conflict(
                    f"checkpoint {number} is older than the stored checkpoint"
                    f" {task.checkpoint_seq}",
                    "checkpoint_stale",
                )
            if number == task.checkpoint_seq:
                stored = yield Statement("checkpoint", {"id": fence.task})
                if stored and stored[0]["attempt"] == fence.attempt:
                    return number
                message = f"checkpoint {number} was already stored by another attempt"
                raise Conflict(message, "checkpoint_stale")
            yield Statement(
                "checkpoint_save",
                {
                    "id": fence.task,
                    "workspace": task.workspace,
                    "seq": number,
                    "attempt": fence.attempt,
                    "data": text,
                    "now": self._core.now(),
                },
            )
            return number

        return await self._core.store.transact(script)

    async def append(self, fence: Fence, lines: Sequence[Line]) -> None:
        """Adds new lines to the attempt's transcript up to a size limit; ignores an outdated fence.

        The last line of a full transcript says so. Lines whose number is stored already are
        dropped.
        """
        check_fence(fence)
        for line in lines:
            bounds.check_number("line", line.number, 0, bounds.MAX_COUNT)
            bounds.check_text("level", line.level, bounds.MAX_NAME, empty=False)
            bounds.check_text("text", line.text, bounds.MAX_TEXT)
        if not lines:
            return
        redact = (await self._task_secrets.redactor(fence)).redact_text
        redacted = [msgspec.structs.replace(line, text=redact(line.text)) for line in lines]

        def script() -> Script[None]:
            max_kb = self._core.transcript_kb
            params = fence_params(self._workspace, fence) | {"most": max_kb * 1024}
            rows = yield Statement("transcript_reserve", params | {"bytes": 0})
            if not rows:
                return  # the attempt lost its task, or its transcript is full
            line_numbers = [line.number for line in redacted]
            known_params = {"task": fence.task, "attempt": fence.attempt, "lines": line_numbers}
            existing = yield Statement("transcript_existing", known_params)
            existing_numbers = {row["line_no"] for row in existing}
            new_lines = [line for line in redacted if line.number not in existing_numbers]
            if not new_lines:
                return
            fitting_lines = fit_lines(new_lines, rows[0]["bytes"], max_kb)
            cells = [
                (fence.task, fence.attempt, line.number, self._workspace, line.level, line.text)
                for line in fitting_lines
            ]
            yield Statement("transcript_append", {"now": self._core.now()}, {"line": cells})
            added_bytes = {"bytes": sum(line.size for line in new_lines)}
            yield Statement("transcript_reserve", params | added_bytes)

        await self._core.store.transact(script)

    async def steps(self, task: UUID) -> dict[str, tuple[Any, UUID | None]]:
        """Returns the task's recorded steps by key: a value, or `None` and a subtask's id."""
        params = {"id": task, "workspace": self._workspace}
        rows = await self._core.store.fetch(Statement("steps", params))
        return {row["key"]: (decode_json(row["value"]), row["child"]) for row in rows}

    async def record_step(self, fence: Fence, key: str, value: Any) -> None:
        """Stores a step's value for later attempts; `Conflict` if the key has another value."""
        redactor = await self._task_secrets.redactor(fence)
        check_key(key, redactor)
        text = redactor.redact_json(bounds.to_json_text("value", value))

        def script() -> Script[None]:
            task = yield from self.lock_owned_task(fence)
            if (yield self.step_statement(task, key, text, None)):
                return
            existing = (yield Statement("step", {"id": fence.task, "key": key}))[0]
            if existing["child"] is not None or decode_json(existing["value"]) != decode_json(text):
                raise Conflict(f"step {key!r} already has another value", "step_conflict")

        await self._core.store.transact(script)

    async def spawn(
        self, fence: Fence, workspace: UUID, key: str, new: NewTask, actor: str | None
    ) -> UUID:
        """Creates a subtask and returns its id; for a repeated key, that of the first subtask."""
        redactor = await self._task_secrets.redactor(fence)
        check_key(key, redactor)
        if new.next or new.control or new.group:
            raise Invalid("next, group and control are not allowed for a subtask", field="task")
        child_id = uuid5(fence.task, key)
        child = msgspec.structs.replace(redact_child(new, redactor), id=child_id, parent=fence.task)
        check(child)
        prepared = await self._submitter.prepare([child], workspace, actor, owner=fence.task)

        def script(cascade: Cascade) -> Script[UUID]:
            task = yield from self.lock_owned_task(fence)
            if child.concurrency is not None:
                yield from check_ancestors(task, child.concurrency)
            if prepared.waits or prepared.keyed:
                submitted = yield from self._submitter.insert_with_dependencies(
                    prepared, workspace, cascade
                )
            else:
                submitted = yield from submit_script(self._core, prepared, workspace)
            if submitted[0].created:
                ceiling = self._core.lanes.ceiling
                yield from self._core.spawn_limits.check_and_store_depth(
                    task, submitted[0].id, ceiling
                )
            if not (yield self.step_statement(task, key, None, submitted[0].id)):
                existing = yield Statement("step", {"id": fence.task, "key": key})
                if existing[0]["child"] != submitted[0].id:
                    message = f"step {key!r} is already used for something other than this subtask"
                    raise Conflict(message, "step_conflict")
            return submitted[0].id

        result = await self._core.run_with_cascade(script, actor)
        self._submitter.send_hints(prepared)
        return result

    def step_statement(
        self, task: Task, key: str, value: str | None, child: UUID | None
    ) -> Statement:
        """Returns the statement that records a step of a locked task; no row if the step exists."""
        return Statement(
            "step_record",
            {
                "id": task.id,
                "workspace": task.workspace,
                "key": key,
                "attempt": task.attempt,
                "value": value,
                "child": child,
                "now": self._core.now(),
            },
        )

    def lock_owned_task(self, fence: Fence, *, allow_pausing: bool = False) -> Script[Task]:
        """Locks and returns the fence's task; `Conflict` if lost, or to be cancelled or paused.

        With `allow_pausing`, a requested pause is no conflict.
        """
        check_fence(fence)
        rows = yield Statement("tasks_locked", {"ids": [fence.task]})
        if not rows or rows[0]["workspace"] != self._workspace:
            raise NotFound(f"no task {fence.task}")
        try:
            task = parse_task(rows[0])
        except CorruptRow as error:
            raise Conflict(f"task {fence.task} has an invalid row", "corrupt") from error
        is_owner = task.attempt == fence.attempt and task.lease_token == token_hash(fence.token)
        if task.status not in LEASED or not is_owner:
            raise Conflict(f"attempt {fence.attempt} no longer owns the task", LEASE_LOST)
        if task.cancel_requested_at is not None:
            raise Conflict(f"task {fence.task} is being cancelled", "cancel_requested")
        if task.pause_requested_at is not None and not allow_pausing:
            raise Conflict(f"task {fence.task} is being paused", "pause_requested")
        return task


def _lease_status(row: Row) -> LeaseStatus:
    """Returns the lease status of a row of the heartbeat query."""
    return LeaseStatus(
        row["lease_until"],
        row["cancel_requested_at"] is not None,
        row["pause_requested_at"] is not None,
        row["hung_warned_at"] is not None,
        row["started_at"] is not None,
    )
