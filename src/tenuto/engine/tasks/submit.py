"""Submit: one task, many, again after a lost answer."""

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
from tenuto.engine.flows.plans import refers
from tenuto.engine.limits.pending_quota import check_pending
from tenuto.engine.rows import (
    LANE,
    STATUS,
    UNMET,
    Rows,
    add_labels,
    body_row,
    hot_row,
    insert,
    joined,
    no_rows,
    plain_body_row,
    plain_hot_row,
)
from tenuto.engine.tasks.dependencies import NOBODY, DependencyGraph, SubmitDependencies, waits_of
from tenuto.engine.tasks.references import check_references
from tenuto.engine.tenancy.encryption import EncryptedTasks, TaskSecrets
from tenuto.model import bounds
from tenuto.model.agents.matching import Requirements
from tenuto.model.errors import (
    Conflict,
    Forbidden,
    Invalid,
    NotFound,
    TenutoError,
    Unavailable,
)
from tenuto.model.limits.complexity import ComplexityRules, gated
from tenuto.model.limits.concurrency import HOLD
from tenuto.model.tasks.fingerprint import fingerprint, fingerprints
from tenuto.model.tasks.submission import NewTask, check, requirements, same_lane
from tenuto.model.tasks.task import Status, rank
from tenuto.model.tenancy import secrets
from tenuto.store.batching import Answers, WriteKind
from tenuto.store.protocol import Script, Statement

_INPUT = 5
_ENV = 19
"""Places of columns in the rows of `_body`."""


REFUSED = (Forbidden, Invalid, NotFound)
"""Errors of a submit that an accepted one may meet when it is repeated."""
_PART = 300
_FIRST_PART = 100
"""Tasks of a large submit that are written at a time: more are spelled meanwhile."""


class Submitted(msgspec.Struct, frozen=True, gc=False):
    """A task that is in the store for certain; `created` is false for a repeated submit."""

    id: UUID
    created: bool = True
    at: datetime | None = None
    """When it was made, where that is known without reading it again."""


class PreparedSubmit(msgspec.Struct, frozen=True):
    """Tasks spelled out as rows, with the lanes whose workers to wake.

    `prints` are the fingerprints by which a task is known again, the first of them stored.
    """

    ids: list[UUID]
    keys: list[str | None]
    prints: list[tuple[str, ...]]
    rows: Rows
    wakes: set[int]
    at: datetime
    """When they were submitted."""
    waits: DependencyGraph = NOBODY
    keyed: bool = False
    """Whether some of the tasks share a concurrency key."""


