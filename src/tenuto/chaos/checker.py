"""Checks the invariants of a run, using only the recorder's file and the final database."""

import msgspec

from tenuto.chaos.client import kind_of
from tenuto.chaos.recorder import Recorder
from tenuto.coordinator.coordinator import NAME
from tenuto.coordinator.duties import ALERTS
from tenuto.engine.engine import Engine
from tenuto.engine.operations.audit import AuditReader, TaskAuditRow
from tenuto.model.tasks.task import TERMINAL, TRANSITIONS

FAILING_KINDS = ("failing", "poison")
LEGAL_TRANSITIONS = {(str(a), str(b)) for pairs in TRANSITIONS.values() for a, b in pairs}
MAX_CASES_SHOWN = 5
"""Maximum number of cases shown per broken invariant."""


class Verdict(msgspec.Struct, frozen=True):
    """Result of the check. The JSON names are `breaches` and `told`."""

    violations: dict[str, list[str]] = msgspec.field(name="breaches")
    """For each invariant, the cases that violate it; all lists are empty if the run passed."""
    info: dict[str, int] = msgspec.field(name="told")
    """Figures of the run that no invariant limits."""

    @property
    def holds(self) -> bool:
        """True if no invariant is violated."""
        return not any(self.violations.values())


async def check_run(engine: Engine, record: Recorder) -> Verdict:
    """Checks every invariant; returns for each the cases that violate it."""
    audit_reader = AuditReader(engine.system)
    tasks = await audit_reader.tasks()
    by_id = {str(task.id): task for task in tasks}
    transitions = await audit_reader.count_transitions()
    audit = await engine.maintenance.audit()
    leader = await engine.maintenance.leader(NAME)
    violations = {
        "acknowledged tasks lost": [
            key for key, task in record.acknowledged.items() if task not in by_id
        ],
        "tasks made twice": record.conflicting_ids + _duplicates(tasks, record),
        "stale commits accepted": [
            f"{task.key}: {reason}" for task in tasks if (reason := _stale_result(task, record))
        ],
        "illegal transitions": [
            f"{a} to {b}, {n} times"
            for (a, b), n in transitions.items()
            if a != b and (a, b) not in LEGAL_TRANSITIONS
        ],
        "audit mismatches": audit,
        "tasks stuck": [f"{task.key} {task.status}" for task in tasks if not _is_finished(task)],
        "tasks that ended otherwise": [
            f"{task.key} {task.status}"
            for task in tasks
            if _is_finished(task) and not _has_expected_status(task)
        ],
        "leases left": [f"{task.key}" for task in tasks if _is_finished(task) and task.leased],
        "tries above the limit": [
            f"{task.key}: {task.tries} of {task.max_attempts}"
            for task in tasks
            if task.tries > task.max_attempts or _started_too_often(task, record)
        ],
        "checkpoints forgotten": record.lost_checkpoints,
        "events not relayed": ["some"] * await audit_reader.count_unread(ALERTS, errors=True),
    }
    counts = {
        "acknowledged": len(record.acknowledged),
        "tasks": len(tasks),
        "executions": record.starts.total(),
        "executions doubled": sum(1 for n in record.starts.values() if n > 1),
        "leases taken over": await audit_reader.count_lost_leases(),
        "leaders": leader.epoch if leader else 0,
    }
    return Verdict(violations, counts)


def _is_finished(task: TaskAuditRow) -> bool:
    """True if the task has a terminal status."""
    return task.status in TERMINAL


def _has_expected_status(task: TaskAuditRow) -> bool:
    """True if a finished task has the status that its kind must end with."""
    must_fail = kind_of(task.key or "") in FAILING_KINDS
    return task.status in (("DEAD", "FAILED") if must_fail else ("COMPLETED",))


def _started_too_often(task: TaskAuditRow, record: Recorder) -> bool:
    """True if a task that always fails was started more often than `max_attempts`."""
    return (
        kind_of(task.key or "") in FAILING_KINDS and record.starts[str(task.id)] > task.max_attempts
    )


def _stale_result(task: TaskAuditRow, record: Recorder) -> str:
    """Returns why the result is not from the attempt that held the lease; "" if it is."""
    if task.completed > 1:
        return f"{task.completed} attempts were completed"
    if task.completed_by is None:
        return "completed by no attempt" if task.status == "COMPLETED" else ""
    if task.completed_by != task.attempt:
        return f"attempt {task.completed_by} of {task.attempt} was completed"
    writer = task.output.get("attempt") if isinstance(task.output, dict) else None
    if writer != task.completed_by:
        return f"attempt {task.completed_by} has the result of attempt {writer}"
    if (str(task.id), task.completed_by) not in record.ended:
        return f"attempt {task.completed_by} never recorded its end"
    return ""


def _duplicates(tasks: list[TaskAuditRow], record: Recorder) -> list[str]:
    """Returns keys of tasks whose key was acknowledged with a different task id."""
    return [
        f"{task.key}"
        for task in tasks
        if record.acknowledged.get(task.key or "", str(task.id)) != str(task.id)
    ]
