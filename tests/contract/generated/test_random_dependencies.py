"""Random graphs of dependent tasks do what the interpreter predicts."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from unittest.mock import patch
from uuid import UUID

import msgspec
import pytest
from tests.contract.conftest import new
from tests.contract.generated.sequences import Ground, Step, code_of
from tests.contract.generated.task_interpreter import Job, chosen
from tests.contract.generated.test_random_concurrency import KeyedTasks

from tenuto.engine.agents import subtask_tree
from tenuto.engine.flows import advance, deferred
from tenuto.engine.tasks import retry
from tenuto.model.tasks.submission import NewTask
from tenuto.store.protocol import Statement

KINDS = (
    *("graph", "graph", "graph", "submit", "block", "claim", "claim", "claim", "end", "end"),
    *("end", "end", "cancel", "pause", "pause", "resume", "resume", "retry", "revive", "revive"),
    *("revive", "repeat", "time"),
)
SEEDS = (*range(8), 21)
"""Between them they notice the faults in tests/mutants/areas/generated.toml."""
POLICIES = ("fail", "fail", "skip", "run")
UNMIXED = ("fail", "fail", "run")
"""Whichever of several ends is heard of first, the same becomes of who waited for them."""


class WaitingTasks(KeyedTasks):
    """Tasks that wait for tasks on an engine, and what is expected of them."""

    policies: Sequence[str] = UNMIXED
    most = 2
    """What a new task waits for."""
    ends = ("complete", "complete", "fail", "fail", "fail", "retry", "park")

    def _drawn(self, step: Step, n: int = 0) -> Job:
        number, mode = len(self._keys.jobs) + n, step.how
        some = [step.which % number, mode % number] if self._keys.jobs and mode % 4 else []
        needs = set(some[: self.most])
        policy = self.policies[mode % len(self.policies)] if needs else "fail"
        return Job(number=number, needs=dict.fromkeys(sorted(needs), "open"), on_failure=policy)

    # Graphs.

    async def _graph(self, step: Step) -> None:
        """Some tasks at once: each may wait for some before it, or block some after it."""
        first = len(self._keys.jobs)
        numbers = range(first, first + 3 + step.which % 6)
        needs = {number: _needs(step, number, first)[: self.most] for number in numbers}
        blocks = {number: self._blocks(step, number, first, numbers) for number in numbers}
        jobs = [self._node(step, number, needs[number]) for number in numbers]
        new_tasks = [self._spelled(job, first, blocks[job.number]) for job in jobs]
        created: list[UUID] = []

        async def submit() -> None:
            created.extend(
                [submitted.id for submitted in await self._engine.submit_many(new_tasks)]
            )

        refused = await code_of(submit())
        assert (refused is None) == self._accepted(jobs, blocks), refused
        if refused is None:
            self._news += new_tasks
            self._ids += created

    def _blocks(self, step: Step, number: int, first: int, numbers: range) -> list[int]:
        """Returns the tasks that it blocks, except waits of handlers, which are polled later."""
        result = _blocks(step, number, first, numbers) if self.most > 1 else []
        return [item for item in result if item >= first or not self._keys.jobs[item].is_parked]

    def _node(self, step: Step, number: int, needs: list[int]) -> Job:
        policy = self.policies[(step.how + number) % len(self.policies)] if needs else "fail"
        return Job(number=number, needs=dict.fromkeys(needs, "open"), on_failure=policy)

    def _spelled(self, job: Job, first: int, blocks: list[int]) -> NewTask:
        """Tasks of the same submit are named by their keys, others by their ids."""

        def name(number: int) -> str:
            return f"t{number}" if number >= first else str(self._ids[number])

        return new(
            f"task {job.number}",
            key=f"t{job.number}",
            depends_on=[name(need) for need in job.needs],
            on_dependency_failure=job.on_failure,
            blocks=[name(other) for other in blocks],
            max_attempts=100,
            idempotency_key=f"{self._engine.workspace} {job.number}",
        )

    def _accepted(self, jobs: list[Job], blocks: dict[int, list[int]]) -> bool:
        """Submit them to the interpreter, whole or not at all."""
        existing = self._keys.jobs
        before = [msgspec.structs.replace(job) for job in existing]
        for job in jobs:
            self._keys.submit(job)
        pairs = [(job, existing[number]) for job in jobs for number in blocks[job.number]]
        # Who says itself that it waits for that one is not asked.
        expected = [(job, other) for job, other in pairs if job.number not in other.needs]
        accepted = all(self._may_block(other, len(before)) for _, other in expected)
        for job, other in expected:
            accepted = accepted and not self._leads(job, other)
            if accepted:
                self._keys.block(other, job)
        self._keys.jobs = existing if accepted else before
        return accepted

    def _may_block(self, job: Job, first: int) -> bool:
        """True if it has neither started nor finished; for a new task without former outcomes."""
        failed = [need for need, mode in job.needs.items() if mode == "failed"]
        if job.number >= first and job.is_over:
            return min(failed) >= first
        return job.status in ("WAITING", "PENDING", "PAUSED")

    def _leads(self, job: Job, other: Job) -> bool:
        """True if one waits for the other, direct or nested, or ever did."""
        return job is other or any(self._leads(self._keys.jobs[n], other) for n in job.needs)

    # What people ask.

    async def _revive(self, step: Step) -> None:
        """Retry a task, most often one that ended by itself, with all that ended because of it."""
        over = ("FAILED", "CANCELLED", "SKIPPED")
        some = [job for job in self._keys.jobs if job.status in over]
        if step.how % 5:
            some = [job for job in some if "failed" not in job.needs.values()]
        for job in chosen(some, step.which, lambda job: True):
            refused = await code_of(self._engine.retry(self._ids[job.number], cascade=True))
            assert (refused is None) == self._keys.retry_all(job), (job, refused)

    # What is compared.

    async def check(self) -> None:
        await super().check()
        rows = await self._engine.core.store.fetch(
            Statement("dependencies_unmet", {"ids": sorted(self._ids)})
        )
        number = {task: number for number, task in enumerate(self._ids)}
        matches = {(number[row["id"]], number[row["needs"]], bool(row["failed"])) for row in rows}
        expected = {
            (job.number, need, mode == "failed")
            for job in self._keys.jobs
            for need, mode in job.needs.items()
            if mode != "met"
        }
        assert matches == expected, matches ^ expected


class SingleWaits(WaitingTasks):
    """Tasks that wait for one task each, so that no other's end can come before that."""

    policies = POLICIES
    most = 1

    async def _block(self, step: Step) -> None:
        await self._submit(step)


