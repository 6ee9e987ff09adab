"""Dependencies of newly submitted tasks (`depends_on` and `blocks`)."""

from collections import Counter
from collections.abc import Sequence
from typing import Any
from uuid import UUID

import msgspec

from tenuto.engine.flows.advance import Cascade
from tenuto.engine.flows.outcomes import command_for_failed_dependency
from tenuto.engine.flows.rows import MAX_RANK_STEPS, add_waiters_statement
from tenuto.engine.rows import (
    HOLD_COLUMN,
    RANK_COLUMN,
    RUN_AT_COLUMN,
    STATUS_COLUMN,
    UNMET_COLUMN,
    decode_json,
)
from tenuto.model.errors import Conflict, Invalid
from tenuto.model.flows.definition import referenced_keys
from tenuto.model.flows.plan import find_cycle
from tenuto.model.tasks import commands
from tenuto.model.tasks.submission import NewTask
from tenuto.model.tasks.task import LEASED, TERMINAL, Status, Task
from tenuto.store.protocol import Row, Script, Statement

_MAX_PATH = 100_000
"""Most dependencies that the search for a cycle reads."""


class DependencyGraph(msgspec.Struct, frozen=True):
    """Dependencies among the tasks of one submit and existing tasks, by task id.

    `needs` maps a task to the tasks that it waits for, `blocks` a task to the tasks that shall
    wait for it. `policies` has a waiting task's `on_dependency_failure`, `names` the id per key.
    """

    needs: dict[UUID, list[UUID]]
    blocks: dict[UUID, list[UUID]]
    policies: dict[UUID, str]
    names: dict[str, UUID]
    needed: Counter[UUID]
    """Number of tasks of the submit that wait for a task."""

    def __bool__(self) -> bool:
        """True if the submit has dependencies."""
        return bool(self.needs or self.blocks)

    def waiter_count(self, task: UUID) -> int | None:
        """Returns how many tasks wait for the task at its submit; `None` for none."""
        return self.needed[task] + len(self.blocks.get(task, ())) or None


NO_DEPENDENCIES = DependencyGraph({}, {}, {}, {}, Counter())


def build_dependency_graph(new_tasks: Sequence[NewTask], ids: Sequence[UUID]) -> DependencyGraph:
    """Returns the dependencies of a submit; raises `Invalid` for cycles and unknown names."""
    if not any(new.depends_on or new.blocks for new in new_tasks):
        return NO_DEPENDENCIES
    names: dict[str, UUID] = {}
    for new, task in zip(new_tasks, ids, strict=True):
        if new.key is not None and names.setdefault(new.key, task) != task:
            raise Invalid(f"key {new.key!r} is used by two tasks of this submit", field="key")
    graph = DependencyGraph({}, {}, {}, names, Counter())
    for new, task in zip(new_tasks, ids, strict=True):
        if new.depends_on:
            needed = [
                _parse_task_reference("dependsOn", name, names)
                for name in dict.fromkeys(new.depends_on)
            ]
            graph.needs[task] = list(dict.fromkeys(needed))
            graph.needed.update(graph.needs[task])
            graph.policies[task] = new.on_dependency_failure
        if new.blocks:
            named_ids = [_parse_task_reference("blocks", name, names) for name in new.blocks]
            graph.blocks[task] = list(dict.fromkeys(named_ids))
    for task, blocked in graph.blocks.items():
        # A dependency given by both `depends_on` and `blocks` counts once.
        blocked[:] = [other for other in blocked if task not in graph.needs.get(other, ())]
    keys = {str(task): new.key or str(task) for new, task in zip(new_tasks, ids, strict=True)}
    _check_cycles(graph, keys)
    return graph


def _check_cycles(graph: DependencyGraph, keys: dict[str, str]) -> None:
    """Raises `Invalid` with the path if the dependencies within the submit form a cycle."""
    edges = {str(task): [str(need) for need in needs] for task, needs in graph.needs.items()}
    for task, blocked in graph.blocks.items():
        for other in blocked:
            edges.setdefault(str(other), []).append(str(task))
    if cycle := find_cycle(edges, lambda key: edges.get(key, ())):
        path = [keys.get(other, other) for other in cycle[:10]]
        raise Invalid(f"cyclic dependencies: {' -> '.join(path)}", "dependency_cycle")


