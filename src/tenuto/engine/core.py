"""What all use cases share: the store, group commit, hints, the lanes, and load-decide-write."""

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any
from uuid import UUID

import msgspec

from tenuto.broker.protocol import Wakeups
from tenuto.clock import Clock
from tenuto.engine.lanes import Lanes
from tenuto.model.commands import Command, Complete, Moment
from tenuto.model.decide import decide
from tenuto.model.errors import Conflict, NotFound, TenutoError
from tenuto.model.task import Change, Status, Task
from tenuto.store.batching import Answers, Batcher, Kind
from tenuto.store.protocol import Row, Script, Statement, Store

if TYPE_CHECKING:
    from tenuto.vault import Vault

    Keys = Vault | Callable[[], Vault] | None
    """A vault, or how to open it."""

Decided = Change | TenutoError | None
"""A change, a refusal, or `None` for a repeated message."""

_STATUS = {status.value: status for status in Status}
_CHANGED = (
    "id version status hold unmet rank priority tries free_ends free_mark losses agent worker"
    " session_key lease_until timeout_s watch_s cancel_requested_at pause_requested_at"
    " hung_warned_at run_at resume_at wait_until next_attempt_at due_at last_error error_class"
    " last_outcome updated_at started_at finished_at archived_at"
).split()


_TIMES = tuple(
    name for name in Task.__struct_fields__ if name.endswith(("_at", "lease_until", "wait_until"))
)


class Order(msgspec.Struct, frozen=True):
    """A command for one task, as it waits for its batch."""

    task: UUID
    workspace: UUID | None
    command: Command
    actor: str | None


class CorruptRow(Exception):
    """A stored row that cannot be understood."""

    def __init__(self, task: UUID, why: str) -> None:
        super().__init__(why)
        self.task = task


def task_of(row: Row) -> Task:
    """The task in a row; raises `CorruptRow` when no task could have been written like that."""
    try:
        fields = {name: row[name] for name in Task.__struct_fields__}
        fields["status"] = _STATUS[row["status"]]
        task = Task(**fields)
        if task.retry is not None:
            _ = task.policy
        if not isinstance(task.workspace, UUID):
            raise TypeError("workspace is not an id")
        for name in _TIMES:
            if not isinstance(fields[name], datetime | None):
                raise TypeError(f"{name} is beyond the calendar")
    except (KeyError, ValueError, TypeError, msgspec.MsgspecError) as error:
        raise CorruptRow(row["id"], f"unreadable row: {error!r}") from error
    return task


