"""Parks tasks until subtasks finish or people answer. Each wait is one fenced transaction.

A handler that has to wait ends its attempt, which frees its slot. When the wait is over, the task
runs again from its start. The same call then returns at once: results of subtasks and answers are
stored under their keys.
"""

import hashlib
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, Literal
from uuid import UUID

import msgspec

from tenuto.engine.agents.escalation import escalate, failed_for_good
from tenuto.engine.agents.subtask_tree import close_inbox_statement
from tenuto.engine.core import Core
from tenuto.engine.flows.advance import Cascade
from tenuto.engine.rows import decode_json
from tenuto.engine.tasks.report import AttemptReporter
from tenuto.engine.tenancy.encryption import TaskSecrets
from tenuto.engine.tenancy.output_redaction import ENGINE_PREFIX, check_key
from tenuto.model import bounds
from tenuto.model.errors import Conflict, Invalid, NotFound
from tenuto.model.limits.budgets import HOLD as BUDGET
from tenuto.model.tasks import commands
from tenuto.model.tasks.task import LEASED, TERMINAL, Fence, Outcome, Status, Task, token_hash
from tenuto.store.protocol import Row, Script, Statement

_MAX_PATH = 10_000
MAX_WAIT_S = 366 * 24 * 3600


class Child(msgspec.Struct, frozen=True):
    """A finished subtask. If the wait timed out: an unfinished one, with its status then."""

    id: UUID
    key: str | None
    status: str
    output: Any = None
    error: str | None = None


class WaitResult(msgspec.Struct, frozen=True):
    """`parked`: the attempt has ended, because the task waits. If false, `children` are given."""

    parked: bool
    children: list[Child] = []


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """A handler's question to people. `default` is the answer if none comes within `timeout_s`."""

    kind: Literal["approval", "question"]
    title: str
    body: Any = None
    timeout_s: float | None = None
    default: Any = None

    @property
    def hold(self) -> str:
        """Returns the task's hold while it waits for the answer."""
        return "approval" if self.kind == "approval" else "input"

    def fallback(self) -> dict[str, Any]:
        """Returns the answer if none comes in time: the default; approvals without one: no."""
        if self.kind == "approval":
            return {"decision": "approved" if self.default else "rejected", "by": "timeout"}
        return {"answer": self.default, "by": "timeout"}


class AskResult(msgspec.Struct, frozen=True):
    """`parked`: the attempt has ended, because the task waits. If false, `answer` is given."""

    parked: bool
    answer: Any = None


