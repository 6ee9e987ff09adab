"""Rate limits shared by all workers: requests are counted at claims, tokens at usage reports."""

from collections import Counter
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any
from uuid import UUID

import msgspec

from tenuto.broker.protocol import ALL_TOPICS
from tenuto.engine.agents.lanes import limit_of
from tenuto.model import bounds
from tenuto.model.errors import Invalid, NotFound
from tenuto.model.limits import rate_limits
from tenuto.model.limits.rate_limits import LimitNames, RateLimit, RateLimitUsage
from tenuto.store.protocol import Row, Rows, Script, Statement

if TYPE_CHECKING:
    from tenuto.engine.core import Core


class RateLimitView(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A rate limit as shown to users, with its remaining amounts; `None` means not limited."""

    name: str
    provider: str | None
    model: str | None
    account: str | None
    requests_per_minute: int | None
    tokens_per_minute: int | None
    requests_left: int | None
    tokens_left: int | None
    next_at: datetime | None
    """When the next request is allowed; `None` if now."""
    created_by: str | None
    created_at: datetime
    updated_at: datetime


class RateLimitedClaim(msgspec.Struct, frozen=True):
    """The claimed rows, and the limits that are used up after the claim."""

    rows: Rows
    exhausted: dict[str, datetime]
    """Used-up limits by name, with the time of their next request."""


class RateLimits:
    """The rate limits of one workspace, on behalf of one actor."""

    def __init__(self, core: "Core", workspace: UUID, actor: str | None) -> None:
        self._core = core
        self._workspace = workspace
        self._actor = actor

    async def list(self) -> Sequence[RateLimitView]:
        """Returns all rate limits, ordered by name."""
        now = self._core.now()
        return [_view(row, now) for row in await limit_rows(self._core, self._workspace)]

    async def put(self, limit: RateLimit) -> RateLimitView:
        """Creates or replaces a limit, wakes workers; counted usage stays. `Invalid`: too many."""
        limit.check()

        def script() -> Script[bool]:
            now = self._core.now()
            usage = rate_limits.initial_usage(limit, now)
            for row in (yield _lock_statement(self._workspace, [limit.name])):
                usage = rate_limits.adjust_usage(limit_of(row), limit, _stored_usage(row), now)
            rows = yield Statement("rate_limit_put", self._put_params(limit, usage, now))
            return bool(rows)

        if not await self._core.store.transact(script):
            max_limits = rate_limits.MAX_RATE_LIMITS
            text = f"the workspace already has {max_limits:,} rate limits; delete some first"
            raise Invalid(text, "too_large")
        await self._reload_and_wake()
        return next(view for view in await self.list() if view.name == limit.name)

    async def delete(self, name: str) -> None:
        """Deletes a limit and wakes all workers; raises `NotFound`."""
        bounds.check_text("name", name, bounds.MAX_TEXT)
        params = {"workspace": self._workspace, "name": name, "actor": self._actor}
        params |= {"now": self._core.now(), "id": self._core.clock.new_id()}

        def script() -> Script[bool]:
            return bool((yield Statement("rate_limit_delete", params)))

        if not await self._core.store.transact_one(script):
            raise NotFound(f"no rate limit {name!r}")
        await self._reload_and_wake()

    async def _reload_and_wake(self) -> None:
        """Reloads this process's cached limits and wakes all workers."""
        await self._core.lanes.reload_if_changed(self._workspace)
        self._core.wakeups.notify({ALL_TOPICS})

    def _put_params(self, limit: RateLimit, usage: RateLimitUsage, now: datetime) -> dict[str, Any]:
        """Returns the parameters of the query `rate_limit_put`."""
        return msgspec.structs.asdict(limit) | {
            "workspace": self._workspace,
            "taken": msgspec.json.encode(usage.taken).decode(),
            "tokens": usage.tokens,
            "most": rate_limits.MAX_RATE_LIMITS,
            "actor": self._actor,
            "now": now,
            "id": self._core.clock.new_id(),
            "data": msgspec.json.encode(limit).decode(),
        }


async def limit_rows(core: "Core", workspace: UUID) -> Sequence[Row]:
    """Returns the rows of a workspace's rate limits, ordered by name."""
    return await core.store.fetch(Statement("rate_limits", {"workspace": workspace}))


def exhausted_limits(
    rows: Sequence[Row], model: str | None, account: str | None, now: datetime
) -> dict[str, datetime]:
    """Returns the used-up limits that apply, by name, with the time of their next request."""
    exhausted = {}
    for row in rows:
        limit, usage = limit_of(row), _stored_usage(row)
        if (
            limit.applies_to(model, account)
            and rate_limits.remaining_requests(limit, usage, now) == 0
        ):
            exhausted[limit.name] = rate_limits.next_request_at(limit, usage, now)
    return exhausted


def claim_within_limits(
    workspace: UUID,
    groups: dict[LimitNames, list[int]],
    n: int,
    now: datetime,
    claim: Callable[[list[int], int], Statement],
) -> Script[RateLimitedClaim]:
    """Claims up to `n` best-ranked tasks within limits, counts requests; none if a limit is gone.

    `groups` has the lanes per set of limits. The limits' rows are locked in order of their names
    until the transaction ends, so no other claim counts meanwhile.
    """
    names = sorted({name for group in groups for name in group})
    rows = {row["name"]: row for row in (yield _lock_statement(workspace, names))}
    if len(rows) < len(names):
        return RateLimitedClaim([], {})  # a limit was deleted: the lanes are computed again
    limits = {name: limit_of(row) for name, row in rows.items()}
    usages = {name: _stored_usage(row) for name, row in rows.items()}
    remaining = {
        name: rate_limits.remaining_requests(limits[name], usages[name], now) for name in names
    }
    claimed: list[Row] = []
    counts: Counter[str] = Counter()
    for group, share in (yield from _shares_by_group(groups, remaining, n)).items():
        claimed_rows = (yield claim(groups[group], share)) if share > 0 else []
        claimed += claimed_rows
        counts.update(dict.fromkeys(group, len(claimed_rows)))
    for name in +counts:
        usages[name] = rate_limits.add_requests(usages[name], now, counts[name])
    yield from _store_usage(workspace, {name: usages[name] for name in +counts})
    exhausted = {
        name: rate_limits.next_request_at(limits[name], usages[name], now)
        for name in names
        if remaining[name] - counts[name] <= 0
    }
    return RateLimitedClaim(claimed, exhausted)


def _shares_by_group(
    groups: dict[LimitNames, list[int]], remaining: dict[str, int], n: int
) -> Script[dict[LimitNames, int]]:
    """Returns how many tasks to claim per group; several groups share `n` by their best ranks.

    `remaining` has the number of requests left by limit.
    """
    max_by_group = {
        group: min(n, rate_limits.allowed_claims(group, remaining, n)) for group in groups
    }
    if len(groups) == 1:
        return max_by_group
    heads = {}
    for group, lanes in groups.items():
        if max_by_group[group] > 0:
            rows = yield Statement("lane_heads", {"lanes": lanes, "n": max_by_group[group]})
            heads[group] = [row["rank"] for row in rows]
    return rate_limits.allocate_claims(heads, remaining, n)


def charge_tokens(
    workspace: UUID, agent: UUID | None, model: str | None, tokens: int, now: datetime
) -> Script[None]:
    """Counts tokens against the token limits of the model (`None`: the agent's) and account."""
    if tokens <= 0:
        return
    rows = yield Statement("rate_limits", {"workspace": workspace})
    token_limits = [limit_of(row) for row in rows if row["tokens_per_minute"] is not None]
    if not token_limits:
        return
    agent_model = yield from _load_agent_model(workspace, agent)
    group = rate_limits.applicable_limit_names(
        token_limits, model or agent_model.model, agent_model.account
    )
    if not group:
        return
    usages = {}
    for row in (yield _lock_statement(workspace, list(group))):
        usages[row["name"]] = rate_limits.subtract_tokens(
            limit_of(row), _stored_usage(row), now, tokens
        )
    yield from _store_usage(workspace, usages)


class _AgentModel(msgspec.Struct, frozen=True):
    """The fields of an agent that decide which limits apply."""

    model: str | None = None
    account: str | None = None


def _load_agent_model(workspace: UUID, agent: UUID | None) -> Script[_AgentModel]:
    """Returns the agent's model and account; both `None` if there is no such agent."""
    if agent is None:
        return _AgentModel()
    rows = yield Statement("agent", {"workspace": workspace, "id": agent})
    return msgspec.json.decode(rows[0]["profile"], type=_AgentModel) if rows else _AgentModel()


def _store_usage(workspace: UUID, usages: dict[str, RateLimitUsage]) -> Script[None]:
    """Writes the usage of limits, by name. The caller has locked them."""
    if usages:
        usage_rows = [
            (name, msgspec.json.encode(usage.taken).decode(), usage.tokens, usage.counted_at)
            for name, usage in sorted(usages.items())
        ]
        yield Statement("rate_limits_update_usage", {"workspace": workspace}, {"used": usage_rows})


def _lock_statement(workspace: UUID, names: list[str]) -> Statement:
    """Returns the statement that locks and reads the limits with these names."""
    return Statement("rate_limits_locked", {"workspace": workspace, "names": names})


def _stored_usage(row: Row) -> RateLimitUsage:
    """Returns the usage in a limit's row."""
    taken = msgspec.json.decode(row["taken"], type=rate_limits.TakenRequests)
    return RateLimitUsage(taken, row["tokens"], row["counted_at"])


def _view(row: Row, now: datetime) -> RateLimitView:
    """Returns the limit in a row as shown to users, with what is left of it now."""
    limit, usage = limit_of(row), _stored_usage(row)
    requests_left = rate_limits.remaining_requests(limit, usage, now)
    next_at = rate_limits.next_request_at(limit, usage, now)
    return RateLimitView(
        **msgspec.structs.asdict(limit),
        requests_left=None if limit.requests_per_minute is None else requests_left,
        tokens_left=(
            None
            if limit.tokens_per_minute is None
            else int(rate_limits.remaining_tokens(limit, usage, now))
        ),
        next_at=next_at if next_at > now else None,
        created_by=row["created_by"],
        created_at=row["created_at"],
        updated_at=row["updated_at"],
    )