class TaskSubmitter:
    """The submit family."""

    def __init__(self, core: Core, sealing: TaskSecrets) -> None:
        self._core = core
        self._sealing = sealing
        self._kind = WriteKind("submit", self._script, one_statement=True, at_once=True)

    async def one(self, new: NewTask, workspace: UUID, actor: str | None) -> Submitted:
        """A task, durable when this returns."""
        draft = self._draft_plain(new, workspace, actor) if check(new) else None
        if draft is None:
            return (await self.many([new], workspace, actor))[0]
        [done] = await self._plain(draft, workspace)
        self.announce(draft)
        return done

    async def many(
        self,
        news: Sequence[NewTask],
        workspace: UUID,
        actor: str | None,
        *,
        rerun_of: UUID | None = None,
    ) -> list[Submitted]:
        """All the tasks or none, durable when this returns."""
        if not news:
            return []
        if len(news) > bounds.MAX_BULK:
            raise Invalid(f"{len(news):,} tasks in one submit", "bulk_too_large")
        bounded = (await self._core.lanes.quota(workspace)).pending is not None
        many = len(news) > _PART and not self._core.store.mixes and not bounded
        if many and not any(map(_needs_lookup, news)):
            return await self._in_parts(news, workspace, actor, rerun_of=rerun_of)
        plain = _checked(news)
        places = _same_as(news)
        unique = sorted(set(places))
        draft = await self.draft(
            [news[place] for place in unique], workspace, actor, rerun_of=rerun_of, plain=plain
        )
        if draft.waits or draft.keyed or bounded or any(draft.prints):
            done = await self._settled(draft, workspace, actor, bounded=bounded)
        else:
            done = await self._plain(draft, workspace)
        self.announce(draft)
        known = dict(zip(unique, done, strict=True))
        return [
            known[place] if place == index else Submitted(known[place].id, created=False)
            for index, place in enumerate(places)
        ]

    async def repeated(
        self, news: Sequence[NewTask], workspace: UUID, refused: TenutoError
    ) -> list[Submitted]:
        """What the same submit made before; raises why it is refused where it made nothing.

        What a task names may be gone, and rules may be stricter, since it was accepted.
        """
        # Nobody can have submitted what has no fingerprint or a key that cannot be stored.
        with suppress(Invalid, ValueError, TypeError, msgspec.MsgspecError):
            if (made := await self._made_before(news, workspace)) is not None:
                return made
        raise refused

    async def _made_before(
        self, news: Sequence[NewTask], workspace: UUID
    ) -> list[Submitted] | None:
        """What is stored of the same submit; `None` unless it is all of its tasks."""
        if not all(new.id or new.idempotency_key for new in news):
            return None
        for new in news:
            bounds.text("idempotencyKey", new.idempotency_key or "", bounds.MAX_TEXT)
        fresh = self._core.clock.new_ids(len(news))
        ids = [new.id or each for new, each in zip(news, fresh, strict=True)]
        hidden = self._sealing.encrypt_secrets(news, ids, workspace)
        prints = _fingerprints(hidden, await self._core.lanes.complexity(workspace))
        wanted = [(task, new.idempotency_key) for task, new in zip(ids, news, strict=True)]
        rows = await self._core.store.fetch(
            Statement("submitted_before", {"workspace": workspace}, {"wanted": wanted})
        )
        before = {row["wanted_id"]: row for row in rows if row["fingerprint"]}
        if any(
            task not in before or before[task]["fingerprint"] not in known
            for task, known in zip(ids, prints, strict=True)
        ):
            return None
        return [Submitted(before[task]["id"], created=False) for task in ids]

    async def _settled(
        self, draft: PreparedSubmit, workspace: UUID, actor: str | None, *, bounded: bool
    ) -> list[Submitted]:
        """Insert tasks that may be known, wait for others or meet a quota.

        The answer of the first try may be lost and the commit not. The ids stay the same, so a
        second one finds what the first has made.
        """

        async def write() -> list[Submitted]:
            if draft.waits or draft.keyed:
                return await self._core.run_with_cascade(
                    lambda cascade: self._counted(
                        self.waiting_script(draft, workspace, cascade), workspace, bounded=bounded
                    ),
                    actor,
                )
            crash_point("engine.before_commit")
            done = await self._core.store.transact(
                lambda: self._counted(
                    submit_script(self._core, draft, workspace), workspace, bounded=bounded
                )
            )
            crash_point("engine.committed")
            return done

        try:
            return await write()
        except Unavailable:
            return [
                each if known else msgspec.structs.replace(each, created=True)
                for each, known in zip(await write(), draft.prints, strict=True)
            ]

    async def _in_parts(
        self, news: Sequence[NewTask], workspace: UUID, actor: str | None, *, rerun_of: UUID | None
    ) -> list[Submitted]:
        """The same for many tasks that have nothing to do with each other."""
        now = self._core.now()
        drafts: list[PreparedSubmit] = []
        made: list[Submitted] = []

        async def spelled() -> AsyncIterator[Statement]:
            ends = range(_FIRST_PART, len(news) + _PART, _PART)
            for start, end in pairwise((0, *ends)):
                part = news[start:end]
                plain = _checked(part)
                draft = await self.draft(part, workspace, actor, rerun_of=rerun_of, plain=plain)
                drafts.append(draft)
                made.extend([Submitted(each, at=now) for each in draft.ids])
                yield insert("submit_new", draft.rows, now)

        crash_point("engine.before_commit")
        parts = spelled()
        try:
            await self._core.store.stream(parts)
        except Unavailable:
            # The answer may be lost and the commit not. Ids are ours, so asking again is safe.
            async for _ in parts:
                pass
            if len(made) < len(news):
                raise  # a part could not be spelled: nothing was written
            await self._core.store.transact(lambda: self._return_existing(drafts, workspace))
        crash_point("engine.committed")
        for draft in drafts:
            self.announce(draft)
        return made

    def _return_existing(self, drafts: list[PreparedSubmit], workspace: UUID) -> Script[None]:
        for draft in drafts:
            yield from submit_script(self._core, draft, workspace)

    def announce(self, draft: PreparedSubmit) -> None:
        """Hint at the tasks that can be claimed at once."""
        crash_point("engine.before_announce")
        if draft.wakes:
            self._core.wakeups.announce([f"lane:{lane}" for lane in draft.wakes])

    def _counted(
        self, script: Script[list[Submitted]], workspace: UUID, *, bounded: bool
    ) -> Script[list[Submitted]]:
        """What a submit answers; `TooMany` where a bounded workspace has no room for it."""
        made = yield from script
        if bounded and any(each.created for each in made):
            yield from check_pending(workspace, self._core.lanes.ceiling)
        return made

    def waiting_script(
        self, draft: PreparedSubmit, workspace: UUID, cascade: Cascade
    ) -> Script[list[Submitted]]:
        """Insert tasks that wait for others or for a place, within a transaction."""
        others = SubmitDependencies(draft.waits, workspace)
        yield from others.look(draft.ids)
        others.check_results(draft.rows, _INPUT)
        counted = msgspec.structs.replace(draft, rows=others.counted(draft.rows))
        made = yield from submit_script(self._core, counted, workspace)
        fresh = {each.id for each in made if each.created}
        _check_whole(draft, fresh)
        hot = [row for row in counted.rows["hot"] if row[0] in fresh]
        yield from others.made(cascade, hot)
        for row in hot:
            if row[UNMET - 1] == HOLD and not row[UNMET]:
                cascade.turns.request_permit(row[0], workspace)
        return made

    async def _plain(self, draft: PreparedSubmit, workspace: UUID) -> list[Submitted]:
        """Insert tasks whose ids are new for certain."""
        try:
            at = await self._core.batcher.submit(self._kind, draft)
        except Unavailable:
            # The answer may be lost and the commit not. Ids are ours, so asking again is safe.
            return await self._core.store.transact(
                lambda: submit_script(self._core, draft, workspace)
            )
        return [Submitted(each, at=at) for each in draft.ids]

    def _script(self, batch: list[PreparedSubmit]) -> Script[Answers]:
        at = max(draft.at for draft in batch)
        yield insert("submit_new", joined([draft.rows for draft in batch]), at)
        return [at] * len(batch)

    async def draft(
        self,
        news: Sequence[NewTask],
        workspace: UUID,
        actor: str | None,
        *,
        rerun_of: UUID | None = None,
        plain: bool = False,
        owner: UUID | None = None,
    ) -> PreparedSubmit:
        """Checked tasks spelled out; nothing is written but, at the end, the lanes.

        `plain` is what `check` said of all of them, `owner` the task whose attempt makes them.
        """
        if not plain:
            await check_references(self._core, workspace, news, owner)
        made = self._core.clock.new_ids(len(news))
        ids = [new.id or fresh for new, fresh in zip(news, made, strict=True)]
        hidden = self._sealing.encrypt_secrets(news, ids, workspace)
        rules = await self._core.lanes.complexity(workspace)
        news = (
            [gated(new, rules) for new in hidden.news] if rules.policy == "require" else hidden.news
        )
        trace = tracing.current_traceparent()
        if plain and rules.policy != "require" and rerun_of is None and trace is None:
            return await self._plain_draft(hidden, ids, workspace, actor)
        rows = no_rows()
        rows["sealed"] = hidden.rows
        keys = [new.idempotency_key for new in news]
        prints = _fingerprints(hidden, rules)
        for new, task_id, known in zip(news, ids, prints, strict=True):
            first = known[0] if known else None
            rows["body"].append(body_row(new, task_id, workspace, first, actor, rerun_of, trace))
            add_labels(rows, new, task_id, workspace)
        named = (text for row in rows["body"] for text in (row[_INPUT], row[_ENV]))
        await self._sealing.check_names(named, workspace)
        places, wanted = _lane_wishes(news, workspace)
        numbers = await self._core.lanes.ensure(set(wanted))
        lanes = [numbers[each] for each in wanted]
        now = self._core.now()
        waits = waits_of(news, ids)
        if not waits:
            _check_no_references(row[_INPUT] for row in rows["body"])
        rows["hot"] = [
            _waiting_row(new, task_id, workspace, lanes[place], actor, now, waits)
            for new, task_id, place in zip(news, ids, places, strict=True)
        ]
        wakes = {row[LANE] for row in rows["hot"] if row[STATUS] is Status.PENDING}
        keyed = any(new.concurrency is not None for new in news)
        return PreparedSubmit(ids, keys, prints, rows, wakes, now, waits, keyed)

    def _draft_plain(
        self, new: NewTask, workspace: UUID, actor: str | None
    ) -> PreparedSubmit | None:
        """One plain task spelled out, which most submits are; `None` if anybody has to be asked."""
        now = self._core.now()
        lane = self._core.lanes.lane_by_type(workspace, new.task_type, now)
        if (
            lane is None
            or tracing.current_traceparent() is not None
            or secrets.has_secrets(new.input)
        ):
            return None
        [task] = self._core.clock.new_ids(1, now)
        body = plain_body_row(new, task, workspace, actor)
        if secrets.refers(body[_INPUT]):
            return None
        _check_no_references(body[_INPUT : _INPUT + 1])
        hot = plain_hot_row(new, task, workspace, lane, actor, rank(new.priority, now))
        return PreparedSubmit([task], [None], [()], {"body": [body], "hot": [hot]}, {lane}, now)

    async def _plain_draft(
        self, hidden: EncryptedTasks, ids: list[UUID], workspace: UUID, actor: str | None
    ) -> PreparedSubmit:
        """The same for plain tasks: their type is all they require, and all may start at once."""
        rows = no_rows()
        rows["sealed"] = hidden.rows
        body, hot = rows["body"], rows["hot"]
        for new, task_id in zip(hidden.news, ids, strict=True):
            body.append(plain_body_row(new, task_id, workspace, actor))
        texts = [row[_INPUT] for row in body]
        await self._sealing.check_names(texts, workspace)
        _check_no_references(texts)
        types = {new.task_type: new for new in hidden.news}
        wanted = {each: requirements(new, workspace) for each, new in types.items()}
        numbers = await self._core.lanes.ensure(set(wanted.values()))
        lanes = {task_type: numbers[needs] for task_type, needs in wanted.items()}
        now = self._core.now()
        ranks = {each: rank(each, now) for each in {new.priority for new in hidden.news}}
        for new, task_id in zip(hidden.news, ids, strict=True):
            place = ranks[new.priority]
            hot.append(plain_hot_row(new, task_id, workspace, lanes[new.task_type], actor, place))
        nothing: list[Any] = [None] * len(ids)
        return PreparedSubmit(ids, nothing, [()] * len(ids), rows, set(lanes.values()), now)


