"""Rate limits: what all workers share, counted where they claim and where attempts report."""

from collections import Counter
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any
from uuid import UUID

import msgspec

from tenuto.broker.protocol import EVERYTHING
from tenuto.engine.agents.lanes import limit_of
from tenuto.model import bounds
from tenuto.model.errors import Invalid, NotFound
from tenuto.model.limits import rate_limits
from tenuto.model.limits.rate_limits import Group, RateLimit, RateLimitUsage
from tenuto.store.protocol import Row, Rows, Script, Statement

if TYPE_CHECKING:
    from tenuto.engine.core import Core


class RateLimitView(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A limit as people see it, with what is left of it now; none: not limited."""

    name: str
    provider: str | None
    model: str | None
    account: str | None
    requests_per_minute: int | None
    tokens_per_minute: int | None
    requests_left: int | None
    tokens_left: int | None
    next_at: datetime | None
    """When the next request may be made, unless that is now."""
    created_by: str | None
    created_at: datetime
    updated_at: datetime


class RateLimitedClaim(msgspec.Struct, frozen=True):
    """What a claim within limits took, and which limits it left used up, until when."""

    rows: Rows
    held: dict[str, datetime]


class RateLimits:
    """The rate limits of one workspace, on behalf of one actor."""

    def __init__(self, core: "Core", workspace: UUID, actor: str | None) -> None:
        self._core = core
        self._workspace = workspace
        self._actor = actor

    async def list(self) -> Sequence[RateLimitView]:
        """The limits by name."""
        now = self._core.now()
        return [_view(row, now) for row in await limit_rows(self._core, self._workspace)]

    async def put(self, limit: RateLimit) -> RateLimitView:
        """Keep a limit under its name, in place of any other; what was used stays used."""
        limit.check()

        def script() -> Script[bool]:
            now = self._core.now()
            usage = rate_limits.fresh(limit, now)
            for row in (yield _locked(self._workspace, [limit.name])):
                usage = rate_limits.adjusted(limit_of(row), limit, _usage(row), now)
            rows = yield Statement("rate_limit_put", self._params(limit, usage, now))
            return bool(rows)

        if not await self._core.store.transact(script):
            most = rate_limits.MAX_RATE_LIMITS
            raise Invalid(f"the workspace has {most:,} rate limits already", "too_large")
        await self._changed()
        return next(each for each in await self.list() if each.name == limit.name)

    async def delete(self, name: str) -> None:
        """Forget a limit; workers look at once."""
        bounds.text("name", name, bounds.MAX_TEXT)
        params = {"workspace": self._workspace, "name": name, "actor": self._actor}
        params |= {"now": self._core.now(), "id": self._core.clock.new_id()}

        def script() -> Script[bool]:
            return bool((yield Statement("rate_limit_drop", params)))

        if not await self._core.store.once(script):
            raise NotFound(f"no rate limit {name!r}")
        await self._changed()

    async def _changed(self) -> None:
        await self._core.lanes.reload_if_changed(self._workspace)
        self._core.wakeups.announce({EVERYTHING})

    def _params(self, limit: RateLimit, usage: RateLimitUsage, now: datetime) -> dict[str, Any]:
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
    """The rows of a workspace's limits, by name."""
    return await core.store.fetch(Statement("rate_limits", {"workspace": workspace}))


def used_up(
    rows: Sequence[Row], model: str | None, account: str | None, now: datetime
) -> dict[str, datetime]:
    """Of the limits that hold for a model on an account: those used up, and until when."""
    found = {}
    for row in rows:
        limit, usage = limit_of(row), _usage(row)
        if limit.applies(model, account) and rate_limits.requests_left(limit, usage, now) == 0:
            found[limit.name] = rate_limits.next_request_at(limit, usage, now)
    return found


def take(
    workspace: UUID,
    groups: dict[Group, list[int]],
    n: int,
    now: datetime,
    claim: Callable[[list[int], int], Statement],
) -> Script[RateLimitedClaim]:
    """Claim up to n tasks over lanes by their limits, best rank first, and count what was taken.

    The limits' rows are held in order of their names until the end: nobody else counts meanwhile.
    """
    names = sorted({name for group in groups for name in group})
    rows = {row["name"]: row for row in (yield _locked(workspace, names))}
    if len(rows) < len(names):
        return RateLimitedClaim([], {})  # one was deleted: the lanes are looked at anew
    known = {name: limit_of(row) for name, row in rows.items()}
    usages = {name: _usage(row) for name, row in rows.items()}
    left = {name: rate_limits.requests_left(known[name], usages[name], now) for name in names}
    taken: list[Row] = []
    counts: Counter[str] = Counter()
    for group, share in (yield from _shares(groups, left, n)).items():
        found = (yield claim(groups[group], share)) if share > 0 else []
        taken += found
        counts.update(dict.fromkeys(group, len(found)))
    for name in +counts:
        usages[name] = rate_limits.add_requests(usages[name], now, counts[name])
    yield from _write(workspace, {name: usages[name] for name in +counts})
    held = {
        name: rate_limits.next_request_at(known[name], usages[name], now)
        for name in names
        if left[name] - counts[name] <= 0
    }
    return RateLimitedClaim(taken, held)


def _shares(
    groups: dict[Group, list[int]], left: dict[str, int], n: int
) -> Script[dict[Group, int]]:
    """How many tasks to claim of each group; of several, where the best ones are is looked up."""
    most = {group: min(n, rate_limits.allowance(group, left, n)) for group in groups}
    if len(groups) == 1:
        return most
    heads = {}
    for group, lanes in groups.items():
        if most[group] > 0:
            rows = yield Statement("lane_heads", {"lanes": lanes, "n": most[group]})
            heads[group] = [row["rank"] for row in rows]
    return rate_limits.allocate_claims(heads, left, n)


def charge(
    core: "Core", workspace: UUID, agent: UUID | None, model: str | None, tokens: int, now: datetime
) -> Script[None]:
    """Count tokens that an attempt of the agent has used of a model against the limits for it."""
    del core
    if tokens <= 0:
        return
    rows = yield Statement("rate_limits", {"workspace": workspace})
    found = [limit_of(row) for row in rows if row["tokens_per_minute"] is not None]
    if not found:
        return
    profile = yield from _profile(workspace, agent)
    group = rate_limits.group_of(found, model or profile.model, profile.account)
    if not group:
        return
    usages = {}
    for row in (yield _locked(workspace, list(group))):
        usages[row["name"]] = rate_limits.with_tokens(limit_of(row), _usage(row), now, tokens)
    yield from _write(workspace, usages)


class _AgentModel(msgspec.Struct, frozen=True):
    """What limits look at of an agent."""

    model: str | None = None
    account: str | None = None


def _profile(workspace: UUID, agent: UUID | None) -> Script[_AgentModel]:
    if agent is None:
        return _AgentModel()
    rows = yield Statement("agent", {"workspace": workspace, "id": agent})
    return msgspec.json.decode(rows[0]["profile"], type=_AgentModel) if rows else _AgentModel()


def _write(workspace: UUID, usages: dict[str, RateLimitUsage]) -> Script[None]:
    if usages:
        used = [
            (name, msgspec.json.encode(usage.taken).decode(), usage.tokens, usage.counted_at)
            for name, usage in sorted(usages.items())
        ]
        yield Statement("rate_limits_used", {"workspace": workspace}, {"used": used})


def _locked(workspace: UUID, names: list[str]) -> Statement:
    return Statement("rate_limits_locked", {"workspace": workspace, "names": names})


def _usage(row: Row) -> RateLimitUsage:
    taken = msgspec.json.decode(row["taken"], type=rate_limits.Taken)
    return RateLimitUsage(taken, row["tokens"], row["counted_at"])


def _view(row: Row, now: datetime) -> RateLimitView:
    limit, usage = limit_of(row), _usage(row)
    requests = rate_limits.requests_left(limit, usage, now)
    opens = rate_limits.next_request_at(limit, usage, now)
    return RateLimitView(
        **msgspec.structs.asdict(limit),
        requests_left=None if limit.requests_per_minute is None else requests,
        tokens_left=(
            None
            if limit.tokens_per_minute is None
            else int(rate_limits.tokens_left(limit, usage, now))
        ),
        next_at=opens if opens > now else None,
        created_by=row["created_by"],
        created_at=row["created_at"],
        updated_at=row["updated_at"],
    )
