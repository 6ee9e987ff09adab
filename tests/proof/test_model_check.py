"""The model check: production's rules hold in every small world, and each planted bug is caught."""

import sys
from typing import Any
from uuid import UUID

import msgspec
import pytest
from tests.proof.checker import INVARIANTS, Row, Worker, World, explore
from tests.proof.planted_model import LEASE, NOW, PLANTED, Rules

from tenuto.model.tasks.retry import ATTEMPT_CAP, FREE_ENDS
from tenuto.model.tasks.task import Status, Task, next_due_at

TWO = (Worker(), Worker())


def row(number: int = 1, **fields: Any) -> Row:
    """A task that was just submitted, with some fields as if it had a longer past."""
    values: dict[str, Any] = {"status": Status.PENDING, "max_attempts": 2} | fields
    task = Task(
        id=UUID(int=number),
        workspace=UUID(int=9),
        lane=1,
        lease_s=int(LEASE.total_seconds()),
        created_at=NOW,
        updated_at=NOW,
        **values,
    )
    task = msgspec.structs.replace(task, due_at=next_due_at(task))
    return Row(task, (task.version, task.status), free=(task.free_ends, 0))


class Case(msgspec.Struct, frozen=True):
    """A world, a number of states it surely has, and what must have happened in it."""

    start: World
    states: int
    answers: str


CASES: dict[str, Case] = {
    "zombies": Case(
        World(rows=(row(),), messages=("complete", "fail")),
        700,
        "complete accepted, complete lease_lost, fail accepted, fail lease_lost, due accepted",
    ),
    "crashes": Case(
        World(rows=(row(),), faults=3, messages=("complete", "fail")),
        10_000,
        "complete accepted, complete repeated, complete lease_lost, fail repeated",
    ),
    "checkpoints": Case(
        World(
            rows=(row(),),
            faults=1,
            orders=1,
            operator=("cancel",),
            checkpoints=1,
            workers=TWO,
        ),
        14_000,
        "complete cancel_requested, cancel repeated",
    ),
    "cancel": Case(
        World(rows=(row(),), faults=1, orders=1, operator=("cancel",)),
        12_000,
        "complete cancel_requested, cancel accepted, cancel repeated, expire accepted",
    ),
    "operator": Case(
        World(
            rows=(row(max_attempts=1),),
            faults=1,
            orders=2,
            operator=("cancel", "pause", "resume", "retry"),
            workers=TWO,
        ),
        17_000,
        "pause accepted, pause repeated, pause cancel_requested, resume accepted, retry accepted",
    ),
    "retry": Case(
        World(
            rows=(row(max_attempts=1),),
            faults=1,
            orders=1,
            operator=("retry",),
            messages=("complete", "fail", "fail for good"),
        ),
        5_000,
        "retry accepted, fail lease_lost",
    ),
    "push": Case(
        World(
            rows=(row(max_attempts=1, free_ends=FREE_ENDS - 1),),
            faults=1,
            push=True,
            messages=("complete", "not started", "release"),
        ),
        9_000,
        "begin accepted, begin repeated, not_started accepted, release repeated",
    ),
    "give back": Case(
        World(
            rows=(row(max_attempts=1, free_ends=FREE_ENDS - 1),),
            faults=1,
            messages=("complete", "release", "park"),
        ),
        1_500,
        "park accepted, park repeated, release accepted, ready accepted",
    ),
    "last numbers": Case(
        World(
            rows=(row(max_attempts=3, attempt=ATTEMPT_CAP - 2),),
            orders=2,
            operator=("pause", "resume", "retry"),
            workers=TWO,
        ),
        4_500,
        "complete accepted, resume accepted, retry attempts_used_up",
    ),
    "timers": Case(
        World(
            rows=(
                row(
                    max_attempts=1,
                    free_ends=FREE_ENDS - 1,
                    timeout_s=10,
                    watch_s=40,
                    queue_ttl_s=30,
                ),
            ),
            faults=1,
            messages=("complete", "rate limit", "time out", "park with a limit"),
            workers=TWO,
        ),
        3_500,
        "time_out accepted, refuse accepted, fail accepted, park accepted",
    ),
    "two tasks": Case(
        World(rows=(row(), row(2, max_attempts=1)), faults=1), 45_000, "complete lease_lost"
    ),
}


def check(case: Case, rules: Rules) -> None:
    report = explore(case.start, rules)
    sys.stdout.write(f"{report.states} states, {report.steps} steps\n")
    assert report.violation is None, "\n".join(report.trace)
    assert report.states >= case.states
    assert set(case.answers.split(", ")) <= report.answers


@pytest.mark.parametrize("name", CASES)
def test_rules_hold_in_every_state(name: str) -> None:
    check(CASES[name], Rules())


def test_rules_hold_with_coordinators_that_compare_instead_of_lock() -> None:
    start = World(rows=(row(),), faults=1)
    check(Case(start, 13_000, "expire accepted, complete lease_lost"), Rules(locked=False))


@pytest.mark.parametrize("name", PLANTED)
def test_planted_bug_is_detected(name: str) -> None:
    planted = PLANTED[name]
    report = explore(CASES[planted.world].start, planted.rules)
    sys.stdout.write(f"{name}, {len(report.trace)} steps: {'; '.join(report.trace)}\n")
    assert report.violation is not None
    assert report.violation.invariant == planted.breaks
    assert len(report.trace) <= 12


def test_every_invariant_has_a_planted_bug() -> None:
    assert {planted.breaks for planted in PLANTED.values()} == set(INVARIANTS)
