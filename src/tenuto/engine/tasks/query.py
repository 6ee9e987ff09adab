"""Lists and reads tasks, their history, counters and explanations. Reads only."""

import string
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec

from tenuto.engine.agents.gateways import GatewayState, unavailable_reason
from tenuto.engine.agents.lanes import Lane
from tenuto.engine.agents.registry import claim_blockers, profile_of
from tenuto.engine.core import Core
from tenuto.engine.limits.budgets import usage_by_attempt
from tenuto.engine.limits.concurrency import describe_position
from tenuto.engine.limits.quotas import quota_gates
from tenuto.engine.limits.rate_limits import exhausted_limits, limit_rows
from tenuto.engine.rows import CorruptRow, parse_task
from tenuto.engine.tasks.explain import ActiveGates, explain, waiting_for
from tenuto.engine.tasks.maintenance import SYSTEM_WORKSPACE
from tenuto.engine.views import (
    AttemptView,
    Explanation,
    Gate,
    LogLine,
    Page,
    TaskView,
    decode_or_excerpt,
    task_summary,
    task_view,
)
from tenuto.model import bounds
from tenuto.model.agents.matching import AgentProfile
from tenuto.model.errors import Invalid, NotFound
from tenuto.model.limits.concurrency import HOLD
from tenuto.model.tasks.submission import FILTER_FIELDS, Filter, check_filter
from tenuto.model.tasks.task import LEASED, Outcome, Status
from tenuto.store.protocol import Row, Statement

LEVELS = ("DEBUG", "INFO", "WARN", "ERROR", "CRITICAL")
_ATTENTION = frozenset("WAITING PAUSED RETRY_WAIT FAILED DEAD CANCELLED SKIPPED".split())
_ALIASES = {"QUEUED": "PENDING", "SUCCEEDED": "COMPLETED"}
_OUTCOMES = frozenset({Outcome.STALLED.value, Outcome.ABORTED.value})
_ASCII_LOWER = str.maketrans(string.ascii_uppercase, string.ascii_lowercase)
"""The part of `lower` that both databases do alike: ASCII letters only."""


_OWN_PARAMS = ("status", "tags", "text")
"""Fields that `list_statement` passes in another form than as a parameter of the same name."""


def list_statement(
    name: str, where: Filter, workspace: UUID, limit: int, before: UUID | None
) -> Statement:
    """Returns the statement of query `name` that lists the tasks of a filter, newest first."""
    check_filter(where)
    params: dict[str, Any] = {
        name: getattr(where, name) for name in FILTER_FIELDS if name not in _OWN_PARAMS
    }
    params |= {"workspace": workspace, "most": limit, "before": before}
    literals: dict[str, tuple[str, ...]] = {}
    statuses, outcomes, archived = _parse_statuses(where.status)
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
    if where.text is not None:
        escaped = where.text.translate(_ASCII_LOWER)
        for char in "!%_":
            escaped = escaped.replace(char, f"!{char}")
        params["contains"] = f"%{escaped}%"
    return Statement(name, params, {}, literals)


def _parse_statuses(names: Sequence[str]) -> tuple[frozenset[str], frozenset[str], bool]:
    """Returns statuses, last outcomes, and if ARCHIVED is among the names; else `Invalid`."""
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
            allowed = ", ".join([*Status, "ARCHIVED", "STALLED", "ABORTED"])
            raise Invalid(f"unknown status {name[:40]!r}; use {allowed}", "invalid_filter")
    return frozenset(statuses), frozenset(outcomes), archived


