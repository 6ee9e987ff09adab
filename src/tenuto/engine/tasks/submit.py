"""Validates and inserts new tasks: one, many, or again after a lost response."""

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import pairwise
from typing import Any
from uuid import UUID

import msgspec

from tenuto import tracing
from tenuto.crash_points import crash_point
from tenuto.engine.core import Core
from tenuto.engine.flows.advance import Cascade
from tenuto.engine.flows.plans import has_reference_marker
from tenuto.engine.limits.pending_quota import check_pending
from tenuto.engine.rows import (
    ENV_COLUMN,
    HOLD_COLUMN,
    INPUT_COLUMN,
    LANE_COLUMN,
    STATUS_COLUMN,
    UNMET_COLUMN,
    Rows,
    add_labels,
    body_row,
    empty_rows,
    hot_row,
    insert_statement,
    merge_rows,
    plain_body_row,
    plain_hot_row,
)
from tenuto.engine.tasks.dependencies import (
    NO_DEPENDENCIES,
    DependencyGraph,
    SubmitDependencies,
    build_dependency_graph,
)
from tenuto.engine.tasks.references import check_references
from tenuto.engine.tenancy.encryption import EncryptedTasks, TaskSecrets
from tenuto.model import bounds
from tenuto.model.agents.matching import Requirements
from tenuto.model.errors import Conflict, Forbidden, Invalid, NotFound, TenutoError, Unavailable
from tenuto.model.limits.complexity import ComplexityRules, with_required_capability
from tenuto.model.limits.concurrency import HOLD
from tenuto.model.tasks.fingerprint import fingerprint, fingerprints
from tenuto.model.tasks.submission import NewTask, check, is_same_lane, requirements
from tenuto.model.tasks.task import Status, rank
from tenuto.model.tenancy.secrets import REFERENCE_MARK, SECRETS_MARK
from tenuto.store.batching import Answers, WriteKind
from tenuto.store.protocol import Script, Statement

REFUSALS = (Forbidden, Invalid, NotFound)
"""Errors that a repeated submit can raise although its first try was accepted."""
_PART_TASKS = 300
_FIRST_PART_TASKS = 100
"""Tasks per part of a large submit. The next part is built while one is written."""


class Submitted(msgspec.Struct, frozen=True, gc=False):
    """A task that is stored durably; `created` is False for a repeated submit."""

    id: UUID
    created: bool = True
    at: datetime | None = None
    """The creation time, if the stored task has exactly the fields of its request; else `None`."""


class PreparedSubmit(msgspec.Struct, frozen=True):
    """Rows of new tasks, with the lanes whose workers to wake.

    `prints` are the fingerprints that identify a repeated task; the first one is stored.
    """

    ids: list[UUID]
    keys: list[str | None]
    prints: list[tuple[str, ...]]
    rows: Rows
    wakes: set[int]
    at: datetime
    """The time of the submit."""
    waits: DependencyGraph = NO_DEPENDENCIES
    keyed: bool = False
    """True if some of the tasks have a concurrency key."""
    is_as_requested: bool = False
    """True if one task is stored as requested: without secrets, trace or complexity rules."""


