"""The verdict on a run, from the recorder and the final database alone."""

import msgspec

from tenuto.chaos.client import kind_of
from tenuto.chaos.recorder import Recorder
from tenuto.coordinator.coordinator import ALERTS, NAME
from tenuto.engine.engine import Engine
from tenuto.engine.operations.audit import AuditReader, TaskAuditRow
from tenuto.model.tasks.task import TERMINAL, TRANSITIONS

DOOMED = ("failing", "poison")
LEGAL = {(str(a), str(b)) for pairs in TRANSITIONS.values() for a, b in pairs}
SHOWN = 5
"""Cases of a breach that are named."""


class Verdict(msgspec.Struct, frozen=True):
    """What must be nought, and what is merely told."""

    breaches: dict[str, list[str]]
    told: dict[str, int]

    @property
    def holds(self) -> bool:
        return not any(self.breaches.values())


async def judge(engine: Engine, record: Recorder) -> Verdict:
    """Every invariant, with the cases that break it."""
    proof = AuditReader(engine.system)
    tasks = await proof.tasks()
    found = {str(task.id): task for task in tasks}
    moves = await proof.moves()
    audit = await engine.upkeep.audit()
    leadership = await engine.upkeep.leader(NAME)
    breaches = {
        "acknowledged tasks lost": [
            key for key, task in record.acknowledged.items() if task not in found
        ],
        "tasks made twice": record.contradicted + _twice(tasks, record),
        "stale commits accepted": [
            f"{task.key}: {why}" for task in tasks if (why := _stale(task, record))
        ],
        "illegal transitions": [
            f"{a} to {b}, {n} times"
            for (a, b), n in moves.items()
            if a != b and (a, b) not in LEGAL
        ],
        "audit mismatches": audit,
        "tasks stuck": [f"{task.key} {task.status}" for task in tasks if not _ended(task)],
        "tasks that ended otherwise": [
            f"{task.key} {task.status}" for task in tasks if _ended(task) and not _as_planned(task)
        ],
        "leases left": [f"{task.key}" for task in tasks if _ended(task) and task.leased],
        "tries above the limit": [
            f"{task.key}: {task.tries} of {task.max_attempts}"
            for task in tasks
            if task.tries > task.max_attempts or _too_often(task, record)
        ],
        "checkpoints forgotten": record.forgotten,
        "events not relayed": ["some"] * await proof.untold(ALERTS, errors=True),
    }
    told = {
        "acknowledged": len(record.acknowledged),
        "tasks": len(tasks),
        "executions": record.starts.total(),
        "executions doubled": sum(1 for n in record.starts.values() if n > 1),
        "leases taken over": await proof.stalls(),
        "leaders": leadership.epoch if leadership else 0,
    }
    return Verdict(breaches, told)


def _ended(task: TaskAuditRow) -> bool:
    return task.status in TERMINAL


def _as_planned(task: TaskAuditRow) -> bool:
    """Whether it ended as its kind has to."""
    doomed = kind_of(task.key or "") in DOOMED
    return task.status in (("DEAD", "FAILED") if doomed else ("COMPLETED",))


def _too_often(task: TaskAuditRow, record: Recorder) -> bool:
    """Whether one that kills its worker was started more often than it may be tried."""
    return kind_of(task.key or "") in DOOMED and record.starts[str(task.id)] > task.max_attempts


def _stale(task: TaskAuditRow, record: Recorder) -> str:
    """Why the task's result is not that of the one attempt which had the right to it."""
    if task.completed > 1:
        return f"{task.completed} attempts were completed"
    if task.completed_by is None:
        return "completed by no attempt" if task.status == "COMPLETED" else ""
    if task.completed_by != task.attempt:
        return f"attempt {task.completed_by} of {task.attempt} was completed"
    wrote = task.output.get("attempt") if isinstance(task.output, dict) else None
    if wrote != task.completed_by:
        return f"attempt {task.completed_by} has the result of attempt {wrote}"
    if (str(task.id), task.completed_by) not in record.ended:
        return f"attempt {task.completed_by} never came to its end"
    return ""


def _twice(tasks: list[TaskAuditRow], record: Recorder) -> list[str]:
    """Tasks beside the one that was acknowledged under the same key."""
    return [
        f"{task.key}"
        for task in tasks
        if record.acknowledged.get(task.key or "", str(task.id)) != str(task.id)
    ]
