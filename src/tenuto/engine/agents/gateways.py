"""Gateways: how those are that spawn sessions, for all coordinators alike.

One that fails three times in a row is left alone for a while, then tried once; a success ends it.
"""

from collections.abc import Iterable
from datetime import datetime, timedelta

import msgspec

from tenuto.engine.core import Core
from tenuto.model import bounds
from tenuto.model.tasks.retry import RetryPolicy, backoff
from tenuto.store.protocol import Rows, Script, Statement

TRIP_AFTER = 3
"""Failures in a row after which a gateway is left alone for a while."""
REST = RetryPolicy(base_s=1.0, cap_s=60.0)
SERVED_FOR = timedelta(minutes=2)
"""How long after a coordinator was last heard of a gateway counts as served."""


class GatewayState(msgspec.Struct, frozen=True, kw_only=True):
    """How a gateway is."""

    name: str
    failures: int
    closed_until: datetime | None
    last_error: str | None
    last_ok_at: datetime | None
    updated_at: datetime

    def status_at(self, now: datetime) -> str:
        """`connected`, `failing`, `unreachable`, or `unused` while nothing was asked of it."""
        if self.closed_until is not None and self.closed_until > now:
            return "unreachable"
        if self.failures:
            return "failing"
        return "unused" if self.last_ok_at is None else "connected"

    def is_served(self, now: datetime) -> bool:
        """Whether some coordinator pushes to it."""
        return now - self.updated_at <= SERVED_FOR

    def probing(self, now: datetime) -> bool:
        """Whether it was left alone long enough for one try."""
        return self.closed_until is not None and self.closed_until <= now


WORST = ("unreachable", "failing", "unused", "connected")


def worst(states: Iterable[GatewayState], now: datetime) -> str:
    """The worst state of all gateways that coordinators serve."""
    words = {state.status_at(now) for state in states if state.is_served(now)}
    return next((word for word in WORST if word in words), "not configured")


def obstacle(gateway: str, states: Iterable[GatewayState], now: datetime) -> str | None:
    """Why nothing is pushed through a gateway now, for people who may not see more of it."""
    for state in states:
        if state.name == gateway and state.is_served(now):
            if state.status_at(now) == "unreachable":
                return f"its gateway {gateway} does not answer"
            return None
    return f"its gateway {gateway} is not configured, or no coordinator runs"


class Gateways:
    """The gateways that coordinators serve."""

    def __init__(self, core: Core) -> None:
        self._core = core

    async def states(self) -> list[GatewayState]:
        """How the gateways are, by name."""
        rows = await self._core.store.fetch(Statement("gateways"))
        fields = GatewayState.__struct_fields__
        return [GatewayState(**{name: row[name] for name in fields}) for row in rows]

    async def serve(self, names: Iterable[str]) -> None:
        """Say that these gateways are served."""
        params = {"names": sorted(names), "now": self._core.now()}
        await self._write(Statement("gateway_served", params))

    async def record_success(self, name: str) -> None:
        """The gateway answered as it should."""
        await self._write(Statement("gateway_ok", {"name": name, "now": self._core.now()}))

    async def probe(self, name: str, seconds: float) -> bool:
        """Take the one try that the gateway gets; False when somebody else has it."""
        now = self._core.now()
        params = {"name": name, "now": now, "until": now + timedelta(seconds=seconds)}
        return bool(await self._write(Statement("gateway_probe", params)))

    async def record_failure(self, name: str, error: str, *, probe: bool) -> datetime | None:
        """Count a failure of the gateway; answers until when it is left alone.

        What was under way while it is left alone already counts for nothing more.
        """
        now, roll = self._core.now(), self._core.clock.random()
        said = bounds.clean(error, bounds.MAX_ERROR)

        def script() -> Script[datetime | None]:
            rows = yield Statement("gateway_lock", {"name": name})
            if not rows:
                return None
            closed_until: datetime | None = rows[0]["closed_until"]
            if not probe and closed_until is not None and closed_until > now:
                return closed_until
            failures = rows[0]["failures"] + 1
            if failures >= TRIP_AFTER:
                rest = backoff(REST, failures - TRIP_AFTER + 1, roll)
                closed_until = now + timedelta(seconds=rest)
            params = {"name": name, "failures": failures, "closed_until": closed_until}
            yield Statement("gateway_failed", params | {"last_error": said})
            return closed_until

        return await self._core.store.transact(script)

    async def _write(self, statement: Statement) -> Rows:
        def script() -> Script[Rows]:
            rows: Rows = yield statement
            return rows

        return await self._core.store.once(script)
