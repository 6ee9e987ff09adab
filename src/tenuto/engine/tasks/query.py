"""Query: list, show, history, explain. Reads only."""

import string
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec

from tenuto.engine.agents.gateways import GatewayState, obstacle
from tenuto.engine.agents.lanes import Lane
from tenuto.engine.agents.registry import claim_blockers, profile_of
from tenuto.engine.core import Core
from tenuto.engine.limits.budgets import spent_by_attempt
from tenuto.engine.limits.concurrency import standing
from tenuto.engine.limits.quotas import quota_gates
from tenuto.engine.limits.rate_limits import limit_rows, used_up
from tenuto.engine.rows import CorruptRow, task_of
from tenuto.engine.tasks.explain import ActiveGates, explain, waiting_for
from tenuto.engine.tasks.maintenance import APART
from tenuto.engine.views import (
    AttemptView,
    Explanation,
    Gate,
    LogLine,
    Page,
    TaskView,
    readable,
    summary_of,
    view_of,
)
from tenuto.model import bounds
from tenuto.model.agents.matching import AgentProfile
from tenuto.model.errors import Invalid, NotFound
from tenuto.model.limits.concurrency import HOLD
from tenuto.model.tasks.task import LEASED, Outcome, Status
from tenuto.store.protocol import Row, Statement

LEVELS = ("DEBUG", "INFO", "WARN", "ERROR", "CRITICAL")
_ATTENTION = frozenset("WAITING PAUSED RETRY_WAIT FAILED DEAD CANCELLED SKIPPED".split())
_ALIASES = {"QUEUED": "PENDING", "SUCCEEDED": "COMPLETED"}
_OUTCOMES = frozenset({Outcome.STALLED.value, Outcome.ABORTED.value})
_ASCII_LOWER = str.maketrans(string.ascii_uppercase, string.ascii_lowercase)
"""What `lower` does in both databases."""


