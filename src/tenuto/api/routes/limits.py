"""Routes for pauses (gates) and for rate limits that all workers share."""

from collections.abc import Sequence
from datetime import datetime

import msgspec
from litestar.params import FromPath, JSONBody

from tenuto.api.operation import ADMIN, READ, operation
from tenuto.api.routes.flow_bodies import StrictBody
from tenuto.api.service import InjectedContext
from tenuto.engine.limits.pauses import PauseView
from tenuto.engine.limits.rate_limits import RateLimitView
from tenuto.model.errors import Invalid, NotFound
from tenuto.model.limits.pauses import KINDS, WORKSPACE_SUBJECT, PauseKind
from tenuto.model.limits.rate_limits import RateLimit


class PauseBody(StrictBody):
    """What to pause: a lane by its id, an agent by its name, a task type, or the workspace."""

    kind: PauseKind
    subject: str | None = None
    reason: str | None = None
    until: datetime | None = None


class PauseList(msgspec.Struct, frozen=True, rename="camel"):
    """The active pauses."""

    gates: Sequence[PauseView]


class RateLimitBody(StrictBody):
    """A rate limit per minute; without a provider, model or account it applies to any."""

    provider: str | None = None
    model: str | None = None
    account: str | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None


class RateLimitList(msgspec.Struct, frozen=True, rename="camel"):
    """The rate limits by name."""

    rate_limits: Sequence[RateLimitView]


@operation("GET", "/gates", READ)
async def list_pauses(ctx: InjectedContext) -> PauseList:
    """Returns the active pauses."""
    return PauseList(await ctx.engine.gates.list())


@operation("POST", "/gates", ADMIN)
async def create_pause(ctx: InjectedContext, data: JSONBody[PauseBody]) -> PauseView:
    """Pauses claims for a lane, agent, task type or workspace; running tasks continue."""
    if data.subject is None and data.kind != "workspace":
        raise Invalid(
            "subject is required: a lane id, an agent name or a task type", field="subject"
        )
    subject = WORKSPACE_SUBJECT if data.subject is None else data.subject
    return await ctx.engine.gates.close(data.kind, subject, data.reason, data.until)


@operation("DELETE", "/gates/{kind:str}/{subject:path}", ADMIN)
async def delete_pause(ctx: InjectedContext, kind: FromPath[str], subject: FromPath[str]) -> None:
    """Ends a pause."""
    for known_kind in KINDS:
        if kind == known_kind:
            # A task type may contain slashes: the subject is the rest of the path, with a slash.
            await ctx.engine.gates.open(known_kind, subject.removeprefix("/"))
            return
    name = subject.removeprefix("/")
    raise NotFound(f'{kind} {name} is not paused; "orchestrate pause" lists all pauses')


@operation("GET", "/rate-limits", READ)
async def list_rate_limits(ctx: InjectedContext) -> RateLimitList:
    """Returns the rate limits by name, with their remaining capacity."""
    return RateLimitList(await ctx.engine.rate_limits.list())


@operation("PUT", "/rate-limits/{name:str}", ADMIN)
async def put_rate_limit(
    ctx: InjectedContext, name: FromPath[str], data: JSONBody[RateLimitBody]
) -> RateLimitView:
    """Creates or replaces the rate limit of this name."""
    return await ctx.engine.rate_limits.put(RateLimit(name=name, **msgspec.structs.asdict(data)))


@operation("DELETE", "/rate-limits/{name:str}", ADMIN)
async def delete_rate_limit(ctx: InjectedContext, name: FromPath[str]) -> None:
    """Deletes a rate limit."""
    await ctx.engine.rate_limits.delete(name)
