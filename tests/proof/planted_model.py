"""The rules a checked world can run by: production's, and production's with one bug planted each.

The guards that exist only as SQL are mirrored here; `decide` and `on_due` are the real ones.
"""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import msgspec

from tenuto.model.errors import Conflict
from tenuto.model.tasks import commands as c
from tenuto.model.tasks import decide as production
from tenuto.model.tasks.changes import replace_fields
from tenuto.model.tasks.commands import AttemptCommand, Command, DecisionContext
from tenuto.model.tasks.retry import ATTEMPT_CAP
from tenuto.model.tasks.task import LEASED, TERMINAL, Fence, Status, Task, TaskChange, token_hash

NOW = datetime(2030, 1, 1, tzinfo=UTC)
LEASE = timedelta(seconds=30)


def claim(task: Task, agent: UUID, worker: str, token: str, status: Status) -> Task | None:
    """As the statement `claim`."""
    spent = task.tries >= task.max_attempts or task.attempt >= ATTEMPT_CAP
    if task.status is not Status.PENDING or spent:
        return None
    return replace_fields(
        task,
        status=status,
        version=task.version + 1,
        attempt=task.attempt + 1,
        tries=task.tries + 1,
        agent=agent,
        worker=worker,
        lease_token=token_hash(token),
        session_key=None,
        lease_until=NOW + LEASE,
        started_at=NOW if status is Status.RUNNING else None,
        due_at=None if task.watch_s is None else NOW + timedelta(seconds=task.watch_s),
        progress_at=None,
    )


def owns(task: Task, fence: Fence) -> bool:
    held = task.attempt == fence.attempt and task.lease_token == token_hash(fence.token)
    return held and task.status in LEASED


def heartbeat(task: Task, fence: Fence) -> Task | None:
    """As the statement `heartbeat`: the task with its lease renewed, or `None` when it is lost."""
    return replace_fields(task, lease_until=NOW + LEASE) if owns(task, fence) else None


def checkpoint(task: Task, fence: Fence) -> Task | None:
    """As `Reporting.checkpoint`: saved with the next number, or refused."""
    if not owns(task, fence) or task.cancel_requested_at is not None:
        return None
    return replace_fields(task, checkpoint_seq=task.checkpoint_seq + 1)


def same_lease(read: Task, now: Task) -> bool:
    """Compare-and-set for a coordinator without a lock; heartbeats do not raise the version."""
    return (read.version, read.lease_until) == (now.version, now.lease_until)


Write = Callable[[Task, Fence], Task | None]
"""A fenced write that is no transition: the task after it, or `None` when it is refused."""


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """What decides in a world. As it stands: production."""

    decide: Callable[[Task, Command, DecisionContext], TaskChange | None] = production.decide
    on_due: Callable[[Task, DecisionContext], Command | None] = production.due_command
    claim: Callable[[Task, UUID, str, str, Status], Task | None] = claim
    heartbeat: Write = heartbeat
    checkpoint: Write = checkpoint
    audited: Callable[[TaskChange], bool] = lambda _change: True
    locked: bool = True
    """Coordinators read and write under one lock, else in two steps with `unchanged` between."""
    unchanged: Callable[[Task, Task], bool] = same_lease


Commands = type[Command] | tuple[type[Command], ...]


def unfenced(passes: Callable[[Task, Fence], bool], **seen: Any) -> Rules:
    """A guard that lets pass what it should not, whatever the fence."""

    def decide(task: Task, command: Command, moment: DecisionContext) -> TaskChange | None:
        if not isinstance(command, AttemptCommand) or not passes(task, command.fence):
            return production.decide(task, command, moment)
        token = token_hash(command.fence.token)
        posed = replace_fields(task, attempt=command.fence.attempt, lease_token=token, **seen)
        created = production.decide(posed, command, moment)
        return created and _with(created, attempt=task.attempt, lease_token=task.lease_token)

    return Rules(decide=decide)


def blind(commands: Commands, *when: Status, **seen: Any) -> Rules:
    """Decisions on these commands that see a row not as it is; in some statuses, or in all."""

    def decide(task: Task, command: Command, moment: DecisionContext) -> TaskChange | None:
        if not isinstance(command, commands) or (when and task.status not in when):
            return production.decide(task, command, moment)
        created = production.decide(replace_fields(task, **seen), command, moment)
        if created is None:
            return None
        left = [name for name, value in seen.items() if getattr(created.task, name) == value]
        end = created.end and msgspec.structs.replace(created.end, attempt=task.attempt)
        created = _with(created, **{name: getattr(task, name) for name in left})
        return msgspec.structs.replace(created, end=end)

    return Rules(decide=decide)


