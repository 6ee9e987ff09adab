"""A stage for push tests: an engine with a manual clock, a stub gateway, dispatchers."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID

from tests.contract.conftest import ManualClock, Raw, check_attempts, check_trail, opened
from tests.coordinator.stub_gateway import StubGateway, stub_gateway

from tenuto.coordinator.dispatch import Dispatcher, DispatcherConfig
from tenuto.coordinator.gateway import HttpGateway
from tenuto.engine.agents.gateways import Gateways, GatewayState
from tenuto.engine.agents.push import PushSessions
from tenuto.engine.engine import Engine
from tenuto.model.agents.matching import AgentProfile
from tenuto.model.tasks.submission import NewTask
from tenuto.model.tasks.task import Fence
from tenuto.settings import Settings

SETTINGS = Settings(dispatch_per_s=40, public_url="http://api.test", grace_s=10)
KEY = "key-5d2c-of-the-operator"


class Stage:
    """An engine whose clock a test moves, a gateway that does as it is told, and dispatchers."""

    def __init__(self, engine: Engine, clock: ManualClock, gateway: StubGateway) -> None:
        self.engine = engine
        self.clock = clock
        self.gateway = gateway
        self.fences: dict[UUID, Fence] = {}
        self.leads = True
        self.dispatcher = self.another()

    def another(self, deadline_s: float = 5.0, **changes: Any) -> Dispatcher:
        """A dispatcher as after a restart: it knows nothing of what others did."""

        async def leads() -> bool:
            return self.leads

        gateway = HttpGateway("default", self.gateway.url, KEY, deadline_s=deadline_s)
        means = DispatcherConfig(
            gateways={"default": gateway},
            issue=self._issue,
            leads=leads,
        )
        settings = Settings(**{**_fields(SETTINGS), **changes})
        return Dispatcher(PushSessions(self.engine.system), means, settings)

    def _issue(self, agent: UUID, workspace: UUID, fence: Fence) -> str:
        assert workspace == self.engine.workspace
        self.fences[fence.task] = fence
        return f"token of {agent}"

    async def agent(self, name: str = "pushed", **changes: Any) -> AgentProfile:
        plain: dict[str, Any] = {
            "id": self.clock.new_id(),
            "workspace": self.engine.workspace,
            "name": name,
            "runtimes": ("gateway",),
            "gateway": "default",
        }
        return await self.engine.register_agent(AgentProfile(**plain | changes), managed=True)

    async def submit(self, n: int = 1, **options: Any) -> list[UUID]:
        new_tasks = [NewTask(title=f"task {number}", **options) for number in range(n)]
        return [submitted.id for submitted in await self.engine.submit_many(new_tasks)]

    async def push(self, dispatcher: Dispatcher | None = None) -> int:
        """One look, and what came of its calls."""
        doing = dispatcher or self.dispatcher
        started = await doing.once()
        await doing.finish_calls(30)
        return started

    async def status(self, task: UUID) -> str:
        return (await self.engine.show(task)).status

    async def outcomes(self, task: UUID) -> list[str | None]:
        return [attempt.outcome for attempt in await self.engine.attempts(task)]

    async def state(self) -> GatewayState:
        [state] = await Gateways(self.engine.system).states()
        return state

    async def later(self, seconds: float) -> None:
        """Time passes, and a coordinator does what is due."""
        self.clock.advance(seconds)
        await self.engine.maintenance.expire_once("reaper")
        await self.engine.maintenance.promote_once("promoter")


def _fields(settings: Settings) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in Settings.__struct_fields__}


@asynccontextmanager
async def staged(url: str) -> AsyncIterator[Stage]:
    """A stage on an empty database; in the end rows and trail must agree."""
    clock, raw = ManualClock(), Raw(url)
    async with opened(url, clock) as store, stub_gateway() as gateway:
        created = Stage(Engine(store, actor="test"), clock, gateway)
        yield created
        assert await created.engine.maintenance.audit() == []
        await check_trail(raw)
        await check_attempts(raw)
