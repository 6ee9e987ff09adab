"""Report: what an attempt says while it runs and when it ends. Every write carries its fence.

Whoever reports, here or over a network, the task's secrets are struck before anything is stored.
"""

from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from typing import Any, TypeVar
from uuid import UUID, uuid5

import msgspec

from tenuto.engine.cascade import Cascade
from tenuto.engine.consequences import Ended
from tenuto.engine.core import Core
from tenuto.engine.links import Link, Standing
from tenuto.engine.rows import CorruptRow, decode, task_of
from tenuto.engine.sealing import Sealing, struck
from tenuto.engine.spending import counted, spend
from tenuto.engine.submit import Submitting, submit_script
from tenuto.engine.turns import check_above
from tenuto.model import commands, limits
from tenuto.model.decide import token_hash
from tenuto.model.errors import Conflict, Invalid, NotFound
from tenuto.model.flow import Unfit
from tenuto.model.redact import Redactor
from tenuto.model.retry import ATTEMPT_CAP
from tenuto.model.spending import Usage, check_usage
from tenuto.model.submission import NewTask, check
from tenuto.model.task import DEFAULT_LEASE_S, LEASED, Change, Fence, Status, Task
from tenuto.store.batching import Answers, Kind
from tenuto.store.protocol import Row, Rows, Script, Statement

_LOST = "lease_lost"
OWN = "$"
"""How the keys of steps begin that the engine records for itself."""
_SAID = ("failure", "receipt", "hold", "session_key")
"""What an attempt may put into a command in its own words."""
F = TypeVar("F", bound=commands.Fenced)


class Pulse(msgspec.Struct, frozen=True):
    """What a heartbeat answers for one lease that is still held."""

    lease_until: datetime
    cancel: bool
    pause: bool
    hung: bool
    begun: bool = True
    """Whether the session is known to have begun."""


class Beat(msgspec.Struct, frozen=True):
    """A worker's heartbeat, answered: what it still holds and what it has lost."""

    held: dict[UUID, Pulse]
    lost: list[Fence]


class Presence(msgspec.Struct):
    """Who a worker is, as the registry of workers shows it."""

    worker: str
    host: str
    pid: int
    agents: list[str] = []
    slots: int = 0
    status: str = "RUNNING"


class Line(msgspec.Struct, frozen=True):
    """One line of a transcript."""

    number: int
    level: str
    text: str


class _Result(msgspec.Struct, frozen=True):
    command: commands.Complete
    workspace: UUID
    actor: str | None
    usage: Usage | None = None
    standing: Standing | None = None


class _Followed(msgspec.Struct, frozen=True):
    """Whether a completion was accepted; one of a batch brings what followed."""

    moved: bool
    cascade: Cascade | None = None
    lanes: set[int] = set()