class TaskSubmitter:
    """Validates and inserts new tasks."""

    def __init__(self, core: Core, task_secrets: TaskSecrets) -> None:
        self._core = core
        self._task_secrets = task_secrets
        self._plain_kind = WriteKind("submit", self._plain_script, one_statement=True, at_once=True)

    async def submit_one(self, new: NewTask, workspace: UUID, actor: str | None) -> Submitted:
        """Inserts one task durably; returns the existing task for a repeated submit."""
        prepared = self._prepare_plain_task(new, workspace, actor) if check(new) else None
        if prepared is None:
            return (await self.submit_many([new], workspace, actor))[0]
        [submitted] = await self._insert_plain(prepared, workspace)
        self.send_hints(prepared)
        return submitted

    async def submit_many(
        self,
        new_tasks: Sequence[NewTask],
        workspace: UUID,
        actor: str | None,
        *,
        rerun_of: UUID | None = None,
    ) -> list[Submitted]:
        """Inserts all tasks or none, durably; returns one result per task, in order."""
        if not new_tasks:
            return []
        if len(new_tasks) > bounds.MAX_BULK:
            text = f"{len(new_tasks):,} tasks in one submit; the limit is {bounds.MAX_BULK:,}"
            raise Invalid(text, "bulk_too_large")
        has_quota = (await self._core.lanes.quota(workspace)).pending is not None
        is_large = len(new_tasks) > _PART_TASKS and not self._core.store.mixes and not has_quota
        if is_large and not any(map(_needs_lookup, new_tasks)):
            return await self._insert_in_parts(new_tasks, workspace, actor, rerun_of=rerun_of)
        plain = _check_all(new_tasks)
        firsts = _first_indexes(new_tasks)
        unique = sorted(set(firsts))
        prepared = await self.prepare(
            [new_tasks[first] for first in unique], workspace, actor, rerun_of=rerun_of, plain=plain
        )
        if prepared.waits or prepared.keyed or has_quota or any(prepared.prints):
            submitted = await self._insert_checked(prepared, workspace, actor, has_quota=has_quota)
        else:
            submitted = await self._insert_plain(prepared, workspace)
        self.send_hints(prepared)
        by_index = dict(zip(unique, submitted, strict=True))
        return [
            by_index[first] if first == index else Submitted(by_index[first].id, created=False)
            for index, first in enumerate(firsts)
        ]

    async def find_repeated(
        self, new_tasks: Sequence[NewTask], workspace: UUID, refusal: TenutoError
    ) -> list[Submitted]:
        """Returns the tasks of an earlier, equal submit; raises `refusal` if there are none.

        Since the first submit was accepted, tasks that it names may have been deleted, and rules
        may have become stricter.
        """
        # A task without a fingerprint or with an invalid key cannot have been submitted before.
        with suppress(Invalid, ValueError, TypeError, msgspec.MsgspecError):
            if (earlier := await self._find_earlier_submit(new_tasks, workspace)) is not None:
                return earlier
        raise refusal

    async def _find_earlier_submit(
        self, new_tasks: Sequence[NewTask], workspace: UUID
    ) -> list[Submitted] | None:
        """Returns the stored tasks of the same submit; `None` if one is missing or differs."""
        if not all(new.id or new.idempotency_key for new in new_tasks):
            return None
        for new in new_tasks:
            bounds.check_text("idempotencyKey", new.idempotency_key or "", bounds.MAX_TEXT)
        new_ids = self._core.clock.new_ids(len(new_tasks))
        ids = [new.id or new_id for new, new_id in zip(new_tasks, new_ids, strict=True)]
        encrypted = self._task_secrets.encrypt_secrets(new_tasks, ids, workspace)
        prints = _fingerprints(encrypted, await self._core.lanes.complexity(workspace))
        keys = [(task, new.idempotency_key) for task, new in zip(ids, new_tasks, strict=True)]
        rows = await self._core.store.fetch(
            Statement("submitted_before", {"workspace": workspace}, {"wanted": keys})
        )
        earlier = {row["wanted_id"]: row for row in rows if row["fingerprint"]}
        if any(
            task not in earlier or earlier[task]["fingerprint"] not in accepted
            for task, accepted in zip(ids, prints, strict=True)
        ):
            return None
        return [Submitted(earlier[task]["id"], created=False) for task in ids]

    async def _insert_checked(
        self, prepared: PreparedSubmit, workspace: UUID, actor: str | None, *, has_quota: bool
    ) -> list[Submitted]:
        """Inserts tasks that may exist already, have dependencies or count against a quota.

        If the response of the first try is lost, its commit may have succeeded. The ids stay the
        same, so a second try finds the tasks of the first.
        """

        async def write() -> list[Submitted]:
            if prepared.waits or prepared.keyed:
                return await self._core.run_with_cascade(
                    lambda cascade: self._submit_within_quota(
                        self.insert_with_dependencies(prepared, workspace, cascade),
                        workspace,
                        has_quota=has_quota,
                    ),
                    actor,
                )
            crash_point("engine.before_commit")
            submitted = await self._core.store.transact(
                lambda: self._submit_within_quota(
                    submit_script(self._core, prepared, workspace), workspace, has_quota=has_quota
                )
            )
            crash_point("engine.committed")
            return submitted

        try:
            return await write()
        except Unavailable:
            return [
                submitted if prints else msgspec.structs.replace(submitted, created=True)
                for submitted, prints in zip(await write(), prepared.prints, strict=True)
            ]

    async def _insert_in_parts(
        self,
        tasks: Sequence[NewTask],
        workspace: UUID,
        actor: str | None,
        *,
        rerun_of: UUID | None,
    ) -> list[Submitted]:
        """Inserts many tasks without ids, keys or dependencies at once, and sends hints."""
        now = self._core.now()
        parts: list[PreparedSubmit] = []
        submitted: list[Submitted] = []

        async def build_parts() -> AsyncIterator[Statement]:
            ends = range(_FIRST_PART_TASKS, len(tasks) + _PART_TASKS, _PART_TASKS)
            for start, end in pairwise((0, *ends)):
                part = tasks[start:end]
                plain = _check_all(part)
                prepared = await self.prepare(
                    part, workspace, actor, rerun_of=rerun_of, plain=plain
                )
                parts.append(prepared)
                submitted.extend([Submitted(task_id, at=now) for task_id in prepared.ids])
                yield insert_statement("submit_new", prepared.rows, now)

        crash_point("engine.before_commit")
        statements = build_parts()
        try:
            await self._core.store.stream(statements)
        except Unavailable:
            # The commit may have succeeded. The engine chose the ids, so a retry is safe.
            async for _ in statements:
                pass
            if len(submitted) < len(tasks):
                raise  # a part could not be built: nothing was written
            await self._core.store.transact(lambda: self._insert_missing(parts, workspace))
        crash_point("engine.committed")
        for prepared in parts:
            self.send_hints(prepared)
        return submitted

    def _insert_missing(self, parts: list[PreparedSubmit], workspace: UUID) -> Script[None]:
        """Inserts those tasks of the parts that are not stored yet."""
        for prepared in parts:
            yield from submit_script(self._core, prepared, workspace)

    def send_hints(self, prepared: PreparedSubmit) -> None:
        """Sends hints about the tasks that can be claimed at once."""
        crash_point("engine.before_announce")
        if prepared.wakes:
            self._core.wakeups.notify([f"lane:{lane}" for lane in prepared.wakes])

    def _submit_within_quota(
        self, script: Script[list[Submitted]], workspace: UUID, *, has_quota: bool
    ) -> Script[list[Submitted]]:
        """Runs a submit and returns its tasks; `TooMany` if pending tasks exceed the quota."""
        submitted = yield from script
        if has_quota and any(task.created for task in submitted):
            yield from check_pending(workspace, self._core.lanes.ceiling)
        return submitted

    def insert_with_dependencies(
        self, prepared: PreparedSubmit, workspace: UUID, cascade: Cascade
    ) -> Script[list[Submitted]]:
        """Inserts tasks with dependencies or concurrency keys; adds follow-ups to the cascade."""
        dependencies = SubmitDependencies(prepared.waits, workspace)
        yield from dependencies.lock_dependencies(prepared.ids)
        dependencies.check_result_references(prepared.rows, INPUT_COLUMN)
        rows = dependencies.add_dependency_rows(prepared.rows)
        with_rows = msgspec.structs.replace(prepared, rows=rows)
        submitted = yield from submit_script(self._core, with_rows, workspace)
        inserted = {task.id for task in submitted if task.created}
        dependencies.check_all_inserted(prepared.ids, inserted)
        hot = [row for row in rows["hot"] if row[0] in inserted]
        yield from dependencies.apply_effects(cascade, hot)
        for row in hot:
            if row[HOLD_COLUMN] == HOLD and not row[UNMET_COLUMN]:
                cascade.permits.record_request(row[0], workspace)
        return submitted

    async def _insert_plain(self, prepared: PreparedSubmit, workspace: UUID) -> list[Submitted]:
        """Inserts tasks whose ids are certainly new."""
        try:
            at = await self._core.batcher.submit(self._plain_kind, prepared)
        except Unavailable:
            # The commit may have succeeded. The engine chose the ids, so a retry is safe.
            return await self._core.store.transact(
                lambda: submit_script(self._core, prepared, workspace)
            )
        stored_at = at if prepared.is_as_requested else None
        return [Submitted(task_id, at=stored_at) for task_id in prepared.ids]

    def _plain_script(self, batch: list[PreparedSubmit]) -> Script[Answers]:
        """Inserts the tasks of several submits in one statement; returns the time for each."""
        at = max(prepared.at for prepared in batch)
        yield insert_statement("submit_new", merge_rows([prepared.rows for prepared in batch]), at)
        return [at] * len(batch)

    async def prepare(
        self,
        new_tasks: Sequence[NewTask],
        workspace: UUID,
        actor: str | None,
        *,
        rerun_of: UUID | None = None,
        plain: bool = False,
        owner: UUID | None = None,
    ) -> PreparedSubmit:
        """Builds the rows of checked tasks; writes nothing except new lanes, at the end.

        `plain` is True if `check` returned True for all tasks. `owner` is the task whose attempt
        creates them.
        """
        if not plain:
            await check_references(self._core, workspace, new_tasks, owner)
        new_ids = self._core.clock.new_ids(len(new_tasks))
        ids = [new.id or new_id for new, new_id in zip(new_tasks, new_ids, strict=True)]
        encrypted = self._task_secrets.encrypt_secrets(new_tasks, ids, workspace)
        rules = await self._core.lanes.complexity(workspace)
        new_tasks = (
            [with_required_capability(new, rules) for new in encrypted.new_tasks]
            if rules.policy == "require"
            else encrypted.new_tasks
        )
        trace = tracing.current_traceparent()
        if plain and rules.policy != "require" and rerun_of is None and trace is None:
            return await self._prepare_plain_tasks(encrypted, ids, workspace, actor)
        rows = empty_rows()
        rows["sealed"] = encrypted.rows
        keys = [new.idempotency_key for new in new_tasks]
        prints = _fingerprints(encrypted, rules)
        for new, task_id, task_prints in zip(new_tasks, ids, prints, strict=True):
            first = task_prints[0] if task_prints else None
            rows["body"].append(body_row(new, task_id, workspace, first, actor, rerun_of, trace))
            add_labels(rows, new, task_id, workspace)
        texts = (text for row in rows["body"] for text in (row[INPUT_COLUMN], row[ENV_COLUMN]))
        await self._task_secrets.check_names(texts, workspace)
        lane_indexes, lane_requirements = _lane_index(new_tasks, workspace)
        lane_ids = await self._core.lanes.ensure(set(lane_requirements))
        lanes = [lane_ids[needs] for needs in lane_requirements]
        now = self._core.now()
        graph = build_dependency_graph(new_tasks, ids)
        if not graph:
            _check_no_references(row[INPUT_COLUMN] for row in rows["body"])
        rows["hot"] = [
            _full_hot_row(new, task_id, workspace, lanes[lane_index], actor, now, graph)
            for new, task_id, lane_index in zip(new_tasks, ids, lane_indexes, strict=True)
        ]
        wakes = {row[LANE_COLUMN] for row in rows["hot"] if row[STATUS_COLUMN] is Status.PENDING}
        keyed = any(new.concurrency is not None for new in new_tasks)
        as_requested = (
            len(ids) == 1
            and trace is None
            and rules.policy != "require"
            and _is_literal(rows["body"][0])
        )
        return PreparedSubmit(ids, keys, prints, rows, wakes, now, graph, keyed, as_requested)

    def _prepare_plain_task(
        self, new: NewTask, workspace: UUID, actor: str | None
    ) -> PreparedSubmit | None:
        """Builds the rows of one plain task, the usual case; `None` if it needs a query."""
        now = self._core.clock.now()
        lane = self._core.lanes.lane_by_type(workspace, new.task_type, now)
        if lane is None or tracing.current_traceparent() is not None:
            return None
        [task] = self._core.clock.new_ids(1, now)
        body_cells = plain_body_row(new, task, workspace, actor)
        if not _is_literal(body_cells):
            return None
        hot_cells = plain_hot_row(new, task, workspace, lane, actor, rank(new.priority, now))
        rows: Rows = {"body": [body_cells], "hot": [hot_cells]}
        return PreparedSubmit([task], [None], [()], rows, {lane}, now, is_as_requested=True)

    async def _prepare_plain_tasks(
        self, encrypted: EncryptedTasks, ids: list[UUID], workspace: UUID, actor: str | None
    ) -> PreparedSubmit:
        """Builds the rows of plain tasks, which require only a type; creates missing lanes."""
        rows = empty_rows()
        rows["sealed"] = encrypted.rows
        body, hot = rows["body"], rows["hot"]
        for new, task_id in zip(encrypted.new_tasks, ids, strict=True):
            body.append(plain_body_row(new, task_id, workspace, actor))
        texts = [row[INPUT_COLUMN] for row in body]
        await self._task_secrets.check_names(texts, workspace)
        _check_no_references(texts)
        types = {new.task_type: new for new in encrypted.new_tasks}
        by_type = {name: requirements(new, workspace) for name, new in types.items()}
        lane_ids = await self._core.lanes.ensure(set(by_type.values()))
        lanes = {task_type: lane_ids[needs] for task_type, needs in by_type.items()}
        now = self._core.now()
        priorities = {new.priority for new in encrypted.new_tasks}
        ranks = {priority: rank(priority, now) for priority in priorities}
        for new, task_id in zip(encrypted.new_tasks, ids, strict=True):
            lane, row_rank = lanes[new.task_type], ranks[new.priority]
            hot.append(plain_hot_row(new, task_id, workspace, lane, actor, row_rank))
        no_keys: list[Any] = [None] * len(ids)
        return PreparedSubmit(ids, no_keys, [()] * len(ids), rows, set(lanes.values()), now)


