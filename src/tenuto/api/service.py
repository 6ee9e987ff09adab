"""What all requests share: the store, an engine per workspace, and who may do what."""

import asyncio
import copy
from collections import OrderedDict
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec
from litestar.di import NamedDependency

from tenuto.api.auth.attempt_tokens import AttemptTokens
from tenuto.api.auth.authentication import TokenCache
from tenuto.api.auth.logins import Logins
from tenuto.api.auth.throttling import RequestThrottle
from tenuto.api.edge.body_budget import BodyBudget
from tenuto.api.edge.concurrent import Concurrent
from tenuto.api.edge.event_hub import EventHub
from tenuto.api.edge.json_checks import Checks
from tenuto.broker.protocol import Wakeups
from tenuto.clock import Clock
from tenuto.encryption_keys import KeyRing
from tenuto.engine.agents.gateways import Gateways
from tenuto.engine.agents.registry import AgentRegistry
from tenuto.engine.agents.subtask_tree import SpawnLimits
from tenuto.engine.core import Core
from tenuto.engine.engine import Engine
from tenuto.engine.tasks.maintenance import TaskMaintenance
from tenuto.engine.tenancy.accounts import Identity
from tenuto.engine.webhooks.endpoints import Check, WebhookEndpoints
from tenuto.model.errors import Forbidden, Unauthenticated
from tenuto.model.tenancy.access import Caller, Role, Scope
from tenuto.settings import Settings
from tenuto.store.protocol import Store

ENGINES = 1000
"""Workspaces whose lanes are kept in memory."""


class RequestContext(msgspec.Struct, frozen=True):
    """One request's means: who asks, and the engine that acts for them."""

    caller: Caller
    engine: Engine
    service: "Service"
    token: str

    @property
    def workspace(self) -> UUID:
        return self.caller.workspace

    @property
    def hooks(self) -> WebhookEndpoints:
        return WebhookEndpoints(self.engine.core, self.service.check_url)

    @property
    def registry(self) -> AgentRegistry:
        return AgentRegistry(self.engine.core, self.workspace)


def service_of(scope: Any) -> "Service":
    """The service that a request was sent to."""
    service: Service = scope["state"]["service"]
    return service


def bind(scope: Any, service: "Service") -> None:
    """Say which service a request was sent to."""
    scope.setdefault("state", {})["service"] = service


InjectedContext = NamedDependency[RequestContext]
"""How a handler asks for its request's means."""


class Service:
    """One API process."""

    def __init__(
        self,
        store: Store,
        wakeups: Wakeups,
        vault: KeyRing,
        settings: Settings,
        check_url: Check,
    ) -> None:
        self.store = store
        self.wakeups = wakeups
        self.vault = vault
        self.settings = settings
        self.check_url = check_url
        self.identity = Identity(store, settings.workspaces_per_owner)
        self.attempts = AttemptTokens(vault, store.clock)
        self.callers = TokenCache(self.identity, self.attempts)
        self.rates = RequestThrottle(store.clock, settings)
        self.logins = Logins(store.clock)
        self.streams = Concurrent("live streams", "too_many_streams")
        self.polls = Concurrent("waiting claims", "too_many_polls")
        self.hub = EventHub(store)
        self.body_bytes = settings.body_kb * 1024
        """How large a body may be."""
        self.body_budget = BodyBudget(self.body_bytes)
        self.body_checks = Checks()
        core = Core(store, wakeups, vault)
        self.system = TaskMaintenance(core)
        self.gateways = Gateways(core)
        self.stopping = asyncio.Event()
        """Set when the server ends: streams and long polls end with it."""
        self.down_since: datetime | None = None
        """Since when the database does not answer those who ask for the coordinator's health."""
        self._engines: OrderedDict[UUID, Engine] = OrderedDict()

    @property
    def clock(self) -> Clock:
        return self.store.clock

    def engine(self, workspace: UUID) -> Engine:
        """The engine of a workspace; those used least are let go."""
        engine = self._engines.get(workspace)
        if engine is None:
            engine = Engine(self.store, self.wakeups, workspace=workspace, vault=self.vault)
            engine.core.tree = SpawnLimits(self.settings.max_depth, self.settings.max_children)
            engine.core.transcript_kb = self.settings.transcript_kb
            engine.core.lanes.ceiling = self.settings.ceiling()
            self._engines[workspace] = engine
            if len(self._engines) > ENGINES:
                self._engines.popitem(last=False)
        self._engines.move_to_end(workspace)
        return engine

    def request_context(self, caller: Caller, token: str) -> RequestContext:
        """The means of a request by that caller."""
        engine = copy.copy(self.engine(caller.workspace))
        engine.actor = caller.actor
        engine.caller = caller
        return RequestContext(caller, engine, self, token)

    async def is_still_allowed(
        self, desk: RequestContext, role: Role = Role.VIEWER, scope: Scope = "read"
    ) -> bool:
        """Whether a request's caller may still do what takes that role and scope."""
        try:
            caller = await self.callers.of(desk.token, desk.workspace)
        except (Unauthenticated, Forbidden):
            return False
        return caller.may(role, scope)
