"""The duties of a coordinator: one table of them, and their functions.

A duty is bounded, can be repeated, and decides on locked rows, so two coordinators do no harm.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from itertools import chain, repeat

import msgspec

from tenuto.coordinator.resume import SuspensionDetector
from tenuto.crash_points import crash_point
from tenuto.engine.agents.registry import MAX_BATCH as AGENT_BATCH
from tenuto.engine.agents.registry import AgentMaintenance
from tenuto.engine.engine import Engine
from tenuto.engine.flows.repair import FlowRepair
from tenuto.engine.flows.start import Flows
from tenuto.engine.limits.concurrency import PermitRepair
from tenuto.engine.schedules.event_matching import CURSOR as TRIGGER_CURSOR
from tenuto.engine.schedules.event_matching import MAX_BATCH as TRIGGER_BATCH
from tenuto.engine.schedules.event_matching import TriggerRunner
from tenuto.engine.schedules.firing import MAX_BATCH as SCHEDULE_BATCH
from tenuto.engine.schedules.firing import ScheduleRunner
from tenuto.engine.tasks.maintenance import BATCH, EVERY_LEASE, Sink
from tenuto.model.errors import TenutoError
from tenuto.periodic import MAX_BATCHES, repeat_while_full
from tenuto.store.protocol import Row

log = logging.getLogger("tenuto.coordinator")

ALERTS = "tenuto.alerts"


class DutyContext(msgspec.Struct, frozen=True):
    """What duties work with: the engine, the coordinator's name, exempt leases, subscribers."""

    engine: Engine
    name: str
    suspensions: SuspensionDetector
    subscribers: Mapping[str, Sink]


Work = Callable[[DutyContext], Awaitable[int]]


class Duty(msgspec.Struct, frozen=True):
    """Periodic work of a coordinator; its name labels the metric of its duration."""

    name: str
    work: Mapping[str, Work]
    """The functions to run, in order, by the name of their count in the cycle's report."""
    every_s: float = 0.0
    """Seconds between two runs; 0 is every cycle."""
    leader_only: bool = True
    """False if every coordinator runs it; it runs before the leader is elected."""
    is_long: bool = False
    """True if it may take minutes: the leadership is renewed meanwhile."""


# A full batch means that more rows are due, perhaps all of them in one workspace. From the second
# batch on workspaces take turns, so that none waits for the backlog of another. The exempt leases
# are computed again before each batch: the system may have been suspended.


async def run_deferred_work(ctx: DutyContext) -> int:
    """Runs due deferred work of cascades, postpones what fails; returns the number of rows run."""
    flows = Flows(ctx.engine.system, ctx.engine.workspace, ctx.name)
    return await repeat_while_full(flows.run_deferred_once, 1)


async def expire(ctx: DutyContext) -> int:
    """Ends attempts whose lease has expired, except exempt ones; returns their number."""
    maintenance = ctx.engine.maintenance
    batches = chain([maintenance.expire_once], repeat(maintenance.expire_shared))

    async def expire_batch() -> int:
        exempt = ctx.suspensions.lease_exemption()
        if exempt == EVERY_LEASE:
            return 0
        done = await next(batches)(ctx.name, exempt=exempt)
        ctx.suspensions.record_answer()
        return done

    if expired := await repeat_while_full(expire_batch, BATCH):
        crash_point("coordinator.expired")
    return expired


async def promote(ctx: DutyContext) -> int:
    """Applies due timers of tasks, for example retries, except exempt ones; returns how many."""
    maintenance = ctx.engine.maintenance

    async def promote_shared() -> int:
        ctx.suspensions.record_answer()
        return await maintenance.promote_shared(ctx.name, exempt=ctx.suspensions.lease_exemption())

    promoted = await maintenance.promote_once(ctx.name, exempt=ctx.suspensions.lease_exemption())
    if promoted == BATCH:
        promoted += await repeat_while_full(promote_shared, 1, MAX_BATCHES - 1)
    if promoted:
        crash_point("coordinator.promoted")
    return promoted


