"""Claims tasks for an agent: up to n tasks of its open lanes, each under a lease."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from operator import itemgetter
from typing import Any
from uuid import UUID

import msgspec

from tenuto.engine.agents.lanes import OpenLanes
from tenuto.engine.core import Core, KnownAttempt
from tenuto.engine.flows.chains import claim_snapshot
from tenuto.engine.flows.inputs import InputBuilder
from tenuto.engine.flows.plans import has_reference_marker
from tenuto.engine.limits import rate_limits
from tenuto.engine.limits.rate_limits import RateLimitedClaim
from tenuto.engine.tenancy.encryption import DecryptedInput, TaskSecrets
from tenuto.engine.tenancy.secret_use import Claimant
from tenuto.model import bounds
from tenuto.model.agents.lifecycle import ENDING, claim_refusal
from tenuto.model.agents.matching import AgentProfile
from tenuto.model.errors import Forbidden, TenutoError, Unavailable
from tenuto.model.limits.quota import effective_quota, parse_quota
from tenuto.model.limits.rate_limits import LimitNames
from tenuto.model.tasks import commands
from tenuto.model.tasks.retry import ErrorClass, RetryPolicy
from tenuto.model.tasks.task import DEFAULT_LEASE_S, Fence, Status, token_hash
from tenuto.model.tenancy.access import Caller
from tenuto.model.tenancy.redact import Redactor
from tenuto.model.tenancy.secrets import (
    REFERENCE_MARK,
    SECRETS_MARK,
    SecretReference,
    may_have_secrets,
)
from tenuto.store.batching import Answers, WriteKind
from tenuto.store.protocol import Row, Rows, Script, Statement


class ClaimedTask(msgspec.Struct, frozen=True):
    """A claimed task with all the data that its attempt receives."""

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
    """The result of the previous task in its flow."""
    secrets: tuple[str, ...] = ()
    """The secret values in the fields above; they are redacted from everything it reports."""


_BY_RANK = itemgetter("rank")
_CHECKED_COLUMNS = itemgetter("watched", "input", "env", "flow")
_TASK_COLUMNS = itemgetter(
    *("id", "attempt", "workspace", "tries", "max_attempts", "lease_until", "timeout_s"),
    *("checkpoint_seq", "title", "prompt", "system_prompt", "model", "task_type", "command"),
    *("cwd", "env", "input", "metadata", "parent", "trace_id", "checkpoint", "flow", "key"),
)
"""The columns of a `ClaimedTask`, in the order of its fields."""
_NEW_CLAIMED_TASK: Callable[..., ClaimedTask] = ClaimedTask
"""Creates a `ClaimedTask` from positional values, which have no static types."""


class _ClaimRequest(msgspec.Struct, frozen=True):
    """One claim as it waits for its batch: query parameters and open lanes."""

    params: dict[str, Any]
    lanes: list[int]
    agent: UUID
    has_running_limit: bool
    """True if the agent or the workspace limits the number of running tasks."""
    rate_limited_lanes: dict[LimitNames, list[int]] = {}
    """Lanes whose tasks count against rate limits."""
    has_caller_token: bool = False
    """True if the caller sent the token, and may repeat the claim with it at other processes."""


class ClaimOutcomeUnknown(Exception):
    """An outage interrupted a claim, and a second query did not find its tasks.

    The claim may still commit.
    """

    def __init__(self, outage: Unavailable) -> None:
        super().__init__()
        self.outage = outage


class _UnknownClaims(msgspec.Struct, eq=False):
    """Tokens of claims by one agent and worker with an unknown outcome."""

    tokens: list[str]
    lock: asyncio.Lock
    """Held by the caller that queries the outcome; other callers wait for it."""


class TaskClaimer:
    """Claims tasks for the agents of one workspace, or of all if `workspace` is `None`."""

    def __init__(
        self, core: Core, task_secrets: TaskSecrets, workspace: UUID | None = None
    ) -> None:
        self._core = core
        self._workspace = workspace
        self._task_secrets = task_secrets
        self._input_builder = InputBuilder(core.plans)
        self._plain_kind = WriteKind("claim", self._plain_script, one_statement=True, alone=True)
        self._limited_kind = WriteKind("claim_counted", self._limited_script, alone=True)
        self._unknown_claims: dict[tuple[UUID, str], _UnknownClaims] = {}
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
        """Claims up to `n` tasks, best rank first; raises `Forbidden` for an agent that is ending.

        Tasks of an earlier claim with an unknown outcome are returned first. `caller` decides which
        secrets the tasks receive; `None` is a program on the database. A caller that may lose the
        response sends its own `token`, and later passes the token to `claimed_by_token`. A caller
        that still has to start a session claims with status ASSIGNED.
        """
        bounds.check_text("worker", worker, bounds.MAX_TITLE, empty=False)
        bounds.check_number("n", max(n, 0), 0, bounds.MAX_CLAIM)
        bounds.check_number("lease_s", lease_s, 1, bounds.MAX_LEASE_S)
        if self._workspace not in (None, agent.workspace):
            return []
        key = (agent.id, worker)
        has_unknown = n > 0 and token is None and key in self._unknown_claims
        if has_unknown and (
            recovered := await self._recover_unknown_claims(agent, worker, n, caller)
        ):
            return recovered
        claimed: list[ClaimedTask] = []
        while len(claimed) < n:
            open_lanes = await self._core.lanes.open_lanes(agent, self._core.now())
            if open_lanes.free or open_lanes.limited:
                own_token = token or self._core.clock.new_token()
                params = self._params(
                    agent, worker, n - len(claimed), lease_s, open_lanes.version, own_token
                )
                params["status"] = status
                try:
                    rows = await self._submit_claim(
                        open_lanes.agent, params, open_lanes, has_caller_token=token is not None
                    )
                except ClaimOutcomeUnknown as error:
                    if token is None:
                        unknown = self._unknown_claims.setdefault(
                            key, _UnknownClaims([], asyncio.Lock())
                        )
                        unknown.tokens.append(own_token)
                    raise error.outage from error
                claimed += await self._build_tasks(rows, own_token, Claimant(agent.id, caller))
                if rows:
                    break
            if not await self._core.lanes.reload_if_changed(agent.workspace):
                break
        return claimed

    def _params(
        self, agent: AgentProfile, worker: str, n: int, lease_s: int, version: int, token: str
    ) -> dict[str, Any]:
        """Returns the parameters of the claim queries, with the hash of the token."""
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

    async def _submit_claim(
        self,
        agent: AgentProfile,
        params: dict[str, Any],
        open_lanes: OpenLanes,
        *,
        has_caller_token: bool,
    ) -> Rows:
        """Claims in a shared transaction; returns the tasks' rows, or raises `ClaimOutcomeUnknown`.

        The outcome is unknown if the store is away and the claim may still have committed. Used-up
        rate limits close lanes in the cache.
        """
        has_quota = self._core.lanes.max_running(agent.workspace) is not None
        has_running_limit = agent.max_concurrent is not None or has_quota
        request = _ClaimRequest(
            params,
            open_lanes.free,
            agent.id,
            has_running_limit,
            open_lanes.limited,
            has_caller_token,
        )
        is_limited = has_running_limit or bool(open_lanes.limited) or has_caller_token
        try:
            result: RateLimitedClaim = await self._core.batcher.submit(
                self._limited_kind if is_limited else self._plain_kind, request, key=agent.id.int
            )
        except Unavailable as error:
            # The claim may have committed although its response is lost: find it by its token.
            try:
                rows = await self._fetch_by_token(agent.id, params["token"])
            except Unavailable as fetch_error:
                raise ClaimOutcomeUnknown(fetch_error) from error
            if not rows:
                # A commit that waits for a standby is not visible yet.
                raise ClaimOutcomeUnknown(error) from error
            return rows
        if result.exhausted:
            self._core.lanes.exclude_limited(agent.workspace, open_lanes.version, result.exhausted)
        return result.rows

    async def _recover_unknown_claims(
        self, agent: AgentProfile, worker: str, n: int, caller: Caller | None
    ) -> list[ClaimedTask]:
        """Returns up to `n` tasks of claims with an unknown outcome; releases the surplus tasks.

        Raises `Unavailable` if an outcome stays unknown and no task was found; until then nothing
        else is claimed.
        """
        key = (agent.id, worker)
        claims = self._unknown_claims[key]
        recovered: list[ClaimedTask] = []
        async with claims.lock:
            try:
                while claims.tokens:
                    recovered += await self._recover_claim(agent, claims.tokens[0], caller)
                    claims.tokens.pop(0)
            except Unavailable:
                if not recovered:
                    raise
            if not claims.tokens and self._unknown_claims.get(key) is claims:
                del self._unknown_claims[key]
        for surplus in recovered[n:]:
            with suppress(TenutoError):
                command = commands.Release(fence=surplus.fence)
                await self._core.apply_command(surplus.fence.task, command, actor="engine")
        return recovered[:n]

    async def _recover_claim(
        self, agent: AgentProfile, token: str, caller: Caller | None
    ) -> list[ClaimedTask]:
        """Returns a claim's tasks, none if it was lost; `Unavailable` while it may still commit."""
        if tasks := await self.claimed_by_token(agent.id, token, caller):
            return tasks

        def write_marker() -> Script[None]:
            yield Statement("commit_mark", {"workspace": agent.workspace})

        # Standbys confirm commits in order: after this later commit, the claim is visible or lost.
        await self._core.store.transact_one(write_marker)
        return await self.claimed_by_token(agent.id, token, caller)

    async def claimed_by_token(
        self, agent: UUID, token: str, caller: Caller | None = None
    ) -> list[ClaimedTask]:
        """Returns the tasks that an earlier claim with this token still owns."""
        rows = await self._fetch_by_token(agent, token_hash(token))
        return await self._build_tasks(rows, token, Claimant(agent, caller))

    async def _fetch_by_token(self, agent: UUID, token: str) -> Rows:
        """Returns the rows of the tasks that the agent holds with this hashed lease token."""
        params = {"agent": agent, "token": token}
        return await self._core.store.fetch(Statement("claimed_by_token", params))

    def _plain_script(self, requests: list[_ClaimRequest]) -> Script[Answers]:
        """Claims for several requests without limits, one statement each; returns their rows."""
        answers = []
        for request in requests:
            answers.append(
                RateLimitedClaim((yield _claim_statement(request.params, request.lanes)), {})
            )
        return answers

    def _limited_script(self, requests: list[_ClaimRequest]) -> Script[Answers]:
        """Claims within quotas and rate limits; a repeated token returns its earlier claim."""
        answers: list[Any] = []
        for request in requests:
            if request.has_caller_token and (earlier := (yield from _fetch_earlier_claim(request))):
                answers.append(RateLimitedClaim(earlier, {}))
                continue
            n = request.params["n"]
            if request.has_running_limit:
                n = yield from self._lock_free_capacity(request)
            answers.append(
                n if isinstance(n, Forbidden) else (yield from _claim_within_limits(request, n))
            )
        return answers

    def _lock_free_capacity(self, request: _ClaimRequest) -> Script[int | Forbidden]:
        """Locks workspace and agent; returns how many tasks they may run, maybe < 0, or an error.

        `Forbidden` is returned if the agent is unknown or accepts no tasks.
        """
        # The count is a separate statement: it must see the writes of the previous lock holder.
        n = yield from self._lock_free_quota(request)
        agents = yield Statement("agent_lock", {"agent": request.agent})
        if not agents:
            text = f'agent {request.agent} is not registered; use "orchestrate agent create"'
            return Forbidden(text, "agent_terminated")
        if agents[0]["status"] in ENDING:
            return claim_refusal(agents[0]["status"])
        max_running = agents[0]["max_concurrent"]
        running = (yield Statement("agent_load", {"agent": request.agent}))[0]["load"]
        if max_running is not None:
            n = min(n, max_running - running)
        return n

    def _lock_free_quota(self, request: _ClaimRequest) -> Script[int]:
        """Returns how many tasks the quota allows, possibly < 0; locks a workspace with a quota."""
        n: int = request.params["n"]
        workspace = {"workspace": request.params["workspace"]}
        if self._core.lanes.max_running(workspace["workspace"]) is None:
            return n
        rows = yield Statement("workspace_lock", workspace)
        quota = parse_quota(rows[0]["quota"] if rows else None)
        max_running = effective_quota(quota, self._core.lanes.ceiling).running if rows else 0
        if max_running is None:
            return n
        running: int = (yield Statement("workspace_load", workspace))[0]["load"]
        return min(n, max_running - running)

    async def _build_tasks(self, rows: Rows, token: str, claimant: Claimant) -> list[ClaimedTask]:
        """Returns tasks with secrets and inputs, best rank first; leaves out and ends broken ones.

        Tasks with an invalid row are quarantined, and tasks without their secrets or inputs are
        reported as not started or failed. The attempts are cached in `known_attempts`.
        """
        tasks = []
        secret_rows = []
        flow_rows = []
        snapshots = {}
        for row in sorted(rows, key=_BY_RANK):
            try:
                tasks.append(_parse_row(row, token))
            except (ValueError, TypeError, msgspec.MsgspecError) as error:
                await self._quarantine(row, error)
                continue
            watched, input_text, env, flow = _CHECKED_COLUMNS(row)
            if watched:
                snapshots[row["id"]] = claim_snapshot(row)
            if flow is None and env is None and _is_literal(input_text):
                continue
            if may_have_secrets(input_text) or may_have_secrets(env):
                secret_rows.append(row)
            if flow is not None or has_reference_marker(input_text):
                flow_rows.append(row)
        # Secrets first: text that a referenced result inserts must not be read as a secret name.
        if secret_rows:
            tasks = await self._add_secrets(
                tasks, await self._task_secrets.decrypt_inputs(secret_rows, claimant)
            )
        if flow_rows:
            tasks = await self._add_flow_inputs(tasks, flow_rows)
        for task in tasks:
            redactor = Redactor(task.secrets) if task.secrets else None
            attempt = KnownAttempt(task.fence.attempt, redactor, snapshots.get(task.fence.task))
            self._core.known_attempts.add(task.fence.task, attempt)
        return tasks

    async def _add_flow_inputs(self, tasks: list[ClaimedTask], rows: Rows) -> list[ClaimedTask]:
        """Returns tasks with group prompts and referenced results; fails those that miss one."""
        inputs = {task.fence.task: task.input for task in tasks}
        valid_rows = [row for row in rows if row["id"] in inputs]
        built = await self._core.read(self._input_builder.build_inputs(valid_rows, inputs))
        complete = []
        for task in tasks:
            result = built.get(task.fence.task)
            if isinstance(result, TenutoError):
                failure = commands.Failure(message=result.message, retryable=False)
                await self._fail_for_good(task.fence, failure)
            elif result is None:
                complete.append(task)
            else:
                complete.append(msgspec.structs.replace(task, **result))
        return complete

    async def _fail_for_good(self, fence: Fence, failure: commands.Failure) -> None:
        """Fails a RUNNING or ASSIGNED task without a retry; ignores a refusal."""
        command: commands.Command = commands.Fail(fence=fence, failure=failure)
        try:
            await self._core.apply_command(fence.task, command, actor="engine")
        except TenutoError as error:
            if error.code == "out_of_turn":
                command = commands.NotStarted(fence=fence, failure=failure)
                with suppress(TenutoError):
                    await self._core.apply_command(fence.task, command, actor="engine")

    async def _add_secrets(
        self, tasks: list[ClaimedTask], decrypted: dict[UUID, DecryptedInput | TenutoError]
    ) -> list[ClaimedTask]:
        """Returns tasks with decrypted secrets; reports those that miss one as not started."""
        complete = []
        for task in tasks:
            result = decrypted.get(task.fence.task)
            if isinstance(result, TenutoError):
                await self._report_not_started(task.fence, result)
            elif result is None:
                complete.append(task)
            else:
                change = {"input": result.input, "env": result.env, "secrets": result.values}
                complete.append(msgspec.structs.replace(task, **change))
        return complete

    async def _report_not_started(self, fence: Fence, error: TenutoError) -> None:
        """Ends an attempt whose secrets cannot be decrypted; if this fails, its lease expires."""
        failure = commands.Failure(message=error.message, error_class=ErrorClass.CRASH)
        command = commands.NotStarted(fence=fence, failure=failure)
        with suppress(TenutoError):
            await self._core.apply_command(fence.task, command, actor="engine")

    async def _quarantine(self, row: Row, error: Exception) -> None:
        """Quarantines a claimed task whose row cannot be parsed."""

        def script() -> Script[None]:
            yield Statement(
                "quarantine",
                {
                    "id": row["id"],
                    "message": f"invalid row: {error}",
                    "now": self._core.now(),
                    "actor": "engine",
                },
            )

        await self._core.store.transact_one(script)


