"""Gates: what people hold back, and the rates that all workers share."""

from collections.abc import Sequence
from datetime import datetime

import msgspec
from litestar import delete, get, post, put
from litestar.params import FromPath, JSONBody

from tenuto.api.routes.bodies import Written
from tenuto.api.service import InjectedContext
from tenuto.engine.limits.pauses import PauseView
from tenuto.engine.limits.rate_limits import RateLimitView
from tenuto.model.errors import Invalid, NotFound
from tenuto.model.limits.pauses import EVERYTHING, KINDS, GateKind
from tenuto.model.limits.rate_limits import RateLimit


class PauseBody(Written):
    """What to hold back: a lane by its number, an agent by its name, a type, or the workspace."""

    kind: GateKind
    subject: str | None = None
    reason: str | None = None
    until: datetime | None = None


class PauseList(msgspec.Struct, frozen=True, rename="camel"):
    """What is held back."""

    gates: Sequence[PauseView]


class RateLimitBody(Written):
    """What is limited, and to how much a minute; no provider, model or account: any."""

    provider: str | None = None
    model: str | None = None
    account: str | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None


class RateLimitList(msgspec.Struct, frozen=True, rename="camel"):
    """The limits by name."""

    rate_limits: Sequence[RateLimitView]


@get("/gates")
async def gates(desk: InjectedContext) -> PauseList:
    """What is held back now."""
    return PauseList(await desk.engine.gates.list())


@post("/gates")
async def close(desk: InjectedContext, data: JSONBody[PauseBody]) -> PauseView:
    """Let nobody claim what is meant, from now on; what runs goes on."""
    if data.subject is None and data.kind != "workspace":
        raise Invalid("name what to pause", field="subject")
    subject = EVERYTHING if data.subject is None else data.subject
    return await desk.engine.gates.close(data.kind, subject, data.reason, data.until)


@delete("/gates/{kind:str}/{subject:path}")
async def reopen(desk: InjectedContext, kind: FromPath[str], subject: FromPath[str]) -> None:
    """Let what was held back go on."""
    for known in KINDS:
        if kind == known:
            # A type may hold slashes: the subject is the rest of the path, which begins with one.
            await desk.engine.gates.open(known, subject.removeprefix("/"))
            return
    raise NotFound("that is not paused")


@get("/rate-limits")
async def rate_limits(desk: InjectedContext) -> RateLimitList:
    """The limits by name, with what is left of them."""
    return RateLimitList(await desk.engine.rate_limits.list())


@put("/rate-limits/{name:str}")
async def limit(
    desk: InjectedContext, name: FromPath[str], data: JSONBody[RateLimitBody]
) -> RateLimitView:
    """Keep a limit under its name, in place of any other."""
    return await desk.engine.rate_limits.put(RateLimit(name=name, **msgspec.structs.asdict(data)))


@delete("/rate-limits/{name:str}")
async def unlimit(desk: InjectedContext, name: FromPath[str]) -> None:
    """Forget a limit."""
    await desk.engine.rate_limits.delete(name)


HANDLERS = [gates, close, reopen, rate_limits, limit, unlimit]