class AttemptWaits:
    """Waits of attempts of one workspace, for subtasks and for answers of people."""

    def __init__(
        self, core: Core, reporter: AttemptReporter, secrets: TaskSecrets, workspace: UUID
    ) -> None:
        self._core = core
        self._reporter = reporter
        self._secrets = secrets
        self._workspace = workspace

    async def wait_for_children(
        self,
        fence: Fence,
        names: Sequence[UUID | str] | None,
        timeout_s: float | None,
        key: str | None,
        actor: str | None,
    ) -> WaitResult:
        """Returns children (ids or keys; `None`: all) if all finished or late; else parks the task.

        `key` names the wait. A repeated wait with the same key keeps the deadline of the first one.
        Raises `NotFound`; `Conflict` if the lease is lost; `Invalid` if a child waits for the task.
        """
        _check_seconds(timeout_s)
        if names is not None:
            bounds.check_number(
                "the number of children", len(names), 0, self._core.spawn_limits.max_children
            )
        step_name = _wait_step_name(names, key)

        def script(cascade: Cascade) -> Script[WaitResult]:
            requested = yield from self._find_children(fence.task, names)
            parent_key = {"parent": fence.task, "workspace": self._workspace}
            rows = yield Statement("children_locked", parent_key | {"ids": sorted(requested)})
            if missing := requested.keys() - {row["id"] for row in rows}:
                raise NotFound(f"task {fence.task} has no subtask {min(map(str, missing))}")
            open_ = [row["id"] for row in rows if Status(row["status"]) not in TERMINAL]
            task = yield from self._lock_owned_task(fence)
            if task is None:
                return WaitResult(parked=True)
            until = yield from self._wait_deadline(task, step_name, timeout_s)
            late = yield from self._store_late_children(task, step_name, until, rows)
            if not open_ or late:
                return WaitResult(
                    parked=False, children=(yield from _load_results(requested, late))
                )
            path = {"from_ids": open_, "to_ids": [task.id], "most": _MAX_PATH}
            if (yield Statement("dependency_path", path)):
                text = f"a subtask depends on task {task.id}, which waits for that subtask"
                raise Invalid(text, "dependency_cycle")
            if until is not None:
                text = msgspec.json.encode({"until": until}).decode()
                yield self._reporter.step_statement(task, step_name, text, None)
            park = commands.Park(fence=fence, hold="children", wait_until=until)
            yield from self._park(cascade, task, park)
            ids = {"task": task.id, "workspace": self._workspace, "ids": open_}
            yield Statement("child_wait_set", ids)
            return WaitResult(parked=True)

        return await self._core.run_with_cascade(script, actor)

    async def wait_for_people(
        self, fence: Fence, key: str, question: Question, actor: str | None
    ) -> AskResult:
        """Returns the answer stored under the key; without one, asks people and parks the task."""
        _check_seconds(question.timeout_s)
        redactor = await self._secrets.redactor(fence)
        check_key(key, redactor)
        title = redactor.redact_text(
            bounds.check_text("title", question.title, bounds.MAX_TITLE, empty=False)
        )
        body = redactor.redact_json(bounds.to_json_text("body", question.body))
        fallback = redactor.redact_json(bounds.to_json_text("default", question.fallback()))

        def script(cascade: Cascade) -> Script[AskResult]:
            task = yield from self._lock_owned_task(fence)
            if task is None:
                return AskResult(parked=True)
            steps = yield Statement("step", {"id": task.id, "key": key})
            if steps:
                return AskResult(parked=False, answer=_answer_of(steps[0], key, question))
            existing = yield Statement("inbox_open_question", {"task": task.id, "key": key})
            until = existing[0]["expires_at"] if existing else self._time_after(question.timeout_s)
            if not existing:
                item = {"key": key, "kind": question.kind, "title": title, "body": body}
                yield self._question_statement(
                    task, item | {"fallback": fallback, "expires_at": until}
                )
            park = commands.Park(fence=fence, hold=question.hold, wait_until=until)
            yield from self._park(cascade, task, park)
            return AskResult(parked=True)

        return await self._core.run_with_cascade(script, actor)

    def _question_statement(self, task: Task, item: dict[str, Any]) -> Statement:
        """Returns the statement that adds the question to the inbox."""
        own_fields = {"id": self._core.clock.new_id(), "task": task.id, "workspace": task.workspace}
        return Statement("inbox_ask", item | own_fields | {"now": self._core.now()})

    def _find_children(
        self, task: UUID, names: Sequence[UUID | str] | None
    ) -> Script[dict[UUID, str | None]]:
        """Returns children (ids or keys; `None`: all) in this order, id to key; or `NotFound`."""
        rows = yield Statement("child_keys", {"id": task, "workspace": self._workspace})
        by_key: dict[str, UUID] = {row["key"]: row["child"] for row in rows}
        keys = {child: key for key, child in by_key.items()}
        if names is None:
            return dict(keys)
        children: dict[UUID, str | None] = {}
        for name in names:
            child = name if isinstance(name, UUID) else by_key.get(name) or _parse_child_id(name)
            children[child] = keys.get(child)
        return children

    def _lock_owned_task(self, fence: Fence) -> Script[Task | None]:
        """Locks and returns the task; `None` if this attempt has parked it. Raises `Conflict`."""
        try:
            return (yield from self._reporter.lock_owned_task(fence))
        except Conflict as error:
            if error.code != "lease_lost":
                raise
            rows = yield Statement("tasks_locked", {"ids": [fence.task]})
            if rows and rows[0]["workspace"] == self._workspace and _is_parked_by(rows[0], fence):
                return None  # the response to the first call was lost
            raise

    def _wait_deadline(
        self, task: Task, step_name: str, timeout_s: float | None
    ) -> Script[datetime | None]:
        """Returns the deadline that the first call stored, else a new one; `None`: no timeout."""
        if timeout_s is None:
            return None
        rows = yield Statement("step", {"id": task.id, "key": step_name})
        if rows:
            return msgspec.convert(decode_json(rows[0]["value"])["until"], datetime)
        return self._time_after(timeout_s)

    def _store_late_children(
        self, task: Task, step_name: str, until: datetime | None, rows: Sequence[Row]
    ) -> Script[dict[str, str]]:
        """Stores and returns the children unfinished at the deadline: id to status; none before it.

        They are stored as a step, so that a handler sees the same result in every attempt.
        """
        if until is None or until > self._core.now():
            return {}
        over_name = f"{step_name} over"
        steps = yield Statement("step", {"id": task.id, "key": over_name})
        if steps:
            return msgspec.convert(decode_json(steps[0]["value"]), dict[str, str])
        statuses = {str(row["id"]): row["status"] for row in rows}
        late = {
            child: status for child, status in statuses.items() if Status(status) not in TERMINAL
        }
        if late:
            yield self._reporter.step_statement(
                task, over_name, msgspec.json.encode(late).decode(), None
            )
        return late

    def _time_after(self, seconds: float | None) -> datetime | None:
        """Returns the time in that many seconds; `None` for no limit."""
        return None if seconds is None else self._core.now() + timedelta(seconds=seconds)

    def _park(self, cascade: Cascade, task: Task, park: commands.Park) -> Script[None]:
        """Ends the attempt and parks its locked task; escalates if that makes the task fail."""
        if task.status is Status.ASSIGNED:  # a session that reports has started
            begin = commands.Begin(fence=park.fence)
            yield from cascade.apply_to_each([task.id], lambda _: begin)
        changes = yield from cascade.apply_to_each([task.id], lambda _: park)
        assert changes, "the attempt owns the task, and its row is locked"
        if failed := failed_for_good([(changes[-1], park)]):
            # The task has failed, so no attempt will read an answer.
            yield close_inbox_statement(
                task.id, self._core.now(), changes[-1].event.actor, kept=BUDGET
            )
            yield from escalate(self._core.clock, failed)
        self._core.known_attempts.evict(park.fence.task)