def _parse_task_reference(field: str, name: str, names: dict[str, UUID]) -> UUID:
    """Returns the id for a key of this submit or a task id; raises `Invalid` otherwise."""
    if name in names:
        return names[name]
    try:
        return UUID(name)
    except ValueError:
        message = f"{field}: {name!r} is neither a task id nor a key of a task in this submit"
        raise Invalid(message, "dependency_unknown", field=field) from None


class SubmitDependencies:
    """Adds dependencies to a submit's transaction. The methods run in it (scripts)."""

    def __init__(self, graph: DependencyGraph, workspace: UUID) -> None:
        self._graph = graph
        self._workspace = workspace
        self._existing: dict[UUID, Row] = {}

    def lock_dependencies(self, ids: Sequence[UUID]) -> Script[None]:
        """Locks the existing tasks that the new tasks `ids` need; `Invalid` for a missing one."""
        if self._graph.blocks:
            # Only `blocks` can create a cycle with existing tasks: one submit at a time.
            yield Statement("workspace_lock", {"workspace": self._workspace})
        own = set(ids)
        needed = {need for needs in self._graph.needs.values() for need in needs}
        outside = sorted(needed - own)
        if not outside:
            return
        params = {"workspace": self._workspace, "ids": outside}
        rows = yield Statement("dependency_targets_locked", params)
        self._existing = {row["id"]: row for row in rows}
        for need in outside:
            if need not in self._existing:
                raise Invalid(f"dependsOn: no task {need}", "dependency_unknown", field="dependsOn")

    def check_all_inserted(self, ids: Sequence[UUID], inserted: set[UUID]) -> None:
        """Raises `Conflict` if a new task depends on a task of this submit that existed before."""
        own = set(ids)
        pairs = [(task, need) for task, needs in self._graph.needs.items() for need in needs]
        pairs += [(other, task) for task, others in self._graph.blocks.items() for other in others]
        for task, need in pairs:
            if task in inserted and need in own and need not in inserted:
                raise Conflict(
                    f"new task {task} depends on task {need} of this submit, which exists already;"
                    " refer to it by its id",
                    "idempotency_conflict",
                )

    def add_dependency_rows(
        self, rows: dict[str, list[tuple[Any, ...]]]
    ) -> dict[str, list[tuple[Any, ...]]]:
        """Returns the rows with dependency rows added; met dependencies make no task wait."""
        hot = []
        pairs = []
        for row in rows["hot"]:
            needs = self._graph.needs.get(row[0], ())
            met = [need for need in needs if self._is_met(row[0], need)]
            if met:
                unmet = len(needs) - len(met)
                cells = list(row)
                cells[UNMET_COLUMN] = unmet or None
                if unmet == 0 and _has_no_other_wait(row):
                    cells[STATUS_COLUMN] = Status.PENDING
                row = tuple(cells)  # noqa: PLW2901  the same row with the new count
            hot.append(row)
            pairs += [
                (
                    row[0],
                    need,
                    self._workspace,
                    need in met,
                    self._has_finished(need) and need not in met,
                )
                for need in needs
            ]
        return rows | {"hot": hot, "dependency": pairs}

    def _has_finished(self, need: UUID) -> bool:
        """True if the needed task existed before this submit and has finished."""
        row = self._existing.get(need)
        return row is not None and Status(row["status"]) in TERMINAL

    def _is_met(self, task: UUID, need: UUID) -> bool:
        """True if the needed task completed, or finished with the policy `run`."""
        if not self._has_finished(need):
            return False
        status = self._existing[need]["status"]
        return status == Status.COMPLETED or self._graph.policies[task] == "run"

    def check_result_references(
        self, rows: dict[str, list[tuple[Any, ...]]], input_column: int
    ) -> None:
        """Raises `Invalid` if an input refers to the result of a task it does not wait for."""
        keys = {str(row["key"]): need for need, row in self._existing.items() if row["key"]}
        names = {**keys, **self._graph.names}
        for row in rows["body"]:
            if row[input_column] is None or '"$from"' not in row[input_column]:
                continue
            needs = self._graph.needs.get(row[0], ())
            for name in referenced_keys(decode_json(row[input_column])):
                if name not in map(str, needs) and names.get(name) not in needs:
                    raise Invalid(
                        f"input refers to the result of {name!r}; add {name!r} to dependsOn",
                        "reference_invalid",
                        field="input",
                    )

    def apply_effects(self, cascade: Cascade, hot: list[tuple[Any, ...]]) -> Script[None]:
        """Counts waiters, fails tasks with a failed dependency, blocks others, raises ranks."""
        needs = (need for row in hot for need in self._graph.needs.get(row[0], ()))
        counts = Counter(need for need in needs if need in self._existing)
        if counts:
            yield add_waiters_statement(counts, self._existing)
        yield from self._fail_waiters(cascade, hot)
        yield from self._block_others(cascade, {row[0] for row in hot})
        yield from self._raise_ranks(hot)

    def _fail_waiters(self, cascade: Cascade, hot: list[tuple[Any, ...]]) -> Script[None]:
        """Fails or skips the new tasks that wait for an already failed task."""
        failed: dict[UUID, commands.Command] = {}
        for row in hot:
            task = row[0]
            for need in self._graph.needs.get(task, ()):
                if self._has_finished(need) and not self._is_met(task, need):
                    status = Status(self._existing[need]["status"])
                    failed[task] = command_for_failed_dependency(
                        need, status, self._graph.policies[task]
                    )
        if failed:
            yield from cascade.apply_to_each(sorted(failed), lambda task: failed[task.id])

    def _block_others(self, cascade: Cascade, inserted: set[UUID]) -> Script[None]:
        """Makes existing tasks wait for inserted ones; `Conflict` if started, `Invalid` if cyclic.

        A repeated submit has stored its dependencies already.
        """
        for task, blocked in sorted(self._graph.blocks.items()):
            if task not in inserted or not blocked:
                continue
            params = {"from_ids": [task], "to_ids": sorted(blocked), "most": _MAX_PATH}
            if (yield Statement("dependency_path", params)):
                text = f"blocks: task {task} would be part of a dependency cycle"
                raise Invalid(text, "dependency_cycle")
            rows = yield Statement(
                "dependency_targets_locked", {"workspace": self._workspace, "ids": sorted(blocked)}
            )
            existing = {row["id"] for row in rows}
            for other in blocked:
                if other not in existing:
                    raise Invalid(f"blocks: no task {other}", "dependency_unknown", field="blocks")
            if (yield Statement("permit_holders", {"ids": sorted(blocked)})):
                raise Conflict(
                    "a blocked task already holds a permit of its concurrency key and cannot wait"
                )
            changed = yield from cascade.apply_to_each(sorted(blocked), _add_dependency_command)
            changed_ids = {change.task.id for change in changed}
            for other in blocked:
                if other not in changed_ids:
                    raise Conflict(f"task {other} has started or finished and cannot wait anymore")
            pairs = [(other, task, self._workspace) for other in sorted(blocked)]
            yield Statement("dependency_put", rows={"pair": pairs})

    def _raise_ranks(self, hot: list[tuple[Any, ...]]) -> Script[None]:
        """Gives dependencies the rank of a more urgent task that waits for them."""
        ranks = {row[0]: row[RANK_COLUMN] for row in hot}
        ranks |= {need: row["rank"] for need, row in self._existing.items()}
        urgent = [
            (task, ranks[task])
            for task, needs in self._graph.needs.items()
            if task in ranks and any(ranks[need] > ranks[task] for need in needs if need in ranks)
        ]
        if urgent:
            yield Statement("inherit_rank", {"most": MAX_RANK_STEPS}, {"eager": sorted(urgent)})


def _has_no_other_wait(row: tuple[Any, ...]) -> bool:
    """True if the task has neither a hold nor a start time."""
    hold, run_at = row[HOLD_COLUMN], row[RUN_AT_COLUMN]
    return hold is None and run_at is None


def _add_dependency_command(task: Task) -> commands.Command | None:
    """Returns the command that adds a dependency; `None` for a started or finished task."""
    return None if task.status in LEASED or task.status in TERMINAL else commands.AddDependency()