class Reporting:
    """The report family, for the attempts of one workspace."""

    def __init__(
        self, core: Core, submitting: Submitting, sealing: Sealing, workspace: UUID
    ) -> None:
        self._core = core
        self._workspace = workspace
        self._sealing = sealing
        self._submitting = submitting
        self._complete = Kind("complete", self._complete_script, one_statement=True)
        self._watched = Kind(
            "complete_watched", self._watched_script, leads=True, single=self._linked
        )
        self._progress = Kind("progress", self._progress_script, one_statement=True)

    async def complete(
        self,
        fence: Fence,
        workspace: UUID,
        output: Any,
        summary: str | None,
        actor: str | None,
        usage: Usage | None = None,
    ) -> None:
        """Record the result; accepted once, and only from the attempt that owns the task."""
        _check_fence(fence)
        redactor = self._sealing.known(fence) or await self._sealing.redactor(fence)
        if summary is not None:
            summary = redactor.text(limits.text("summary", summary, limits.MAX_TEXT))
        text = redactor.json(limits.json_text("output", output))
        command = commands.Complete(fence=fence, output=text, summary=summary)
        _check_usage(usage)
        standing = self._core.watched.take(fence.task)
        known = standing is not None or usage is not None
        result = _Result(command, workspace, actor, usage, standing)
        moved = not known and await self._core.batcher.submit(
            self._complete, result, key=fence.task.int
        )
        if not moved:
            await self._complete_watched(result)
        self._sealing.forget(fence)

    async def _complete_watched(self, result: _Result) -> None:
        """Finish a task together with what follows from it."""
        fence = result.command.fence
        try:
            done: _Followed = await self._core.batcher.submit(
                self._watched, result, key=fence.task.int
            )
        except Unfit as error:
            failure = commands.Failure(message=error.message, retryable=False)
            fail = commands.Fail(fence=fence, failure=failure)
            await self.order(fail, result.actor, result.usage)
            return
        if result.usage is not None and done.moved:
            counted(result.usage)
        if done.cascade is not None:
            self._core.announce_cascade(done.cascade)
        if done.lanes:
            self._core.wakeups.announce([f"lane:{lane}" for lane in done.lanes])
        if not done.moved:
            # Neither of the plain cases: the model says what it is.
            await self._ordered(result.command, result.workspace, result.actor)

    async def _ordered(
        self,
        command: commands.Fenced,
        workspace: UUID,
        actor: str | None,
        usage: Usage | None = None,
    ) -> Change | None:
        """Apply a command, and count with it what its attempt has used."""
        task = command.fence.task
        first = None if usage is None else partial(spend, self._core, command.fence, usage)
        return await self._core.order(task, command, workspace=workspace, actor=actor, first=first)

    def _watched_script(self, results: list[_Result]) -> Script[Answers]:
        plain = yield from self._paid(results)
        rows = yield self._completion("complete_watched", results)
        cascade = self._core.cascade(results[0].actor, strict=True)
        yield from cascade.follow(
            Ended(row["id"], row["workspace"], Status.COMPLETED, row)
            for row in sorted(rows, key=lambda row: row["id"].int)
        )
        moved = {row["id"] for row in rows} | plain
        told = [_Followed(each.command.fence.task in moved) for each in results]
        told[0] = _Followed(told[0].moved, cascade)
        return told

    def _linked(self, result: _Result) -> Callable[[], Script[_Followed | None]] | None:
        """A completion and what follows from it in one statement, if that is known to be plain."""
        if result.standing is None or result.usage is not None:
            return None
        link = self._core.link(result.command.fence.task, result.standing, result.actor)
        return None if link is None else partial(self._linked_script, result, link)

    def _linked_script(self, result: _Result, link: Link) -> Script[_Followed | None]:
        fence, found = result.command.fence, _found(result)
        params = {
            "id": fence.task,
            "attempt": fence.attempt,
            "token": token_hash(fence.token),
            "workspace": result.workspace,
            "now": self._core.now(),
        }
        rows = yield link.statement(params, [] if found is None else [found])
        if not rows:
            return None
        woken = {row["lane"] for row in rows if row.get("status") == Status.PENDING}
        return _Followed(moved=True, lanes=woken | link.lanes)

    def _paid(self, results: list[_Result]) -> Script[set[UUID]]:
        """Count what attempts used that say so at their end; those whose end nobody watches end."""
        paying = []
        for each in results:
            if each.usage is not None:
                yield from spend(self._core, each.command.fence, each.usage)
                paying.append(each)
        if not paying:
            return set()
        rows = yield self._completion("complete_if_owned", paying)
        return {row["id"] for row in rows}

    def _complete_script(self, results: list[_Result]) -> Script[Answers]:
        rows = yield self._completion("complete_if_owned", results)
        if len(rows) == len(results):
            return [True] * len(results)
        moved = {row["id"] for row in rows}
        return [result.command.fence.task in moved for result in results]

    def _completion(self, query: str, results: list[_Result]) -> Statement:
        done = []
        found = []
        for result in sorted(results, key=lambda each: each.command.fence.task.int):
            fence = result.command.fence
            done.append((fence.task, fence.attempt, token_hash(fence.token)))
            if (each := _found(result)) is not None:
                found.append(each)
        return Statement(query, {"now": self._core.now()}, {"done": done, "result": found})

    async def order(
        self, command: commands.Fenced, actor: str | None, usage: Usage | None = None
    ) -> Change | None:
        """Any other end of an attempt, or its beginning, as the model decides."""
        check_report(command)
        _check_usage(usage)
        if any(getattr(command, field, None) is not None for field in _SAID):
            command = redacted(command, await self._sealing.redactor(command.fence))
        change = await self._ordered(command, self._workspace, actor, usage)
        if usage is not None and change is not None:
            counted(usage)
        if not isinstance(command, commands.Begin):
            self._sealing.forget(command.fence)
        return change

    async def receipt(self, fence: Fence, receipt: dict[str, Any]) -> dict[str, Any]:
        """A receipt as it may be stored."""
        limits.json_text("receipt", receipt)
        struck_out: dict[str, Any] = (await self._sealing.redactor(fence)).value(receipt)
        return struck_out

    async def heartbeat(self, fences: Sequence[Fence], lease_s: int = DEFAULT_LEASE_S) -> Beat:
        """Renew all leases in one statement."""
        limits.number("lease_s", lease_s, 1, limits.MAX_LEASE_S)
        sane = [fence for fence in fences if _is_sane(fence)]
        if not sane:
            return Beat({}, list(fences))
        rows = sorted((f.task, f.attempt, token_hash(f.token)) for f in sane)

        def script() -> Script[Rows]:
            held: Rows = yield Statement(
                "heartbeat", {"now": self._core.now(), "lease_s": lease_s}, {"lease": rows}
            )
            return held

        found = await self._core.store.once(script)
        held = {row["id"]: _pulse(row) for row in found}
        mine = {(row["id"], row["attempt"]) for row in found}
        return Beat(held, [fence for fence in fences if (fence.task, fence.attempt) not in mine])

    async def progress(
        self, fence: Fence, percent: float | None, step: str | None, finish_at: datetime | None
    ) -> None:
        """Note how far the attempt is; a part of a percent is rounded."""
        _check_fence(fence)
        limits.instant("finish_at", finish_at)
        if percent is not None:
            if isinstance(percent, bool) or not isinstance(percent, int | float):
                raise Invalid("progress_percent must be a number", field="progress_percent")
            limits.number("progress_percent", percent, 0, 100)
            percent = round(percent)
        if step is not None:
            if not isinstance(step, str):
                raise Invalid("current_step must be text", field="current_step")
            limits.text("current_step", step, limits.MAX_ERROR)
            step = (await self._sealing.redactor(fence)).text(step)
        item = (fence, percent, step, finish_at)
        if not await self._core.batcher.submit(self._progress, item, key=fence.task.int):
            raise Conflict(f"attempt {fence.attempt} no longer owns the task", _LOST)

    def _progress_script(self, items: list[Any]) -> Script[Answers]:
        rows = sorted(
            (f.task, f.attempt, token_hash(f.token), percent, step, finish_at)
            for f, percent, step, finish_at in items
        )
        moved = yield Statement("progress", {"now": self._core.now()}, {"report": rows})
        kept = {row["id"] for row in moved}
        return [item[0].task in kept for item in items]

    async def checkpoint(self, fence: Fence, data: Any, seq: int | None = None) -> int:
        """Replace the checkpoint; answers its number. A lower number than the stored is refused."""
        _check_fence(fence)
        if seq is not None:
            limits.number("seq", seq, 0, limits.MAX_COUNT)
        redactor = await self._sealing.redactor(fence)
        text = redactor.json(limits.json_text("checkpoint", data)) or "null"

        def script() -> Script[int]:
            task = yield from self.owned(fence, pausing=True)
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
        """Add to the attempt's transcript. Lines of an attempt that lost its task are dropped."""
        _check_fence(fence)
        for line in lines:
            limits.number("line", line.number, 0, limits.MAX_COUNT)
            limits.text("level", line.level, limits.MAX_NAME, empty=False)
            limits.text("text", line.text, limits.MAX_TEXT)
        if not lines:
            return
        said = (await self._sealing.redactor(fence)).text
        owner = (fence.task, fence.attempt, token_hash(fence.token))
        rows = [(*owner, line.number, line.level, said(line.text)) for line in lines]

        def script() -> Script[None]:
            yield Statement("transcript_append", {"now": self._core.now()}, {"line": rows})

        await self._core.store.once(script)

    async def steps(self, task: UUID) -> dict[str, tuple[Any, UUID | None]]:
        """What earlier and present attempts recorded, by key: the value and the child."""
        params = {"id": task, "workspace": self._workspace}
        rows = await self._core.store.fetch(Statement("steps", params))
        return {row["key"]: (decode(row["value"]), row["child"]) for row in rows}

    async def record_step(self, fence: Fence, key: str, value: Any) -> None:
        """Remember a step's value for every later attempt."""
        redactor = await self._sealing.redactor(fence)
        check_key(key, redactor)
        text = redactor.json(limits.json_text("value", value))

        def script() -> Script[None]:
            task = yield from self.owned(fence)
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
        born = msgspec.structs.replace(struck(new, redactor), id=child, parent=fence.task)
        check(born)
        draft = await self._submitting.draft([born], workspace, actor)

        def script(cascade: Cascade) -> Script[UUID]:
            task = yield from self.owned(fence)
            if born.concurrency is not None:
                yield from check_above(task, born.concurrency)
            if draft.waits or draft.keyed:
                made = yield from self._submitting.waiting_script(draft, workspace, cascade)
            else:
                made = yield from submit_script(self._core, draft, workspace)
            if made[0].created:
                yield from self._core.tree.grown(task, made[0].id)
            if not (yield self.step(task, key, None, made[0].id)):
                before = yield Statement("step", {"id": fence.task, "key": key})
                if before[0]["child"] != made[0].id:
                    raise Conflict(f"step {key!r} is no such child", "step_conflict")
            return made[0].id

        known = await self._core.flowing(script, actor)
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

    def owned(self, fence: Fence, *, pausing: bool = False) -> Script[Task]:
        """The task, locked, if the fence is current and nobody asked to stop."""
        _check_fence(fence)
        rows = yield Statement("tasks_locked", {"ids": [fence.task]})
        if not rows or rows[0]["workspace"] != self._workspace:
            raise NotFound(f"no task {fence.task}")
        try:
            task = task_of(rows[0])
        except CorruptRow as error:
            raise Conflict(f"the row of task {fence.task} is unreadable", "corrupt") from error
        mine = task.attempt == fence.attempt and task.lease_token == token_hash(fence.token)
        if task.status not in LEASED or not mine:
            raise Conflict(f"attempt {fence.attempt} no longer owns the task", _LOST)
        if task.cancel_requested_at is not None:
            raise Conflict("the task is being cancelled", "cancel_requested")
        if task.pause_requested_at is not None and not pausing:
            raise Conflict("the task is being paused", "pause_requested")
        return task