def spoilt(commands: Commands, spoil: Callable[[TaskChange], TaskChange]) -> Rules:
    """Decisions on these commands with something wrong in what they make of the row."""

    def decide(task: Task, command: Command, moment: DecisionContext) -> TaskChange | None:
        created = production.decide(task, command, moment)
        return spoil(created) if created and isinstance(command, commands) else created

    return Rules(decide=decide)


def writing(commands: Commands, **fields: Any) -> Rules:
    """Decisions on these commands that write these values."""
    return spoilt(commands, lambda row: _with(row, **fields))


def _with(created: TaskChange, **fields: Any) -> TaskChange:
    task = replace_fields(created.task, **fields)
    event = msgspec.structs.replace(created.event, new=task.status)
    return msgspec.structs.replace(created, task=task, event=event)


def _same_agent(task: Task, fence: Fence) -> bool:
    return task.status in LEASED and fence.token[:2] == (task.worker or "")[:2]


def _same_worker(task: Task, fence: Fence) -> bool:
    return task.status in LEASED and fence.token.rpartition(".")[0] == task.worker


def _same_attempt(task: Task, fence: Fence) -> bool:
    return task.status in LEASED and fence.attempt == task.attempt


def _same_token(task: Task, fence: Fence) -> bool:
    return task.status in LEASED and token_hash(fence.token) == task.lease_token


def _stale_but_accepted(task: Task, command: Command, moment: DecisionContext) -> TaskChange | None:
    try:
        return production.decide(task, command, moment)
    except Conflict as refusal:
        if refusal.code == "lease_lost":
            return None
        raise


def _steal(task: Task, agent: UUID, worker: str, token: str, status: Status) -> Task | None:
    pending = task if task.status in TERMINAL else replace_fields(task, status=Status.PENDING)
    return claim(pending, agent, worker, token, status)


def _claim_writing(**changes: int) -> Rules:
    def taken(task: Task, agent: UUID, worker: str, token: str, status: Status) -> Task | None:
        created = claim(task, agent, worker, token, status)
        added = {name: getattr(task, name) + more for name, more in changes.items()}
        return created and replace_fields(created, **added)

    return Rules(claim=taken)


def _renewed(passes: Callable[[Task, Fence], bool]) -> Rules:
    def renew(task: Task, fence: Fence) -> Task | None:
        return replace_fields(task, lease_until=NOW + LEASE) if passes(task, fence) else None

    return Rules(heartbeat=renew)


def _saved(passes: Callable[[Task, Fence], bool]) -> Rules:
    def save(task: Task, fence: Fence) -> Task | None:
        saved = replace_fields(task, checkpoint_seq=task.checkpoint_seq + 1)
        return saved if passes(task, fence) else None

    return Rules(checkpoint=save)


class Planted(msgspec.Struct, frozen=True):
    """A bug: the world that shows it, the invariant it breaks, and the rules that have it."""

    world: str
    breaks: str
    rules: Rules


