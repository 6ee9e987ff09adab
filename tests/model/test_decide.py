"""Decide: every command in every status, and what holds after any sequence of them."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenuto.model.errors import Conflict
from tenuto.model.tasks import commands as c
from tenuto.model.tasks.commands import AttemptCommand, Command, DecisionContext, Failure
from tenuto.model.tasks.decide import _DECIDERS, decide, due_command
from tenuto.model.tasks.retry import ATTEMPT_CAP, ErrorClass
from tenuto.model.tasks.task import (
    LEASED,
    TERMINAL,
    TRANSITIONS,
    Fence,
    Outcome,
    Status,
    Task,
    TaskChange,
    next_due_at,
    rank,
    token_hash,
)

NOW = datetime(2030, 1, 1, tzinfo=UTC)
ID, WORKSPACE, AGENT = UUID(int=1), UUID(int=2), UUID(int=3)
TOKEN = "token"
KILLED = {"state": "killed"}


def task(status: Status = Status.PENDING, **changes: Any) -> Task:
    """A task in a status, in the shape the database's checks demand."""
    fields: dict[str, Any] = {"attempt": 1, "tries": 1, "lease_token": token_hash(TOKEN)}
    if status in LEASED:
        fields |= {"lease_until": NOW + timedelta(seconds=20), "agent": AGENT, "worker": "w"}
    if status is Status.RUNNING:
        fields |= {"started_at": NOW}
    if status in TERMINAL:
        fields |= {"finished_at": NOW}
    if status is Status.RETRY_WAIT:
        fields |= {"next_attempt_at": NOW}
    made = Task(
        id=ID,
        workspace=WORKSPACE,
        lane=1,
        status=status,
        created_at=NOW,
        updated_at=NOW,
        **(fields | changes),
    )
    return msgspec.structs.replace(made, due_at=next_due_at(made))


def boom(error_class: ErrorClass = ErrorClass.ERROR, retryable: bool | None = None) -> Failure:
    return Failure(message="boom", error_class=error_class, retryable=retryable)


COMMANDS: dict[str, Callable[[Fence], Command]] = {
    "begin": lambda fence: c.Begin(fence=fence, session_key="s"),
    "complete": lambda fence: c.Complete(fence=fence),
    "fail": lambda fence: c.Fail(fence=fence, failure=boom()),
    "fail for good": lambda fence: c.Fail(fence=fence, failure=boom(ErrorClass.SYNTAX)),
    "fail by timeout": lambda fence: c.Fail(fence=fence, failure=boom(ErrorClass.TIMEOUT)),
    "rate limit": lambda fence: c.Fail(fence=fence, failure=boom(ErrorClass.RATE_LIMIT)),
    "rate limit until": lambda fence: c.Fail(
        fence=fence,
        failure=boom(ErrorClass.RATE_LIMIT),
        resume_at=NOW + timedelta(minutes=1),
    ),
    "not started": lambda fence: c.NotStarted(fence=fence, failure=boom()),
    "never to start": lambda fence: c.NotStarted(
        fence=fence, failure=boom(ErrorClass.SYNTAX, retryable=False)
    ),
    "timed out": lambda fence: c.TimedOut(fence=fence, receipt=KILLED),
    "park": lambda fence: c.Park(fence=fence, hold="approval"),
    "park with a limit": lambda fence: c.Park(
        fence=fence, hold="approval", wait_until=NOW + timedelta(minutes=1)
    ),
    "park until": lambda fence: c.Park(
        fence=fence, hold="quota", resume_at=NOW + timedelta(minutes=1)
    ),
    "release": lambda fence: c.Release(fence=fence),
    "confirm cancel": lambda fence: c.ConfirmCancel(fence=fence, receipt=KILLED),
    "confirm pause": lambda fence: c.ConfirmPause(fence=fence, receipt=KILLED),
    "expire": lambda _: c.Expire(),
    "seen dead": lambda _: c.Expire(seen_dead=True),
    "pause": lambda _: c.Pause(reason="r"),
    "resume": lambda _: c.Resume(),
    "cancel": lambda _: c.Cancel(reason="r"),
    "skip": lambda _: c.Skip(),
    "refuse": lambda _: c.FailWithoutAttempt(code="queue_ttl", message="m"),
    "retry": lambda _: c.Retry(),
    "archive": lambda _: c.Archive(),
    "reprioritise": lambda _: c.SetPriority(priority=9),
    "start": lambda _: c.StartNow(),
    "edit": lambda _: c.Edit(fields=("title",)),
    "erase": lambda _: c.DeletePayload(),
}
DUTIES: dict[str, Callable[[Fence], Command]] = {
    "overrun": lambda _: c.ForceTimeOut(),
    "warn hung": lambda _: c.WarnHung(),
    "abort": lambda _: c.Abort(),
    "ready": lambda _: c.Ready(),
    "due": lambda _: c.RetryDue(),
}
FLOWS: dict[str, Callable[[Fence], Command]] = {
    "met": lambda _: c.DependenciesMet(n=0),
    "turn": lambda _: c.ClearHold(),
    "wake": lambda _: c.Unpark(),
    "wake in vain": lambda _: c.Unpark(progress=False),
    "ask": lambda _: c.AwaitAnswer(hold="approval", timeout_s=60),
    "exceed": lambda _: c.PauseForBudget(hold="budget:1", reason="used up"),
    "block": lambda _: c.AddDependency(),
    "approve": lambda _: c.Resolve(status=Status.COMPLETED, output="{}"),
    "reject": lambda _: c.Resolve(status=Status.FAILED, message="no", code="rejected"),
    "leave out": lambda _: c.Resolve(status=Status.SKIPPED),
    "revive": lambda _: c.Reopen(hold="turn"),
    "assign": lambda _: c.Assign(lane=7, agent=None),
}
ALL = COMMANDS | DUTIES | FLOWS
FENCE = Fence(ID, 1, TOKEN)


