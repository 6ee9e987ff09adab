"""Claim: an agent takes up to n tasks over its lanes, under a lease."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from operator import itemgetter
from typing import Any
from uuid import UUID

import msgspec

from tenuto.engine.agents.lanes import OpenLanes
from tenuto.engine.core import Core
from tenuto.engine.flows.chains import claim_snapshot
from tenuto.engine.flows.inputs import InputBuilder
from tenuto.engine.flows.plans import refers
from tenuto.engine.limits import rate_limits
from tenuto.engine.limits.rate_limits import RateLimitedClaim
from tenuto.engine.rows import decode
from tenuto.engine.tenancy.encryption import DecryptedInput, TaskSecrets
from tenuto.engine.tenancy.secret_use import Claimant
from tenuto.model import bounds
from tenuto.model.agents.lifecycle import ENDING, refusal
from tenuto.model.agents.matching import AgentProfile
from tenuto.model.errors import Forbidden, TenutoError, Unavailable
from tenuto.model.limits.quota import effective, quota_of
from tenuto.model.limits.rate_limits import Group
from tenuto.model.tasks import commands
from tenuto.model.tasks.decide import token_hash
from tenuto.model.tasks.retry import ErrorClass, RetryPolicy
from tenuto.model.tasks.task import DEFAULT_LEASE_S, Fence, Status
from tenuto.model.tenancy.access import Caller
from tenuto.model.tenancy.secrets import SecretReference, may_have_secrets
from tenuto.store.batching import Answers, WriteKind
from tenuto.store.protocol import Row, Rows, Script, Statement


class ClaimedTask(msgspec.Struct, frozen=True):
    """A claimed task as its attempt sees it."""

    fence: Fence
    workspace: UUID
    tries: int
    max_attempts: int
    lease_until: datetime
    timeout_s: int | None
    checkpoint_seq: int
    title: str
    prompt: str | None
    system_prompt: str | None
    model: str | None
    task_type: str
    command: list[str] | None
    cwd: str | None
    env: dict[str, str]
    input: Any
    metadata: dict[str, Any]
    parent: UUID | None
    trace_id: str | None
    checkpoint: Any
    flow: UUID | None = None
    key: str | None = None
    previous: Any = None
    """What the task before it in its flow has made."""
    secrets: tuple[str, ...] = ()
    """The secret values among all this: to be struck from whatever the attempt says."""


_RANK = itemgetter("rank")
_LOOKED_AT = itemgetter("watched", "input", "env", "flow")
_COLUMNS = itemgetter(
    *("id", "attempt", "workspace", "tries", "max_attempts", "lease_until", "timeout_s"),
    *("checkpoint_seq", "title", "prompt", "system_prompt", "model", "task_type", "command"),
    *("cwd", "env", "input", "metadata", "parent", "trace_id", "checkpoint", "flow", "key"),
)
"""What a work is made of, in the order of its fields."""
_MADE: Callable[..., ClaimedTask] = ClaimedTask
"""Makes a work by position: rows have no types that could be checked beforehand."""


class _ClaimRequest(msgspec.Struct, frozen=True):
    params: dict[str, Any]
    lanes: list[int]
    agent: UUID
    counted: bool
    """Whether the agent or the workspace may run only so many tasks at once."""
    limited: dict[Group, list[int]] = {}
    """Lanes whose tasks count against rate limits."""
    repeats: bool = False
    """Whether the caller brought the token, and may ask with it at several processes at once."""


class ClaimOutcomeUnknown(Exception):
    """A claim failed with an outage, and its tasks were not found: its commit may still come."""

    def __init__(self, why: Unavailable) -> None:
        super().__init__()
        self.why = why


class _UnknownClaims(msgspec.Struct, eq=False):
    """Tokens of claims by one agent and worker whose outcome is not known yet."""

    tokens: list[str]
    asking: asyncio.Lock
    """Held by the caller who finds out; the others wait for it."""


class TaskClaimer:
    """The claim family, for the agents of one workspace or of all."""

    def __init__(self, core: Core, sealing: TaskSecrets, workspace: UUID | None = None) -> None:
        self._core = core
        self._workspace = workspace
        self._sealing = sealing
        self._dressing = InputBuilder(core.plans)
        self._kind = WriteKind("claim", self._script, one_statement=True, alone=True)
        self._counted = WriteKind("claim_counted", self._counted_script, alone=True)
        self._doubts: dict[tuple[UUID, str], _UnknownClaims] = {}
        """Claims whose outcome is unknown, by agent and worker."""

    async def claim(
        self,
        agent: AgentProfile,
        worker: str,
        n: int,
        lease_s: int = DEFAULT_LEASE_S,
        token: str | None = None,
        status: Status = Status.RUNNING,
        caller: Caller | None = None,
    ) -> list[ClaimedTask]:
        """Up to n tasks that the agent may take, best rank first, now RUNNING and its own.

        `caller` decides which secrets they are handed; none is the database itself. A caller that
        may not hear the answer brings the token, and asks `claimed` by it. One that still has to
        start a session has them ASSIGNED.
        """
        bounds.text("worker", worker, bounds.MAX_TITLE, empty=False)
        bounds.number("n", max(n, 0), 0, bounds.MAX_CLAIM)
        bounds.number("lease_s", lease_s, 1, bounds.MAX_LEASE_S)
        if self._workspace not in (None, agent.workspace):
            return []
        who = (agent.id, worker)
        doubted = n > 0 and token is None and who in self._doubts
        if doubted and (late := await self._claimed_before(agent, worker, n, caller)):
            return late
        taken: list[ClaimedTask] = []
        while len(taken) < n:
            found = await self._core.lanes.eligible(agent, self._core.now())
            if found.free or found.limited:
                mine = token or self._core.clock.new_token()
                params = self._params(agent, worker, n - len(taken), lease_s, found.version, mine)
                params["status"] = status
                try:
                    rows = await self._take(found.agent, params, found, repeats=token is not None)
                except ClaimOutcomeUnknown as error:
                    if token is None:
                        doubt = self._doubts.setdefault(who, _UnknownClaims([], asyncio.Lock()))
                        doubt.tokens.append(mine)
                    raise error.why from error
                taken += await self._parse_rows(rows, mine, Claimant(agent.id, caller))
                if rows:
                    break
            if not await self._core.lanes.reload_if_changed(agent.workspace):
                break
        return taken

    def _params(
        self, agent: AgentProfile, worker: str, n: int, lease_s: int, version: int, token: str
    ) -> dict[str, Any]:
        return {
            "n": n,
            "status": Status.RUNNING,
            "workspace": agent.workspace,
            "lanes_version": version,
            "agent": agent.id,
            "worker": worker,
            "token": token_hash(token),
            "lease_s": lease_s,
            "now": self._core.now(),
        }

    async def _take(
        self, agent: AgentProfile, params: dict[str, Any], found: OpenLanes, *, repeats: bool
    ) -> Rows:
        bounded = self._core.lanes.running(agent.workspace) is not None
        counted = agent.max_concurrent is not None or bounded
        wish = _ClaimRequest(params, found.free, agent.id, counted, found.limited, repeats)
        slow = counted or bool(found.limited) or repeats
        try:
            taken: RateLimitedClaim = await self._core.batcher.submit(
                self._counted if slow else self._kind, wish, key=agent.id.int
            )
        except Unavailable as error:
            # The answer may be lost and the commit not: the token tells what became ours.
            try:
                rows = await self._taken(agent.id, params["token"])
            except Unavailable as away:
                raise ClaimOutcomeUnknown(away) from error
            if not rows:
                # A commit that waits for a standby is not visible yet.
                raise ClaimOutcomeUnknown(error) from error
            return rows
        if taken.held:
            self._core.lanes.exclude_limited(agent.workspace, found.version, taken.held)
        return taken.rows

    async def _claimed_before(
        self, agent: AgentProfile, worker: str, n: int, caller: Caller | None
    ) -> list[ClaimedTask]:
        """Up to n tasks that claims of unknown outcome took; surplus tasks are released.

        Raises `Unavailable` while an outcome stays unknown: until then nothing else is claimed.
        """
        who = (agent.id, worker)
        doubt = self._doubts[who]
        taken: list[ClaimedTask] = []
        async with doubt.asking:
            try:
                while doubt.tokens:
                    taken += await self._settled(agent, doubt.tokens[0], caller)
                    doubt.tokens.pop(0)
            except Unavailable:
                if not taken:
                    raise
            if not doubt.tokens and self._doubts.get(who) is doubt:
                del self._doubts[who]
        for work in taken[n:]:
            with suppress(TenutoError):
                command = commands.Release(fence=work.fence)
                await self._core.apply_command(work.fence.task, command, actor="engine")
        return taken[:n]

    async def _settled(
        self, agent: AgentProfile, token: str, caller: Caller | None
    ) -> list[ClaimedTask]:
        """What a claim took of which nothing was known; `Unavailable` while that may change."""
        if found := await self.claimed_by_token(agent.id, token, caller):
            return found

        def mark() -> Script[None]:
            yield Statement("commit_mark", {"workspace": agent.workspace})

        # Standbys confirm commits in order: after a later one the claim's is visible or lost.
        await self._core.store.once(mark)
        return await self.claimed_by_token(agent.id, token, caller)

    async def claimed_by_token(
        self, agent: UUID, token: str, caller: Caller | None = None
    ) -> list[ClaimedTask]:
        """What an earlier claim took with that token and still holds."""
        rows = await self._taken(agent, token_hash(token))
        return await self._parse_rows(rows, token, Claimant(agent, caller))

    async def _taken(self, agent: UUID, token: str) -> Rows:
        params = {"agent": agent, "token": token}
        return await self._core.store.fetch(Statement("claimed_by_token", params))

    def _script(self, wishes: list[_ClaimRequest]) -> Script[Answers]:
        answers = []
        for wish in wishes:
            answers.append(RateLimitedClaim((yield _statement(wish.params, wish.lanes)), {}))
        return answers

    def _counted_script(self, wishes: list[_ClaimRequest]) -> Script[Answers]:
        answers: list[Any] = []
        for wish in wishes:
            if wish.repeats and (before := (yield from _taken_before(wish))):
                answers.append(RateLimitedClaim(before, {}))
                continue
            n = wish.params["n"]
            if wish.counted:
                n = yield from self._within_capacity(wish)
            answers.append(
                n if isinstance(n, Forbidden) else (yield from _claim_within_limits(wish, n))
            )
        return answers

    def _within_capacity(self, wish: _ClaimRequest) -> Script[int | Forbidden]:
        """How many of the tasks wished for the agent and the workspace may run."""
        # Counts are statements of their own: they must see what the last holder of the lock did.
        n = yield from self._within_quota(wish)
        agents = yield Statement("agent_lock", {"agent": wish.agent})
        if not agents:
            return Forbidden("the agent was never registered", "agent_terminated")
        if agents[0]["status"] in ENDING:
            return refusal(agents[0]["status"])
        most = agents[0]["max_concurrent"]
        load = (yield Statement("agent_load", {"agent": wish.agent}))[0]["load"]
        if most is not None:
            n = min(n, most - load)
        return n

    def _within_quota(self, wish: _ClaimRequest) -> Script[int]:
        """How many of the tasks wished for the workspace's quota allows."""
        n: int = wish.params["n"]
        workspace = {"workspace": wish.params["workspace"]}
        if self._core.lanes.running(workspace["workspace"]) is None:
            return n
        rows = yield Statement("workspace_lock", workspace)
        quota = quota_of(rows[0]["quota"] if rows else None)
        most = effective(quota, self._core.lanes.ceiling).running if rows else 0
        if most is None:
            return n
        load: int = (yield Statement("workspace_load", workspace))[0]["load"]
        return min(n, most - load)

    async def _parse_rows(self, rows: Rows, token: str, claimant: Claimant) -> list[ClaimedTask]:
        works = []
        secret = []
        placed = []
        for row in sorted(rows, key=_RANK):
            try:
                works.append(_work(row, token))
            except (ValueError, TypeError, msgspec.MsgspecError) as error:
                await self._quarantine(row, error)
                continue
            watched, given, env, flow = _LOOKED_AT(row)
            if watched:
                self._core.watched.add(row["id"], claim_snapshot(row))
            if may_have_secrets(given) or may_have_secrets(env):
                secret.append(row)
            if flow is not None or refers(given):
                placed.append(row)
        # Secrets first: what a result says in the place of a reference names none.
        if secret:
            works = await self._with_secrets(works, await self._sealing.open(secret, claimant))
        if placed:
            works = await self._add_flow_inputs(works, placed)
        for work in works:
            self._sealing.remember(work.fence, work.secrets)
        return works

    async def _add_flow_inputs(self, works: list[ClaimedTask], rows: Rows) -> list[ClaimedTask]:
        """The works with what their flows add; those that lack something fail for good."""
        given = {work.fence.task: work.input for work in works}
        ready = [row for row in rows if row["id"] in given]
        dressed = await self._core.read(self._dressing.build_inputs(ready, given))
        whole = []
        for work in works:
            found = dressed.get(work.fence.task)
            if isinstance(found, TenutoError):
                failure = commands.Failure(message=found.message, retryable=False)
                await self._fail(work.fence, failure)
            elif found is None:
                whole.append(work)
            else:
                whole.append(msgspec.structs.replace(work, **found))
        return whole

    async def _fail(self, fence: Fence, failure: commands.Failure) -> None:
        """End a task for good that lacks something, whether it runs or was only assigned."""
        command: commands.Command = commands.Fail(fence=fence, failure=failure)
        try:
            await self._core.apply_command(fence.task, command, actor="engine")
        except TenutoError as error:
            if error.code == "out_of_turn":
                command = commands.NotStarted(fence=fence, failure=failure)
                with suppress(TenutoError):
                    await self._core.apply_command(fence.task, command, actor="engine")

    async def _with_secrets(
        self, works: list[ClaimedTask], opened: dict[UUID, DecryptedInput | TenutoError]
    ) -> list[ClaimedTask]:
        """The works with what was left out of them; those that lack something do not start."""
        whole = []
        for work in works:
            found = opened.get(work.fence.task)
            if isinstance(found, TenutoError):
                await self._cannot_start(work.fence, found)
            elif found is None:
                whole.append(work)
            else:
                change = {"input": found.input, "env": found.env, "secrets": found.values}
                whole.append(msgspec.structs.replace(work, **change))
        return whole

    async def _cannot_start(self, fence: Fence, error: TenutoError) -> None:
        """Give a task back whose secrets are out of reach; if that fails, its lease runs out."""
        failure = commands.Failure(message=error.message, error_class=ErrorClass.CRASH)
        command = commands.NotStarted(fence=fence, failure=failure)
        with suppress(TenutoError):
            await self._core.apply_command(fence.task, command, actor="engine")

    async def _quarantine(self, row: Row, error: Exception) -> None:
        def script() -> Script[None]:
            yield Statement(
                "quarantine",
                {
                    "id": row["id"],
                    "message": f"unreadable task: {error}",
                    "now": self._core.now(),
                    "actor": "engine",
                },
            )

        await self._core.store.once(script)


