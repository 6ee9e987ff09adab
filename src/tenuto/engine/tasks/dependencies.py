"""Tasks that wait for other tasks from the moment they are submitted."""

from collections import Counter
from collections.abc import Sequence
from typing import Any
from uuid import UUID

import msgspec

from tenuto.engine.flows.advance import Cascade
from tenuto.engine.flows.outcomes import failed_need
from tenuto.engine.flows.rows import RANKS_FAR, awaiting
from tenuto.engine.rows import RANK, STATUS, UNMET, decode
from tenuto.model.errors import Conflict, Invalid
from tenuto.model.flows.definition import references
from tenuto.model.flows.plan import find_cycle
from tenuto.model.tasks import commands
from tenuto.model.tasks.submission import NewTask
from tenuto.model.tasks.task import LEASED, TERMINAL, Status, Task
from tenuto.store.protocol import Row, Script, Statement

_PATH = 100_000


class DependencyGraph(msgspec.Struct, frozen=True):
    """Who waits for whom, by id; `names` are those under which a task may be referred to."""

    needs: dict[UUID, list[UUID]]
    blocks: dict[UUID, list[UUID]]
    policies: dict[UUID, str]
    names: dict[str, UUID]
    needed: Counter[UUID]
    """How many tasks of the submit wait for one."""

    def __bool__(self) -> bool:
        return bool(self.needs or self.blocks)

    def awaited(self, task: UUID) -> int | None:
        """How many wait for the task from the start."""
        return self.needed[task] + len(self.blocks.get(task, ())) or None


NOBODY = DependencyGraph({}, {}, {}, {}, Counter())


def waits_of(news: Sequence[NewTask], ids: Sequence[UUID]) -> DependencyGraph:
    """Who waits for whom in a submit; raises `Invalid` for circles and names of nobody."""
    if not any(new.depends_on or new.blocks for new in news):
        return NOBODY
    names: dict[str, UUID] = {}
    for new, task in zip(news, ids, strict=True):
        if new.key is not None and names.setdefault(new.key, task) != task:
            raise Invalid(f"two tasks of one submit have the key {new.key!r}", field="key")
    waits = DependencyGraph({}, {}, {}, names, Counter())
    for new, task in zip(news, ids, strict=True):
        if new.depends_on:
            found = [_named("dependsOn", each, names) for each in dict.fromkeys(new.depends_on)]
            waits.needs[task] = list(dict.fromkeys(found))
            waits.needed.update(waits.needs[task])
            waits.policies[task] = new.on_dependency_failure
        if new.blocks:
            named = [_named("blocks", each, names) for each in new.blocks]
            waits.blocks[task] = list(dict.fromkeys(named))
    for task, blocked in waits.blocks.items():
        # Who says itself that it waits is counted once, whoever else says so.
        blocked[:] = [each for each in blocked if task not in waits.needs.get(each, ())]
    keys = {str(task): new.key or str(task) for new, task in zip(news, ids, strict=True)}
    _check_circles(waits, keys)
    return waits


def _check_circles(waits: DependencyGraph, keys: dict[str, str]) -> None:
    edges = {str(task): [str(need) for need in needs] for task, needs in waits.needs.items()}
    for task, blocked in waits.blocks.items():
        for each in blocked:
            edges.setdefault(str(each), []).append(str(task))
    if circle := find_cycle(edges, lambda key: edges.get(key, ())):
        shown = [keys.get(each, each) for each in circle[:10]]
        raise Invalid(f"these wait for each other: {' -> '.join(shown)}", "dependency_cycle")


def _named(field: str, name: str, names: dict[str, UUID]) -> UUID:
    if name in names:
        return names[name]
    try:
        return UUID(name)
    except ValueError:
        text = f"{field} has {name!r}, which is neither a task's id nor a key in this submit"
        raise Invalid(text, "dependency_unknown", field=field) from None