def _is_literal(input_text: str | None) -> bool:
    """True if the input's JSON text certainly has no references and no secrets."""
    return input_text is None or not (REFERENCE_MARK in input_text or SECRETS_MARK in input_text)


def _claim_statement(params: dict[str, Any], lanes: list[int]) -> Statement:
    """Returns the claim query; one lane has a query of its own."""
    if len(lanes) == 1:
        return Statement("claim_lane", params | {"lane": lanes[0]})
    return Statement("claim", params | {"lanes": lanes})


def _fetch_earlier_claim(request: _ClaimRequest) -> Script[Rows]:
    """Returns the rows that an earlier claim with the same token still owns.

    Locks the token, so that claims with one token run one after the other.
    """
    params = {"agent": request.agent, "token": request.params["token"]}
    yield Statement("claim_token_lock", {"token": params["token"]})
    # A separate statement: it must see the claim of the previous lock holder.
    return (yield Statement("claimed_by_token", params))


def _claim_within_limits(request: _ClaimRequest, n: int) -> Script[RateLimitedClaim]:
    """Claims up to `n` of the requested tasks, within the rate limits of their lanes."""
    if n <= 0:
        return RateLimitedClaim([], {})
    if not request.rate_limited_lanes:
        return RateLimitedClaim(
            (yield _claim_statement(request.params | {"n": n}, request.lanes)), {}
        )

    def claim(lanes: list[int], max_tasks: int) -> Statement:
        return _claim_statement(request.params | {"n": max_tasks}, lanes)

    groups = request.rate_limited_lanes | ({(): request.lanes} if request.lanes else {})
    workspace, now = request.params["workspace"], request.params["now"]
    return (yield from rate_limits.claim_within_limits(workspace, groups, n, now, claim))


def _parse_row(row: Row, token: str) -> ClaimedTask:
    """Returns the claimed task in a row; raises `msgspec.MsgspecError` for invalid JSON."""
    (
        task,
        attempt,
        *unparsed,
        command,
        cwd,
        env,
        input_text,
        metadata,
        parent,
        trace_id,
        checkpoint,
        flow,
        key,
    ) = _TASK_COLUMNS(row)
    if (retry := row["retry"]) is not None:
        msgspec.json.decode(retry, type=RetryPolicy)
    return _NEW_CLAIMED_TASK(
        Fence(task, attempt, token),
        *unparsed,
        None if command is None else msgspec.json.decode(command, type=list[str]),
        cwd,
        {} if env is None else msgspec.json.decode(env, type=dict[str, str | SecretReference]),
        None if input_text is None else msgspec.json.decode(input_text),
        {} if metadata is None else msgspec.json.decode(metadata, type=dict[str, Any]),
        parent,
        trace_id,
        None if checkpoint is None else msgspec.json.decode(checkpoint),
        flow,
        key,
    )