def _full_hot_row(
    new: NewTask,
    task: UUID,
    workspace: UUID,
    lane: int,
    actor: str | None,
    now: datetime,
    graph: DependencyGraph,
) -> tuple[Any, ...]:
    """Returns the hot row of a task that may have dependencies, dependents or a concurrency key."""
    has_key = new.concurrency is not None
    waiters = graph.waiter_count(task) if graph else None
    return hot_row(
        new,
        task,
        workspace,
        lane,
        actor,
        now,
        hold=HOLD if has_key else None,
        unmet=len(graph.needs.get(task, ())) or None if graph else None,
        watched=True if has_key or waiters else None,
        waiter_count=waiters,
    )


def _check_all(new_tasks: Sequence[NewTask]) -> bool:
    """Returns True if all tasks are plain; raises `Invalid` for a task that cannot be stored."""
    plain = True
    for new in new_tasks:
        plain = check(new) and plain
    return plain


def _is_literal(body_cells: tuple[Any, ...]) -> bool:
    """True if a task's input and environment certainly have no references and no secrets."""
    env = body_cells[ENV_COLUMN] if len(body_cells) > ENV_COLUMN else None
    for text in (body_cells[INPUT_COLUMN], env):
        if text is not None and (REFERENCE_MARK in text or SECRETS_MARK in text):
            return False
    return True


