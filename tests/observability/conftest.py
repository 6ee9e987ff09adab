"""An engine on each kind of store, a hub whose events are counted, and the log as it is written."""

import io
import logging
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
import pytest
from tests.contract.conftest import AnyStore, ManualClock, opened

from tenuto import logs
from tenuto.api.edge.event_hub import EventHub
from tenuto.engine.core import Core
from tenuto.engine.engine import Engine
from tenuto.engine.operations.metrics import MetricsRecorder
from tenuto.metrics import Metrics


class Counted:
    """What one API process counts."""

    def __init__(self, engine: Engine) -> None:
        self.metrics = Metrics()
        self.core: Core = engine.system
        self.hub = EventHub(engine.store)

    async def listen(self) -> None:
        await self.hub.add_sink(MetricsRecorder(self.core, self.metrics).process_events)

    async def look(self) -> None:
        """Read what happened since the last look."""
        await self.hub._poll_logged()

    def value(self, name: str, **labels: str) -> float:
        return self.metrics.value(name, **labels)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def store(database_url: str, clock: ManualClock) -> AsyncIterator[AnyStore]:
    async with opened(database_url, clock) as store:
        yield store


@pytest.fixture
async def engine(store: AnyStore) -> Engine:
    return Engine(store, actor="tester")


@pytest.fixture
async def counted(engine: Engine) -> Counted:
    created = Counted(engine)
    await created.listen()
    return created


class Log:
    """The program's log as it is written."""

    def __init__(self, stream: io.StringIO) -> None:
        self._stream = stream

    @property
    def text(self) -> str:
        return self._stream.getvalue()

    @property
    def json(self) -> list[dict[str, Any]]:
        return [msgspec.json.decode(line) for line in self.text.splitlines()]


@pytest.fixture(params=["", "json"])
def style(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def log(style: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Log]:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    ours = logging.getLogger("tenuto")
    before = ours.handlers[:], ours.level, ours.propagate
    logs.set_up("DEBUG", style)
    yield Log(stream)
    ours.handlers[:], _, ours.propagate = before
    ours.setLevel(before[1])