def attempted(of: Task, command: Command, now: datetime = NOW) -> TaskChange | str | None:
    try:
        return decide(of, command, DecisionContext(now, 0.5, "actor"))
    except Conflict as error:
        return error.code


def test_every_command_is_tried_here() -> None:
    assert {type(make(FENCE)) for make in ALL.values()} == set(_DECIDERS)
    names = {make(FENCE).name for make in ALL.values()}
    assert TRANSITIONS.keys() - names == {"claim"}


def check(before: Task, command: Command, made: TaskChange, now: datetime = NOW) -> None:
    """What every change must satisfy."""
    after, event, end = made.task, made.event, made.end
    assert after.version == before.version + 1
    assert (event.previous, event.new) == (before.status, after.status)
    assert (event.attempt, event.actor) == (before.attempt, "actor")
    if after.status is not before.status:
        assert (before.status, after.status) in TRANSITIONS[command.name]
    assert 0 <= after.tries <= after.max_attempts
    assert after.attempt == before.attempt <= ATTEMPT_CAP
    assert after.updated_at == now
    assert after.due_at == next_due_at(after)
    assert (after.finished_at is not None) == (after.status in TERMINAL)
    if after.status is Status.RETRY_WAIT:
        assert after.next_attempt_at is not None
    leased = after.status in LEASED
    assert leased == (after.lease_until is not None)
    if leased:
        assert after.agent is not None
    else:
        asked = (after.cancel_requested_at, after.pause_requested_at, after.hung_warned_at)
        assert asked == (None, None, None)
    assert (end is not None) == (before.status in LEASED and not leased)
    if end is not None:
        assert (end.attempt, end.agent, end.ended_at) == (before.attempt, before.agent, now)
        assert after.last_outcome == end.outcome
    assert after.id == before.id
    assert after.created_at == before.created_at


@pytest.mark.parametrize("status", Status)
@pytest.mark.parametrize("name", ALL)
def test_every_command_in_every_status(name: str, status: Status) -> None:
    command = ALL[name](FENCE)
    late = NOW + timedelta(hours=2)
    for asked in ("", "cancel", "pause", "both"):
        requested = {
            f"{word}_requested_at": NOW
            for word in ("cancel", "pause")
            if asked in (word, "both") and status in LEASED
        }
        before = task(status, estimate_minutes=1, timeout_s=60, **requested)
        made = attempted(before, command, late)
        if isinstance(made, TaskChange):
            check(before, command, made, late)
            legal = {pair for pair in TRANSITIONS.get(command.name, ()) if pair[0] is status}
            assert legal or command.name in ("archive", "reprioritise", "edit", "erase", "assign")
        else:
            assert made in (
                None,
                "out_of_turn",
                "lease_lost",
                "cancel_requested",
                "pause_requested",
            )


