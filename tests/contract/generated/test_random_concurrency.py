"""Random commands to tasks with concurrency keys do what the interpreter predicts."""

from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from tests.contract.conftest import LEASE_S, WORKER, Raw, failure, new, profile
from tests.contract.generated.sequences import (
    KILLED,
    Ground,
    Step,
    code_of,
    do_rest,
    pass_time,
    rows_of,
)
from tests.contract.generated.task_interpreter import Job, Keys, chosen

from tenuto.engine.engine import Engine
from tenuto.engine.limits import concurrency
from tenuto.model.limits.concurrency import HOLD, Concurrency
from tenuto.model.tasks.submission import NewTask
from tenuto.model.tasks.task import Fence, Status
from tenuto.store.protocol import Statement

KINDS = (
    *("submit", "submit", "submit", "bulk", "claim", "claim", "end", "end", "end", "end"),
    *("cancel", "pause", "pause", "resume", "resume", "retry", "retry", "block", "repeat", "time"),
)
KEYS = ("build", "deploy", "site")
OPEN = ("WAITING", "PENDING", "RUNNING", "RETRY_WAIT")
SEEDS = (0, 1, 2, 3, 9, 12, 17, 19)
"""Between them they notice the faults in tests/mutants/areas/generated.toml."""
ENDS = ("complete", "complete", "complete", "fail", "fail", "retry", "release", "park")


