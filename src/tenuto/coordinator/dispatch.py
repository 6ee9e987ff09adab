"""The dispatcher: claims for agents with a gateway, has their sessions spawned, and killed.

Whatever it forgets by dying, the store has: an ASSIGNED task whose session never was told runs out
of its lease, and a session that outlives its attempt is found among the unconfirmed ends.
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

from tenuto.broker.protocol import EVERYTHING
from tenuto.coordinator.gateway import KILL_S, Gateway, GatewayError, SpawnRejected
from tenuto.coordinator.rate import RateLimiter
from tenuto.crash_points import crash_point
from tenuto.engine.agents.push import PushSessions, PushTarget, SessionToKill, lease_of
from tenuto.engine.tasks.claim import ClaimedTask
from tenuto.metrics import PROCESS_METRICS
from tenuto.model import bounds
from tenuto.model.agents.matching import AgentProfile
from tenuto.model.errors import TenutoError
from tenuto.model.tasks.commands import Failure
from tenuto.model.tasks.retry import ErrorClass
from tenuto.model.tasks.task import GATEWAY, Fence
from tenuto.periodic import run_periodically
from tenuto.settings import Settings

log = logging.getLogger("tenuto.dispatch")

SLOTS = 32
"""Spawns that a gateway is asked for at once, and kills."""
OTHERS_TURN = 50
"""Agents looked at before other duties of the process have a turn."""
REST_S = 0.1
"""Seconds after a look in vain."""
SERVE_EVERY_S = 30.0
"""Seconds between words that the gateways are served."""
DEADLINE = 0.9
"""How much of an assigned task's lease its gateway has: the rest is for noting the answer."""

Issue = Callable[[UUID, UUID, Fence], str]
"""Makes the token of an attempt, from agent, workspace and fence."""


class DispatcherConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a dispatcher is given besides the store."""

    gateways: Mapping[str, Gateway]
    issue: Issue
    leads: Callable[[], Awaitable[bool]]
    """Whether this process is the one to dispatch."""
    actor: str = "dispatcher"


class Dispatcher:
    """Pushes the tasks of all workspaces, in turn, at a bounded pace."""

    def __init__(
        self, dispatching: PushSessions, means: DispatcherConfig, settings: Settings
    ) -> None:
        self._engine = dispatching
        self._means = means
        self._gateways = means.gateways
        self._settings = settings
        self._clock = dispatching.core.clock
        self._lease_s = math.ceil(settings.spawn_timeout_s)
        self._pace = RateLimiter(settings.dispatch_per_s)
        self._poke = asyncio.Event()
        self._calls: set[asyncio.Task[None]] = set()
        self._spawning: Counter[str] = Counter()
        self._killing: dict[tuple[UUID, int], str] = {}
        self._others: set[int] = set()
        """Lanes that no agent of a gateway takes from: their hints are not for us."""
        self._lanes: set[int] = set()
        """Lanes of hints since the last look."""
        self._turn = 0
        self._paced = False
        """Whether tasks wait for nothing but the pace."""
        self._unasked: set[str | None] = set()
        """Gateways last tried out by a kill that a spawn waits for, and nothing but the pace."""
        self._full = False
        """Whether something waits for a call to end."""
        self._served = -math.inf
        self._well: set[str] = set()
        self._kill_tried: set[str] = set()
        """Gateways that were left alone and last tried out by a kill."""

    async def run(self, stop: asyncio.Event) -> None:
        """Dispatch until `stop`, then give calls that are under way a moment to end."""
        silence = self._engine.core.wakeups.subscribe(self._heard)
        try:
            await run_periodically(self._guarded, self._pause, stop, self._clock, self._poke)
        finally:
            silence()
        await self.settle(self._settings.drain_s)
        for gateway in self._gateways.values():
            await gateway.close()

    async def settle(self, seconds: float) -> None:
        """Wait so long for calls under way; what is left then runs out of its lease."""
        if self._calls:
            await asyncio.wait(self._calls, timeout=seconds)
        for call in list(self._calls):
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)

    def _heard(self, topic: str) -> None:
        kind, _, rest = topic.partition(":")
        if kind == "lane":
            if rest.isdigit() and int(rest) not in self._others:
                self._lanes.add(int(rest))
                self._poke.set()
        elif topic == EVERYTHING or topic.startswith(f"worker:{GATEWAY}"):
            self._poke.set()

    def _pause(self) -> float:
        """Seconds until the next look: soon while tasks wait for the pace alone."""
        if not self._paced:
            return self._settings.poll_s
        return max(self._pace.wait_s(self._clock.now()), 0.01)

    async def _guarded(self) -> None:
        try:
            if not await self.once():
                # However many hints there are for others, looks in vain are not many.
                await self._clock.sleep(REST_S)
        except TenutoError as error:
            log.warning("dispatch has to wait: %s", error)
        except Exception:
            log.exception("a fault in the dispatch; the next look goes on")

    async def once(self) -> int:
        """Start kills and spawns, as many as may be; answers how many, without waiting for them."""
        self._paced = self._full = False
        self._unasked = set()
        if not await self._means.leads():
            return 0
        await self._serve()
        now = self._clock.now()
        states = [
            each for each in await self._engine.gateways.states() if each.name in self._gateways
        ]
        ready = {each.name for each in states if each.closed_until is None}
        probes = {each.name for each in states if each.probing(now)}
        self._well -= {each.name for each in states if each.failures}
        # Where a kill had the last try a spawn has the next, if any waits: one session that cannot
        # be killed must not keep its gateway from all others, however long those wait for the pace.
        after = probes & self._kill_tried
        first = probes - after
        started = await self._kill(ready, first)
        probes = first | after
        started += await self._push(ready, probes)
        return started + await self._kill(set(), (probes & after) - self._unasked)

    async def _serve(self) -> None:
        if self._clock.elapsed() - self._served > SERVE_EVERY_S:
            await self._engine.gateways.serve(self._gateways)
            self._served = self._clock.elapsed()

    async def _push(self, ready: set[str], probes: set[str]) -> int:
        """Claim and spawn for the agents of these gateways, everybody in turn.

        One that was left alone gets one try, and the rest when that went well.
        """
        waiting = await self._engine.targets(ready | probes)
        busy = await self._engine.busy_lanes(target.agent.workspace for target in waiting)
        self._turn += 1
        pushed, mine = 0, set[int]()
        while waiting and busy:
            again = []
            order = in_turn(waiting, self._turn)
            for number, target in enumerate(order):
                if number % OTHERS_TURN == OTHERS_TURN - 1:
                    await self._clock.sleep(0)
                lanes = await self._engine.lanes_of(target.agent)
                mine |= lanes
                name = target.agent.gateway
                if target.is_full or not lanes & busy or name not in ready | probes:
                    continue
                if not self._room(name):
                    continue
                if not (left := self._pace.left(self._clock.now())):
                    self._paced = True
                    self._unasked = await self._gateways_on_probe(order[number:], busy)
                    return pushed
                taken = await self._offer(target, left // len(waiting), probes)
                pushed += taken
                if taken:
                    again.append(_after(target, taken))
            self._others = (self._others | self._lanes | busy) - mine
            waiting = again
        self._lanes.clear()
        return pushed

    async def _gateways_on_probe(
        self, targets: Iterable[PushTarget], busy: set[int]
    ) -> set[str | None]:
        """Gateways last tried out by a kill whose agents could be given something."""
        return {
            each.agent.gateway
            for each in targets
            if each.agent.gateway in self._kill_tried
            and not each.is_full
            and await self._engine.lanes_of(each.agent) & busy
        }

    async def _offer(self, target: PushTarget, n: int, probes: set[str]) -> int:
        """Claim about so many tasks for an agent and have their sessions spawned."""
        name = target.agent.gateway
        assert name is not None
        probe = name in probes
        most = 1 if probe else max(1, min(self._room(name), n))
        works = await self._claim(target, most)
        if works:
            probes.discard(name)
            await self._spawn_all(target.agent, works, probe=probe)
        return len(works)

    def _room(self, gateway: str) -> int:
        """How many more spawns the gateway may be asked for."""
        room = max(0, SLOTS - self._spawning[gateway])
        self._full = self._full or not room
        return room

    async def _claim(self, target: PushTarget, n: int) -> list[ClaimedTask]:
        most = n if target.free is None else min(n, target.free)
        works = await self._engine.claim(target.agent, most, self._lease_s)
        # Counted when the claim is over: what the trail says of it is not later.
        self._pace.grant(len(works), self._clock.now())
        if works:
            crash_point("dispatch.claimed")
        return works

    async def _spawn_all(
        self, agent: AgentProfile, works: Sequence[ClaimedTask], *, probe: bool
    ) -> None:
        """Start the spawns, unless the gateway's one try is somebody else's."""
        assert agent.gateway is not None
        gateway = self._gateways[agent.gateway]
        if probe and not await self._engine.gateways.probe(gateway.name, gateway.deadline_s):
            for work in works:
                await self._engine.release(work.fence, self._means.actor)
            return
        if probe:
            self._kill_tried.discard(gateway.name)
        described = await self._engine.descriptions(works)
        for work in works:
            body = self._body(agent, work, described.get(work.fence.task))
            self._spawning[gateway.name] += 1
            self._start(self._spawn(gateway, agent, work, body, probe=probe))

    def _body(
        self, agent: AgentProfile, work: ClaimedTask, description: str | None
    ) -> dict[str, Any]:
        """What the gateway is asked."""
        fence = work.fence
        return {
            "workspaceId": work.workspace,
            "agentId": agent.id,
            "taskId": fence.task,
            "label": f"task:{fence.task}:{work.title[:30]}",
            "context": {
                "taskTitle": work.title,
                "taskDescription": description,
                "prompt": work.prompt,
                "inputContext": work.input,
                "checkpointData": work.checkpoint,
            },
            "callback": {
                "url": f"{self._settings.callback_url()}/api/v1",
                "token": self._means.issue(agent.id, work.workspace, fence),
            },
            "idempotencyKey": f"{fence.task}:{fence.attempt}",
        }

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        call = asyncio.get_running_loop().create_task(self._recorded(work))
        self._calls.add(call)
        call.add_done_callback(self._ended)

    def _ended(self, call: asyncio.Task[None]) -> None:
        self._calls.discard(call)
        if self._full:
            self._poke.set()

    async def _recorded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except TenutoError as error:
            log.warning("what came of a call to a gateway is not recorded: %s", error)
        except Exception:
            log.exception("a fault in a call to a gateway")

    async def _spawn(
        self,
        gateway: Gateway,
        agent: AgentProfile,
        work: ClaimedTask,
        body: Mapping[str, Any],
        *,
        probe: bool,
    ) -> None:
        PROCESS_METRICS.count("tenuto_agents_spawned_total")
        fence = work.fence
        try:
            session = await gateway.spawn(body, [*work.secrets, body["callback"]["token"]])
        except SpawnRejected as error:
            await self._not_started(fence, gateway, str(error), ErrorClass.ERROR)
            await self._fine(gateway)
        except GatewayError as error:
            await self._broke(gateway, str(error), probe=probe)
            await self._not_started(fence, gateway, str(error), ErrorClass.CONNECTION)
        else:
            crash_point("dispatch.spawned")
            await self._begin(gateway, agent, fence, session)
            await self._fine(gateway)
        finally:
            self._spawning[gateway.name] -= 1

    async def _begin(
        self, gateway: Gateway, agent: AgentProfile, fence: Fence, session: str
    ) -> None:
        """The task runs; or, if it is no longer that attempt's, the session must not."""
        actor = self._means.actor
        if await self._engine.record_session(fence, session, lease_of(agent), actor):
            crash_point("dispatch.begun")
            return
        if await self._engine.reported(fence):
            return
        log.warning(
            "conflict: attempt %d of task %s is over; its session %s at %s is killed",
            fence.attempt,
            fence.task,
            session,
            gateway.name,
        )
        left = SessionToKill(fence.task, fence.attempt, f"{GATEWAY}{gateway.name}", session)
        await self._end(gateway, left, probe=False)

    async def _not_started(
        self, fence: Fence, gateway: Gateway, why: str, error_class: ErrorClass
    ) -> None:
        message = bounds.clean(f"gateway {gateway.name}: {why}", bounds.MAX_ERROR)
        failure = Failure(message=message, error_class=error_class)
        await self._engine.not_started(fence, failure, self._means.actor)

    async def _fine(self, gateway: Gateway) -> None:
        """Note that the gateway works, the first time since it was last seen not to."""
        if gateway.name not in self._well:
            await self._engine.gateways.record_success(gateway.name)
            self._well.add(gateway.name)

    async def _broke(self, gateway: Gateway, why: str, *, probe: bool) -> None:
        self._well.discard(gateway.name)
        until = await self._engine.gateways.record_failure(gateway.name, why, probe=probe)
        if until is not None:
            log.warning("gateway %s is left alone until %s: %s", gateway.name, until, why)

    async def _kill(self, ready: set[str], probes: set[str]) -> int:
        """Start to kill sessions that were asked to stop, or that outlived their attempt."""
        names = ready | probes
        if not names:
            return 0
        doomed = await self._engine.stopping(names, self._settings.grace_s)
        doomed += await self._engine.sessions_to_kill(names)
        started = 0
        for left in doomed:
            name, key = left.gateway, (left.task, left.attempt)
            if key in self._killing or name not in ready | probes:
                continue
            if sum(1 for each in self._killing.values() if each == name) >= SLOTS:
                self._full = True
                continue
            probe = name in probes
            if probe:
                probes.discard(name)
                if not await self._engine.gateways.probe(name, KILL_S):
                    continue
                self._kill_tried.add(name)
            self._killing[key] = name
            self._start(self._killed(self._gateways[name], left, probe=probe))
            started += 1
        return started

    async def _killed(self, gateway: Gateway, left: SessionToKill, *, probe: bool) -> None:
        try:
            await self._end(gateway, left, probe=probe)
        finally:
            del self._killing[left.task, left.attempt]

    async def _end(self, gateway: Gateway, left: SessionToKill, *, probe: bool) -> None:
        """Kill a session and record the receipt; when the gateway fails, the next look tries."""
        if left.session_key is None:
            receipt = {"state": "unknown", "how": "no session was ever told; its lease is over"}
        else:
            try:
                state = await gateway.kill(left.session_key)
            except GatewayError as error:
                log.warning("session %s was not killed: %s", left.session_key, error)
                await self._broke(gateway, str(error), probe=probe)
                return
            receipt = {
                "state": state,
                "how": f"gateway {gateway.name}",
                "session": left.session_key,
                "at": self._clock.now().isoformat(),
            }
        await self._engine.confirm_killed(left, receipt, self._means.actor)
        if left.session_key is not None:
            await self._fine(gateway)


def in_turn(targets: Iterable[PushTarget], turn: int) -> list[PushTarget]:
    """One agent of each workspace after the other, beginning elsewhere at each turn."""
    spaces: dict[UUID, list[PushTarget]] = defaultdict(list)
    for target in targets:
        spaces[target.agent.workspace].append(target)
    columns = [_turned(spaces[space], turn) for space in _turned(sorted(spaces), turn)]
    return [each for row in zip_longest(*columns) for each in row if each is not None]


def _turned(items: list[Any], turn: int) -> list[Any]:
    start = turn % len(items) if items else 0
    return items[start:] + items[:start]


def _after(target: PushTarget, taken: int) -> PushTarget:
    free = None if target.free is None else target.free - taken
    return PushTarget(target.agent, free)