@pytest.mark.parametrize("name", [n for n in ALL if isinstance(ALL[n](FENCE), AttemptCommand)])
def test_a_wrong_fence_is_refused_in_every_status(name: str) -> None:
    wrong = [Fence(ID, 2, TOKEN), Fence(ID, 0, TOKEN), Fence(ID, 1, "x"), Fence(ID, 1, "")]
    for status in Status:
        for fence in wrong:
            assert attempted(task(status), ALL[name](fence)) == "lease_lost"


@pytest.mark.parametrize("name", [n for n in COMMANDS if isinstance(ALL[n](FENCE), AttemptCommand)])
def test_a_repeat_is_answered_and_changes_nothing(name: str) -> None:
    command = ALL[name](FENCE)
    asked = {"cancel_requested_at": NOW} if name == "confirm cancel" else {}
    asked |= {"pause_requested_at": NOW} if name == "confirm pause" else {}
    status = Status.ASSIGNED if name == "begin" else Status.RUNNING
    made = attempted(task(status, **asked), command)
    assert isinstance(made, TaskChange)
    assert attempted(made.task, command) is None


@pytest.mark.parametrize(("first", "second"), [("park", "fail"), ("rate limit until", "park")])
def test_another_command_is_no_repeat(first: str, second: str) -> None:
    made = attempted(task(Status.RUNNING), ALL[first](FENCE))
    assert isinstance(made, TaskChange)
    assert attempted(made.task, ALL[second](FENCE)) == "lease_lost"


def test_to_wait_until_another_time_is_no_repeat() -> None:
    made = attempted(task(Status.RUNNING), ALL["park until"](FENCE))
    assert isinstance(made, TaskChange)
    later = c.Park(fence=FENCE, hold="quota", resume_at=NOW + timedelta(minutes=2))
    assert attempted(made.task, later) == "lease_lost"


@pytest.mark.parametrize(
    ("worker", "session", "left"),
    [("gateway:g", "s", True), ("gateway:g", None, False), ("host:1:w", "s", False)],
)
@pytest.mark.parametrize("name", ["expire", "overrun", "abort"])
def test_only_a_session_that_a_gateway_told_of_is_to_be_killed(
    name: str, worker: str, session: str | None, *, left: bool
) -> None:
    before = task(Status.RUNNING, worker=worker, session_key=session)
    made = attempted(before, ALL[name](FENCE))
    assert isinstance(made, TaskChange)
    assert made.end is not None
    assert made.end.unconfirmed is left


@pytest.mark.parametrize(("own", "given", "lasts"), [(60, 20, 60), (20, 60, 60), (None, 20, 20)])
def test_a_session_begins_with_the_longer_lease(own: int | None, given: int, lasts: int) -> None:
    before = task(Status.ASSIGNED, lease_s=own)
    made = attempted(before, c.Begin(fence=FENCE, session_key="s", lease_s=given))
    assert isinstance(made, TaskChange)
    assert made.task.lease_until == NOW + timedelta(seconds=lasts)


def test_timers_choose_the_command() -> None:
    def chosen(of: Task, seconds: float) -> str | None:
        command = due_command(of, DecisionContext(NOW + timedelta(seconds=seconds)))
        return None if command is None else type(command).__name__

    scheduled = task(Status.WAITING, run_at=NOW + timedelta(seconds=9), attempt=0, tries=0)
    assert [chosen(scheduled, at) for at in (8, 9)] == [None, "Ready"]
    held = task(Status.WAITING, hold="quota", resume_at=NOW + timedelta(seconds=9))
    assert [chosen(held, at) for at in (8, 9)] == [None, "Ready"]
    assert chosen(task(Status.WAITING, hold="approval"), 10**6) is None
    assert chosen(task(Status.WAITING, unmet=1), 10**6) is None
    queued = task(queue_ttl_s=60, attempt=0, tries=0)
    assert [chosen(queued, at) for at in (59, 60)] == [None, "FailWithoutAttempt"]
    assert chosen(task(queue_ttl_s=60), 60) is None
    assert chosen(task(Status.RETRY_WAIT), 0) == "RetryDue"
    assert chosen(task(Status.RUNNING, timeout_s=60), 89) is None
    assert chosen(task(Status.RUNNING, timeout_s=60), 90) == "ForceTimeOut"
    assert chosen(task(Status.RUNNING, estimate_minutes=1), 60 + 1800) == "WarnHung"
    warned = task(Status.RUNNING, estimate_minutes=1, hung_warned_at=NOW)
    assert [chosen(warned, at) for at in (599, 600)] == [None, "Abort"]
    cancelled = task(Status.RUNNING, cancel_requested_at=NOW, timeout_s=1)
    assert [chosen(cancelled, at) for at in (29, 30)] == [None, "Expire"]
    for status in TERMINAL | {Status.PAUSED}:
        assert chosen(task(status, timeout_s=1, queue_ttl_s=1), 10**9) is None


