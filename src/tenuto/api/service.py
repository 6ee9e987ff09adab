"""Objects shared by all requests: the store, one engine per workspace, caches and limits."""

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
from tenuto.api.auth.logins import LoginLimiter
from tenuto.api.auth.throttling import RequestThrottle
from tenuto.api.edge.body_budget import BodyBudget
from tenuto.api.edge.concurrent import ConcurrencyLimiter
from tenuto.api.edge.event_hub import EventHub
from tenuto.api.edge.json_checks import JsonChecker
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
from tenuto.engine.webhooks.endpoints import CheckUrl, WebhookEndpoints
from tenuto.model.errors import Forbidden, Unauthenticated
from tenuto.model.tenancy.access import Caller, Role, Scope
from tenuto.settings import Settings
from tenuto.store.protocol import Store

MAX_ENGINES = 1000
"""Engines kept in memory, one per workspace, each with its cached lanes."""


class RequestContext(msgspec.Struct, frozen=True):
    """Context of one request: the caller, its token, and an engine that acts as this caller."""

    caller: Caller
    engine: Engine
    service: "Service"
    token: str

    @property
    def workspace(self) -> UUID:
        return self.caller.workspace

    @property
    def webhooks(self) -> WebhookEndpoints:
        """The webhook endpoints of the caller's workspace."""
        return WebhookEndpoints(self.engine.core, self.service.check_url)

    @property
    def agents(self) -> AgentRegistry:
        """The agents of the caller's workspace."""
        return AgentRegistry(self.engine.core, self.workspace)


def service_of(scope: Any) -> "Service":
    """Returns the service that `bind_service` stored in the ASGI scope."""
    service: Service = scope["state"]["service"]
    return service


def bind_service(scope: Any, service: "Service") -> None:
    """Stores the service in the ASGI scope of a request."""
    scope.setdefault("state", {})["service"] = service


InjectedContext = NamedDependency[RequestContext]
"""Type of the parameter `ctx` of route handlers; filled by dependency injection."""


class Service:
    """State of one API process."""

    def __init__(
        self,
        store: Store,
        wakeups: Wakeups,
        vault: KeyRing,
        settings: Settings,
        check_url: CheckUrl,
    ) -> None:
        self.store = store
        self.wakeups = wakeups
        self.vault = vault
        self.settings = settings
        self.check_url = check_url
        self.identity = Identity(store, settings.workspaces_per_owner)
        self.attempt_tokens = AttemptTokens(vault, store.clock)
        self.token_cache = TokenCache(self.identity, self.attempt_tokens)
        self.throttle = RequestThrottle(store.clock, settings)
        self.login_limiter = LoginLimiter(store.clock)
        self.open_streams = ConcurrencyLimiter("live streams", "too_many_streams")
        self.waiting_claims = ConcurrencyLimiter("waiting claims", "too_many_polls")
        self.hub = EventHub(store)
        self.max_body_bytes = settings.body_kb * 1024
        """Maximum size of a request body."""
        self.body_budget = BodyBudget(self.max_body_bytes)
        self.json_checker = JsonChecker()
        core = Core(store, wakeups, vault)
        self.maintenance = TaskMaintenance(core)
        self.gateways = Gateways(core)
        self.stopping = asyncio.Event()
        """Set when the server stops; streams and long polls end then."""
        self.down_since: datetime | None = None
        """When a request for the coordinator's health first found the database down."""
        self._engines: OrderedDict[UUID, Engine] = OrderedDict()

    @property
    def clock(self) -> Clock:
        return self.store.clock

    def engine_for(self, workspace: UUID) -> Engine:
        """Returns the shared engine of a workspace; the `MAX_ENGINES` used last are kept."""
        engine = self._engines.get(workspace)
        if engine is None:
            engine = Engine(self.store, self.wakeups, workspace=workspace, key_ring=self.vault)
            engine.core.spawn_limits = SpawnLimits(
                self.settings.max_depth, self.settings.max_children
            )
            engine.core.transcript_kb = self.settings.transcript_kb
            engine.core.lanes.ceiling = self.settings.quota_ceiling()
            self._engines[workspace] = engine
            if len(self._engines) > MAX_ENGINES:
                self._engines.popitem(last=False)
        self._engines.move_to_end(workspace)
        return engine

    def request_context(self, caller: Caller, token: str) -> RequestContext:
        """Returns the context of a request, with an engine that acts as the caller."""
        engine = copy.copy(self.engine_for(caller.workspace))
        engine.actor = caller.actor
        engine.caller = caller
        return RequestContext(caller, engine, self, token)

    async def is_still_allowed(
        self, ctx: RequestContext, role: Role = Role.VIEWER, scope: Scope = "read"
    ) -> bool:
        """True if the request's token is still valid, with role and scope; cached for a second."""
        try:
            caller = await self.token_cache.caller_of(ctx.token, ctx.workspace)
        except (Unauthenticated, Forbidden):
            return False
        return caller.may(role, scope)
