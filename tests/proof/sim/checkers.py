"""The oracles of a run. They read what the recorder wrote down and the final database, no more."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, TypeVar
from uuid import UUID

import msgspec
from tests.proof.sim.actors import SETTLED_S
from tests.proof.sim.clock import START
from tests.proof.sim.loop import run_now
from tests.proof.sim.recorder import Recorder
from tests.proof.sim.store import Database

from tenuto.clock import to_micros
from tenuto.engine.engine import Engine
from tenuto.model.tasks.retry import FREE_ENDS
from tenuto.model.tasks.task import LEASED, TERMINAL, TRANSITIONS

S = TypeVar("S", bound=msgspec.Struct)
Broken = tuple[str, str]

BY_KIND: dict[str, str] = {
    "ready": "ready unblock",
    "claimed": "claim",
    "started": "begin",
    "completed": "complete decide",
    "retry_scheduled": "fail",
    "timed_out": "time_out",
    "not_started": "not_started",
    "lease_expired": "expire",
    "aborted": "abort",
    "parked": "park fail",
    "released": "release",
    "due": "due",
    "paused": "pause expire",
    "resumed": "resume",
    "cancelled": "cancel expire",
    "skipped": "skip decide",
    "retried": "retry",
    "revived": "revive",
    "failed": "fail not_started refuse decide",
    "dead": "fail expire not_started abort time_out park release",
}
"""The rows of the transition table that may stand behind an event."""
STAYS = frozenset(
    "cancel_requested pause_requested hung_warned archived swept unblocked asked".split()
)
PASSES = {"cancel": ("cancel",), "pause": ("pause", "cancel", "checkpoint")}
"""What may still be accepted from an attempt that was asked to stop."""
AFTER_THE_END = frozenset({"archived", "retried", "revived", "swept"})
FREE = frozenset({"released", "parked", "not_started"})


class Event(msgspec.Struct, frozen=True):
    """One row of a task's trail."""

    seq: int
    kind: str
    previous: str | None
    new: str
    attempt: int
    message: str | None
    at: int
    data: Any


class Final(msgspec.Struct, frozen=True):
    """A task as the run left it."""

    id: UUID
    title: str
    key: str | None
    parent: str | None
    status: str
    version: int
    attempt: int
    tries: int
    max_attempts: int
    checkpoint_seq: int
    lease_until: int | None
    due_at: int | None
    trail: list[Event]


def _made(kind: type[S], cells: list[Any]) -> S:
    return kind(**dict(zip(kind.__struct_fields__, cells, strict=True)))


class Outcome:
    """The final database, read once."""

    def __init__(self, database: Database) -> None:
        self.database = database
        trails: dict[str, list[Event]] = defaultdict(list)
        for task, *cells, data in database.rows(
            "select task, seq, kind, previous, new, attempt, message, at, data from event"
            " order by task, seq"
        ):
            reported = msgspec.json.decode(data) if data else None
            trails[task].append(_made(Event, [*cells, reported]))
        self.tasks: dict[UUID, Final] = {}
        for task, *cells in database.rows(
            "select id, title, idempotency_key, parent, status, version, attempt, tries,"
            " max_attempts, checkpoint_seq, lease_until, due_at"
            " from task join task_body on task_body.task = task.id"
        ):
            self.tasks[UUID(task)] = _made(Final, [UUID(task), *cells, trails[task]])


def check(recorder: Recorder, database: Database, more: Sequence["Oracle"] = ()) -> list[Broken]:
    """Every way in which the run broke an invariant."""
    outcome = Outcome(database)
    matches: list[Broken] = []
    for oracle in (*ORACLES, *more):
        matches += oracle(recorder, outcome)
    mismatches = run_now(Engine(database.store).maintenance.audit())
    return matches + [("I13", text) for text in mismatches]


def submits(recorder: Recorder, outcome: Outcome) -> Iterator[Broken]:
    """Checks that each acknowledged task is stored once, and once per key."""
    titles = Counter(task.title for task in outcome.tasks.values())
    for submit in recorder.submits:
        for answer in submit.answers:
            for task in answer:
                if task not in outcome.tasks:
                    yield "I1", f"{submit.titles} was acknowledged as {task} and is lost"
        if len({tuple(answer) for answer in submit.answers}) > 1:
            yield "I2", f"{submit.titles} got different ids: {submit.answers}"
        if len({titles[title] for title in submit.titles}) > 1:
            yield "I2", f"{submit.titles} was submitted in part"
        for title in submit.titles:
            if titles[title] > 1:
                yield "I2", f"{title} is there {titles[title]} times"
        if submit.keyed_conflict:
            yield "I2", f"the key of {submit.titles} was taken for another body"