class Filter(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Which tasks. Everything given must hold; of several statuses, any."""

    status: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    min_priority: int | None = None
    priority: int | None = None
    task_type: str | None = None
    agent: UUID | None = None
    parent: UUID | None = None
    since: datetime | None = None
    until: datetime | None = None
    text: str | None = None


def statement(name: str, where: Filter, workspace: UUID, most: int, before: UUID | None) -> Any:
    """The listing statement for a filter."""
    params: dict[str, Any] = {
        "workspace": workspace,
        "most": most,
        "before": before,
        "min_priority": where.min_priority,
        "priority": where.priority,
        "task_type": where.task_type,
        "agent": where.agent,
        "parent": where.parent,
        "since": where.since,
        "until": where.until,
    }
    literals: dict[str, tuple[str, ...]] = {}
    statuses, outcomes, archived = _statuses(where.status)
    if statuses:
        literals["statuses"] = tuple(sorted(statuses))
    if outcomes or archived:
        params["several"] = True
        params["or_statuses"] = True if statuses else None
        params["archived"] = True if archived else None
        if outcomes:
            literals["outcomes"] = tuple(sorted(outcomes))
    elif statuses:
        params["only_statuses"] = True
        params["attention"] = True if statuses <= _ATTENTION else None
    if where.tags:
        params["labels"] = list(dict.fromkeys(where.tags))
        params["label_count"] = len(params["labels"])
    _check_filter(where)
    if where.text is not None:
        escaped = where.text.translate(_ASCII_LOWER)
        for char in "!%_":
            escaped = escaped.replace(char, f"!{char}")
        params["contains"] = f"%{escaped}%"
    return Statement(name, params, {}, literals)


def _check_filter(where: Filter) -> None:
    for tag in where.tags:
        bounds.text("tags", tag, bounds.MAX_NAME)
    for field in ("text", "task_type"):
        if (value := getattr(where, field)) is not None:
            bounds.text(field, value, bounds.MAX_TITLE)
    for field in ("priority", "min_priority"):
        if (number := getattr(where, field)) is not None:
            bounds.number(field, number, 1, 10)
    bounds.instant("since", where.since)
    bounds.instant("until", where.until)


def _statuses(names: Sequence[str]) -> tuple[frozenset[str], frozenset[str], bool]:
    """Statuses, last outcomes and whether archived, from the words a filter may use."""
    statuses = set()
    outcomes = set()
    archived = False
    for name in names:
        word = _ALIASES.get(name.upper(), name.upper())
        if word == "ARCHIVED":
            archived = True
        elif word in _OUTCOMES:
            outcomes.add(word)
        elif word in Status.__members__:
            statuses.add(word)
        else:
            known = ", ".join([*Status, "ARCHIVED", "STALLED", "ABORTED"])
            raise Invalid(f"no status {name[:40]!r}; known are {known}", "invalid_filter")
    return frozenset(statuses), frozenset(outcomes), archived


class TaskQueries:
    """The query family."""

    def __init__(self, core: Core) -> None:
        self._core = core

    async def page(self, where: Filter, workspace: UUID, limit: int, cursor: UUID | None) -> Page:
        bounds.number("limit", limit, 1, bounds.MAX_PAGE)
        rows = await self._fetch(statement("list", where, workspace, limit + 1, cursor))
        tasks = [summary_of(row) for row in rows[:limit]]
        return Page(tasks, tasks[-1].id if len(rows) > limit else None)

    async def ids(self, where: Filter, workspace: UUID, limit: int) -> list[UUID]:
        rows = await self._fetch(statement("list_ids", where, workspace, limit, None))
        return [row["id"] for row in rows]

    async def find(self, text: str, workspace: UUID) -> UUID:
        """The task that a full id, or the unambiguous beginning of one, names."""
        try:
            return UUID(text)
        except ValueError:
            pass
        wanted = text.strip().lower()
        if len(wanted) < 4 or set(wanted) - set("0123456789abcdef-"):
            raise NotFound(f"{text[:60]!r} is not a task id")
        rows = await self._fetch(
            Statement("ids_like", {"workspace": workspace, "prefix": f"{wanted}%"})
        )
        if len(rows) != 1:
            many = "more than one task" if rows else "no task"
            raise NotFound(f"{many} whose id begins with {wanted}")
        found: UUID = rows[0]["id"]
        return found

    async def show(self, task: UUID, workspace: UUID) -> TaskView:
        row = await self._row(task, workspace)
        labels = await self.labels([task])
        wanted = Statement("needs_of", {"task": task, "workspace": workspace})
        needs = [each["id"] for each in await self._fetch(wanted)]
        return view_of(row, labels[task], _reason(row, self._core.now()), needs)

    async def labels(self, ids: Sequence[UUID]) -> dict[UUID, dict[str, Any]]:
        """Labels, task tags and capabilities by task and kind."""
        found: dict[UUID, dict[str, Any]] = {task: defaultdict(list) for task in ids}
        for row in await self._fetch(Statement("labels_of", {"ids": list(ids)})):
            found[row["id"]][row["kind"]].append(row["value"])
        return found

    async def attempts(self, task: UUID, workspace: UUID) -> list[AttemptView]:
        """The ended attempts, then the one under way."""
        row = await self._row(task, workspace)
        used = spent_by_attempt(await self._fetch(Statement("spending_of", {"task": task})))
        ended = [
            AttemptView(
                **{**dict(each), "receipt": readable(each["receipt"]), **used[each["attempt"]]}
            )
            for each in await self._fetch(Statement("attempts", {"id": task}))
        ]
        if row["status"] not in LEASED:
            return ended
        names = ("attempt", "agent", "agent_name", "worker", "session_key", "started_at")
        told = {name: row[name] for name in names} | used[row["attempt"]]
        current = AttemptView(**told, outcome=None, ended_at=None)
        return [*ended, current]

    async def events(
        self, task: UUID, workspace: UUID, after: int = 0, limit: int = 1000
    ) -> list[LogLine]:
        """The audit trail after a version."""
        bounds.whole("limit", limit, 1, bounds.MAX_COUNT)
        await self._row(task, workspace)
        params = {"id": task, "after": after, "most": limit}
        return [_event_line(row) for row in await self._fetch(Statement("events", params))]

    async def transcript(
        self, task: UUID, workspace: UUID, after: tuple[int, int] = (0, -1), limit: int = 1000
    ) -> list[LogLine]:
        """What the attempts printed and logged, after (attempt, line number)."""
        bounds.whole("limit", limit, 1, bounds.MAX_COUNT)
        await self._row(task, workspace)
        params = {"id": task, "attempt": after[0], "after": after[1], "most": limit}
        return [_said_line(row) for row in await self._fetch(Statement("transcript", params))]

    async def logs(
        self, task: UUID, workspace: UUID, level: str = "DEBUG", limit: int = 1000
    ) -> list[LogLine]:
        """Events and transcript merged by time, of at least that level."""
        wanted = _from_level(level)
        bounds.whole("limit", limit, 1, bounds.MAX_COUNT)
        await self._row(task, workspace)
        newest = {"id": task, "most": limit}
        lines = [_event_line(row) for row in await self._fetch(Statement("events_tail", newest))]
        lines += [
            _said_line(row) for row in await self._fetch(Statement("transcript_tail", newest))
        ]
        kept = (line for line in lines if line.level in wanted)
        merged = sorted(kept, key=lambda line: (line.at, line.source, line.attempt, line.seq))
        return merged[-limit:]

    async def notable(self, workspace: UUID, level: str, limit: int) -> list[LogLine]:
        """The newest events of at least that level, of any task of the workspace."""
        params = {"workspace": workspace, "most": limit}
        levels = {"levels": _from_level(level)}
        rows = await self._fetch(Statement("events_notable", params, {}, levels))
        return [_event_line(row) for row in reversed(rows)]

    async def coordinators(self, level: str, limit: int) -> list[LogLine]:
        """The newest events of at least that level, of coordinators themselves."""
        params = {"apart": APART, "most": limit}
        levels = {"levels": _from_level(level)}
        rows = await self._fetch(Statement("coordinator_events", params, {}, levels))
        return [_event_line(row) for row in reversed(rows)]

    async def counts(self, workspace: UUID) -> dict[str, int]:
        rows = await self._fetch(Statement("counts", {"workspace": workspace}))
        found = {row["status"]: row["n"] for row in rows}
        return {status.value: found.get(status.value, 0) for status in Status}

    async def workers(self, workspace: UUID) -> Sequence[Row]:
        return await self._fetch(Statement("workers", {"workspace": workspace}))

    async def agents(self, workspace: UUID) -> dict[str, AgentProfile]:
        """The agents that are not terminated, by name."""
        rows = await self._agent_rows(workspace)
        return {row["name"]: profile_of(row) for row in rows}

    async def _agent_rows(self, workspace: UUID) -> Sequence[Row]:
        rows = await self._fetch(Statement("agents", {"workspace": workspace}))
        return [row for row in rows if row["status"] != "TERMINATED"]

    async def explain(
        self, task: UUID, workspace: UUID, gateways: Sequence[GatewayState] = ()
    ) -> Explanation:
        """Why the task is not running: every gate, its number, when it clears."""
        row = await self._row(task, workspace)
        now = self._core.now()
        lanes = {lane.id: lane for lane in await self._core.lanes.all(workspace)}
        ahead = 0
        if row["status"] == Status.PENDING:
            params = {"lane": row["lane"], "rank": row["rank"], "id": task, "most": 100_000}
            ahead = (await self._fetch(Statement("queue_ahead", params)))[0]["n"]
        rows = await self._agent_rows(workspace)
        agents = {each["name"]: profile_of(each) for each in rows}
        workers = await self.workers(workspace)
        try:
            known = task_of(row)
        except CorruptRow as error:
            gate = Gate(gate="corrupt", detail=str(error))
            return Explanation(
                id=task, status=row["status"], summary=str(error), gates=[gate], agents={}
            )
        needs: Sequence[Row] = ()
        if known.unmet > 0:
            params = {"task": task, "workspace": workspace}
            needs = await self._fetch(Statement("dependencies", params))
        lane = lanes.get(row["lane"])
        held = await self._held(workspace, lane, agents, now)
        pushed = {
            name: obstacle(agent.gateway, gateways, now)
            for name, agent in agents.items()
            if agent.gateway is not None
        }
        idle = {each["name"]: claim_blockers(each, now) for each in rows}
        held = msgspec.structs.replace(held, gateways=pushed, agents=idle)
        if known.hold == HOLD:
            holds = {HOLD: await standing(self._core, task, workspace)}
            held = msgspec.structs.replace(held, holds=holds)
        return explain(known, lane, agents, workers, ahead, now, needs, held)

    async def _held(
        self, workspace: UUID, lane: Lane | None, agents: Mapping[str, AgentProfile], now: datetime
    ) -> ActiveGates:
        """What keeps agents from a lane for a while."""
        wanted = None if lane is None else lane.requirements.model
        rows = await limit_rows(self._core, workspace)
        limits = {
            name: used_up(rows, wanted or agent.model, agent.account, now)
            for name, agent in agents.items()
        }
        gates = await self._core.lanes.gates(workspace)
        return ActiveGates(gates, limits, quota=await quota_gates(self._core, workspace))

    async def _row(self, task: UUID, workspace: UUID) -> Row:
        rows = await self._fetch(Statement("show", {"workspace": workspace, "id": task}))
        if not rows:
            raise NotFound(f"no task {task}")
        return rows[0]

    async def _fetch(self, wanted: Statement) -> Sequence[Row]:
        return await self._core.store.fetch(wanted)


def _from_level(level: str) -> tuple[str, ...]:
    """That level and those above it."""
    if level.upper() not in LEVELS:
        raise Invalid(f"no level {level[:40]!r}; known are {', '.join(LEVELS)}", "invalid_filter")
    return LEVELS[LEVELS.index(level.upper()) :]


def _reason(row: Row, now: datetime) -> str | None:
    try:
        return waiting_for(task_of(row), now)
    except CorruptRow:
        return None


def _event_line(row: Row) -> LogLine:
    arrow = f" {row['previous']} -> {row['new']}" if row["previous"] != row["new"] else ""
    start = "" if row["previous"] or row["new"] is None else f" -> {row['new']}"
    said = f": {row['message']}" if row["message"] else ""
    return LogLine(
        at=row["at"],
        level=row["level"],
        source="event",
        attempt=row["attempt"],
        seq=row["seq"],
        text=f"{row['kind']}{start or arrow}{said}",
        event=row["kind"],
        previous_status=row["previous"],
        new_status=row["new"],
        actor=row["actor"],
        data=readable(row["data"]),
        stack_trace=row["stack_trace"],
    )


def _said_line(row: Row) -> LogLine:
    return LogLine(
        at=row["at"],
        level=row["level"],
        source="transcript",
        attempt=row["attempt"],
        seq=row["line_no"],
        text=row["text"],
    )
