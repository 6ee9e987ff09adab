"""Faults planted in the processes of a chaos run, to see that the run finds them.

    python -m tests.proof.planted_chaos NAME MODULE WORDS...

runs a module with production's rules but for one.
"""

import asyncio
import runpy
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

from tenuto.engine import rows
from tenuto.engine.tasks import maintenance, submit
from tenuto.model.errors import TenutoError
from tenuto.model.tasks import changes, commands
from tenuto.model.tasks.submission import NewTask
from tenuto.model.tasks.task import Task, TaskChange
from tenuto.periodic import wait_first_event
from tenuto.store import sql
from tenuto.store.dialects import POSTGRES, SQLITE
from tenuto.store.protocol import Statement

PLANTS: dict[str, Callable[[], None]] = {}
GUARD = "where task.id = done.id and task.attempt = done.attempt and task.lease_token = done.token"
OWNER_ONLY = "where task.id = done.id and done.attempt > 0 and done.token <> ''"


def plant(function: Callable[[], None]) -> Callable[[], None]:
    PLANTS[function.__name__] = function
    return function


@plant
def complete_guarded_by_owner() -> None:
    """The right agent is enough, though it may be its attempt before."""
    for dialect in (SQLITE, POSTGRES):
        queries = sql.load(dialect)
        before = queries["complete_if_owned"]
        steps = tuple(
            msgspec.structs.replace(step, text=step.text.replace(GUARD, OWNER_ONLY))
            for step in before.steps
        )
        assert steps != before.steps, "the guard is spelled in another way"
        queries["complete_if_owned"] = msgspec.structs.replace(before, steps=steps)


@plant
def expiry_not_audited() -> None:
    """The reaper's changes leave no event."""
    write = rows.changes_statement

    def silent(decided: Sequence[tuple[TaskChange, commands.Command]]) -> Statement:
        created = write(decided)
        return msgspec.structs.replace(created, rows={**created.rows, "noted": []})

    maintenance.changes_statement = silent  # type: ignore[attr-defined]


@plant
def reaper_without_a_cap() -> None:
    """A task is queued again though it has no try left."""

    def never(task: Task, tries: int) -> bool:
        del task, tries
        return False

    changes.has_no_try_left = never


@plant
def acknowledged_before_the_commit() -> None:
    """A submit is answered at once, and stored when there is time."""
    many = submit.TaskSubmitter.submit_many

    async def eager(
        self: submit.TaskSubmitter, new_tasks: Sequence[NewTask], *args: object, **kwargs: object
    ) -> list[submit.Submitted]:
        named = [msgspec.structs.replace(new, id=self._core.clock.new_id()) for new in new_tasks]

        async def commit() -> None:
            await wait_first_event([], 0.5, self._core.clock)
            with suppress(TenutoError):
                await many(self, named, *args, **kwargs)  # type: ignore[arg-type]

        keeping = asyncio.get_running_loop().create_task(commit())
        _LATER.add(keeping)
        keeping.add_done_callback(_LATER.discard)
        return [submit.Submitted(new.id) for new in named if new.id is not None]

    submit.TaskSubmitter.submit_many = eager  # type: ignore[method-assign]


_LATER: set[asyncio.Task[None]] = set()


if __name__ == "__main__":
    name, module, *words = sys.argv[1:]
    PLANTS[name]()
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