def _waiting_row(
    new: NewTask,
    task: UUID,
    workspace: UUID,
    lane: int,
    actor: str | None,
    now: datetime,
    waits: DependencyGraph,
) -> tuple[Any, ...]:
    """The hot half of a task that may wait for others or for a place, or be waited for."""
    keyed = new.concurrency is not None
    awaited = waits.awaited(task) if waits else None
    return hot_row(
        new,
        task,
        workspace,
        lane,
        actor,
        now,
        hold=HOLD if keyed else None,
        unmet=len(waits.needs.get(task, ())) or None if waits else None,
        watched=True if keyed or awaited else None,
        awaited=awaited,
    )


def _checked(news: Sequence[NewTask]) -> bool:
    """Whether all the tasks are plain; raises `Invalid` for one that cannot be stored."""
    plain = True
    for new in news:
        plain = check(new) and plain
    return plain


def _check_no_references(texts: Iterable[str | None]) -> None:
    """Raise `Invalid` where the input of a task that waits for nobody refers to a result."""
    if any(map(refers, texts)):
        raise Invalid(
            "the input refers to a result, and the task waits for none",
            "reference_invalid",
            field="input",
        )


def _needs_lookup(new: NewTask) -> bool:
    """Whether a task may be one that was submitted before, or wait for another."""
    return bool(new.id or new.idempotency_key or new.depends_on or new.blocks or new.concurrency)