@pytest.mark.parametrize(("hours", "counts"), [(-1, 0), (0, 0), (24, 24)])
def test_a_new_priority_counts_from_when_the_task_may_start(hours: int, counts: int) -> None:
    before = task(Status.WAITING, run_at=NOW + timedelta(hours=hours), attempt=0, tries=0)
    made = attempted(before, c.SetPriority(priority=9))
    assert isinstance(made, TaskChange)
    assert made.task.rank == rank(9, NOW + timedelta(hours=counts))


@pytest.mark.parametrize(("hold", "progress"), [("children", False), ("approval", True)])
def test_a_handlers_wait_that_is_over_lets_the_task_go_on(hold: str, *, progress: bool) -> None:
    parked = task(Status.WAITING, hold=hold, wait_until=NOW, free_ends=7)
    assert due_command(parked, DecisionContext(NOW)) == c.Unpark(progress=progress)
    woken = decide(parked, c.Unpark(progress=progress), DecisionContext(NOW))
    assert woken is not None
    after = woken.task
    assert (after.status, after.hold, after.wait_until) == (Status.PENDING, None, None)
    assert after.free_ends == (0 if progress else 7)
    never_ran = msgspec.structs.replace(parked, attempt=0, tries=0)
    assert isinstance(due_command(never_ran, DecisionContext(NOW)), c.FailWithoutAttempt)
    assert attempted(never_ran, c.Unpark()) == "out_of_turn"


def test_a_woken_task_may_have_more_to_wait_for() -> None:
    for more in ({"unmet": 1}, {"run_at": NOW + timedelta(hours=1)}):
        woken = decide(
            task(Status.WAITING, hold="children", **more), c.Unpark(), DecisionContext(NOW)
        )
        assert woken is not None
        assert (woken.task.status, woken.task.hold) == (Status.WAITING, None)


def claimed(before: Task, now: datetime) -> Task:
    """What the store's claim makes of a PENDING row."""
    after = msgspec.structs.replace(
        before,
        status=Status.RUNNING,
        version=before.version + 1,
        attempt=before.attempt + 1,
        tries=before.tries + 1,
        agent=AGENT,
        worker="w",
        lease_token=token_hash(f"{TOKEN}{before.attempt + 1}"),
        session_key=None,
        lease_until=now + timedelta(seconds=20),
        assigned_at=now,
        started_at=now,
        progress_at=None,
        updated_at=now,
    )
    return msgspec.structs.replace(after, due_at=next_due_at(after))


# What a person asks is asked more often, and what only ends or decorates a task is left out.
LIVELY = ["pause", "cancel", "pause", "cancel", *COMMANDS]
LIVELY = [n for n in LIVELY if n not in ("archive", "reprioritise", "skip", "refuse", "seen dead")]

Made = tuple[Task, Command, TaskChange]
"""The row before, the command, and the change it made."""