def _found(result: _Result) -> tuple[Any, ...] | None:
    """The row of what an attempt has made, if it has made anything."""
    command = result.command
    if command.output is None and command.summary is None:
        return None
    return command.fence.task, result.workspace, command.output, command.summary


def _pulse(row: Row) -> Pulse:
    return Pulse(
        row["lease_until"],
        row["cancel_requested_at"] is not None,
        row["pause_requested_at"] is not None,
        row["hung_warned_at"] is not None,
        row["started_at"] is not None,
    )


def _is_sane(fence: Fence) -> bool:
    return 0 < fence.attempt <= ATTEMPT_CAP


def _check_fence(fence: Fence) -> None:
    """A number that no attempt can have is that of an attempt which owns nothing."""
    if not _is_sane(fence):
        raise Conflict("no such attempt owns the task", _LOST)


def _check_usage(usage: Usage | None) -> None:
    if usage is not None:
        check_usage(usage)


def check_key(key: str, redactor: Redactor) -> None:
    """Struck out, two keys could become one, and a step's value be taken for another's."""
    limits.text("key", key, limits.MAX_TITLE, empty=False)
    if key.startswith(OWN):
        raise Invalid(f"keys that begin with {OWN} are the engine's own", field="key")
    if redactor.text(key) != key:
        raise Invalid("a step's key must not hold a secret", field="key")