def _check_whole(draft: PreparedSubmit, fresh: set[UUID]) -> None:
    """Raise `Conflict` when new tasks wait for one of the same submit that is not new."""
    mine = set(draft.ids)
    waits = [(task, need) for task, needs in draft.waits.needs.items() for need in needs]
    waits += [(each, task) for task, blocked in draft.waits.blocks.items() for each in blocked]
    for task, need in waits:
        if task in fresh and need in mine and need not in fresh:
            raise Conflict(
                "a new task waits for one of this submit that exists already; name it by its id",
                "idempotency_conflict",
            )


def _fingerprints(hidden: EncryptedTasks, rules: ComplexityRules) -> list[tuple[str, ...]]:
    """The fingerprints of tasks that may be submitted again; none for the others.

    They are of what the caller asked for: what complexity requires of an agent may change.
    """
    return [
        _known_by(new, gated(new, rules), hidden.hashes.get(index, [""]))
        if new.id or new.idempotency_key
        else ()
        for index, new in enumerate(hidden.news)
    ]


def _known_by(new: NewTask, required: NewTask, hashes: list[str]) -> tuple[str, ...]:
    """The fingerprints of a task with each key of its secrets; 0.1 hashed what it required, too."""
    known = [each for secret in hashes for each in fingerprints(new, secret)]
    if required is not new:
        known += [each for secret in hashes for each in fingerprints(required, secret)[1:]]
    return tuple(known)


