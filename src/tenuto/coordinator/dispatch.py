"""The push dispatcher: claims tasks for agents with a gateway; spawns and kills their sessions.

After a crash nothing is lost, because the store has it: an ASSIGNED task without a recorded session
loses its lease, and a session that outlives its attempt is found among the unconfirmed attempts.
"""

import asyncio
import logging
import math
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any
from uuid import UUID

import msgspec

from tenuto.broker.protocol import ALL_TOPICS
from tenuto.coordinator.gateway import KILL_TIMEOUT_S, Gateway, GatewayError, SpawnRejected
from tenuto.coordinator.rate import RateLimiter
from tenuto.crash_points import crash_point
from tenuto.engine.agents.push import PushSessions, PushTarget, SessionToKill, lease_seconds
from tenuto.engine.tasks.claim import ClaimedTask
from tenuto.metrics import PROCESS_METRICS
from tenuto.model import bounds
from tenuto.model.agents.matching import AgentProfile
from tenuto.model.errors import TenutoError
from tenuto.model.tasks.commands import Failure
from tenuto.model.tasks.retry import ErrorClass
from tenuto.model.tasks.task import GATEWAY_PREFIX, Fence
from tenuto.periodic import run_periodically
from tenuto.settings import Settings

log = logging.getLogger("tenuto.dispatch")

MAX_CALLS = 32
"""Most spawn calls per gateway at the same time, and most kill calls."""
YIELD_EVERY = 50
"""Agents checked before other duties of the process can run."""
EMPTY_POLL_DELAY_S = 0.1
"""Seconds to wait after a poll that started nothing."""
REPORT_GATEWAYS_EVERY_S = 30.0
"""Seconds between two reports of the gateways that this process serves."""
SPAWN_SHARE = 0.9
"""Share of an assigned task's lease for the spawn call: the rest is for recording the answer."""

IssueToken = Callable[[UUID, UUID, Fence], str]
"""Issues the token of an attempt, from agent, workspace and fence."""


class DispatcherConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of a dispatcher."""

    gateways: Mapping[str, Gateway]
    issue: IssueToken
    leads: Callable[[], Awaitable[bool]]
    """Returns true if this process is the one that dispatches."""
    actor: str = "dispatcher"


class Dispatcher:
    """Pushes tasks of all workspaces in turns, at a limited rate."""

    def __init__(
        self, sessions: PushSessions, config: DispatcherConfig, settings: Settings
    ) -> None:
        self._sessions = sessions
        self._config = config
        self._gateways = config.gateways
        self._settings = settings
        self._clock = sessions.core.clock
        self._lease_s = math.ceil(settings.spawn_timeout_s)
        self._limiter = RateLimiter(settings.dispatch_per_s)
        self._wake = asyncio.Event()
        self._calls: set[asyncio.Task[None]] = set()
        self._spawning: Counter[str] = Counter()
        self._killing: dict[tuple[UUID, int], str] = {}
        self._other_lanes: set[int] = set()
        """Lanes that no agent of a gateway claims from: their hints are ignored."""
        self._hinted_lanes: set[int] = set()
        """Lanes of hints since the last poll."""
        self._round = 0
        self._is_limited = False
        """True if tasks wait for the rate limit only."""
        self._limited_probes: set[str | None] = set()
        """Gateways last probed by a kill, for which a spawn waits for the rate limit only."""
        self._waits_for_call = False
        """True if a spawn or kill waits for a running call to end."""
        self._reported_at = -math.inf
        self._healthy: set[str] = set()
        self._probed_by_kill: set[str] = set()
        """Gateways with an open circuit that were last probed by a kill."""

    async def run(self, stop: asyncio.Event) -> None:
        """Dispatches until `stop`; then waits `drain_s` for running calls, and closes clients."""
        unsubscribe = self._sessions.core.wakeups.subscribe(self._on_hint)
        try:
            await run_periodically(
                self._run_once_logged, self._next_delay, stop, self._clock, self._wake
            )
        finally:
            unsubscribe()
        await self.finish_calls(self._settings.drain_s)
        for gateway in self._gateways.values():
            await gateway.close()

    async def finish_calls(self, timeout_s: float) -> None:
        """Waits up to `timeout_s` for running calls, then cancels them; their leases expire."""
        if self._calls:
            await asyncio.wait(self._calls, timeout=timeout_s)
        for call in list(self._calls):
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)

    def _on_hint(self, topic: str) -> None:
        """Wakes the dispatcher for hints about gateway sessions or lanes of gateways' agents."""
        kind, _, rest = topic.partition(":")
        if kind == "lane":
            if rest.isdigit() and int(rest) not in self._other_lanes:
                self._hinted_lanes.add(int(rest))
                self._wake.set()
        elif topic == ALL_TOPICS or topic.startswith(f"worker:{GATEWAY_PREFIX}"):
            self._wake.set()

    def _next_delay(self) -> float:
        """Returns the seconds until the next poll: less if tasks wait for the rate limit only."""
        if not self._is_limited:
            return self._settings.poll_s
        return max(self._limiter.wait_s(self._clock.now()), 0.01)

    async def _run_once_logged(self) -> None:
        """Polls once, and pauses if nothing was started; logs errors instead of raising them."""
        try:
            if not await self.once():
                # Limits the polls that start nothing, however many hints for other lanes arrive.
                await self._clock.sleep(EMPTY_POLL_DELAY_S)
        except TenutoError as error:
            log.warning("push dispatch is delayed: %s", error)
        except Exception:
            log.exception("internal error in push dispatch; the next poll retries")

    async def once(self) -> int:
        """Starts due kills and spawns in the background; returns how many, 0 if not leading."""
        self._is_limited = self._waits_for_call = False
        self._limited_probes = set()
        if not await self._config.leads():
            return 0
        await self._report_gateways()
        now = self._clock.now()
        states = [
            state
            for state in await self._sessions.gateways.states()
            if state.name in self._gateways
        ]
        ready = {state.name for state in states if state.closed_until is None}
        probes = {state.name for state in states if state.is_probe_due(now)}
        self._healthy -= {state.name for state in states if state.failures}
        # After a probe by a kill, the next probe is a spawn, if one waits: one session that cannot
        # be killed must not block its gateway for all spawns, however long those are rate limited.
        after_spawns = probes & self._probed_by_kill
        before_spawns = probes - after_spawns
        started = await self._start_kills(ready, before_spawns)
        probes = before_spawns | after_spawns
        started += await self._push(ready, probes)
        return started + await self._start_kills(
            set(), (probes & after_spawns) - self._limited_probes
        )

    async def _report_gateways(self) -> None:
        """Records which gateways this process serves, unless it did so in the last 30 seconds."""
        if self._clock.elapsed() - self._reported_at > REPORT_GATEWAYS_EVERY_S:
            await self._sessions.gateways.record_served(self._gateways)
            self._reported_at = self._clock.elapsed()

    async def _push(self, ready: set[str], probes: set[str]) -> int:
        """Claims tasks for the gateways' agents in turns and starts their spawns; returns how many.

        A gateway on probe gets one spawn; more follow when that succeeded.
        """
        waiting = await self._sessions.targets(ready | probes)
        busy = await self._sessions.lanes_with_tasks(target.agent.workspace for target in waiting)
        self._round += 1
        pushed, own_lanes = 0, set[int]()
        while waiting and busy:
            remaining = []
            order = round_robin(waiting, self._round)
            for number, target in enumerate(order):
                if number % YIELD_EVERY == YIELD_EVERY - 1:
                    await self._clock.sleep(0)
                lanes = await self._sessions.open_lanes(target.agent)
                own_lanes |= lanes
                gateway = target.agent.gateway
                if target.is_full or not lanes & busy or gateway not in ready | probes:
                    continue
                if not self._free_spawns(gateway):
                    continue
                if not (available := self._limiter.available(self._clock.now())):
                    self._is_limited = True
                    self._limited_probes = await self._gateways_probed_by_kill(order[number:], busy)
                    return pushed
                claimed = await self._claim_and_spawn(target, available // len(waiting), probes)
                pushed += claimed
                if claimed:
                    remaining.append(_with_less_capacity(target, claimed))
            self._other_lanes = (self._other_lanes | self._hinted_lanes | busy) - own_lanes
            waiting = remaining
        self._hinted_lanes.clear()
        return pushed

    async def _gateways_probed_by_kill(
        self, targets: Iterable[PushTarget], busy: set[int]
    ) -> set[str | None]:
        """Returns the gateways last probed by a kill whose agents could claim tasks now."""
        return {
            target.agent.gateway
            for target in targets
            if target.agent.gateway in self._probed_by_kill
            and not target.is_full
            and await self._sessions.open_lanes(target.agent) & busy
        }

    async def _claim_and_spawn(self, target: PushTarget, n: int, probes: set[str]) -> int:
        """Claims max(1, `n`) tasks at most (a probe: 1), starts their spawns; returns how many."""
        name = target.agent.gateway
        assert name is not None
        probe = name in probes
        limit = 1 if probe else max(1, min(self._free_spawns(name), n))
        claimed = await self._claim(target, limit)
        if claimed:
            probes.discard(name)
            await self._spawn_all(target.agent, claimed, probe=probe)
        return len(claimed)

    def _free_spawns(self, gateway: str) -> int:
        """Returns how many spawn calls may start now; if none, the end of a call starts a poll."""
        free = max(0, MAX_CALLS - self._spawning[gateway])
        self._waits_for_call = self._waits_for_call or not free
        return free

    async def _claim(self, target: PushTarget, n: int) -> list[ClaimedTask]:
        """Claims up to `n` tasks within the agent's capacity and counts them for the rate limit."""
        limit = n if target.free is None else min(n, target.free)
        claimed = await self._sessions.claim(target.agent, limit, self._lease_s)
        # Counted after the claim: its events in the audit trail are not later.
        self._limiter.grant(len(claimed), self._clock.now())
        if claimed:
            crash_point("dispatch.claimed")
        return claimed

    async def _spawn_all(
        self, agent: AgentProfile, claimed: Sequence[ClaimedTask], *, probe: bool
    ) -> None:
        """Starts the spawns; releases the tasks if another process has the gateway's probe."""
        assert agent.gateway is not None
        gateway = self._gateways[agent.gateway]
        if probe and not await self._sessions.gateways.reserve_probe(
            gateway.name, gateway.deadline_s
        ):
            for task in claimed:
                await self._sessions.release(task.fence, self._config.actor)
            return
        if probe:
            self._probed_by_kill.discard(gateway.name)
        descriptions = await self._sessions.descriptions(claimed)
        for task in claimed:
            body = self._spawn_body(agent, task, descriptions.get(task.fence.task))
            self._spawning[gateway.name] += 1
            self._start_call(self._spawn(gateway, agent, task, body, probe=probe))

    def _spawn_body(
        self, agent: AgentProfile, task: ClaimedTask, description: str | None
    ) -> dict[str, Any]:
        """Returns the request body of a spawn call, with a new token for the attempt."""
        fence = task.fence
        return {
            "workspaceId": task.workspace,
            "agentId": agent.id,
            "taskId": fence.task,
            "label": f"task:{fence.task}:{task.title[:30]}",
            "context": {
                "taskTitle": task.title,
                "taskDescription": description,
                "prompt": task.prompt,
                "inputContext": task.input,
                "checkpointData": task.checkpoint,
            },
            "callback": {
                "url": f"{self._settings.callback_url()}/api/v1",
                "token": self._config.issue(agent.id, task.workspace, fence),
            },
            "idempotencyKey": f"{fence.task}:{fence.attempt}",
        }

    def _start_call(self, work: Coroutine[Any, Any, None]) -> None:
        """Starts a gateway call in the background."""
        call = asyncio.get_running_loop().create_task(self._run_logged(work))
        self._calls.add(call)
        call.add_done_callback(self._on_call_done)

    def _on_call_done(self, call: asyncio.Task[None]) -> None:
        """Forgets an ended call; wakes the dispatcher if a spawn or kill waits for that."""
        self._calls.discard(call)
        if self._waits_for_call:
            self._wake.set()

    async def _run_logged(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs a gateway call; logs errors instead of raising them."""
        try:
            await work
        except TenutoError as error:
            log.warning("the result of a gateway call is not recorded: %s", error)
        except Exception:
            log.exception("internal error in a gateway call")

    async def _spawn(
        self,
        gateway: Gateway,
        agent: AgentProfile,
        task: ClaimedTask,
        body: Mapping[str, Any],
        *,
        probe: bool,
    ) -> None:
        """Requests one task's session; records it or the failure, and the gateway's health."""
        PROCESS_METRICS.count("tenuto_agents_spawned_total")
        fence = task.fence
        try:
            session = await gateway.spawn(body, [*task.secrets, body["callback"]["token"]])
        except SpawnRejected as error:
            await self._fail_attempt(fence, gateway, str(error), ErrorClass.ERROR)
            await self._record_success(gateway)
        except GatewayError as error:
            await self._record_failure(gateway, str(error), probe=probe)
            await self._fail_attempt(fence, gateway, str(error), ErrorClass.CONNECTION)
        else:
            crash_point("dispatch.spawned")
            await self._record_session(gateway, agent, fence, session)
            await self._record_success(gateway)
        finally:
            self._spawning[gateway.name] -= 1

    async def _record_session(
        self, gateway: Gateway, agent: AgentProfile, fence: Fence, session: str
    ) -> None:
        """Records a spawned session; kills it if its attempt is over, unless it reported that."""
        actor = self._config.actor
        if await self._sessions.record_session(fence, session, lease_seconds(agent), actor):
            crash_point("dispatch.begun")
            return
        if await self._sessions.has_reported_end(fence):
            return
        log.warning(
            "attempt %d of task %s is already over; killing its session %s at gateway %s",
            fence.attempt,
            fence.task,
            session,
            gateway.name,
        )
        orphan = SessionToKill(
            fence.task, fence.attempt, f"{GATEWAY_PREFIX}{gateway.name}", session
        )
        await self._kill_and_confirm(gateway, orphan, probe=False)

    async def _fail_attempt(
        self, fence: Fence, gateway: Gateway, reason: str, error_class: ErrorClass
    ) -> None:
        """Ends an attempt that could not start, with the reason, if it is still ASSIGNED."""
        message = bounds.make_storable(f"gateway {gateway.name}: {reason}", bounds.MAX_ERROR)
        failure = Failure(message=message, error_class=error_class)
        await self._sessions.record_not_started(fence, failure, self._config.actor)

    async def _record_success(self, gateway: Gateway) -> None:
        """Records a success, which closes the circuit, unless the last call was a success, too."""
        if gateway.name not in self._healthy:
            await self._sessions.gateways.record_success(gateway.name)
            self._healthy.add(gateway.name)

    async def _record_failure(self, gateway: Gateway, reason: str, *, probe: bool) -> None:
        """Counts a failure of the gateway; logs it if the gateway's circuit is open after it."""
        self._healthy.discard(gateway.name)
        until = await self._sessions.gateways.record_failure(gateway.name, reason, probe=probe)
        if until is not None:
            log.warning("gateway %s: circuit open until %s: %s", gateway.name, until, reason)

    async def _start_kills(self, ready: set[str], probes: set[str]) -> int:
        """Starts kills at `ready` gateways and one at each of `probes`; returns how many.

        Removes the gateways that it probes from `probes`.
        """
        names = ready | probes
        if not names:
            return 0
        sessions = await self._sessions.sessions_to_stop(names, self._settings.grace_s)
        sessions += await self._sessions.sessions_to_kill(names)
        started = 0
        for session in sessions:
            name, key = session.gateway, (session.task, session.attempt)
            if key in self._killing or name not in ready | probes:
                continue
            if sum(1 for busy in self._killing.values() if busy == name) >= MAX_CALLS:
                self._waits_for_call = True
                continue
            probe = name in probes
            if probe:
                probes.discard(name)
                if not await self._sessions.gateways.reserve_probe(name, KILL_TIMEOUT_S):
                    continue
                self._probed_by_kill.add(name)
            self._killing[key] = name
            self._start_call(self._kill_session(self._gateways[name], session, probe=probe))
            started += 1
        return started

    async def _kill_session(self, gateway: Gateway, session: SessionToKill, *, probe: bool) -> None:
        """Kills a session and removes it from the running kills."""
        try:
            await self._kill_and_confirm(gateway, session, probe=probe)
        finally:
            del self._killing[session.task, session.attempt]

    async def _kill_and_confirm(
        self, gateway: Gateway, session: SessionToKill, *, probe: bool
    ) -> None:
        """Kills a session, if its key is known, and records the receipt; logs gateway errors."""
        if session.session_key is None:
            receipt = {"state": "unknown", "how": "no session was recorded; its lease expired"}
        else:
            try:
                state = await gateway.kill(session.session_key)
            except GatewayError as error:
                log.warning("session %s was not killed: %s", session.session_key, error)
                await self._record_failure(gateway, str(error), probe=probe)
                return
            receipt = {
                "state": state,
                "how": f"gateway {gateway.name}",
                "session": session.session_key,
                "at": self._clock.now().isoformat(),
            }
        await self._sessions.confirm_killed(session, receipt, self._config.actor)
        if session.session_key is not None:
            await self._record_success(gateway)


def round_robin(targets: Iterable[PushTarget], number: int) -> list[PushTarget]:
    """Returns all targets, workspaces in turns; `number` rotates workspaces and their targets."""
    by_workspace: dict[UUID, list[PushTarget]] = defaultdict(list)
    for target in targets:
        by_workspace[target.agent.workspace].append(target)
    columns = [
        _rotate(by_workspace[workspace], number)
        for workspace in _rotate(sorted(by_workspace), number)
    ]
    return [
        target_or_none
        for row in zip_longest(*columns)
        for target_or_none in row
        if target_or_none is not None
    ]


def _rotate(items: list[Any], number: int) -> list[Any]:
    """Returns the items, starting at position `number` modulo their number."""
    start = number % len(items) if items else 0
    return items[start:] + items[:start]


def _with_less_capacity(target: PushTarget, claimed: int) -> PushTarget:
    """Returns the target with the claimed tasks subtracted from its capacity."""
    free = None if target.free is None else target.free - claimed
    return PushTarget(target.agent, free)
