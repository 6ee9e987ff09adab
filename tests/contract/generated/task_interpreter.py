"""An interpreter that predicts tasks with dependencies and with permits of concurrency keys.

It knows the rules from the documents (concurrency, flows, state machine), not from the code.
"""

from collections.abc import Callable, Iterator
from typing import Any, Literal

import msgspec

OVER = frozenset({"COMPLETED", "FAILED", "CANCELLED", "SKIPPED"})


class Job(msgspec.Struct, eq=False, kw_only=True):
    """A task, as it is expected to be."""

    number: int
    key: str | None = None
    limit: int = 1
    policy: Literal["queue", "cancel_old", "cancel_new"] = "queue"
    on_failure: str = "fail"
    needs: "dict[int, Literal['open', 'met', 'failed']]" = {}
    status: str = "WAITING"
    in_line: int | None = None
    """Its number in the line of its key, from when it asks until it ends."""
    has_place: bool = False
    is_parked: bool = False
    due: int = 0
    """The period from which on it is not held by a time any more."""
    to_cancel: bool = False
    to_pause: bool = False

    @property
    def unmet(self) -> int:
        return list(self.needs.values()).count("open")

    @property
    def is_over(self) -> bool:
        return self.status in OVER

    @property
    def waits_for_place(self) -> bool:
        return self.key is not None and not self.has_place

    @property
    def is_ready(self) -> bool:
        """True if the task waits only for a permit."""
        return self.status == "WAITING" and self.waits_for_place and self.unmet == 0