def redacted(command: F, redactor: Redactor) -> F:
    """What an attempt says as it may be stored."""
    said = {field: redactor.value(getattr(command, field, None)) for field in _SAID}
    failure = said["failure"]
    if failure is not None:
        stack = None if failure.stack is None else redactor.text(failure.stack)
        told = failure.escalation
        if told is not None:
            told = commands.Escalation(redactor.text(told.reason), redactor.text(told.prompt))
        said["failure"] = msgspec.structs.replace(
            failure, message=redactor.text(failure.message), stack=stack, escalation=told
        )
    there = {field: value for field, value in said.items() if value is not None}
    return msgspec.structs.replace(command, **there)


def check_report(command: commands.Fenced) -> None:
    """Raise `Invalid` unless what an attempt says can be stored."""
    _check_fence(command.fence)
    failure = getattr(command, "failure", None)
    if failure is not None:
        limits.text("message", failure.message, limits.MAX_ERROR)
        limits.text("stack", failure.stack or "", limits.MAX_STACK)
        limits.number("exit_code", failure.exit_code or 0, -(2**31), 2**32)
        if failure.escalation is not None:
            limits.text("reason", failure.escalation.reason, limits.MAX_ERROR, empty=False)
            limits.text("prompt", failure.escalation.prompt, limits.MAX_TEXT, empty=False)
    for field, longest in (("hold", limits.MAX_NAME), ("session_key", limits.MAX_TITLE)):
        if (value := getattr(command, field, None)) is not None:
            limits.text(field, value, longest, empty=False)
    limits.json_text("receipt", getattr(command, "receipt", None))
    for field in ("resume_at", "wait_until"):
        limits.instant(field, getattr(command, field, None))