ENDED = (Status.FAILED, Status.DEAD, Status.CANCELLED)
PLANTED: dict[str, Planted] = {
    "guard by agent": Planted("zombies", "I5", unfenced(_same_agent)),
    "guard by worker": Planted("zombies", "I5", unfenced(_same_worker)),
    "guard by RUNNING": Planted("zombies", "I5", unfenced(lambda t, _: t.status in LEASED)),
    "guard by id": Planted("zombies", "I5", unfenced(lambda _t, _f: True, status=Status.RUNNING)),
    "token not compared": Planted("crashes", "I5", unfenced(_same_attempt)),
    "attempt not compared": Planted("crashes", "I5", unfenced(_same_token)),
    "heartbeat by RUNNING": Planted("zombies", "I5", _renewed(lambda t, _: t.status in LEASED)),
    "heartbeat revives a reaped lease": Planted(
        "zombies", "I5", _renewed(lambda task, fence: task.attempt == fence.attempt)
    ),
    "checkpoint by id": Planted(
        "checkpoints", "I5", _saved(lambda task, _: task.cancel_requested_at is None)
    ),
    "checkpoint after the cancel request": Planted("checkpoints", "I16", _saved(owns)),
    "repeated complete is a new result": Planted(
        "crashes", "I5", blind(c.Complete, Status.COMPLETED, status=Status.RUNNING)
    ),
    "stale messages are answered as accepted": Planted(
        "zombies", "I6", Rules(decide=_stale_but_accepted)
    ),
    "expire writes no attempt": Planted(
        "crashes", "I6", spoilt(c.Expire, lambda item: msgspec.structs.replace(item, end=None))
    ),
    "expire keeps the lease": Planted("crashes", "I7", writing(c.Expire, lease_until=NOW)),
    "complete keeps the lease": Planted("crashes", "I7", writing(c.Complete, lease_until=NOW)),
    "reaper without compare": Planted(
        "crashes", "I7", Rules(locked=False, unchanged=lambda _read, _now: True)
    ),
    "reaper compares the version only": Planted(
        "crashes",
        "I7",
        Rules(locked=False, unchanged=lambda read, now: read.version == now.version),
    ),
    "reaper compares the lease only": Planted(
        "push",
        "I13",
        Rules(locked=False, unchanged=lambda read, now: read.lease_until == now.lease_until),
    ),
    "claim takes what is not queued": Planted("crashes", "I11", Rules(claim=_steal)),
    "claim keeps the attempt": Planted("crashes", "I15", _claim_writing(attempt=0)),
    "claim counts no try": Planted("crashes", "I15", _claim_writing(tries=0)),
    "release costs the task its queue": Planted(
        "give back", "I11", writing(c.Release, status=Status.WAITING)
    ),
    "fail reopens what ended": Planted(
        "retry", "I12", blind(c.Fail, *ENDED, status=Status.RUNNING)
    ),
    "cancel undoes a result": Planted(
        "cancel", "I12", blind(c.Cancel, Status.COMPLETED, status=Status.PENDING)
    ),
    "retry of a result": Planted(
        "retry", "I11", blind(c.Retry, Status.COMPLETED, status=Status.FAILED)
    ),
    "no event of a cancel request": Planted(
        "cancel", "I13", Rules(audited=lambda item: item.event.kind != "cancel_requested")
    ),
    "no event of an expired lease": Planted(
        "crashes", "I13", Rules(audited=lambda item: item.event.kind != "lease_expired")
    ),
    "version not raised": Planted(
        "crashes",
        "I13",
        spoilt(c.RetryDue, lambda item: _with(item, version=item.task.version - 1)),
    ),
    "reaper without attempt cap": Planted("crashes", "I15", blind(c.Expire, max_attempts=99)),
    "reaper beyond the last number": Planted("last numbers", "I15", blind(c.Expire, attempt=9)),
    "fail without attempt cap": Planted("crashes", "I15", blind(c.Fail, max_attempts=99)),
    "give-back without bound": Planted("give back", "I15", blind((c.Release, c.Park), free_ends=0)),
    "retry resets the attempt": Planted("retry", "I15", writing(c.Retry, attempt=0)),
    "retry keeps the tries": Planted("retry", "I15", writing(c.Retry, tries=1)),
    "retry beyond the last number": Planted("last numbers", "I15", blind(c.Retry, attempt=9)),
    "cancel of a run is forgotten": Planted(
        "cancel", "I16", writing(c.Cancel, cancel_requested_at=None)
    ),
    "complete after the cancel request": Planted(
        "cancel", "I16", blind(c.Complete, cancel_requested_at=None)
    ),
    "pause after the cancel request": Planted(
        "operator", "I16", blind(c.ConfirmPause, cancel_requested_at=None)
    ),
    "expire forgets the cancel request": Planted(
        "cancel", "I16", blind(c.Expire, cancel_requested_at=None)
    ),
    "retry without a timer": Planted("crashes", "I24", writing((c.Fail, c.Expire), due_at=None)),
    "holds never end": Planted(
        "give back",
        "I24",
        Rules(
            on_due=lambda task, moment: (
                None if task.status is Status.WAITING else production.due_command(task, moment)
            )
        ),
    ),
    "resume into nothing": Planted("operator", "I24", writing(c.Resume, status=Status.WAITING)),
}
