"""Waiting without a slot: for children, and for people. Each wait is one fenced transaction.

A handler that has to wait gives its attempt up. The task is woken by what it waits for, runs again
from its start, and is then answered at once: children and answers are known by their keys.
"""

import hashlib
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, Literal
from uuid import UUID

import msgspec

from tenuto.engine.agents.escalation import escalate, lost
from tenuto.engine.agents.subtask_tree import closed
from tenuto.engine.core import Core
from tenuto.engine.flows.advance import Cascade
from tenuto.engine.rows import decode
from tenuto.engine.tasks.report import AttemptReporter
from tenuto.engine.tenancy.encryption import TaskSecrets
from tenuto.engine.tenancy.output_redaction import OWN, check_key
from tenuto.model import bounds
from tenuto.model.errors import Conflict, Invalid, NotFound
from tenuto.model.limits.budgets import HOLD as BUDGET
from tenuto.model.tasks import commands
from tenuto.model.tasks.decide import token_hash
from tenuto.model.tasks.task import LEASED, TERMINAL, Fence, Outcome, Status, Task
from tenuto.store.protocol import Row, Script, Statement

_PATH = 10_000
MAX_WAIT_S = 366 * 24 * 3600


class Child(msgspec.Struct, frozen=True):
    """How a child ended, or, when the wait was too long, how it is."""

    id: UUID
    key: str | None
    status: str
    output: Any = None
    error: str | None = None


class WaitResult(msgspec.Struct, frozen=True):
    """Whether the attempt is over because the task waits; if not, what it wanted to know."""

    parked: bool
    children: list[Child] = []


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """What a handler asks people; `default` is the answer when none comes in time."""

    kind: Literal["approval", "question"]
    title: str
    body: Any = None
    timeout_s: float | None = None
    default: Any = None

    @property
    def hold(self) -> str:
        """What the task waits for meanwhile."""
        return "approval" if self.kind == "approval" else "input"

    def fallback(self) -> dict[str, Any]:
        """What is recorded when nobody answers."""
        if self.kind == "approval":
            return {"decision": "approved" if self.default else "rejected", "by": "timeout"}
        return {"answer": self.default, "by": "timeout"}


class AskResult(msgspec.Struct, frozen=True):
    """Whether the attempt is over because the task waits; if not, what was answered."""

    parked: bool
    answer: Any = None