def _lane_wishes(news: Sequence[NewTask], workspace: UUID) -> tuple[list[int], list[Requirements]]:
    """For each task its place in the list of requirements; tasks in a row often share theirs."""
    places: list[int] = []
    wanted: list[Requirements] = []
    last: NewTask | None = None
    for new in news:
        if last is None or not same_lane(last, new):
            wanted.append(requirements(new, workspace))
        last = new
        places.append(len(wanted) - 1)
    return places, wanted


def _same_as(news: Sequence[NewTask]) -> list[int]:
    """For each task of a submit, the first of them that it repeats: by id or idempotency key."""
    if not any(new.id or new.idempotency_key for new in news):
        return list(range(len(news)))
    first: dict[UUID | str, int] = {}
    places = []
    for index, new in enumerate(news):
        names = [name for name in (new.id, new.idempotency_key) if name is not None]
        known = {first[name] for name in names if name in first}
        place = min(known, default=index)
        if len(known) > 1 or (known and fingerprint(news[place]) != fingerprint(new)):
            raise Conflict(
                "two different tasks of one submit have the same id or idempotency key",
                "idempotency_conflict",
            )
        first |= dict.fromkeys(names, place)
        places.append(place)
    return places


def submit_script(core: Core, draft: PreparedSubmit, workspace: UUID) -> Script[list[Submitted]]:
    """Insert what is new; what is there already must be the same, or everything is refused."""
    inserted = yield insert("submit", draft.rows, core.now())
    fresh = {row["id"] for row in inserted}
    stale = [
        (task_id, key)
        for task_id, key in zip(draft.ids, draft.keys, strict=True)
        if task_id not in fresh
    ]
    if not stale:
        return [Submitted(each) for each in draft.ids]
    before = yield Statement("submitted_before", {"workspace": workspace}, {"wanted": stale})
    earlier = {row["wanted_id"]: row for row in before}
    answers = []
    for task_id, known in zip(draft.ids, draft.prints, strict=True):
        if task_id in fresh:
            answers.append(Submitted(task_id))
            continue
        row = earlier.get(task_id)
        if row is None or (known and row["fingerprint"] not in known):
            raise Conflict(
                "the idempotency key or id was used before for another task",
                "idempotency_conflict",
                task=None if row is None else str(row["id"]),
            )
        answers.append(Submitted(row["id"], created=False))
    return answers
