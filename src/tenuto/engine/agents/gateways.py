"""Health of gateways, the services that spawn sessions; shared by all coordinators.

A circuit breaker opens after three failures in a row. After a pause, one probe is sent; a success
closes the circuit.
"""

from collections.abc import Iterable
from datetime import datetime, timedelta

import msgspec

from tenuto.engine.core import Core
from tenuto.model import bounds
from tenuto.model.tasks.retry import RetryPolicy, backoff
from tenuto.store.protocol import Rows, Script, Statement

TRIP_AFTER = 3
"""Failures in a row after which a gateway's circuit opens."""
OPEN_DELAYS = RetryPolicy(base_s=1.0, cap_s=60.0)
SERVED_FOR = timedelta(minutes=2)
"""Time after a coordinator's last update during which a gateway counts as served."""


class GatewayState(msgspec.Struct, frozen=True, kw_only=True):
    """Health of one gateway. While `closed_until` is in the future, its circuit is open."""

    name: str
    failures: int
    closed_until: datetime | None
    last_error: str | None
    last_ok_at: datetime | None
    updated_at: datetime

    def status_at(self, now: datetime) -> str:
        """Returns `unreachable` (circuit open), `failing`, `connected`, or `unused` (untried)."""
        if self.closed_until is not None and self.closed_until > now:
            return "unreachable"
        if self.failures:
            return "failing"
        return "unused" if self.last_ok_at is None else "connected"

    def is_served(self, now: datetime) -> bool:
        """True if a coordinator pushes to it: it was updated within `SERVED_FOR`."""
        return now - self.updated_at <= SERVED_FOR

    def is_probe_due(self, now: datetime) -> bool:
        """True if the pause of the open circuit is over, so that one probe can be sent."""
        return self.closed_until is not None and self.closed_until <= now


STATUSES_WORST_FIRST = ("unreachable", "failing", "unused", "connected")


def worst_status(states: Iterable[GatewayState], now: datetime) -> str:
    """Returns the worst status of all served gateways; `not configured` if there is none."""
    found = {state.status_at(now) for state in states if state.is_served(now)}
    return next((status for status in STATUSES_WORST_FIRST if status in found), "not configured")


def unavailable_reason(gateway: str, states: Iterable[GatewayState], now: datetime) -> str | None:
    """Returns that a gateway is unreachable, or served by no coordinator; `None` if it is usable.

    The text is for users who are not permitted to see details of the gateway.
    """
    for state in states:
        if state.name == gateway and state.is_served(now):
            if state.status_at(now) == "unreachable":
                return f"its gateway {gateway} is unreachable"
            return None
    return f"its gateway {gateway} is not configured in a running coordinator"


class Gateways:
    """Reads and writes the health of gateways."""

    def __init__(self, core: Core) -> None:
        self._core = core

    async def states(self) -> list[GatewayState]:
        """Returns the health of all gateways, ordered by name."""
        rows = await self._core.store.fetch(Statement("gateways"))
        fields = GatewayState.__struct_fields__
        return [GatewayState(**{name: row[name] for name in fields}) for row in rows]

    async def record_served(self, names: Iterable[str]) -> None:
        """Records that a coordinator serves these gateways now."""
        params = {"names": sorted(names), "now": self._core.now()}
        await self._write(Statement("gateway_served", params))

    async def record_success(self, name: str) -> None:
        """Records a valid response of the gateway, which closes its circuit."""
        await self._write(Statement("gateway_succeeded", {"name": name, "now": self._core.now()}))

    async def reserve_probe(self, name: str, reserved_s: float) -> bool:
        """Reserves the due probe of a circuit for `reserved_s`; false if reserved or not due."""
        now = self._core.now()
        params = {"name": name, "now": now, "until": now + timedelta(seconds=reserved_s)}
        return bool(await self._write(Statement("gateway_probe", params)))

    async def record_failure(self, name: str, error: str, *, probe: bool) -> datetime | None:
        """Counts a failure; returns until when the circuit is open, or `None` if it is closed.

        While it is open, only a `probe` counts. Also returns `None` for an unknown gateway.
        """
        now, random = self._core.now(), self._core.clock.random()
        message = bounds.make_storable(error, bounds.MAX_ERROR)

        def script() -> Script[datetime | None]:
            rows = yield Statement("gateway_lock", {"name": name})
            if not rows:
                return None
            closed_until: datetime | None = rows[0]["closed_until"]
            if not probe and closed_until is not None and closed_until > now:
                return closed_until
            failures = rows[0]["failures"] + 1
            if failures >= TRIP_AFTER:
                pause_s = backoff(OPEN_DELAYS, failures - TRIP_AFTER + 1, random)
                closed_until = now + timedelta(seconds=pause_s)
            params = {"name": name, "failures": failures, "closed_until": closed_until}
            yield Statement("gateway_failed", params | {"last_error": message})
            return closed_until

        return await self._core.store.transact(script)

    async def _write(self, statement: Statement) -> Rows:
        """Runs one statement in a transaction; returns its rows."""

        def script() -> Script[Rows]:
            rows: Rows = yield statement
            return rows

        return await self._core.store.transact_one(script)