class AttemptWaits:
    """What attempts of one workspace wait for."""

    def __init__(
        self, core: Core, reporting: AttemptReporter, sealing: TaskSecrets, workspace: UUID
    ) -> None:
        self._core = core
        self._reporting = reporting
        self._sealing = sealing
        self._workspace = workspace

    async def wait_for_children(
        self,
        fence: Fence,
        names: Sequence[UUID | str] | None,
        timeout_s: float | None,
        key: str | None,
        actor: str | None,
    ) -> WaitResult:
        """How these children ended, by id or key, or all that were made; else the task waits.

        `key` names the wait: repeated under it, the wait ends when the first one's time is over.
        """
        _check_seconds(timeout_s)
        if names is not None:
            bounds.number("the number of children", len(names), 0, self._core.tree.widest)
        name = _wait_name(names, key)

        def script(cascade: Cascade) -> Script[WaitResult]:
            wanted = yield from self._named(fence.task, names)
            where = {"parent": fence.task, "workspace": self._workspace}
            rows = yield Statement("children_locked", where | {"ids": sorted(wanted)})
            if missing := wanted.keys() - {row["id"] for row in rows}:
                raise NotFound(f"the task has no child {min(map(str, missing))}")
            open_ = [row["id"] for row in rows if Status(row["status"]) not in TERMINAL]
            task = yield from self._owned(fence)
            if task is None:
                return WaitResult(parked=True)
            until = yield from self._until(task, name, timeout_s)
            late = yield from self._unfinished_children(task, name, until, rows)
            if not open_ or late:
                return WaitResult(parked=False, children=(yield from _results(wanted, late)))
            path = {"from_ids": open_, "to_ids": [task.id], "most": _PATH}
            if (yield Statement("dependency_path", path)):
                raise Invalid("a child waits for the task that waits for it", "dependency_cycle")
            if until is not None:
                text = msgspec.json.encode({"until": until}).decode()
                yield self._reporting.step(task, name, text, None)
            park = commands.Park(fence=fence, hold="children", wait_until=until)
            yield from self._park(cascade, task, park)
            ids = {"task": task.id, "workspace": self._workspace, "ids": open_}
            yield Statement("child_await", ids)
            return WaitResult(parked=True)

        return await self._core.run_with_cascade(script, actor)

    async def wait_for_people(
        self, fence: Fence, key: str, question: Question, actor: str | None
    ) -> AskResult:
        """What people answered under the key; until they have, the task waits."""
        _check_seconds(question.timeout_s)
        redactor = await self._sealing.redactor(fence)
        check_key(key, redactor)
        title = redactor.text(bounds.text("title", question.title, bounds.MAX_TITLE, empty=False))
        body = redactor.json(bounds.json_text("body", question.body))
        fallback = redactor.json(bounds.json_text("default", question.fallback()))

        def script(cascade: Cascade) -> Script[AskResult]:
            task = yield from self._owned(fence)
            if task is None:
                return AskResult(parked=True)
            known = yield Statement("step", {"id": task.id, "key": key})
            if known:
                return AskResult(parked=False, answer=_answer_of(known[0], key, question))
            asked = yield Statement("inbox_asked", {"task": task.id, "key": key})
            until = asked[0]["expires_at"] if asked else self._after(question.timeout_s)
            if not asked:
                item = {"key": key, "kind": question.kind, "title": title, "body": body}
                yield self._store_question(task, item | {"fallback": fallback, "expires_at": until})
            park = commands.Park(fence=fence, hold=question.hold, wait_until=until)
            yield from self._park(cascade, task, park)
            return AskResult(parked=True)

        return await self._core.run_with_cascade(script, actor)

    def _store_question(self, task: Task, item: dict[str, Any]) -> Statement:
        own = {"id": self._core.clock.new_id(), "task": task.id, "workspace": task.workspace}
        return Statement("inbox_ask", item | own | {"now": self._core.now()})

    def _named(
        self, task: UUID, names: Sequence[UUID | str] | None
    ) -> Script[dict[UUID, str | None]]:
        """The children that are meant, in order, with their keys."""
        rows = yield Statement("child_keys", {"id": task, "workspace": self._workspace})
        by_key: dict[str, UUID] = {row["key"]: row["child"] for row in rows}
        keys = {child: key for key, child in by_key.items()}
        if names is None:
            return dict(keys)
        found: dict[UUID, str | None] = {}
        for name in names:
            child = name if isinstance(name, UUID) else by_key.get(name) or _id(name)
            found[child] = keys.get(child)
        return found

    def _owned(self, fence: Fence) -> Script[Task | None]:
        """The task, locked; nothing when this very attempt has given it up to wait already."""
        try:
            return (yield from self._reporting.lock_owned_task(fence))
        except Conflict as error:
            if error.code != "lease_lost":
                raise
            rows = yield Statement("tasks_locked", {"ids": [fence.task]})
            if rows and rows[0]["workspace"] == self._workspace and _already_parked(rows[0], fence):
                return None  # the answer to the first message was lost
            raise

    def _until(self, task: Task, name: str, timeout_s: float | None) -> Script[datetime | None]:
        """When the wait is over: as it was said first."""
        if timeout_s is None:
            return None
        rows = yield Statement("step", {"id": task.id, "key": name})
        if rows:
            return msgspec.convert(decode(rows[0]["value"])["until"], datetime)
        return self._after(timeout_s)

    def _unfinished_children(
        self, task: Task, name: str, until: datetime | None, rows: Sequence[Row]
    ) -> Script[dict[str, str]]:
        """The children that had not ended when the wait was over, with the status they had.

        Recorded: a handler that goes on without them takes the same way in every attempt.
        """
        if until is None or until > self._core.now():
            return {}
        over = f"{name} over"
        known = yield Statement("step", {"id": task.id, "key": over})
        if known:
            return msgspec.convert(decode(known[0]["value"]), dict[str, str])
        statuses = {str(row["id"]): row["status"] for row in rows}
        late = {child: now for child, now in statuses.items() if Status(now) not in TERMINAL}
        if late:
            yield self._reporting.step(task, over, msgspec.json.encode(late).decode(), None)
        return late

    def _after(self, seconds: float | None) -> datetime | None:
        return None if seconds is None else self._core.now() + timedelta(seconds=seconds)

    def _park(self, cascade: Cascade, task: Task, park: commands.Park) -> Script[None]:
        if task.status is Status.ASSIGNED:  # a session that speaks has begun
            begin = commands.Begin(fence=park.fence)
            yield from cascade.apply_to_each([task.id], lambda _: begin)
        made = yield from cascade.apply_to_each([task.id], lambda _: park)
        assert made, "the task is owned, and its row held"
        if bad := lost([(made[-1], park)]):
            # Nobody is there to hear an answer.
            yield closed(task.id, self._core.now(), made[-1].event.actor, kept=BUDGET)
            yield from escalate(self._core.clock, bad)
        self._sealing.forget(park.fence)


