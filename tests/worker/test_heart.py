"""The heart and attempts that do not stop."""

from typing import Any, NoReturn

import pytest
from tests.contract.conftest import ManualClock, claim_one, new, opened

from tenuto.engine.engine import Engine
from tenuto.engine.report import Presence
from tenuto.model.task import TIMEOUT_SLACK_S
from tenuto.settings import Settings
from tenuto.worker.attempt import Attempt
from tenuto.worker.heart import Heart
from tenuto.worker.leases import Leases, Reason
from tenuto.worker.runtime.function import FunctionRuntime


class Ended(Exception):
    """The worker ended itself."""


def end() -> None:
    raise Ended


def nothing(*given: Any) -> None:
    del given


async def beating(heart: Heart, clock: ManualClock) -> NoReturn:
    while True:
        clock.advance(1)
        await heart.beat_once()


@pytest.mark.parametrize(("reason", "limit_s"), [("timeout", TIMEOUT_SLACK_S), ("pause", 600)])
async def test_a_handler_that_does_not_stop_ends_its_worker_in_time(
    sqlite_url: str, reason: Reason, limit_s: float
) -> None:
    """After a timeout that is before the task is given to somebody else, however long the grace."""
    clock, leases, settings = ManualClock(), Leases(), Settings(grace_s=590)
    async with opened(sqlite_url, clock) as store:
        engine = Engine(store)
        await engine.submit(new())
        runtime = FunctionRuntime()
        attempt = Attempt(
            engine, await claim_one(engine), runtime, leases, settings, nothing, nothing
        )
        leases.add(attempt._held)
        attempt.stop(reason)
        who = Presence(worker="w", host="h", pid=1, agents=[], slots=2, status="RUNNING")
        heart = Heart(engine, leases, who, settings, nothing, end)
        since = clock.elapsed()
        with pytest.raises(Ended):
            await beating(heart, clock)
        assert limit_s - 10 < clock.elapsed() - since < limit_s