class TaskQueries:
    """Reads the tasks of a workspace."""

    def __init__(self, core: Core) -> None:
        self._core = core

    async def page(self, where: Filter, workspace: UUID, limit: int, cursor: UUID | None) -> Page:
        """Returns up to `limit` matching tasks older than the cursor, newest first."""
        bounds.check_number("limit", limit, 1, bounds.MAX_PAGE)
        rows = await self._fetch(list_statement("task_list", where, workspace, limit + 1, cursor))
        tasks = [task_summary(row) for row in rows[:limit]]
        return Page(tasks, tasks[-1].id if len(rows) > limit else None)

    async def ids(self, where: Filter, workspace: UUID, limit: int) -> list[UUID]:
        """Returns the ids of up to `limit` matching tasks, newest first."""
        rows = await self._fetch(list_statement("task_ids", where, workspace, limit, None))
        return [row["id"] for row in rows]

    async def find(self, text: str, workspace: UUID) -> UUID:
        """Returns the id of the only task with this id prefix; `NotFound` if none or several.

        A full id is returned without a lookup. Also raises `NotFound` if `text` is too short.
        """
        try:
            return UUID(text)
        except ValueError:
            pass
        prefix = text.strip().lower()
        if len(prefix) < 4 or set(prefix) - set("0123456789abcdef-"):
            raise NotFound(f"{text[:60]!r} is not a task id")
        rows = await self._fetch(
            Statement("task_ids_by_prefix", {"workspace": workspace, "prefix": f"{prefix}%"})
        )
        if len(rows) != 1:
            count = "more than one task" if rows else "no task"
            raise NotFound(f"{count} whose id begins with {prefix}")
        task: UUID = rows[0]["id"]
        return task

    async def show(self, task: UUID, workspace: UUID) -> TaskView:
        """Returns the task with all its fields; raises `NotFound` outside the workspace."""
        row = await self._require_row(task, workspace)
        labels = await self.labels([task])
        query = Statement("dependencies_of_tasks", {"task": task, "workspace": workspace})
        needs = [need["id"] for need in await self._fetch(query)]
        return task_view(row, labels[task], _waiting_for(row, self._core.now()), needs)

    async def labels(self, ids: Sequence[UUID]) -> dict[UUID, dict[str, Any]]:
        """Returns the values by task and kind: `label` (tags), `tag` (task tags), `capability`."""
        labels: dict[UUID, dict[str, Any]] = {task: defaultdict(list) for task in ids}
        for row in await self._fetch(Statement("labels_of", {"ids": list(ids)})):
            labels[row["id"]][row["kind"]].append(row["value"])
        return labels

    async def attempts(self, task: UUID, workspace: UUID) -> list[AttemptView]:
        """Returns the ended attempts, then the running attempt if there is one."""
        row = await self._require_row(task, workspace)
        usage = usage_by_attempt(await self._fetch(Statement("usage_of_task", {"task": task})))
        ended = [
            AttemptView(
                **{
                    **dict(attempt),
                    "receipt": decode_or_excerpt(attempt["receipt"]),
                    **usage[attempt["attempt"]],
                }
            )
            for attempt in await self._fetch(Statement("attempts", {"id": task}))
        ]
        if row["status"] not in LEASED:
            return ended
        names = ("attempt", "agent", "agent_name", "worker", "session_key", "started_at")
        fields = {name: row[name] for name in names} | usage[row["attempt"]]
        current = AttemptView(**fields, outcome=None, ended_at=None)
        return [*ended, current]

    async def events(
        self, task: UUID, workspace: UUID, after: int = 0, limit: int = 1000
    ) -> list[LogLine]:
        """Returns the task's audit events after a version of the task, oldest first."""
        bounds.check_whole("limit", limit, 1, bounds.MAX_COUNT)
        await self._require_row(task, workspace)
        params = {"id": task, "after": after, "most": limit}
        return [_event_line(row) for row in await self._fetch(Statement("events", params))]

    async def transcript(
        self, task: UUID, workspace: UUID, after: tuple[int, int] = (0, -1), limit: int = 1000
    ) -> list[LogLine]:
        """Returns the transcript lines of all attempts, after (attempt, line number)."""
        bounds.check_whole("limit", limit, 1, bounds.MAX_COUNT)
        await self._require_row(task, workspace)
        params = {"id": task, "attempt": after[0], "after": after[1], "most": limit}
        return [_transcript_line(row) for row in await self._fetch(Statement("transcript", params))]

    async def logs(
        self, task: UUID, workspace: UUID, level: str = "DEBUG", limit: int = 1000
    ) -> list[LogLine]:
        """Returns those of the newest events and transcript lines from `level` up, by time."""
        levels = _levels_from(level)
        bounds.check_whole("limit", limit, 1, bounds.MAX_COUNT)
        await self._require_row(task, workspace)
        newest = {"id": task, "most": limit}
        lines = [_event_line(row) for row in await self._fetch(Statement("events_tail", newest))]
        lines += [
            _transcript_line(row) for row in await self._fetch(Statement("transcript_tail", newest))
        ]
        selected = (line for line in lines if line.level in levels)
        merged = sorted(selected, key=lambda line: (line.at, line.source, line.attempt, line.seq))
        return merged[-limit:]

    async def severe_events(self, workspace: UUID, level: str, limit: int) -> list[LogLine]:
        """Returns the workspace's newest events from `level` upwards, oldest first."""
        params = {"workspace": workspace, "most": limit}
        levels = {"levels": _levels_from(level)}
        rows = await self._fetch(Statement("events_notable", params, {}, levels))
        return [_event_line(row) for row in reversed(rows)]

    async def coordinator_events(self, level: str, limit: int) -> list[LogLine]:
        """Returns the newest events of coordinators from `level` upwards, oldest first."""
        params = {"apart": SYSTEM_WORKSPACE, "most": limit}
        levels = {"levels": _levels_from(level)}
        rows = await self._fetch(Statement("coordinator_events", params, {}, levels))
        return [_event_line(row) for row in reversed(rows)]

    async def counts(self, workspace: UUID) -> dict[str, int]:
        """Returns the number of tasks by status, with 0 for unused statuses."""
        rows = await self._fetch(Statement("task_counts", {"workspace": workspace}))
        by_status = {row["status"]: row["n"] for row in rows}
        return {status.value: by_status.get(status.value, 0) for status in Status}

    async def workers(self, workspace: UUID) -> Sequence[Row]:
        """Returns the rows of the workspace's workers, newest first."""
        return await self._fetch(Statement("workers", {"workspace": workspace}))

    async def agents(self, workspace: UUID) -> dict[str, AgentProfile]:
        """Returns the agents that are not terminated, by name."""
        rows = await self._agent_rows(workspace)
        return {row["name"]: profile_of(row) for row in rows}

    async def _agent_rows(self, workspace: UUID) -> Sequence[Row]:
        """Returns the rows of the agents that are not terminated."""
        rows = await self._fetch(Statement("agents", {"workspace": workspace}))
        return [row for row in rows if row["status"] != "TERMINATED"]

    async def explain(
        self, task: UUID, workspace: UUID, gateways: Sequence[GatewayState] = ()
    ) -> Explanation:
        """Explains why the task is not running: every gate, its details, and when it clears."""
        row = await self._require_row(task, workspace)
        now = self._core.now()
        lanes = {lane.id: lane for lane in await self._core.lanes.all(workspace)}
        ahead = 0
        if row["status"] == Status.PENDING:
            params = {"lane": row["lane"], "rank": row["rank"], "id": task, "most": 100_000}
            ahead = (await self._fetch(Statement("queue_ahead", params)))[0]["n"]
        rows = await self._agent_rows(workspace)
        agents = {agent_row["name"]: profile_of(agent_row) for agent_row in rows}
        workers = await self.workers(workspace)
        try:
            parsed = parse_task(row)
        except CorruptRow as error:
            gate = Gate(gate="corrupt", detail=str(error))
            return Explanation(
                id=task, status=row["status"], summary=str(error), gates=[gate], agents={}
            )
        needs: Sequence[Row] = ()
        if parsed.unmet > 0:
            params = {"task": task, "workspace": workspace}
            needs = await self._fetch(Statement("dependencies", params))
        lane = lanes.get(row["lane"])
        active = await self._active_gates(workspace, lane, agents, now)
        gateway_problems = {
            name: unavailable_reason(agent.gateway, gateways, now)
            for name, agent in agents.items()
            if agent.gateway is not None
        }
        blockers = {agent_row["name"]: claim_blockers(agent_row, now) for agent_row in rows}
        active = msgspec.structs.replace(active, gateways=gateway_problems, agents=blockers)
        if parsed.hold == HOLD:
            holds = {HOLD: await describe_position(self._core, task, workspace)}
            active = msgspec.structs.replace(active, holds=holds)
        return explain(parsed, lane, agents, workers, ahead, now, needs, active)

    async def _active_gates(
        self, workspace: UUID, lane: Lane | None, agents: Mapping[str, AgentProfile], now: datetime
    ) -> ActiveGates:
        """Returns the workspace's pauses and quota gates, and exhausted rate limits by agent."""
        model = None if lane is None else lane.requirements.model
        rows = await limit_rows(self._core, workspace)
        limits = {
            name: exhausted_limits(rows, model or agent.model, agent.account, now)
            for name, agent in agents.items()
        }
        pauses = await self._core.lanes.pauses(workspace)
        return ActiveGates(pauses, limits, quota=await quota_gates(self._core, workspace))

    async def _require_row(self, task: UUID, workspace: UUID) -> Row:
        """Returns the task's row; raises `NotFound` outside the workspace."""
        rows = await self._fetch(Statement("task_show", {"workspace": workspace, "id": task}))
        if not rows:
            raise NotFound(f"no task {task}")
        return rows[0]

    async def _fetch(self, query: Statement) -> Sequence[Row]:
        """Runs one read and returns its rows."""
        return await self._core.store.fetch(query)


