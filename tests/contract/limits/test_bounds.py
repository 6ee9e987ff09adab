"""Limits of single calls and of workspaces: exactly at the limit, and one more."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from tests.contract.conftest import (
    AGENT,
    WORKER,
    claim_all,
    failure,
    new,
    profile,
    refusal,
    running,
)

from tenuto.engine.agents.mailbox import MAX_DEQUEUED
from tenuto.engine.agents.subtasks import MAX_WAIT_S, Question
from tenuto.engine.engine import Engine
from tenuto.engine.limits import budgets
from tenuto.engine.tasks.edit import TaskChanges
from tenuto.engine.tenancy.accounts import Identity
from tenuto.engine.tenancy.passwords import MAX_PASSWORD, MIN_PASSWORD
from tenuto.metrics import PROCESS_METRICS
from tenuto.model import bounds
from tenuto.model.limits import rate_limits
from tenuto.model.limits.budgets import Usage
from tenuto.model.limits.rate_limits import RateLimit
from tenuto.model.tasks.submission import Filter
from tenuto.model.tenancy.access import Role

Call = Callable[[Engine, int], Awaitable[Any]]


async def heartbeat(engine: Engine, n: int) -> Any:
    return await engine.heartbeat([await running(engine)], n)


async def fail(engine: Engine, n: int, **fields: Any) -> None:
    await engine.fail(await running(engine), failure(message="x" * n, **fields))


async def fail_deep(engine: Engine, n: int) -> None:
    await engine.fail(await running(engine), failure(stack="x" * n))


async def take(engine: Engine, n: int) -> Any:
    await engine.register_agent(profile())
    return await engine.mailboxes.dequeue(AGENT, n)


async def wait(engine: Engine, n: int) -> Any:
    return await engine.wait(await running(engine), [], n)


async def tag(engine: Engine, tags: tuple[str, ...]) -> None:
    await engine.edit((await engine.submit(new())).id, TaskChanges(tags=tags))


async def use(engine: Engine, n: int) -> None:
    await engine.used(await running(engine), Usage(model="x" * n, input_tokens=1))


async def comment(engine: Engine, n: int) -> None:
    await engine.submit(new())
    fence = (await claim_all(engine))[-1].fence
    await engine.ask(fence, "q", Question(kind="approval", title="?"))
    [item, *_] = await engine.inbox.list()
    await engine.inbox.answer(item.id, approve=True, comment="x" * n)


async def checkpoint(engine: Engine, n: int) -> Any:
    return await engine.checkpoint(await running(engine), {}, seq=n)


CALLS: dict[str, tuple[int, Call]] = {
    "tasks of a claim": (
        bounds.MAX_CLAIM,
        lambda engine, n: engine.claim(profile(), WORKER, n),
    ),
    "lease of a claim": (
        bounds.MAX_LEASE_S,
        lambda engine, n: engine.claim(profile(), WORKER, 1, n),
    ),
    "lease of a heartbeat": (bounds.MAX_LEASE_S, heartbeat),
    "number of a checkpoint": (bounds.MAX_COUNT, checkpoint),
    "message of a failure": (bounds.MAX_ERROR, fail),
    "stack of a failure": (bounds.MAX_STACK, fail_deep),
    "a page of tasks": (bounds.MAX_PAGE, lambda engine, n: engine.list(Filter(), n)),
    "a page of the inbox": (bounds.MAX_PAGE, lambda engine, n: engine.inbox.list(limit=n)),
    "messages taken": (MAX_DEQUEUED, take),
    "tasks of an action": (
        bounds.MAX_BULK,
        lambda engine, n: engine.act("cancel", Filter(), limit=n),
    ),
    "seconds of a wait": (MAX_WAIT_S, wait),
    "tags of an edit": (bounds.MAX_TAGS, lambda engine, n: tag(engine, ("x",) * n)),
    "a tag of an edit": (bounds.MAX_NAME, lambda engine, n: tag(engine, ("x" * n,))),
    "a model in a report": (bounds.MAX_NAME, use),
    "a comment": (bounds.MAX_TEXT, comment),
}


@pytest.mark.parametrize("name", CALLS)
async def test_call_at_its_limit_is_accepted_and_beyond_refused(engine: Engine, name: str) -> None:
    maximum, call = CALLS[name]
    await call(engine, maximum)
    assert await refusal(call(engine, maximum + 1)) in ("invalid_value", "too_large")


async def test_bulk_at_its_limit_is_accepted_and_beyond_refused(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "MAX_BULK", 3)
    assert await refusal(engine.submit_many([new()] * 4)) == "bulk_too_large"
    assert len(await engine.submit_many([new()] * 3)) == 3
    assert len(await claim_all(engine)) == 3


async def test_pauses_of_a_workspace_are_limited(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tenuto.engine.limits.pauses.MAX_PAUSES", 2)
    for kind in ("a", "b", "a"):  # one that there is can be changed
        await engine.gates.close("type", kind, reason="freeze")
    assert await refusal(engine.gates.close("type", "c")) == "too_large"
    assert [item.subject for item in await engine.gates.list()] == ["a", "b"]


async def test_rate_limits_of_a_workspace_are_limited(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rate_limits, "MAX_RATE_LIMITS", 2)

    async def put(name: str) -> None:
        await engine.rate_limits.put(RateLimit(name=name, model=name, requests_per_minute=1))

    for name in ("a", "b", "a"):
        await put(name)
    assert await refusal(put("c")) == "too_large"
    assert [item.name for item in await engine.rate_limits.list()] == ["a", "b"]


async def test_password_length_is_bounded(engine: Engine) -> None:
    identity = Identity(engine.store)
    for n in (MIN_PASSWORD - 1, MAX_PASSWORD + 1):
        created = identity.create_user(f"u{n}", "x" * n, engine.workspace, Role.MEMBER)
        assert await refusal(created) == "invalid_value"
    for n in (MIN_PASSWORD, MAX_PASSWORD):
        await identity.create_user(f"u{n}", "x" * n, engine.workspace, Role.MEMBER)
        await identity.login(f"u{n}", "x" * n, str(engine.workspace))


def test_models_in_metric_labels_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets, "MAX_MODELS", 2)
    monkeypatch.setattr(budgets, "_named_models", set[str]())
    before = {
        name: PROCESS_METRICS.value("tenuto_tokens_total", model=name)
        for name in ("m1", "m2", "m3", "other")
    }
    for name in ("m1", "m2", "m3", "m1", "m4"):
        budgets.count_in_metrics(Usage(model=name, input_tokens=1))
    counted = {
        name: PROCESS_METRICS.value("tenuto_tokens_total", model=name) - n
        for name, n in before.items()
    }
    assert counted == {"m1": 2, "m2": 1, "m3": 0, "other": 2}