def ends(recorder: Recorder, outcome: Outcome) -> Iterator[Broken]:
    """Everything ended, lets go of its lease and its timers, within its tries."""
    del recorder
    for task in outcome.tasks.values():
        if task.status not in TERMINAL:
            yield "I24", f"{task.title} is {task.status} for ever"
        if task.lease_until is not None and task.status not in LEASED:
            yield "I7", f"{task.title} is {task.status} under a lease"
        if task.tries > task.max_attempts:
            yield "I15", f"{task.title} had {task.tries} of {task.max_attempts} tries"


def results(recorder: Recorder, outcome: Outcome) -> Iterator[Broken]:
    """At most one attempt's result is accepted; it is the last attempt's, and its output stays."""
    received = defaultdict(set)
    for write in recorder.accepted:
        if write.what == "complete":
            received[write.fence.task].add(write.fence.attempt)
    ended: dict[str, dict[int, str]] = defaultdict(dict)
    for task, attempt, mode in outcome.database.rows("select task, attempt, outcome from attempt"):
        ended[task][attempt] = mode
    outputs = dict(outcome.database.rows("select task, output from task_output"))
    for task in outcome.tasks.values():
        attempts = ended[str(task.id)]
        done = {number for number, mode in attempts.items() if mode == "COMPLETED"}
        if sorted(attempts) != list(range(1, task.attempt + 1)) and task.status in TERMINAL:
            yield "I6", f"{task.title}: attempts {sorted(attempts)} of {task.attempt} ended"
        by_attempt = task.status == "COMPLETED" and task.attempt > 0  # the engine needs none
        if done != ({task.attempt} if by_attempt else set()):
            yield "I5", f"{task.title} is {task.status}, results of attempts {done}"
        if not received[task.id] <= done:
            yield "I5", f"{task.title}: accepted {received[task.id]}, recorded {done}"
        if by_attempt:
            reported = recorder.outputs.get((task.id, task.attempt), "nothing")
            stored = outputs.get(str(task.id))
            if stored is None or msgspec.json.decode(stored) != reported:
                yield (
                    "I5",
                    f"{task.title}: attempt {task.attempt} said {reported}, kept is {stored}",
                )


def checkpoints(recorder: Recorder, outcome: Outcome) -> Iterator[Broken]:
    """Numbers rise, over attempts too, and nobody starts from less than was acknowledged."""
    saves: dict[UUID, list[Any]] = defaultdict(list)
    for save in recorder.saves:
        saves[save.fence.task].append(save)
    stored = {
        UUID(task): (seq, msgspec.json.decode(data))
        for task, seq, data in outcome.database.rows("select task, seq, data from checkpoint")
    }
    for task, created in saves.items():
        title = outcome.tasks[task].title
        by_number = sorted(created, key=lambda save: save.seq)
        if any(a.seq == b.seq for a, b in pairwise(by_number)):
            yield "I3", f"{title}: one number for two checkpoints"
        if [save.fence.attempt for save in by_number] != sorted(
            save.fence.attempt for save in created
        ):
            yield "I3", f"{title}: an older attempt saved over a newer one"
        asked = recorder.asked_to_save[task]
        if asked.index(stored[task][1]) < asked.index(by_number[-1].data):
            yield "I3", f"{title}: kept is {stored[task]}, acknowledged was {by_number[-1].data}"
        for work, _ in recorder.works[task]:
            before = [save for save in created if save.fence.attempt < work.fence.attempt]
            if any(save.seq > work.checkpoint_seq for save in before):
                yield "I3", f"{title}: attempt {work.fence.attempt} began without a checkpoint"


def children(recorder: Recorder, outcome: Outcome) -> Iterator[Broken]:
    """A child once per key; recorded steps are what handlers were told."""
    existing = {
        (UUID(task), key): (value, child)
        for task, key, value, child in outcome.database.rows(
            "select task, key, value, child from task_step"
        )
    }
    for (parent, key), ids in recorder.children.items():
        if len(ids) > 1 or not all(child in outcome.tasks for child in ids):
            yield "spawn", f"{key} of {parent} is {ids}"
    titles = Counter(task.title for task in outcome.tasks.values() if task.parent is not None)
    yield from (("spawn", f"{title} is there {n} times") for title, n in titles.items() if n > 1)
    for (task, key), value in recorder.steps.items():
        if msgspec.json.decode(existing[task, key][0]) != value:
            yield "step", f"{key} of {task} is {existing[task, key][0]}, told was {value}"


