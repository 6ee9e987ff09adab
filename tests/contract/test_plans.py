"""Random plans on both stores do what an interpreter of its own says of them."""

import asyncio
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from tests.contract.conftest import ManualClock, opened, profile
from tests.contract.flowing import Wrong, flow_status, start, statuses, worked
from tests.contract.plans import Block, Choice, Forecast, Items, Job, Node, plans, specs

from tenuto.engine.claim import Work
from tenuto.engine.engine import Engine
from tenuto.model.task import TERMINAL

SETTINGS = settings(
    max_examples=int(os.environ.get("TENUTO_PLANS", "120")),
    derandomize="CI" in os.environ,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


class Here:
    """An engine for all plans of a test."""

    def __init__(self, url: str) -> None:
        self._runner = asyncio.Runner()
        self._opened = opened(url, ManualClock())
        self.engine = Engine(self._runner.run(self._opened.__aenter__()))

    def close(self) -> None:
        self._runner.run(self._opened.__aexit__(None, None, None))
        self._runner.close()

    def play(self, node: Node) -> tuple[list[str], dict[str, list[str]], str]:
        """Run a plan: the keys that ran, what became of every part, and how it ended."""
        return self._runner.run(self._play(node))

    async def _play(self, node: Node) -> tuple[list[str], dict[str, list[str]], str]:
        works = {each.key: each.works for each in steps(node) if isinstance(each, Job)}

        def handler(work: Work) -> Any:
            good = works.get(work.key or "")
            if not (work.input["item"] if good is None else good):
                raise Wrong("no")

        flow = await start(self.engine, node.key, *specs(node))
        ran = await worked(self.engine, profile(), handler)
        return ran, await statuses(self.engine, flow), await flow_status(self.engine, flow)


def steps(node: Node | None) -> Iterator[Node]:
    if node is None:
        return
    yield node
    yield from steps(node.next)
    if isinstance(node, Choice):
        yield from steps(node.yes)
        yield from steps(node.no)
    if isinstance(node, Block):
        for child in node.children:
            yield from steps(child)


@pytest.fixture
def here(database_url: str) -> Iterator[Here]:
    made = Here(database_url)
    yield made
    made.close()


def test_a_plan_runs_as_it_says(here: Here) -> None:
    @SETTINGS
    @given(plans())
    def as_forecast(node: Node) -> None:
        forecast = Forecast(node)
        ran, found, end = here.play(node)
        assert end == forecast.end
        counts = Counter(ran)
        assert counts - forecast.may <= forecast.runs <= counts, (counts, forecast.runs)
        themselves = {each.key for each in steps(node) if isinstance(each, Items)}
        for key, status in forecast.groups.items():
            task = ["COMPLETED"] if key in themselves else []
            assert sorted(found[key]) == sorted([status, *task]), (key, found)
        assert {status for each in found.values() for status in each} <= {*TERMINAL}

    as_forecast()