async def mark_stale_agents(ctx: DutyContext) -> int:
    """Marks silent agents stale, ends drained ones; returns how many, 0 just after a suspension."""
    if ctx.suspensions.lease_exemption() == EVERY_LEASE:
        return 0
    agents = AgentMaintenance(ctx.engine.system)
    return await repeat_while_full(lambda: agents.mark_stale_once(ctx.name), AGENT_BATCH)


async def run_schedules(ctx: DutyContext) -> int:
    """Starts flows of due schedules; returns the number of schedules."""
    return await repeat_while_full(ScheduleRunner(ctx.engine.system).fire_once, SCHEDULE_BATCH)


async def relay(ctx: DutyContext) -> int:
    """Passes new events to alerts, triggers, subscribers; logs their errors; returns the sum."""
    relayed = await ctx.engine.maintenance.relay_once(ALERTS, _log_severe_events, errors=True)
    relays: dict[str, Callable[[], Awaitable[int]]] = {TRIGGER_CURSOR: partial(run_triggers, ctx)}
    relays |= {
        subscriber: partial(relay_to, ctx, subscriber, sink)
        for subscriber, sink in ctx.subscribers.items()
    }
    for subscriber, relay_events in relays.items():
        try:
            relayed += await relay_events()
        except TenutoError as error:
            log.warning("subscriber %s failed: %s", subscriber, error)
        except Exception:
            # Its cursor does not move, so it misses nothing; the others must not wait for it.
            log.exception(
                "internal error in subscriber %s; it gets the same events again", subscriber
            )
    return relayed


async def run_triggers(ctx: DutyContext) -> int:
    """Starts flows of triggers that match new events; returns the number of events read."""
    triggers = TriggerRunner(ctx.engine.system)
    relayed = 0
    for _ in range(MAX_BATCHES):
        done = await triggers.trigger_once()
        relayed += done
        if done < TRIGGER_BATCH or triggers.is_over_limit:
            break
    return relayed


async def relay_to(ctx: DutyContext, subscriber: str, sink: Sink) -> int:
    """Passes new events to one subscriber; returns their number."""
    maintenance = ctx.engine.maintenance
    return await repeat_while_full(lambda: maintenance.relay_once(subscriber, sink), BATCH)


async def _log_severe_events(events: Sequence[Row]) -> None:
    """Logs events at level ERROR and CRITICAL, for operators; this is a subscriber."""
    for event in events:
        if event["level"] == "CRITICAL":
            log.critical("%s %s: %s", event["kind"], event["task"], event["message"])
        elif event["level"] == "ERROR":
            log.error("%s %s: %s", event["kind"], event["task"], event["message"])


async def archive(ctx: DutyContext) -> int:
    """Archives a batch of tasks that finished over 7 days ago; returns their number."""
    return await ctx.engine.maintenance.archive_once(ctx.name)


async def prune(ctx: DutyContext) -> int:
    """Deletes old payloads, events and more, and marks lost workers; returns the number of rows."""
    pruned = await ctx.engine.maintenance.prune_once()
    return pruned + await AgentMaintenance(ctx.engine.system).prune_once()


async def repair(ctx: DutyContext) -> int:
    """Fails tasks of dependency cycles, corrects wrong counters and permits; returns how many."""
    flows = FlowRepair(ctx.engine.system)
    repaired = await flows.fail_cycles_once(ctx.name)
    repaired += await flows.recount_once(ctx.name)
    return repaired + await PermitRepair(ctx.engine.system).recount_once(ctx.name)


DUTIES = (
    Duty("flow", {"flowed": run_deferred_work}, leader_only=False),
    Duty("expire", {"expired": expire}),
    Duty("promote", {"promoted": promote}),
    Duty("agents", {"agents": mark_stale_agents}),
    Duty("fire", {"fired": run_schedules}),
    Duty("relay", {"relayed": relay}),
    Duty(
        "tidy",
        {"archived": archive, "pruned": prune, "mended": repair},
        every_s=60.0,
        is_long=True,
    ),
)
"""The duties in the order in which a cycle runs them."""