def trails(recorder: Recorder, outcome: Outcome) -> Iterator[Broken]:
    """Every trail is gap free, legal, final where it ended, and replays to the row."""
    del recorder
    for task in outcome.tasks.values():
        if [event.seq for event in task.trail] != list(range(1, task.version + 1)):
            yield "I13", f"{task.title}: gaps in {[event.seq for event in task.trail]}"
        status: str | None = None
        for event in task.trail:
            if event.previous != status:
                yield "I13", f"{task.title}: {event.kind} from {event.previous}, was {status}"
            if status in TERMINAL and event.kind not in AFTER_THE_END:
                yield "I12", f"{task.title}: {event.kind} after {status}"
            if not _legal(event):
                yield "I11", f"{task.title}: {event.kind} {event.previous} to {event.new}"
            status = event.new
        if status != task.status:
            yield "I13", f"{task.title} is {task.status}, told was {status}"
        tries, attempt = _replay(task.trail)
        if attempt != task.attempt or (tries is not None and tries != task.tries):
            yield "I15", f"{task.title}: {task.tries} tries, its trail counts {tries}"


def _legal(event: Event) -> bool:
    if event.kind == "submitted":
        return event.previous is None and event.new in ("WAITING", "PENDING")
    if event.kind in STAYS:
        return event.previous == event.new
    moves = BY_KIND.get(event.kind, "").split()
    return any((event.previous, event.new) in TRANSITIONS[move] for move in moves)


def _replay(trail: list[Event]) -> tuple[int | None, int]:
    """Tries and attempts as the trail tells them; no tries where free ends ran out."""
    tries = attempt = free = 0
    for event in trail:
        if event.kind == "claimed":
            tries, attempt = tries + 1, attempt + 1
        elif event.kind == "retried":
            tries = 0
        elif event.kind == "dead":
            tries = event.data["tries"]
        elif event.kind == "paused":
            tries -= event.previous in LEASED
        elif event.kind in FREE or _limited(event):
            tries, free = tries - 1, free + 1
    return (tries if free <= FREE_ENDS else None), attempt


def _limited(event: Event) -> bool:
    return event.kind == "retry_scheduled" and event.data["error_class"] == "rate_limit"


def orders(recorder: Recorder, outcome: Outcome) -> Iterator[Broken]:
    """An acknowledged cancel ends the task, an acknowledged pause holds it, and nothing passes."""
    for order in recorder.controls:
        if order.action not in ("cancel", "pause"):
            continue
        task = outcome.tasks[order.task]
        position = next((i for i, e in enumerate(task.trail) if e.message == order.reason), None)
        if position is None:
            yield "I13", f"{task.title}: {order.action} was acknowledged and left no trace"
            continue
        event = task.trail[position]
        if event.kind not in STAYS:
            continue
        after = next((e for e in task.trail[position:] if e.new != event.new), None)
        allowed = ("cancelled",) if order.action == "cancel" else ("cancelled", "paused")
        if after is None or after.kind not in allowed:
            output = "nothing" if after is None else after.kind
            yield "I16", f"{task.title}: {order.action} was acknowledged, then {output}"
        for write in recorder.accepted:
            own = write.fence.task == order.task and write.fence.attempt == event.attempt
            if own and write.began > order.acked and write.what not in PASSES[order.action]:
                yield "I16", f"{task.title}: {write.what} accepted after {order.action}"


def relayed(recorder: Recorder, outcome: Outcome) -> Iterator[Broken]:
    """Every event reached the subscriber, those of one task first in their order."""
    first: dict[UUID, list[int]] = defaultdict(list)
    for existing, seq in recorder.delivered:
        if seq not in first[existing]:
            first[existing].append(seq)
    closed = to_micros(START) + recorder.closed_at * 1_000_000
    for task in outcome.tasks.values():
        # What workers sweep up when they are asked to end, nobody may be there to relay.
        swept = [item.seq for item in task.trail if item.kind == "swept" and item.at >= closed]
        received = first[task.id]
        seqs = [item.seq for item in task.trail if item.seq in received or item.seq not in swept]
        if first[task.id] != seqs:
            yield "I19", f"{task.title}: relayed {first[task.id]} of {seqs}"


def healthy(recorder: Recorder, outcome: Outcome) -> Iterator[Broken]:
    """Checks that no attempt begun after the last fault lost its lease or ended unconfirmed."""
    if recorder.suicides:
        return  # a handler that would not stop took its worker with it
    from_then = to_micros(START) + (recorder.healed_at + SETTLED_S) * 1_000_000
    badly = {
        (UUID(row[0]), row[1]): row[2]
        for row in outcome.database.rows(
            "select task, attempt, outcome from attempt where outcome = 'STALLED' or unconfirmed"
        )
    }
    for task in outcome.tasks.values():
        for event in task.trail:
            mode = badly.get((task.id, event.attempt))
            if event.kind == "claimed" and event.at >= from_then and mode is not None:
                yield "healthy", f"{task.title}: attempt {event.attempt} {mode} for no reason"


Oracle = Callable[[Recorder, Outcome], Iterator[Broken]]
ORACLES: tuple[Oracle, ...] = (
    *(submits, ends, results, checkpoints, children, trails, orders, relayed, healthy),
)