def _already_parked(row: Row, fence: Fence) -> bool:
    """Whether this attempt was the last one at the task, and gave it up to wait."""
    mine = row["attempt"] == fence.attempt and row["lease_token"] == token_hash(fence.token)
    return mine and row["last_outcome"] == Outcome.PARKED and row["status"] not in LEASED


def lapsed(core: Core, woken: Sequence[Task]) -> Script[None]:
    """Answer for people who did not answer these tasks in time, as their handlers said."""
    now = core.now()
    rows = yield Statement("inbox_lapsed", {"ids": sorted(task.id for task in woken), "now": now})
    attempts = {task.id: task.attempt for task in woken}
    for row in rows:
        yield answer_step(row, attempts[row["task"]], row["fallback"], now)
        decided = {"id": row["id"], "status": "EXPIRED", "decision": row["fallback"]}
        yield Statement("inbox_decide", decided | {"actor": "timeout", "now": now})


def answer_step(item: Row, attempt: int, text: str | None, now: datetime) -> Statement:
    """The statement that records an answer for the handler that asked."""
    return Statement(
        "step_record",
        {
            "id": item["task"],
            "workspace": item["workspace"],
            "key": item["key"],
            "attempt": attempt,
            "value": text,
            "child": None,
            "now": now,
        },
    )


def _answer_of(step: Row, key: str, question: Question) -> Any:
    value = decode(step["value"])
    field = "decision" if question.kind == "approval" else "answer"
    if not isinstance(value, dict) or field not in value:
        raise Conflict(f"step {key!r} is no answer of people", "step_conflict")
    return value


def _results(wanted: dict[UUID, str | None], late: dict[str, str]) -> Script[list[Child]]:
    rows = yield Statement("child_results", {"ids": sorted(wanted)})
    known = {row["id"]: row for row in rows}
    return [
        Child(child, key, late[str(child)])
        if str(child) in late
        else Child(
            id=child,
            key=key,
            status=known[child]["status"],
            output=decode(known[child]["output"]),
            error=known[child]["last_error"],
        )
        for child, key in wanted.items()
    ]


def _wait_name(names: Sequence[UUID | str] | None, key: str | None) -> str:
    """The key of the step that keeps when a wait is over; nothing can be read from it."""
    bounds.text("key", key or "", bounds.MAX_TITLE)
    said = key or "\n".join(map(str, names or ()))
    digest = hashlib.sha256(said.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{OWN}wait {digest[:32]}"


def _check_seconds(seconds: float | None) -> None:
    if seconds is not None:
        bounds.number("timeout", seconds, 0, MAX_WAIT_S)


def _id(name: str) -> UUID:
    try:
        return UUID(name)
    except ValueError:
        raise NotFound(f"the task has no child {name[:60]!r}") from None