def _statement(params: dict[str, Any], lanes: list[int]) -> Statement:
    if len(lanes) == 1:
        return Statement("claim_lane", params | {"lane": lanes[0]})
    return Statement("claim", params | {"lanes": lanes})


def _taken_before(wish: _ClaimRequest) -> Script[Rows]:
    """What another claim with the token took; until this one is over, no other looks."""
    token = {"agent": wish.agent, "token": wish.params["token"]}
    yield Statement("claim_turn", {"token": token["token"]})
    # A statement of its own: it must see what the last holder of the lock took.
    return (yield Statement("claimed_by_token", token))


def _claim_within_limits(wish: _ClaimRequest, n: int) -> Script[RateLimitedClaim]:
    """Claim up to n of the tasks wished for, within the rate limits that hold for them."""
    if n <= 0:
        return RateLimitedClaim([], {})
    if not wish.limited:
        return RateLimitedClaim((yield _statement(wish.params | {"n": n}, wish.lanes)), {})

    def claim(lanes: list[int], share: int) -> Statement:
        return _statement(wish.params | {"n": share}, lanes)

    groups = wish.limited | ({(): wish.lanes} if wish.lanes else {})
    workspace, now = wish.params["workspace"], wish.params["now"]
    return (yield from rate_limits.take(workspace, groups, n, now, claim))


def _work(row: Row, token: str) -> ClaimedTask:
    task, attempt, *plain, command, cwd, env, given, metadata, parent, trace, saved, flow, key = (
        _COLUMNS(row)
    )
    if (retry := row["retry"]) is not None:
        msgspec.json.decode(retry, type=RetryPolicy)
    return _MADE(
        Fence(task, attempt, token),
        *plain,
        None if command is None else msgspec.json.decode(command, type=list[str]),
        cwd,
        {} if env is None else msgspec.json.decode(env, type=dict[str, str | SecretReference]),
        decode(given),
        {} if metadata is None else msgspec.json.decode(metadata, type=dict[str, Any]),
        parent,
        trace,
        decode(saved),
        flow,
        key,
    )