def _check_no_references(texts: Iterable[str | None]) -> None:
    """Raises `Invalid` if the input of a task without dependencies refers to a result."""
    if any(map(has_reference_marker, texts)):
        text = "input refers to the result of a task; add this task to dependsOn"
        raise Invalid(text, "reference_invalid", field="input")


def _needs_lookup(new: NewTask) -> bool:
    """True if a task may exist already, or has dependencies or a concurrency key."""
    return bool(new.id or new.idempotency_key or new.depends_on or new.blocks or new.concurrency)


def _fingerprints(encrypted: EncryptedTasks, rules: ComplexityRules) -> list[tuple[str, ...]]:
    """Returns each task's fingerprints, in order; empty for a task without id and idempotency key.

    They cover the caller's request only: what complexity rules require of an agent may change.
    """
    return [
        _task_fingerprints(
            new, with_required_capability(new, rules), encrypted.hashes.get(index, [""])
        )
        if new.id or new.idempotency_key
        else ()
        for index, new in enumerate(encrypted.new_tasks)
    ]


def _task_fingerprints(new: NewTask, required: NewTask, hashes: list[str]) -> tuple[str, ...]:
    """Returns a task's fingerprints for each key of its secrets.

    Version 0.1 hashed the complexity requirements, too.
    """
    prints = [text for secret in hashes for text in fingerprints(new, secret)]
    if required is not new:
        prints += [text for secret in hashes for text in fingerprints(required, secret)[1:]]
    return tuple(prints)