class Core:
    """One engine's means. Everything in a process may share it."""

    def __init__(self, store: Store, wakeups: Wakeups, vault: "Keys" = None) -> None:
        self.store = store
        self.wakeups = wakeups
        self._vault = vault
        self.batcher = Batcher(store)
        self.lanes = Lanes(store)
        self._orders = Kind("orders", self._order_script)

    @property
    def clock(self) -> Clock:
        return self.store.clock

    @property
    def vault(self) -> "Vault | None":
        """The keys of secrets, opened when they are first needed."""
        if callable(self._vault):
            self._vault = self._vault()
        return self._vault

    def now(self) -> datetime:
        return self.clock.now()

    def moment(self, actor: str | None = None) -> Moment:
        return Moment(self.clock.now(), self.clock.random(), actor)

    async def order(
        self,
        task: UUID,
        command: Command,
        *,
        workspace: UUID | None = None,
        actor: str | None = None,
    ) -> Change | None:
        """Apply a command to a task: load, decide, write, in a shared transaction."""
        item = Order(task, workspace, command, actor)
        change: Change | None = await self.batcher.submit(self._orders, item, key=task.int)
        self.announce([change])
        return change

    def _order_script(self, orders: list[Order]) -> Script[Answers]:
        ids = sorted({order.task for order in orders})
        rows = yield Statement("tasks_locked", {"ids": ids})
        found = {row["id"]: row for row in rows}
        answers: dict[int, Decided] = {}
        decided: list[tuple[Change, Command]] = []
        for index, order in enumerate(orders):
            row = found.get(order.task)
            if row is None or order.workspace not in (None, row["workspace"]):
                answers[index] = NotFound(f"no task {order.task}")
                continue
            try:
                answers[index] = self.consider(row, order.command, order.actor)
            except CorruptRow as error:
                yield self.quarantine(error)
                answers[index] = Conflict(f"the row of task {order.task} is unreadable", "corrupt")
                continue
            change = answers[index]
            if isinstance(change, Change):
                decided.append((change, order.command))
        if decided:
            yield write_changes(decided)
        for change, _ in decided:
            if change.task.hold == "quota" and change.task.resume_at is not None:
                yield _close_lane(change)
        return [answers[index] for index in range(len(orders))]

    def consider(self, row: Row, command: Command, actor: str | None) -> Decided:
        """What the model makes of a command on a row; a refusal is an answer here."""
        task = task_of(row)
        try:
            return decide(task, command, self.moment(actor))
        except TenutoError as error:
            return error
        except (TypeError, ValueError, OverflowError) as error:
            raise CorruptRow(task.id, f"unreadable row: {error!r}") from error

    def quarantine(self, corrupt: CorruptRow) -> Statement:
        return Statement(
            "quarantine",
            {"id": corrupt.task, "message": str(corrupt), "now": self.now(), "actor": "engine"},
        )

    def announce(self, changes: Iterable[Change | None]) -> None:
        """Hint at what the changes made claimable, or asked of a worker."""
        topics = set()
        for change in changes:
            if change is None:
                continue
            if change.task.status is Status.PENDING:
                topics.add(f"lane:{change.task.lane}")
            elif change.event.kind in ("cancel_requested", "pause_requested", "hung_warned"):
                topics.add(f"worker:{change.task.worker}")
        if topics:
            self.wakeups.announce(topics)


def _close_lane(change: Change) -> Statement:
    """A provider's limit holds for every task of the lane, until its reset."""
    task, why = change.task, f"provider limit: {change.event.message}"
    return Statement("lane_close", {"lane": task.lane, "until": task.resume_at, "why": why})


def write_changes(decided: Sequence[tuple[Change, Command]]) -> Statement:
    """The statement that writes decided changes with their events and ended attempts."""
    rows: dict[str, list[tuple[Any, ...]]] = {"changed": [], "ended": [], "noted": [], "result": []}
    for change, command in decided:
        task, event, end = change.task, change.event, change.end
        cells = [getattr(task, name) for name in _CHANGED]
        cells[1] = task.version - 1
        rows["changed"].append(tuple(cells))
        rows["noted"].append(
            (
                task.id,
                task.version,
                task.workspace,
                task.event_xid,
                event.kind,
                event.level,
                event.message,
                event.previous,
                event.new,
                event.attempt,
                event.agent,
                event.actor,
                event.session_key,
                event.stack_trace,
                _json(event.data),
                task.updated_at,
            )
        )
        if end is not None:
            rows["ended"].append(
                (
                    task.id,
                    end.attempt,
                    task.workspace,
                    end.outcome,
                    end.agent,
                    end.worker,
                    end.session_key,
                    end.started_at,
                    end.ended_at,
                    end.error_class,
                    end.message,
                    end.stack,
                    end.exit_code,
                    _json(end.receipt),
                    end.unconfirmed,
                )
            )
        if isinstance(command, Complete) and (command.output or command.summary):
            rows["result"].append((task.id, task.workspace, command.output, command.summary))
    return Statement("change", rows=rows)


def _json(value: Any) -> str | None:
    return None if value is None else msgspec.json.encode(value).decode()


def decode(text: str | None) -> Any:
    """The value of JSON that the store keeps."""
    return None if text is None else msgspec.json.decode(text)
