"""An engine on each kind of store, and a hub whose events are counted."""

from collections.abc import AsyncIterator

import pytest
from tests.contract.conftest import AnyStore, ManualClock, opened

from tenuto.api.hub import Hub
from tenuto.engine.core import Core
from tenuto.engine.counting import Counting
from tenuto.engine.engine import Engine
from tenuto.metrics import Metrics


class Counted:
    """What one API process counts."""

    def __init__(self, engine: Engine) -> None:
        self.metrics = Metrics()
        self.core: Core = engine.system
        self.hub = Hub(engine.store)

    async def listen(self) -> None:
        await self.hub.listen(Counting(self.core, self.metrics).hear)

    async def look(self) -> None:
        """Read what happened since the last look."""
        await self.hub._guarded()

    def told(self, name: str, **labels: str) -> float:
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
    made = Counted(engine)
    await made.listen()
    return made