class KeyedTasks:
    """Tasks with keys on an engine, and what is expected of them."""

    ends: Sequence[str] = ENDS

    def __init__(self, engine: Engine, raw: Raw) -> None:
        self._engine = engine
        self._raw = raw
        self._keys = Keys()
        self._ids: list[UUID] = []
        self._news: list[NewTask] = []
        self._fences: dict[int, Fence] = {}

    async def do(self, step: Step) -> None:
        runs = any(job.status == "RUNNING" for job in self._keys.jobs)
        kind = "claim" if step.kind == "end" and not runs else step.kind
        await getattr(self, f"_{kind}")(step)
        self._keys.give()
        await do_rest(self._engine)

    # What is submitted.

    def _drawn(self, step: Step, n: int = 0) -> Job:
        """A new task, which may wait for others and may have a key."""
        jobs = self._keys.jobs
        number, mode = len(jobs) + n, step.how
        key = None if mode % 7 == 0 else KEYS[mode % 3 // 2]
        usual = {"deploy": 1, "build": 2}.get(key or "", 1)
        policy: Any = ("queue", "queue", "queue", "cancel_old", "cancel_new")[mode // 3 % 5]
        needs = [step.which % number] if jobs and mode // 15 % 4 == 0 else []
        return Job(
            number=number,
            key=key,
            limit=usual if mode // 60 % 2 else 1 + mode // 120 % 4,
            policy=policy,
            on_failure=("fail", "run")[mode % 2] if needs else "fail",
            needs=dict.fromkeys(needs, "open"),
        )

    def _asked(self, job: Job, **more: Any) -> NewTask:
        key = job.key
        key_request = None if key is None else Concurrency(key, job.limit, job.policy)
        return new(
            f"task {job.number}",
            depends_on=[str(self._ids[need]) for need in job.needs],
            on_dependency_failure=job.on_failure,
            concurrency=key_request,
            max_attempts=100,
            idempotency_key=f"{self._engine.workspace} {job.number}",
            **more,
        )

    async def _submit(self, step: Step) -> None:
        await self._submit_all([self._drawn(step)])

    async def _bulk(self, step: Step) -> None:
        """Tasks of one kind; those that cancel others of it have a key of their own.

        In one transaction with others it would matter who asks for a place before whom.
        """
        jobs = [self._drawn(step, n) for n in range(2 + step.which % 5)]
        for job in jobs:
            job.needs, job.on_failure = {}, "fail"
            job.key = "site" if job.policy == "cancel_old" else job.key
        await self._submit_all(jobs)

    async def _submit_all(self, jobs: list[Job]) -> None:
        new_tasks = [self._asked(job) for job in jobs]
        submitted = await self._engine.submit_many(new_tasks)
        self._news += new_tasks
        self._ids += [item.id for item in submitted]
        for job in jobs:
            self._keys.submit(job)

    async def _block(self, step: Step) -> None:
        """A new task for which one that is there has to wait."""
        for blocked in chosen(self._keys.jobs, step.which, lambda job: not job.is_parked):
            job = self._drawn(Step("submit", 0, step.how))
            job.needs, job.on_failure = {}, "fail"
            asked = self._asked(job, blocks=[str(self._ids[blocked.number])])
            created: list[UUID] = []

            async def submit(asked: NewTask, created: list[UUID]) -> None:
                created.append((await self._engine.submit(asked)).id)

            refused = await code_of(submit(asked, created))
            if not self._keys.may_block(blocked):
                assert refused == "out_of_turn"
                continue
            assert refused is None
            self._ids += created
            self._news.append(asked)
            self._keys.block(blocked, job)
            self._keys.submit(job)

    async def _repeat(self, step: Step) -> None:
        """The same submit again makes nothing."""
        for job in chosen(self._keys.jobs, step.which, lambda job: True):
            submitted = await self._engine.submit(self._news[job.number])
            assert (submitted.id, submitted.created) == (self._ids[job.number], False)

    # What workers do.

    async def _claim(self, step: Step) -> None:
        await self._claim_some(1 + step.how % 3)

    async def _claim_some(self, n: int) -> int:
        agent = profile(workspace=self._engine.workspace)
        claimed = await self._engine.claim(agent, WORKER, n, LEASE_S)
        ready = [job for job in self._keys.jobs if job.status == "PENDING"]
        assert len(claimed) == min(n, len(ready))
        for work in claimed:
            number = self._ids.index(work.fence.task)
            self._keys.claim(self._keys.jobs[number])
            self._fences[number] = work.fence
        return len(claimed)

    async def _end(self, step: Step) -> None:
        for job in chosen(self._keys.jobs, step.which, lambda job: job.status == "RUNNING"):
            await self._leave(job, self.ends[step.how % len(self.ends)])

    async def _leave(self, job: Job, mode: str) -> None:
        engine, fence = self._engine, self._fences.pop(job.number)
        if job.to_cancel or job.to_pause:
            asked = "cancel_requested" if job.to_cancel else "pause_requested"
            assert await code_of(engine.complete(fence)) == asked
        if job.to_cancel:
            await engine.confirm_cancel(fence, KILLED)
        elif job.to_pause:
            await engine.confirm_pause(fence, KILLED)
        elif mode == "complete":
            await engine.complete(fence)
        elif mode in ("fail", "retry"):
            await engine.fail(fence, failure("syntax" if mode == "fail" else "error"))
        elif mode == "release":
            await engine.release(fence)
        else:
            await engine.park(fence, "input", engine.clock.now() + timedelta(minutes=30))
        self._keys.leave(job, mode)

    async def _time(self, step: Step) -> None:
        await pass_time(self._engine)
        self._keys.pass_time()
        self._fences.clear()

    # What people ask.

    async def _ask(self, name: str, step: Step, *statuses: str) -> None:
        """Ask something of a task in one of the statuses, now and then of any."""
        expected = statuses if step.how % 6 else tuple(Status)
        for job in chosen(self._keys.jobs, step.which, lambda job: job.status in expected):
            call = getattr(self._engine, name)(self._ids[job.number])
            refused = await code_of(call)
            assert (refused is None) == getattr(self._keys, name)(job), (name, job, refused)

    async def _cancel(self, step: Step) -> None:
        await self._ask("cancel", step, *OPEN)

    async def _pause(self, step: Step) -> None:
        """Of those in line as often as of all others."""
        line = [job for key in KEYS for job in self._keys.line(key)]
        if not line or step.how % 2:
            await self._ask("pause", step, *OPEN)
        else:
            job = line[step.which % len(line)]
            await self._engine.pause(self._ids[job.number])
            assert self._keys.pause(job)

    async def _resume(self, step: Step) -> None:
        await self._ask("resume", step, "PAUSED")

    async def _retry(self, step: Step) -> None:
        await self._ask("retry", step, "FAILED", "CANCELLED", "SKIPPED", "COMPLETED")

    # What is compared.

    async def check(self) -> None:
        rows = await rows_of(self._engine, self._ids)
        for job, task in zip(self._keys.jobs, self._ids, strict=True):
            row = rows[task]
            assert row.status == job.status, f"{job} is {row.status}, {row.hold}"
            assert (row.cancel_requested_at is not None) == job.to_cancel, job
            assert (row.pause_requested_at is not None) == job.to_pause, job
            if row.status is Status.WAITING:
                assert row.unmet == job.unmet, job
                assert (row.hold == HOLD) == job.waits_for_place, job
        for key in KEYS:
            await self._check_line(key)

    async def _check_line(self, key: str) -> None:
        params = {"workspace": self._engine.workspace, "key": key, "most": 100}
        rows = await self._engine.core.store.fetch(Statement("permit_queue", params))
        line = self._keys.line(key)
        assert [row["id"] for row in rows] == [self._ids[job.number] for job in line]
        if line:
            positions = len(self._keys.holders(key))
            assert rows[0]["places"] == positions
            task = self._ids[line[-1].number]
            reported = await concurrency.describe_position(
                self._engine.core, task, self._engine.workspace
            )
            ahead = self._keys.ahead(line[-1])
            assert (
                f"{positions} of {line[-1].limit} in use, {ahead} before it in the queue"
                in reported
            )

    async def finish(self) -> None:
        """Let all of them go on and end: then nobody has a place, or waits for one."""
        await self.do(Step("time", 0, 0))
        while any(job.status == "PAUSED" for job in self._keys.jobs):
            await self.do(Step("resume", 0, 1))
        while any(not job.is_over for job in self._keys.jobs):
            await self._claim_some(100)
            for number in list(self._fences):
                await self._leave(self._keys.jobs[number], "complete")
                self._keys.give()
                await do_rest(self._engine)
            await self.check()
        own = f"where workspace = '{self._engine.workspace}'"
        assert await self._raw.value(f"select count(*) from task_turn {own}") == 0
        assert await self._raw.value(f"select count(*) from turn_key {own}") == 0


@pytest.fixture
def ground(database_url: str) -> Iterator[Ground]:
    created = Ground(database_url)
    yield created
    created.close()


@pytest.mark.parametrize("values", [concurrency.MAX_GRANTS, 2])
def test_random_commands_match_the_concurrency_interpreter(
    ground: Ground, monkeypatch: pytest.MonkeyPatch, values: int
) -> None:
    monkeypatch.setattr(concurrency, "MAX_GRANTS", values)
    ground.play_all("TENUTO_KEYS", SEEDS, KINDS, KeyedTasks, 30, 60)