def _needs(step: Step, number: int, first: int) -> list[int]:
    """Up to two tasks before it, most often the first of the graph."""
    if number == 0:
        return []
    chance = step.how * 31 + number * 17 + step.which
    some = [first, first, chance // 3 % number, chance // 7 % number]
    expected = [some[chance % 4], some[chance // 4 % 4]][: chance % 3]
    return sorted({item for item in expected if item < number})


def _blocks(step: Step, number: int, first: int, numbers: range) -> list[int]:
    """Now and then one after it in the graph, or one that is there already."""
    chance = step.how * 13 + number * 29 + step.which
    if chance % 5 == 0 and number + 1 in numbers:
        return [numbers[-1]]
    if chance % 11 == 0 and first > 0:
        return [chance // 11 % first]
    return []


@pytest.fixture
def ground(database_url: str) -> Iterator[Ground]:
    created = Ground(database_url)
    yield created
    created.close()


def test_random_dependency_graph_matches_the_interpreter(ground: Ground) -> None:
    ground.play_all("TENUTO_WAITS", SEEDS, KINDS, WaitingTasks, 20, 40)


def test_random_dependents_of_one_task_match_the_interpreter(ground: Ground) -> None:
    ground.play_all("TENUTO_WAITS", range(6), KINDS, SingleWaits, 20, 40)


def test_random_dependents_beyond_one_step_match_the_interpreter(ground: Ground) -> None:
    with ExitStack() as stack:
        for module in (advance, deferred, retry, subtask_tree):
            stack.enter_context(patch.object(module, "MAX_CASCADE_ROWS", 3))
        ground.play_all("TENUTO_WAITS", range(8), KINDS, WaitingTasks, 20, 40)
