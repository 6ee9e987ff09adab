"""Report: what an attempt says while it runs. Every write carries its fence.

Whoever reports, here or over a network, the task's secrets are struck before anything is stored.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID, uuid5

import msgspec

from tenuto.engine.core import Core
from tenuto.engine.flows.advance import Cascade
from tenuto.engine.limits.budgets import fenced
from tenuto.engine.limits.concurrency import check_above
from tenuto.engine.rows import CorruptRow, decode, task_of
from tenuto.engine.tasks.submit import TaskSubmitter, submit_script
from tenuto.engine.tenancy.encryption import TaskSecrets, redact_child
from tenuto.engine.tenancy.output_redaction import (
    LOST,
    check_fence,
    check_key,
    check_progress,
    is_valid_fence,
)
from tenuto.model import bounds
from tenuto.model.errors import Conflict, Invalid, NotFound
from tenuto.model.tasks.decide import token_hash
from tenuto.model.tasks.submission import NewTask, check
from tenuto.model.tasks.task import DEFAULT_LEASE_S, LEASED, Fence, Task
from tenuto.model.tasks.transcript import Line, fitting
from tenuto.store.batching import Answers, WriteKind
from tenuto.store.protocol import Row, Rows, Script, Statement


class LeaseStatus(msgspec.Struct, frozen=True):
    """What a heartbeat answers for one lease that is still held."""

    lease_until: datetime
    cancel: bool
    pause: bool
    hung: bool
    begun: bool = True
    """Whether the session is known to have begun."""


class HeartbeatResult(msgspec.Struct, frozen=True):
    """A worker's heartbeat, answered: what it still holds and what it has lost."""

    held: dict[UUID, LeaseStatus]
    lost: list[Fence]


class WorkerInfo(msgspec.Struct):
    """Who a worker is, as the registry of workers shows it."""

    worker: str
    host: str
    pid: int
    agents: list[str] = []
    slots: int = 0
    status: str = "RUNNING"