class SubmitDependencies:
    """What a submit of tasks that wait adds to its transaction. Its methods are scripts."""

    def __init__(self, waits: DependencyGraph, workspace: UUID) -> None:
        self._waits = waits
        self._workspace = workspace
        self._found: dict[UUID, Row] = {}

    def look(self, ids: Sequence[UUID]) -> Script[None]:
        """Lock what the new tasks wait for, and read how it stands."""
        if self._waits.blocks:
            # Only `blocks` can close a circle with tasks that exist: one at a time.
            yield Statement("workspace_lock", {"workspace": self._workspace})
        mine = set(ids)
        outside = sorted({each for needs in self._waits.needs.values() for each in needs} - mine)
        if not outside:
            return
        params = {"workspace": self._workspace, "ids": outside}
        rows = yield Statement("needed", params)
        self._found = {row["id"]: row for row in rows}
        for need in outside:
            if need not in self._found:
                raise Invalid(
                    f"no task {need} to wait for", "dependency_unknown", field="dependsOn"
                )

    def counted(self, rows: dict[str, list[tuple[Any, ...]]]) -> dict[str, list[tuple[Any, ...]]]:
        """The rows of the new tasks with what is already met taken off."""
        hot = []
        pairs = []
        for row in rows["hot"]:
            needs = self._waits.needs.get(row[0], ())
            met = [need for need in needs if self._is_met(row[0], need)]
            if met:
                left = len(needs) - len(met)
                cells = list(row)
                cells[UNMET] = left or None
                if left == 0 and _waits_for_nothing(row):
                    cells[STATUS] = Status.PENDING
                row = tuple(cells)  # noqa: PLW2901  the same row, counted
            hot.append(row)
            pairs += [
                (
                    row[0],
                    need,
                    self._workspace,
                    need in met,
                    self._has_ended(need) and need not in met,
                )
                for need in needs
            ]
        return rows | {"hot": hot, "dependency": pairs}

    def _has_ended(self, need: UUID) -> bool:
        """Whether it is none of the new tasks, and has ended before them."""
        row = self._found.get(need)
        return row is not None and Status(row["status"]) in TERMINAL

    def _is_met(self, task: UUID, need: UUID) -> bool:
        if not self._has_ended(need):
            return False
        status = self._found[need]["status"]
        return status == Status.COMPLETED or self._waits.policies[task] == "run"

    def check_results(self, rows: dict[str, list[tuple[Any, ...]]], column: int) -> None:
        """Raise `Invalid` unless each result referred to is one that its task waits for."""
        keys = {str(row["key"]): need for need, row in self._found.items() if row["key"]}
        names = {**keys, **self._waits.names}
        for row in rows["body"]:
            if row[column] is None or '"$from"' not in row[column]:
                continue
            needs = self._waits.needs.get(row[0], ())
            for name in references(decode(row[column])):
                if name not in map(str, needs) and names.get(name) not in needs:
                    raise Invalid(
                        f"the input refers to the result of {name!r}, which is not waited for",
                        "reference_invalid",
                        field="input",
                    )

    def made(self, cascade: Cascade, hot: list[tuple[Any, ...]]) -> Script[None]:
        """What follows once the tasks are there."""
        needs = (need for row in hot for need in self._waits.needs.get(row[0], ()))
        counts = Counter(need for need in needs if need in self._found)
        if counts:
            yield awaiting(counts, self._found)
        yield from self._fail(cascade, hot)
        yield from self._block(cascade, {row[0] for row in hot})
        yield from self._pull(hot)

    def _fail(self, cascade: Cascade, hot: list[tuple[Any, ...]]) -> Script[None]:
        """End the new tasks that wait for what has failed already."""
        failed: dict[UUID, commands.Command] = {}
        for row in hot:
            task = row[0]
            for need in self._waits.needs.get(task, ()):
                if self._has_ended(need) and not self._is_met(task, need):
                    ended = Status(self._found[need]["status"])
                    failed[task] = failed_need(need, ended, self._waits.policies[task])
        if failed:
            yield from cascade.apply_to_each(sorted(failed), lambda task: failed[task.id])

    def _block(self, cascade: Cascade, fresh: set[UUID]) -> Script[None]:
        """Let others wait for the new tasks; those for one that was there before wait already."""
        for task, blocked in sorted(self._waits.blocks.items()):
            if task not in fresh or not blocked:
                continue
            params = {"from_ids": [task], "to_ids": sorted(blocked), "most": _PATH}
            if (yield Statement("dependency_path", params)):
                raise Invalid("the tasks would wait for each other in a circle", "dependency_cycle")
            rows = yield Statement("needed", {"workspace": self._workspace, "ids": sorted(blocked)})
            there = {row["id"] for row in rows}
            for each in blocked:
                if each not in there:
                    raise Invalid(f"no task {each} to block", "dependency_unknown", field="blocks")
            if (yield Statement("turns_held", {"ids": sorted(blocked)})):
                raise Conflict("a task that has a place under its concurrency key cannot wait")
            changed = yield from cascade.apply_to_each(sorted(blocked), _blocked)
            held = {change.task.id for change in changed}
            for each in blocked:
                if each not in held:
                    raise Conflict(f"task {each} has started or ended; it cannot wait any more")
            pairs = [(each, task, self._workspace) for each in sorted(blocked)]
            yield Statement("dependency_put", rows={"pair": pairs})

    def _pull(self, hot: list[tuple[Any, ...]]) -> Script[None]:
        """Let urgent tasks pull what they wait for."""
        ranks = {row[0]: row[RANK] for row in hot}
        ranks |= {need: row["rank"] for need, row in self._found.items()}
        eager = [
            (task, ranks[task])
            for task, needs in self._waits.needs.items()
            if task in ranks and any(ranks[need] > ranks[task] for need in needs if need in ranks)
        ]
        if eager:
            yield Statement("inherit_rank", {"most": RANKS_FAR}, {"eager": sorted(eager)})


def _waits_for_nothing(row: tuple[Any, ...]) -> bool:
    hold, run_at = row[UNMET - 1], row[UNMET - 3]
    return hold is None and run_at is None


def _blocked(task: Task) -> commands.Command | None:
    return None if task.status in LEASED or task.status in TERMINAL else commands.AddDependency()
