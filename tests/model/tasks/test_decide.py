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
from tenuto.model.tasks.retry import ATTEMPT_CAP, RULES, ErrorClass, Rule
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
    created = Task(
        id=ID,
        workspace=WORKSPACE,
        lane=1,
        status=status,
        created_at=NOW,
        updated_at=NOW,
        **(fields | changes),
    )
    return msgspec.structs.replace(created, due_at=next_due_at(created))


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


def test_every_command_is_covered() -> None:
    assert {type(make(FENCE)) for make in ALL.values()} == set(_DECIDERS)
    names = {make(FENCE).name for make in ALL.values()}
    assert TRANSITIONS.keys() - names == {"claim"}


def check(before: Task, command: Command, created: TaskChange, now: datetime = NOW) -> None:
    """Asserts what every change must satisfy."""
    after, event, end = created.task, created.event, created.end
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
def test_command_in_every_status_follows_the_table(name: str, status: Status) -> None:
    command = ALL[name](FENCE)
    late = NOW + timedelta(hours=2)
    for asked in ("", "cancel", "pause", "both"):
        requested = {
            f"{word}_requested_at": NOW
            for word in ("cancel", "pause")
            if asked in (word, "both") and status in LEASED
        }
        before = task(status, estimate_minutes=1, timeout_s=60, **requested)
        created = attempted(before, command, late)
        if isinstance(created, TaskChange):
            check(before, command, created, late)
            legal = {pair for pair in TRANSITIONS.get(command.name, ()) if pair[0] is status}
            assert legal or command.name in ("archive", "reprioritise", "edit", "erase", "assign")
        else:
            assert created in (
                None,
                "out_of_turn",
                "lease_lost",
                "cancel_requested",
                "pause_requested",
            )


@pytest.mark.parametrize("name", [n for n in ALL if isinstance(ALL[n](FENCE), AttemptCommand)])
def test_wrong_fence_is_refused_in_every_status(name: str) -> None:
    wrong = [Fence(ID, 2, TOKEN), Fence(ID, 0, TOKEN), Fence(ID, 1, "x"), Fence(ID, 1, "")]
    for status in Status:
        for fence in wrong:
            assert attempted(task(status), ALL[name](fence)) == "lease_lost"


@pytest.mark.parametrize("name", [n for n in COMMANDS if isinstance(ALL[n](FENCE), AttemptCommand)])
def test_repeated_command_is_accepted_without_a_change(name: str) -> None:
    command = ALL[name](FENCE)
    asked = {"cancel_requested_at": NOW} if name == "confirm cancel" else {}
    asked |= {"pause_requested_at": NOW} if name == "confirm pause" else {}
    status = Status.ASSIGNED if name == "begin" else Status.RUNNING
    created = attempted(task(status, **asked), command)
    assert isinstance(created, TaskChange)
    assert attempted(created.task, command) is None


@pytest.mark.parametrize("kind", ErrorClass)
def test_a_failure_of_each_class_that_is_reported_again_later_changes_nothing(
    kind: ErrorClass,
) -> None:
    command = c.Fail(fence=FENCE, failure=boom(kind))
    change = attempted(task(Status.RUNNING), command)
    assert isinstance(change, TaskChange)
    assert attempted(change.task, command, NOW + timedelta(days=1)) is None


@pytest.mark.parametrize("counts", [True, False])
def test_a_class_may_park_until_a_time_of_its_own(
    monkeypatch: pytest.MonkeyPatch, *, counts: bool
) -> None:
    reset = Rule(parks=True, counts=counts, reset_time=lambda now: now + timedelta(hours=5))
    monkeypatch.setitem(RULES, ErrorClass.ERROR, reset)
    before = task(Status.RUNNING, tries=1, free_ends=2)
    command = c.Fail(fence=FENCE, failure=boom())
    change = attempted(before, command)
    assert isinstance(change, TaskChange)
    assert (change.task.status, change.task.hold) == (Status.WAITING, "quota")
    assert change.task.resume_at == NOW + timedelta(hours=5)
    assert (change.task.tries, change.task.free_ends) == ((1, 0) if counts else (0, 3))
    assert attempted(change.task, command, NOW + timedelta(minutes=1)) is None, "a repeat"
    reported = c.Fail(fence=FENCE, failure=boom(), resume_at=NOW + timedelta(hours=1))
    assert attempted(change.task, reported) == "lease_lost"
    sooner = attempted(before, reported)
    assert isinstance(sooner, TaskChange)
    assert sooner.task.resume_at == NOW + timedelta(hours=1)


@pytest.mark.parametrize(("first", "second"), [("park", "fail"), ("rate limit until", "park")])
def test_different_command_is_not_a_repeat(first: str, second: str) -> None:
    created = attempted(task(Status.RUNNING), ALL[first](FENCE))
    assert isinstance(created, TaskChange)
    assert attempted(created.task, ALL[second](FENCE)) == "lease_lost"


def test_park_until_another_time_is_not_a_repeat() -> None:
    created = attempted(task(Status.RUNNING), ALL["park until"](FENCE))
    assert isinstance(created, TaskChange)
    later = c.Park(fence=FENCE, hold="quota", resume_at=NOW + timedelta(minutes=2))
    assert attempted(created.task, later) == "lease_lost"