class Walk:
    """A task taken through random commands as the engine would send them."""

    def __init__(self, start: Task) -> None:
        self.start = start
        self.task = start
        self.now = NOW

    def step(self, pick: int, gap: float) -> Made | None:
        """One of the things that may happen now; `None` for a claim or a checkpoint."""
        self.now += timedelta(seconds=gap)
        if self.task.status in (Status.COMPLETED, Status.SKIPPED):
            self.task = self.start  # nothing more can happen to this one: take another
        free = self.task.tries < self.task.max_attempts and self.task.attempt < ATTEMPT_CAP
        if self.task.status is Status.PENDING and free and pick % 4:
            self.task = claimed(self.task, self.now)
            return None
        if self.task.status in LEASED and pick % 7 == 0:
            seq = self.task.checkpoint_seq + 1
            self.task = msgspec.structs.replace(self.task, checkpoint_seq=seq)
            return None
        possible = self.possible()
        if not possible:
            return None
        made = possible[pick % len(possible)]
        self.task = made[2].task
        return made

    def possible(self) -> list[Made]:
        moment = DecisionContext(self.now, 0.5, "actor")
        fence = Fence(ID, self.task.attempt, f"{TOKEN}{self.task.attempt}")
        asked = [due_command(self.task, moment), *(COMMANDS[name](fence) for name in LIVELY)]
        found: list[Made] = []
        for command in asked:
            if command is None:
                continue
            made = attempted(self.task, command, self.now)
            if isinstance(made, TaskChange):
                found.append((self.task, command, made))
        return found


STARTS = st.builds(
    lambda attempt, most, ttl, timeout, estimate, later: task(
        Status.WAITING if later else Status.PENDING,
        attempt=attempt,
        tries=0,
        max_attempts=most,
        queue_ttl_s=ttl,
        timeout_s=timeout,
        estimate_minutes=estimate,
        run_at=NOW + timedelta(seconds=later) if later else None,
    ),
    st.sampled_from([0, 0, 998, 999]),
    st.integers(1, 3),
    st.sampled_from([None, 30]),
    st.sampled_from([None, 60]),
    st.sampled_from([None, 1]),
    st.sampled_from([0, 100]),
)
STEPS = st.lists(
    st.tuples(st.integers(0, 839), st.sampled_from([0, 0, 1, 25, 100, 2000])),
    min_size=40,
    max_size=80,
)
Steps = list[tuple[int, float]]
PROPERTY = settings(deadline=None, max_examples=100)


@PROPERTY
@given(start=STARTS, steps=STEPS)
def test_any_sequence_keeps_the_invariants(start: Task, steps: Steps) -> None:
    walk = Walk(start)
    for pick, gap in steps:
        made = walk.step(pick, gap)
        if made is not None:
            check(*made, walk.now)
        assert walk.task.tries <= walk.task.max_attempts
        assert walk.task.attempt <= ATTEMPT_CAP


@PROPERTY
@given(start=STARTS, steps=STEPS)
def test_what_is_pending_can_be_claimed(start: Task, steps: Steps) -> None:
    walk = Walk(start)
    for pick, gap in steps:
        walk.step(pick, gap)
        if walk.task.status is Status.PENDING:
            assert walk.task.tries < walk.task.max_attempts
            assert walk.task.attempt < ATTEMPT_CAP


@PROPERTY
@given(start=STARTS, steps=STEPS)
def test_an_accepted_cancel_ends_cancelled(start: Task, steps: Steps) -> None:
    walk = Walk(start)
    for pick, gap in steps:
        made = walk.step(pick, gap)
        if made is None:
            continue
        before, _, change = made
        if before.cancel_requested_at is not None and change.end is not None:
            assert change.end.outcome is Outcome.CANCELLED
            assert change.task.status is Status.CANCELLED


@PROPERTY
@given(start=STARTS, steps=STEPS, late=st.sampled_from([1, 40, 4000]))
def test_a_timer_that_has_come_calls_for_something(start: Task, steps: Steps, late: float) -> None:
    walk = Walk(start)
    for pick, gap in steps:
        walk.step(pick, gap)
        now = walk.now + timedelta(seconds=late)
        if walk.task.cancel_requested_at or walk.task.pause_requested_at:
            continue  # an owner that still beats is given more time to stop
        if walk.task.due_at is not None and walk.task.due_at <= now:
            assert due_command(walk.task, DecisionContext(now)) is not None


@PROPERTY
@given(start=STARTS, steps=STEPS)
def test_no_loop_is_free_for_ever(start: Task, steps: Steps) -> None:
    walk = Walk(start)
    free = 0
    for pick, gap in steps:
        seq = walk.task.checkpoint_seq
        made = walk.step(pick, gap)
        if walk.task.checkpoint_seq > seq:
            free = 0
        end = None if made is None else made[2].end
        if made is not None and end is not None:
            before, _, change = made
            gave = change.task.tries < before.tries and end.outcome is not Outcome.PAUSED
            free = free + 1 if gave else 0
            assert free <= 20
