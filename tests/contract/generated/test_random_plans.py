"""Random plans on both databases do what the interpreter predicts."""

import os
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st
from tests.contract.generated.plan_interpreter import Forecast, Items, Job, Node, plans, steps
from tests.contract.generated.plan_runner import Here, Play, Played, Trouble, bounded, troubles

from tenuto.model.tasks.task import TERMINAL

SETTINGS = settings(
    max_examples=int(os.environ.get("TENUTO_PLANS", "50")),
    derandomize="CI" in os.environ,
    deadline=None,
    database=None,
    # Examples share a database: what fails after others need not fail alone, when it is smaller.
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.fixture
def here(database_url: str) -> Iterator[Here]:
    created = Here(database_url)
    yield created
    created.close()


def check(node: Node, played: Played) -> None:
    """Asserts that the outcome of the plan is the predicted one."""
    forecast = Forecast(node, played.cancelled)
    assert played.end == forecast.end
    counts = Counter(played.ran)
    assert counts - forecast.may <= forecast.runs <= counts, (counts, forecast.runs)
    themselves = {step.key for step in steps(node) if isinstance(step, Items)}
    for key in forecast.groups.keys() - forecast.unsure:
        ends = forecast.groups[key]
        tasks = ["COMPLETED"] * len(ends) if key in themselves else []
        assert sorted(played.statuses[key]) == sorted([*ends, *tasks]), (key, played.statuses)
    assert {status for item in played.statuses.values() for status in item} <= {*TERMINAL}


def test_random_plan_matches_the_interpreter(here: Here) -> None:
    @SETTINGS
    @given(plans())
    def as_forecast(node: Node) -> None:
        check(node, here.run(node, Play.go_on))

    as_forecast()


def test_disturbed_plan_matches_the_interpreter(here: Here) -> None:
    @SETTINGS
    @given(plans(), troubles(), st.integers(2, 9), st.integers(0, 9))
    def as_forecast(node: Node, event_name: list[Trouble], rows: int, seed: int) -> None:
        note(f"{event_name}, {rows} rows, seed {seed}")
        with bounded(rows):
            check(node, here.run(node, lambda play: play.go_on(event_name), seed))

    as_forecast()


def test_cancelled_flow_finishes_and_runs_nothing_more(here: Here) -> None:
    @SETTINGS
    @given(plans(), troubles(), st.integers(2, 9), st.integers(0, 9), st.integers(0, 8))
    def as_asked(node: Node, event_name: list[Trouble], rows: int, seed: int, moment: int) -> None:
        ran: list[str] = []

        async def cancelled(play: Play) -> None:
            await play.go_on(event_name, moment)
            ran.extend(play.ran)
            if not await play.cancel():
                ran.clear()
            await play.go_on()

        with bounded(rows):
            played = here.run(node, cancelled, seed)
        assert {status for item in played.statuses.values() for status in item} <= {*TERMINAL}
        if ran:
            assert (played.end, played.ran) == ("CANCELLED", ran)

    as_asked()


def test_retried_flow_runs_its_remaining_tasks_once(here: Here) -> None:
    @SETTINGS
    @given(plans(["all_succeeded"]), troubles(cancels=False), st.integers(2, 9), st.integers(0, 9))
    def as_forecast(node: Node, event_name: list[Trouble], rows: int, seed: int) -> None:
        note(f"{event_name}, {rows} rows, seed {seed}")
        succeeded: list[str] = []

        async def again(play: Play) -> None:
            await play.go_on(event_name)
            play.healed = True
            if await play.revive():
                await play.go_on(event_name)
            succeeded.extend(play.succeeded)

        with bounded(rows):
            played = here.run(node, again, seed)
        heal(node)
        assert (played.end, Counter(succeeded)) == ("COMPLETED", Forecast(node).runs)

    as_forecast()


def heal(node: Node) -> None:
    """Makes every step succeed."""
    for step in steps(node):
        if isinstance(step, Job):
            step.works = True
        if isinstance(step, Items):
            step.works = [True] * len(step.works)