@pytest.mark.parametrize(
    ("worker", "session", "left"),
    [("gateway:g", "s", True), ("gateway:g", None, False), ("host:1:w", "s", False)],
)
@pytest.mark.parametrize("name", ["expire", "overrun", "abort"])
def test_session_is_killed_only_if_its_gateway_reported_it(
    name: str, worker: str, session: str | None, *, left: bool
) -> None:
    before = task(Status.RUNNING, worker=worker, session_key=session)
    created = attempted(before, ALL[name](FENCE))
    assert isinstance(created, TaskChange)
    assert created.end is not None
    assert created.end.unconfirmed is left


@pytest.mark.parametrize(("own", "values", "lasts"), [(60, 20, 60), (20, 60, 60), (None, 20, 20)])
def test_session_begins_with_the_longer_lease(own: int | None, values: int, lasts: int) -> None:
    before = task(Status.ASSIGNED, lease_s=own)
    created = attempted(before, c.Begin(fence=FENCE, session_key="s", lease_s=values))
    assert isinstance(created, TaskChange)
    assert created.task.lease_until == NOW + timedelta(seconds=lasts)


def test_expired_timer_chooses_the_command() -> None:
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
def test_new_priority_counts_from_the_start_time(hours: int, counts: int) -> None:
    before = task(Status.WAITING, run_at=NOW + timedelta(hours=hours), attempt=0, tries=0)
    created = attempted(before, c.SetPriority(priority=9))
    assert isinstance(created, TaskChange)
    assert created.task.rank == rank(9, NOW + timedelta(hours=counts))


@pytest.mark.parametrize(("hold", "progress"), [("children", False), ("approval", True)])
def test_expired_handler_wait_lets_the_task_continue(hold: str, *, progress: bool) -> None:
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


def test_woken_task_can_wait_for_more() -> None:
    for more in ({"unmet": 1}, {"run_at": NOW + timedelta(hours=1)}):
        woken = decide(
            task(Status.WAITING, hold="children", **more), c.Unpark(), DecisionContext(NOW)
        )
        assert woken is not None
        assert (woken.task.status, woken.task.hold) == (Status.WAITING, None)


def claimed(before: Task, now: datetime) -> Task:
    """Returns the PENDING row as the store's claim changes it."""
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
"""The row before, the command, and the change it change."""


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
        created = possible[pick % len(possible)]
        self.task = created[2].task
        return created

    def possible(self) -> list[Made]:
        moment = DecisionContext(self.now, 0.5, "actor")
        fence = Fence(ID, self.task.attempt, f"{TOKEN}{self.task.attempt}")
        asked = [due_command(self.task, moment), *(COMMANDS[name](fence) for name in LIVELY)]
        matches: list[Made] = []
        for command in asked:
            if command is None:
                continue
            created = attempted(self.task, command, self.now)
            if isinstance(created, TaskChange):
                matches.append((self.task, command, created))
        return matches


STARTS = st.builds(
    lambda attempt, max_attempts, ttl, timeout, estimate, later: task(
        Status.WAITING if later else Status.PENDING,
        attempt=attempt,
        tries=0,
        max_attempts=max_attempts,
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
def test_any_sequence_of_commands_keeps_the_invariants(start: Task, steps: Steps) -> None:
    walk = Walk(start)
    for pick, gap in steps:
        created = walk.step(pick, gap)
        if created is not None:
            check(*created, walk.now)
        assert walk.task.tries <= walk.task.max_attempts
        assert walk.task.attempt <= ATTEMPT_CAP


@PROPERTY
@given(start=STARTS, steps=STEPS)
def test_pending_task_can_be_claimed(start: Task, steps: Steps) -> None:
    walk = Walk(start)
    for pick, gap in steps:
        walk.step(pick, gap)
        if walk.task.status is Status.PENDING:
            assert walk.task.tries < walk.task.max_attempts
            assert walk.task.attempt < ATTEMPT_CAP


@PROPERTY
@given(start=STARTS, steps=STEPS)
def test_accepted_cancel_ends_cancelled(start: Task, steps: Steps) -> None:
    walk = Walk(start)
    for pick, gap in steps:
        created = walk.step(pick, gap)
        if created is None:
            continue
        before, _, change = created
        if before.cancel_requested_at is not None and change.end is not None:
            assert change.end.outcome is Outcome.CANCELLED
            assert change.task.status is Status.CANCELLED


@PROPERTY
@given(start=STARTS, steps=STEPS, late=st.sampled_from([1, 40, 4000]))
def test_expired_timer_leads_to_a_command(start: Task, steps: Steps, late: float) -> None:
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
def test_failure_loop_counts_a_try_in_the_end(start: Task, steps: Steps) -> None:
    walk = Walk(start)
    free = 0
    for pick, gap in steps:
        seq = walk.task.checkpoint_seq
        created = walk.step(pick, gap)
        if walk.task.checkpoint_seq > seq:
            free = 0
        end = None if created is None else created[2].end
        if created is not None and end is not None:
            before, _, change = created
            gave = change.task.tries < before.tries and end.outcome is not Outcome.PAUSED
            free = free + 1 if gave else 0
            assert free <= 20