class Keys:
    """All tasks of a workspace. Its methods answer whether the engine should do as it is asked.

    After each of them places are given by `give`.
    """

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.period = 0
        self._last = 0
        self._untold: list[Job] = []
        self._newcomers: list[Job] = []
        """Those that have asked for a place since places were given last."""

    # What stands in line, and who has a place.

    def holders(self, key: str) -> list[Job]:
        return [job for job in self.jobs if job.key == key and job.has_place]

    def line(self, key: str) -> list[Job]:
        """Returns the tasks that could get a permit at once, in order."""
        return [job for job in self._in_order(key) if job.is_ready]

    def ahead(self, job: Job) -> int:
        """Returns how many tasks are queued before it, including those that are passed by."""
        matches = [item for item in self._in_order(job.key) if not item.has_place]
        return matches.index(job)

    def _in_order(self, key: str | None) -> list[Job]:
        matches = [job for job in self.jobs if job.key == key and job.in_line is not None]
        return sorted(matches, key=lambda job: job.in_line or 0)

    def _ask(self, job: Job) -> None:
        if job.in_line is None:
            self._last += 1
            job.in_line = self._last
        self._newcomers.append(job)

    def _make_room(self, job: Job) -> None:
        """Cancel as many of the older ones as it takes."""
        order = self._in_order(job.key)
        before = [item for item in order[: order.index(job)] if not item.to_cancel]
        for item in before[: max(len(before) - job.limit + 1, 0)]:
            self._cancel(item)

    def give(self) -> None:
        """Give the places that are free, once all that follows from something is done."""
        for job in self._newcomers:  # whoever asks because of one of them comes after all of them
            if job.policy == "cancel_old" and job.in_line is not None:
                self._make_room(job)
        for key in dict.fromkeys(job.key for job in self.jobs if job.key is not None):
            self._give(key)
        newcomers, self._newcomers = self._newcomers, []
        for job in newcomers:
            if job.policy == "cancel_new" and job.is_ready:
                self._end(job, "CANCELLED")
        if newcomers:
            self.give()

    def _give(self, key: str) -> None:
        for job in self.line(key):
            if len(self.holders(key)) >= job.limit:
                return
            job.has_place = True
            job.status = "PENDING"

    # What becomes of tasks.

    def submit(self, job: Job) -> None:
        self.jobs.append(job)
        for need in reversed(job.needs):  # of several that ended badly the last one named decides
            other = self.jobs[need]
            if other.is_over:
                self._on_dependency_finished(job, other)
        if job.is_over:
            return
        if job.unmet == 0:
            self._go_on(job)

    def may_block(self, job: Job) -> bool:
        """True if the task has neither started nor finished and has no permit."""
        return job.status in ("WAITING", "PENDING", "PAUSED") and not job.has_place

    def block(self, job: Job, by: Job) -> None:
        """Let a task wait for one that is new."""
        job.needs = {**job.needs, by.number: "open"}
        if job.status == "PENDING":
            job.status = "WAITING"
        if by.is_over:
            self._on_dependency_finished(job, by)

    def _go_on(self, job: Job) -> None:
        """Lets a waiting task continue that nothing else blocks."""
        if job.waits_for_place:
            self._ask(job)
        elif not job.is_parked:
            job.status = "PENDING"

    def _end(self, job: Job, status: str) -> None:
        job.status = status
        job.has_place = job.to_cancel = job.to_pause = job.is_parked = False
        job.in_line = None
        self._untold.append(job)
        if len(self._untold) > 1:
            return  # it is told once those before it are
        while self._untold:
            for item in self.jobs:
                if item.needs.get(self._untold[0].number) == "open":
                    self._on_dependency_finished(item, self._untold[0])
            del self._untold[0]

    def _on_dependency_finished(self, job: Job, need: Job) -> None:
        """Applies the outcome of a dependency to the task."""
        met = need.status == "COMPLETED" or job.on_failure == "run"
        job.needs = {**job.needs, need.number: "met" if met else "failed"}
        if job.is_over:
            return
        if not met:
            skips = job.on_failure == "skip" or need.status == "SKIPPED"
            self._end(job, "SKIPPED" if skips else "FAILED")
        elif job.unmet == 0 and job.status == "WAITING":
            self._go_on(job)

    def claim(self, job: Job) -> None:
        assert job.status == "PENDING", job
        job.status = "RUNNING"

    def leave(self, job: Job, mode: str) -> None:
        """An attempt ends, in a way in which it may."""
        if job.to_cancel or job.to_pause:
            self._stopped(job)
        elif mode == "complete":
            self._end(job, "COMPLETED")
        elif mode == "fail":
            self._end(job, "FAILED")
        else:
            job.status = {"retry": "RETRY_WAIT", "park": "WAITING"}.get(mode, "PENDING")
            job.is_parked = mode == "park"
            job.due = self.period + 1 if mode in ("retry", "park") else 0

    def _stopped(self, job: Job) -> None:
        if job.to_cancel:
            self._end(job, "CANCELLED")
        else:
            job.status, job.to_pause = "PAUSED", False

    def pass_time(self) -> None:
        """Leases run out, and all times come."""
        self.period += 2
        for job in self.jobs:
            if job.status == "RUNNING":
                if job.to_cancel or job.to_pause:
                    self._stopped(job)
                else:
                    job.status = "PENDING"
            elif job.status == "RETRY_WAIT":
                job.status = "PENDING"
            elif job.status == "WAITING" and job.is_parked:
                job.status, job.is_parked = "PENDING", False

    # What people ask.

    def cancel(self, job: Job) -> bool:
        if job.is_over:
            return False
        self._cancel(job)
        return True

    def _cancel(self, job: Job) -> None:
        if job.status == "RUNNING":
            job.to_cancel = True
        else:
            self._end(job, "CANCELLED")

    def pause(self, job: Job) -> bool:
        if job.is_over or job.status == "PAUSED" or job.to_cancel:
            return False
        if job.status == "RUNNING":
            job.to_pause = True
        else:
            job.status = "PAUSED"
        return True

    def resume(self, job: Job) -> bool:
        if job.status != "PAUSED":
            return False
        job.status = "WAITING"
        if job.due <= self.period:
            job.is_parked = False
        if job.unmet == 0:
            self._resumed(job)
        return True

    def _resumed(self, job: Job) -> None:
        self._go_on(job)
        if job.status == "PENDING" and job.due > self.period:
            job.status = "RETRY_WAIT"

    def retry(self, job: Job) -> bool:
        if job.status not in ("FAILED", "CANCELLED"):
            return False
        left = [self.jobs[need] for need, mode in job.needs.items() if mode != "met"]
        if any(need.is_over and need.status != "COMPLETED" for need in left):
            return False
        for need in left:
            met = need.status == "COMPLETED"
            job.needs = {**job.needs, need.number: "met" if met else "open"}
        job.status, job.due, job.is_parked = "WAITING", 0, False
        if job.unmet == 0:
            self._go_on(job)
        return True

    def retry_all(self, job: Job) -> bool:
        """Retry a task with all that ended because of it."""
        if not self.retry(job):
            return False
        causes = [job]
        while causes:
            causes = [other for cause in causes for other in self._reopened_for(cause)]
        return True

    def _reopened_for(self, cause: Job) -> Iterator[Job]:
        for job in self.jobs:
            if job.needs.get(cause.number) != "failed" or job.status not in ("FAILED", "SKIPPED"):
                continue
            job.needs = {**job.needs, cause.number: "open"}
            if "failed" in job.needs.values():
                continue  # it would wait for that for ever
            job.status, job.is_parked = "WAITING", False
            yield job


def chosen(jobs: list[Job], which: int, expected: Callable[[Job], Any]) -> Iterator[Job]:
    """One of the tasks that are wanted, if there is one."""
    matches = [job for job in jobs if expected(job)]
    if matches:
        yield matches[which % len(matches)]
