"""The oracles of flows: what has to be true of joins, items, rounds, turns and approvals."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import msgspec
from tests.proof.sim.checkers import Broken, Oracle, Outcome
from tests.proof.sim.recorder import Recorder

CLOSED = frozenset({"COMPLETED", "FAILED", "CANCELLED", "SKIPPED"})
GOOD, NEITHER = "COMPLETED", "SKIPPED"
RETRIED = "select task from event where kind in ('retried', 'revived')"
"""What was tried again after its group had ended counts for nobody any more."""


class Node(msgspec.Struct, frozen=True):
    """A task or a run of a group, in its place."""

    id: str
    flow: str
    key: str
    activation: int
    group: str | None
    slot: int
    status: str
    attempt: int
    is_group: bool


class Run(msgspec.Struct, frozen=True):
    """A run of a group as its row has it."""

    id: str
    key: str
    kind: str
    status: str
    join_policy: str
    total: int
    made: int
    open: int
    succeeded: int
    failed: int
    version: int
    items: str | None


def nodes(outcome: Outcome) -> list[Node]:
    rows = outcome.database.rows(
        "select body.task, body.flow, body.key, body.activation, body.group_id, body.slot,"
        " task.status, task.attempt, 0 from task_body body join task on task.id = body.task"
        " where body.flow is not null union all select id, flow, key, activation, parent, slot,"
        " status, 0, 1 from task_group order by 1"
    )
    return [Node(*row) for row in rows]


def runs(outcome: Outcome) -> list[Run]:
    names = ", ".join(Run.__struct_fields__)
    return [Run(*row) for row in outcome.database.rows(f"select {names} from task_group")]


def everything_ends(recorder: Recorder, outcome: Outcome) -> Iterator[Broken]:
    """Flows and groups end, and no cascade leaves anything behind."""
    del recorder
    for table in ("flow", "task_group"):
        for key, status in outcome.database.rows(f"select key, status from {table}"):
            if status not in CLOSED:
                yield "I24", f"{table} {key} is {status} for ever"
    for kind, subject in outcome.database.rows("select kind, subject from flow_work"):
        yield "I24", f"{kind} of {subject} was never done"
    if len(outcome.database.rows("select id from flow")) != 1:
        yield "I2", "a flow with a fire key was started more or less than once"


def audit_trails(recorder: Recorder, outcome: Outcome) -> Iterator[Broken]:
    """Groups and flows have trails without gaps that tell of one end, and end as their rows do."""
    first: dict[str, list[int]] = defaultdict(list)
    for existing, seq in recorder.delivered:
        if seq not in first[str(existing)]:
            first[str(existing)].append(seq)
    for table in ("flow", "task_group"):
        for id_, key, status, version in outcome.database.rows(
            f"select id, key, status, version from {table}"
        ):
            trail = outcome.database.rows(
                "select seq, kind from event where task = ? order by seq", id_
            )
            if [seq for seq, _ in trail] != list(range(1, version + 1)):
                yield "I13", f"{table} {key}: gaps in {trail}"
            word = "flow" if table == "flow" else "group"
            over = [kind for _, kind in trail if kind.removeprefix(f"{word}_").upper() in CLOSED]
            again = [kind for _, kind in trail].count(f"{word}_reopened")
            if len(over) != again + 1 or over[-1] != f"{word}_{status.lower()}":
                yield "I18", f"{table} {key} is {status}, told was {over}, reopened {again} times"
            if first[id_] != [seq for seq, _ in trail]:
                yield "I19", f"{table} {key}: relayed {first[id_]} of {len(trail)}"


def _slots(outcome: Outcome) -> dict[tuple[str | None, int], list[Node]]:
    result: dict[tuple[str | None, int], list[Node]] = defaultdict(list)
    for node in nodes(outcome):
        result[node.group, node.slot].append(node)
    return result


def _end(slot: list[Node]) -> str:
    """Returns the outcome of a slot: at most one task in it did not end well."""
    return next((node.status for node in slot if node.status != GOOD), GOOD)


def joins(recorder: Recorder, outcome: Outcome) -> Iterator[Broken]:
    """A group's counters are what its children's rows say, and it ended by its policy."""
    del recorder
    slots = _slots(outcome)
    tried = {row[0] for row in outcome.database.rows(RETRIED)}
    inside: dict[str | None, list[str]] = defaultdict(list)
    for node in nodes(outcome):
        inside[node.group].append(node.id)
    for run in runs(outcome):
        own = {slot: _end(children) for (group, slot), children in slots.items() if group == run.id}
        good = sum(status == GOOD for status in own.values())
        bad = sum(status not in (GOOD, NEITHER) for status in own.values())
        if any(item in tried for item in inside[run.id]):
            pass
        elif run.open == 0:
            if (run.succeeded, run.failed, len(own)) != (good, bad, run.total):
                counted = f"{run.succeeded} good, {run.failed} bad of {run.total}"
                yield "I18", f"{run.key} counted {counted}; there are {good}, {bad}, {len(own)}"
        elif run.succeeded > good or run.failed > bad or run.open > run.total:
            yield "I18", f"{run.key} counted more ends than there are"
        if run.status == GOOD and (run.open or run.failed):
            yield "I18", f"{run.key} is COMPLETED with {run.open} open and {run.failed} failed"
        if run.status == "FAILED" and not run.failed:
            yield "I18", f"{run.key} FAILED and nothing in it has"
        if run.open < 0:
            yield "I18", f"{run.key} has {run.open} open"


def items(recorder: Recorder, outcome: Outcome) -> Iterator[Broken]:
    """Every item once; every activation of a key once, numbered without gaps."""
    del recorder
    slots = _slots(outcome)
    for run in runs(outcome):
        if run.items is None:
            continue
        created = {slot: children for (group, slot), children in slots.items() if group == run.id}
        for slot, children in created.items():
            if len(children) != 1:
                yield "I18", f"item {slot} of {run.key} was made {len(children)} times"
        if sorted(created) != list(range(run.made)) or (
            run.status == GOOD and run.made != run.total
        ):
            yield "I18", f"{run.key} has {len(created)} of {run.total} items"
    numbers: dict[tuple[str, bool], list[int]] = defaultdict(list)
    for node in nodes(outcome):
        numbers[node.key, node.is_group].append(node.activation)
    for (key, _), result in numbers.items():
        if len(set(result)) != len(result):
            yield "I18", f"{key} was activated {sorted(result)}"


def skipped(recorder: Recorder, outcome: Outcome) -> Iterator[Broken]:
    """Checks that no skipped task has run."""
    del recorder
    for node in nodes(outcome):
        if node.status == NEITHER and node.attempt:
            yield "I18", f"{node.key} was skipped after {node.attempt} attempts"


def course(recorder: Recorder, outcome: Outcome) -> Iterator[Broken]:
    """The flow went the way that its results say, once, and ended as its last steps did."""
    from tests.proof.sim.flow_story import ROUNDS, STEPS, expected

    twist = recorder.seen["twist"]
    desired = expected(twist)
    result = Counter(node.key for node in nodes(outcome))
    rows = outcome.database.rows("select status, steps_left from flow")
    status, left = rows[0] if rows else ("nothing", 0)
    ends = {node.status for node in nodes(outcome)}
    if ends <= {GOOD} and result != desired and status == GOOD:
        yield "I18", f"wrong steps: {_difference(result, desired)}"
    if over := result - desired:
        yield "I18", f"too much was run: {dict(over)}"
    if status == GOOD and result != desired:
        yield "I18", f"COMPLETED without {dict(desired - result)}"
    # A retry without cascade leaves a flow as it ended.
    left_so = status == "FAILED" and _retried_after_the_end(outcome)
    wrong = (status == "FAILED") != bool(ends - {GOOD, NEITHER}) and status != "CANCELLED"
    if wrong and not left_so:
        yield "I18", f"the flow is {status}, its parts are {sorted(ends)}"
    if left != STEPS - result["again"]:
        yield "I18", f"{left} jumps left after {result['again']} of {STEPS}"
    if result["final"] and not result["ok"]:
        yield "I18", "the last task ran before its time"
    if result["work"] - result["again"] not in (0, 1) or result["work"] > ROUNDS:
        yield "I18", f"{result['work']} rounds by {result['again']} jumps"


def _difference(result: Counter[str], desired: Counter[str]) -> dict[str, Any]:
    return {"more": dict(result - desired), "less": dict(desired - result)}


def approvals(recorder: Recorder, outcome: Outcome) -> Iterator[Broken]:
    """Each question is asked once and decided once."""
    rows = outcome.database.rows(
        "select item.id, item.status, item.task, task.status from inbox_item item"
        " join task on task.id = item.task"
    )
    asked = Counter(row[2] for row in rows)
    again = "select count(*) from event where task = ? and kind in ('revived', 'retried')"
    for task, times in asked.items():
        if times > 1 + outcome.database.rows(again, task)[0][0]:
            yield "approval", f"{task} was asked {times} times"
    decided = {task for _, status, task, _ in rows if status == "APPROVED"}
    for item, status, task, ended in rows:
        if status == "OPEN":
            yield "approval", f"{item} is open though {task} is {ended}"
        if (task in decided) != (ended == GOOD):
            yield "approval", f"{item} is {status}, its task {ended}"
    for item, times in recorder.seen["answered"].items():
        if times > 1:
            yield "approval", f"{times} answers to {item} were accepted"


def waits(recorder: Recorder, outcome: Outcome) -> Iterator[Broken]:
    """Checks that a task starts after its dependencies, and waits for no finished one."""
    del recorder
    positions: dict[tuple[str, str], int] = {}
    for task, kind, position in outcome.database.rows(
        "select task, kind, position from event where kind in ('claimed', 'completed')"
        " order by position desc"
    ):
        positions[task, kind] = position
    for task, needs, met, failed in outcome.database.rows(
        "select task, needs, met, failed from task_dependency"
    ):
        begun, done = positions.get((task, "claimed")), positions.get((needs, "completed"))
        if begun is not None and (done is None or begun < done):
            yield "I17", f"{task} began before {needs} had ended"
        if not met and not failed and done is not None:
            yield "I17", f"{task} was never told that {needs} had ended"


def turns(recorder: Recorder, outcome: Outcome) -> Iterator[Broken]:
    """In a sequence, nobody is claimed before those in front have ended."""
    del recorder
    positions: dict[str, list[int]] = defaultdict(list)
    for task, position in outcome.database.rows(
        "select task, position from event where kind in ('claimed', 'completed') order by position"
    ):
        positions[task].append(position)
    slots = _slots(outcome)
    tried = {row[0] for row in outcome.database.rows(RETRIED)}
    for run in runs(outcome):
        inside = [
            node.id
            for (group, _), children in slots.items()
            if group == run.id
            for node in children
        ]
        if run.kind != "sequential" or not tried.isdisjoint(inside):
            continue
        last = 0
        for slot in range(run.made):
            here = [at for node in slots[run.id, slot] for at in positions[node.id]]
            if here and min(here) < last:
                yield "I18", f"child {slot} of {run.key} did not wait for its turn"
            last = max([last, *here])


ORACLES: tuple[Oracle, ...] = (
    *(everything_ends, audit_trails, joins, items, skipped, course, approvals, waits, turns),
)


def _retried_after_the_end(outcome: Outcome) -> bool:
    """True if a task was retried when the flow had failed for good."""
    retried = "select 1 from event where kind = 'retried' and at >="
    failed = "select max(at) from event where kind = 'flow_failed'"
    return bool(outcome.database.rows(f"{retried} ({failed}) limit 1"))