def _levels_from(level: str) -> tuple[str, ...]:
    """Returns the given level and all higher levels; raises `Invalid` for an unknown level."""
    if level.upper() not in LEVELS:
        raise Invalid(f"unknown level {level[:40]!r}; use {', '.join(LEVELS)}", "invalid_filter")
    return LEVELS[LEVELS.index(level.upper()) :]


def _waiting_for(row: Row, now: datetime) -> str | None:
    """Returns the reason for WAITING in one word; `None` for another status or an invalid row."""
    try:
        return waiting_for(parse_task(row), now)
    except CorruptRow:
        return None


def _event_line(row: Row) -> LogLine:
    """Returns the log line of an audit event."""
    transition = f" {row['previous']} -> {row['new']}" if row["previous"] != row["new"] else ""
    first_status = "" if row["previous"] or row["new"] is None else f" -> {row['new']}"
    message = f": {row['message']}" if row["message"] else ""
    return LogLine(
        at=row["at"],
        level=row["level"],
        source="event",
        attempt=row["attempt"],
        seq=row["seq"],
        text=f"{row['kind']}{first_status or transition}{message}",
        event=row["kind"],
        previous_status=row["previous"],
        new_status=row["new"],
        actor=row["actor"],
        data=decode_or_excerpt(row["data"]),
        stack_trace=row["stack_trace"],
    )


def _transcript_line(row: Row) -> LogLine:
    """Returns the log line of a transcript line."""
    return LogLine(
        at=row["at"],
        level=row["level"],
        source="transcript",
        attempt=row["attempt"],
        seq=row["line_no"],
        text=row["text"],
    )