def _is_parked_by(row: Row, fence: Fence) -> bool:
    """True if this attempt is the last one of the task, and has parked the task."""
    is_own = row["attempt"] == fence.attempt and row["lease_token"] == token_hash(fence.token)
    return is_own and row["last_outcome"] == Outcome.PARKED and row["status"] not in LEASED


def store_default_answers(core: Core, woken: Sequence[Task]) -> Script[None]:
    """Stores the default answers of the woken tasks' expired questions; closes their items."""
    now = core.now()
    rows = yield Statement("inbox_expired", {"ids": sorted(task.id for task in woken), "now": now})
    attempts = {task.id: task.attempt for task in woken}
    for row in rows:
        yield answer_step_statement(row, attempts[row["task"]], row["fallback"], now)
        decided = {"id": row["id"], "status": "EXPIRED", "decision": row["fallback"]}
        yield Statement("inbox_answer", decided | {"actor": "timeout", "now": now})


def answer_step_statement(item: Row, attempt: int, text: str | None, now: datetime) -> Statement:
    """Returns the statement that stores an answer as a step of the handler that asked."""
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
    """Returns the answer in a step; `Conflict` (`step_conflict`) if it is another kind of step."""
    value = decode_json(step["value"])
    field = "decision" if question.kind == "approval" else "answer"
    if not isinstance(value, dict) or field not in value:
        text = f"key {key!r} is used by a step that is not an answer; choose another key"
        raise Conflict(text, "step_conflict")
    return value


def _load_results(requested: dict[UUID, str | None], late: dict[str, str]) -> Script[list[Child]]:
    """Returns the results of these children; `late` ones only with their status at the deadline."""
    rows = yield Statement("child_results", {"ids": sorted(requested)})
    by_id = {row["id"]: row for row in rows}
    return [
        Child(child, key, late[str(child)])
        if str(child) in late
        else Child(
            id=child,
            key=key,
            status=by_id[child]["status"],
            output=decode_json(by_id[child]["output"]),
            error=by_id[child]["last_error"],
        )
        for child, key in requested.items()
    ]


def _wait_step_name(names: Sequence[UUID | str] | None, key: str | None) -> str:
    """Returns the key of the step that stores a wait's deadline; a hash hides the names."""
    bounds.check_text("key", key or "", bounds.MAX_TITLE)
    text = key or "\n".join(map(str, names or ()))
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{ENGINE_PREFIX}wait {digest[:32]}"


def _check_seconds(seconds: float | None) -> None:
    """Raises `Invalid` if a timeout is negative or longer than `MAX_WAIT_S`."""
    if seconds is not None:
        bounds.check_number("timeout", seconds, 0, MAX_WAIT_S)


def _parse_child_id(name: str) -> UUID:
    """Returns the id; raises `NotFound` if the name is neither a child's key nor an id."""
    try:
        return UUID(name)
    except ValueError:
        raise NotFound(f"the task has no subtask {name[:60]!r}") from None