class AttemptReporter:
    """The report family, for the attempts of one workspace."""

    def __init__(
        self, core: Core, submitting: TaskSubmitter, sealing: TaskSecrets, workspace: UUID
    ) -> None:
        self._core = core
        self._workspace = workspace
        self._sealing = sealing
        self._submitting = submitting
        self._progress = WriteKind("progress", self._progress_script, one_statement=True)

    async def heartbeat(
        self, fences: Sequence[Fence], lease_s: int = DEFAULT_LEASE_S
    ) -> HeartbeatResult:
        """Renew all leases in one statement."""
        bounds.number("lease_s", lease_s, 1, bounds.MAX_LEASE_S)
        sane = [fence for fence in fences if is_valid_fence(fence)]
        if not sane:
            return HeartbeatResult({}, list(fences))
        rows = sorted((f.task, f.attempt, token_hash(f.token)) for f in sane)

        def script() -> Script[Rows]:
            held: Rows = yield Statement(
                "heartbeat", self._params() | {"lease_s": lease_s}, {"lease": rows}
            )
            return held

        found = await self._core.store.once(script)
        held = {row["id"]: _pulse(row) for row in found}
        mine = {(row["id"], row["attempt"]) for row in found}
        return HeartbeatResult(
            held, [fence for fence in fences if (fence.task, fence.attempt) not in mine]
        )

    async def progress(
        self, fence: Fence, percent: float | None, step: str | None, finish_at: datetime | None
    ) -> None:
        """Note how far the attempt is; a part of a percent is rounded."""
        check_fence(fence)
        check_progress(percent, step, finish_at)
        if percent is not None:
            percent = round(percent)
        if step is not None:
            step = (await self._sealing.redactor(fence)).text(step)
        item = (fence, percent, step, finish_at)
        if not await self._core.batcher.submit(self._progress, item, key=fence.task.int):
            raise Conflict(f"attempt {fence.attempt} no longer owns the task", LOST)

    def _progress_script(self, items: list[Any]) -> Script[Answers]:
        rows = sorted(
            (f.task, f.attempt, token_hash(f.token), percent, step, finish_at)
            for f, percent, step, finish_at in items
        )
        moved = yield Statement("progress", self._params(), {"report": rows})
        kept = {row["id"] for row in moved}
        return [item[0].task in kept for item in items]

    def _params(self) -> dict[str, Any]:
        """What every write of an attempt names besides its fence."""
        return {"workspace": self._workspace, "now": self._core.now()}

    async def checkpoint(self, fence: Fence, data: Any, seq: int | None = None) -> int:
        """Replace the checkpoint; answers its number. A lower number than the stored is refused."""
        check_fence(fence)
        if seq is not None:
            bounds.number("seq", seq, 0, bounds.MAX_COUNT)
        redactor = await self._sealing.redactor(fence)
        text = redactor.json(bounds.json_text("checkpoint", data)) or "null"

        def script() -> Script[int]:
            task = yield from self.lock_owned_task(fence, pausing=True)
            number = task.checkpoint_seq + 1 if seq is None else seq
            if number < task.checkpoint_seq:
                raise Conflict(
                    f"checkpoint {task.checkpoint_seq} is already stored", "checkpoint_stale"
                )
            if number == task.checkpoint_seq:
                stored = yield Statement("checkpoint", {"id": fence.task})
                if stored and stored[0]["attempt"] == fence.attempt:
                    return number
                raise Conflict(f"checkpoint {number} is another attempt's", "checkpoint_stale")
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
        """Add to the attempt's transcript, up to its cap, where one last line says that it is full.

        Lines of an attempt that lost its task are dropped, and numbers that are there already.
        """
        check_fence(fence)
        for line in lines:
            bounds.number("line", line.number, 0, bounds.MAX_COUNT)
            bounds.text("level", line.level, bounds.MAX_NAME, empty=False)
            bounds.text("text", line.text, bounds.MAX_TEXT)
        if not lines:
            return
        said = (await self._sealing.redactor(fence)).text
        told = [msgspec.structs.replace(line, text=said(line.text)) for line in lines]

        def script() -> Script[None]:
            most_kb = self._core.transcript_kb
            held = fenced(self._workspace, fence) | {"most": most_kb * 1024}
            rows = yield Statement("transcript_grow", held | {"bytes": 0})
            if not rows:
                return  # the attempt lost its task, or has said enough
            numbers = [line.number for line in told]
            of = {"task": fence.task, "attempt": fence.attempt, "lines": numbers}
            known = yield Statement("transcript_known", of)
            there = {row["line_no"] for row in known}
            fresh = [line for line in told if line.number not in there]
            if not fresh:
                return
            kept = fitting(fresh, rows[0]["bytes"], most_kb)
            cells = [
                (fence.task, fence.attempt, line.number, self._workspace, line.level, line.text)
                for line in kept
            ]
            yield Statement("transcript_append", {"now": self._core.now()}, {"line": cells})
            grown = {"bytes": sum(line.size for line in fresh)}
            yield Statement("transcript_grow", held | grown)

        await self._core.store.transact(script)

    async def steps(self, task: UUID) -> dict[str, tuple[Any, UUID | None]]:
        """What earlier and present attempts recorded, by key: the value and the child."""
        params = {"id": task, "workspace": self._workspace}
        rows = await self._core.store.fetch(Statement("steps", params))
        return {row["key"]: (decode(row["value"]), row["child"]) for row in rows}

    async def record_step(self, fence: Fence, key: str, value: Any) -> None:
        """Remember a step's value for every later attempt."""
        redactor = await self._sealing.redactor(fence)
        check_key(key, redactor)
        text = redactor.json(bounds.json_text("value", value))

        def script() -> Script[None]:
            task = yield from self.lock_owned_task(fence)
            if (yield self.step(task, key, text, None)):
                return
            before = (yield Statement("step", {"id": fence.task, "key": key}))[0]
            if before["child"] is not None or decode(before["value"]) != decode(text):
                raise Conflict(f"step {key!r} has another value already", "step_conflict")

        await self._core.store.transact(script)

    async def spawn(
        self, fence: Fence, workspace: UUID, key: str, new: NewTask, actor: str | None
    ) -> UUID:
        """A child task, made once per key however often the handler repeats it."""
        redactor = await self._sealing.redactor(fence)
        check_key(key, redactor)
        if new.next or new.control or new.group:
            raise Invalid("a child has no next, group or control of its own", field="task")
        child = uuid5(fence.task, key)
        born = msgspec.structs.replace(redact_child(new, redactor), id=child, parent=fence.task)
        check(born)
        draft = await self._submitting.draft([born], workspace, actor, owner=fence.task)

        def script(cascade: Cascade) -> Script[UUID]:
            task = yield from self.lock_owned_task(fence)
            if born.concurrency is not None:
                yield from check_above(task, born.concurrency)
            if draft.waits or draft.keyed:
                made = yield from self._submitting.waiting_script(draft, workspace, cascade)
            else:
                made = yield from submit_script(self._core, draft, workspace)
            if made[0].created:
                ceiling = self._core.lanes.ceiling
                yield from self._core.tree.check_limits_and_place(task, made[0].id, ceiling)
            if not (yield self.step(task, key, None, made[0].id)):
                before = yield Statement("step", {"id": fence.task, "key": key})
                if before[0]["child"] != made[0].id:
                    raise Conflict(f"step {key!r} is no such child", "step_conflict")
            return made[0].id

        known = await self._core.run_with_cascade(script, actor)
        self._submitting.announce(draft)
        return known

    def step(self, task: Task, key: str, value: str | None, child: UUID | None) -> Statement:
        """The statement that records a step of a task that the caller holds."""
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

    def lock_owned_task(self, fence: Fence, *, pausing: bool = False) -> Script[Task]:
        """The task, locked, if the fence is current and nobody asked to stop."""
        check_fence(fence)
        rows = yield Statement("tasks_locked", {"ids": [fence.task]})
        if not rows or rows[0]["workspace"] != self._workspace:
            raise NotFound(f"no task {fence.task}")
        try:
            task = task_of(rows[0])
        except CorruptRow as error:
            raise Conflict(f"the row of task {fence.task} is unreadable", "corrupt") from error
        mine = task.attempt == fence.attempt and task.lease_token == token_hash(fence.token)
        if task.status not in LEASED or not mine:
            raise Conflict(f"attempt {fence.attempt} no longer owns the task", LOST)
        if task.cancel_requested_at is not None:
            raise Conflict("the task is being cancelled", "cancel_requested")
        if task.pause_requested_at is not None and not pausing:
            raise Conflict("the task is being paused", "pause_requested")
        return task


def _pulse(row: Row) -> LeaseStatus:
    return LeaseStatus(
        row["lease_until"],
        row["cancel_requested_at"] is not None,
        row["pause_requested_at"] is not None,
        row["hung_warned_at"] is not None,
        row["started_at"] is not None,
    )