def _lane_index(tasks: Sequence[NewTask], workspace: UUID) -> tuple[list[int], list[Requirements]]:
    """Returns for each task the index of its requirements, and the list of requirements."""
    indexes: list[int] = []
    distinct: list[Requirements] = []
    last: NewTask | None = None
    for new in tasks:
        if last is None or not is_same_lane(last, new):
            distinct.append(requirements(new, workspace))
        last = new
        indexes.append(len(distinct) - 1)
    return indexes, distinct


def _first_indexes(new_tasks: Sequence[NewTask]) -> list[int]:
    """Returns by task the index of the first with its id or key; `Conflict` if these two differ."""
    if not any(new.id or new.idempotency_key for new in new_tasks):
        return list(range(len(new_tasks)))
    first_by_name: dict[UUID | str, int] = {}
    firsts = []
    for index, new in enumerate(new_tasks):
        names = [name for name in (new.id, new.idempotency_key) if name is not None]
        matches = {first_by_name[name] for name in names if name in first_by_name}
        earliest = min(matches, default=index)
        if len(matches) > 1 or (matches and fingerprint(new_tasks[earliest]) != fingerprint(new)):
            raise Conflict(
                "two different tasks of one submit have the same id or idempotency key",
                "idempotency_conflict",
            )
        first_by_name |= dict.fromkeys(names, earliest)
        firsts.append(earliest)
    return firsts


def submit_script(core: Core, prepared: PreparedSubmit, workspace: UUID) -> Script[list[Submitted]]:
    """Inserts the tasks that do not exist; raises `Conflict` if an existing one differs."""
    inserted = yield insert_statement("submit", prepared.rows, core.now())
    new_ids = {row["id"] for row in inserted}
    existing = [
        (task_id, key)
        for task_id, key in zip(prepared.ids, prepared.keys, strict=True)
        if task_id not in new_ids
    ]
    if not existing:
        return [Submitted(task) for task in prepared.ids]
    rows = yield Statement("submitted_before", {"workspace": workspace}, {"wanted": existing})
    earlier = {row["wanted_id"]: row for row in rows}
    answers = []
    for task_id, prints in zip(prepared.ids, prepared.prints, strict=True):
        if task_id in new_ids:
            answers.append(Submitted(task_id))
            continue
        row = earlier.get(task_id)
        if row is None or (prints and row["fingerprint"] not in prints):
            raise Conflict(
                "the idempotency key or id was used before for another task",
                "idempotency_conflict",
                task=None if row is None else str(row["id"]),
            )
        answers.append(Submitted(row["id"], created=False))
    return answers
