"""Repeated submits are recognised after later changes and lost responses."""

from collections.abc import Callable
from typing import Any
from uuid import uuid4

import msgspec
import pytest
from tests.contract.conftest import Raw, new, profile, refusal, row_of
from tests.contract.flows.helpers import task
from tests.secrets.conftest import OLD

from tenuto.encryption_keys import KeyRing
from tenuto.engine.engine import Engine
from tenuto.model.errors import Unavailable
from tenuto.model.limits.budgets import Budget
from tenuto.model.limits.complexity import ComplexityRules
from tenuto.model.limits.concurrency import Concurrency
from tenuto.model.tasks.retry import RetryPolicy
from tenuto.model.tasks.submission import NewTask
from tenuto.model.tenancy.access import Caller, Role
from tenuto.model.tenancy.secret_use import Use

KEYED: dict[str, Any] = {"idempotency_key": "k"}


@pytest.fixture
def engine(engine: Engine) -> Engine:
    """One that can keep secrets."""
    engine.core._key_ring = KeyRing(OLD)
    return engine


async def test_repeated_submit_is_recognised_after_a_new_complexity_rule(
    engine: Engine, raw: Raw
) -> None:
    await engine.definitions.put(task("then"))
    hard = new(estimate_minutes=500, **KEYED)
    followed = NewTask(title="f", estimate_minutes=500, next="then", idempotency_key="f")
    first = [(await engine.submit(item)).id for item in (hard, followed)]
    for rules in (
        ComplexityRules(policy="require"),
        ComplexityRules(policy="require", middle_minutes=600),
        ComplexityRules(policy="warn"),
    ):
        await engine.complexity.set(rules)
        again = [await engine.submit(item) for item in (hard, followed)]
        assert [item.id for item in again] == first
        assert not any(item.created for item in again)
    assert await raw.count("task") == 2


async def test_repeated_submit_is_recognised_after_its_complexity_rule_is_gone(
    engine: Engine,
) -> None:
    await engine.definitions.put(task("then"))
    await engine.complexity.set(ComplexityRules(policy="require"))
    hard = new(estimate_minutes=500, **KEYED)
    followed = NewTask(title="f", estimate_minutes=500, next="then", idempotency_key="f")
    first = [(await engine.submit(item)).id for item in (hard, followed)]
    await engine.complexity.set(ComplexityRules())
    assert [(await engine.submit(item)).id for item in (hard, followed)] == first
    other = msgspec.structs.replace(hard, estimate_minutes=400)
    assert await refusal(engine.submit(other)) == "idempotency_conflict"


@pytest.mark.parametrize("more", [{}, {"next": "then"}], ids=["alone", "followed"])
async def test_repeated_submit_is_recognised_with_whole_numbers_for_fractions(
    engine: Engine, more: dict[str, Any]
) -> None:
    await engine.definitions.put(task("then"))

    def asked(base: float, cost: float) -> NewTask:
        retry, budget = RetryPolicy(base_s=base), Budget(cost_usd=cost)
        return NewTask(title="t", retry=retry, budget=budget, **KEYED, **more)

    first = await engine.submit(asked(7, 2))
    for again in (asked(7, 2), asked(7.0, 2.0)):
        assert (await engine.submit(again)).id == first.id


@pytest.mark.parametrize("bulk", [False, True])
async def test_repeated_submit_is_recognised_after_its_references_are_deleted(
    engine: Engine, raw: Raw, bulk: bool
) -> None:
    """Definitions, secrets and agents may be deleted while a client repeats its request."""
    await engine.definitions.put(task("then"))
    await engine.secrets.put("s", "value")
    agent = await engine.register_agent(msgspec.structs.replace(profile(), id=uuid4()))
    named = new(input={"x": {"$secret": "s"}}, target_agent=agent.id, **KEYED)
    followed = NewTask(title="f", next="then", idempotency_key="f")

    async def submit(task: NewTask) -> Any:
        return (await engine.submit_many([task]))[0] if bulk else await engine.submit(task)

    first = [(await submit(item)).id for item in (named, followed)]
    await engine.secrets.delete("s")
    await engine.definitions.delete("then")
    await raw.execute("delete from agent")
    assert [(await submit(item)).id for item in (named, followed)] == first
    others = (
        (msgspec.structs.replace(named, idempotency_key="other"), "not_found"),
        (msgspec.structs.replace(named, title="other"), "not_found"),
        (new(input=named.input, idempotency_key="s"), "secret_unknown"),
        (msgspec.structs.replace(followed, idempotency_key="g"), "target_unknown"),
    )
    for other, code in others:
        assert await refusal(submit(other)) == code
    assert await raw.count("task") == 2


async def test_repeated_submit_is_recognised_after_secret_rights_are_lost(engine: Engine) -> None:
    await engine.secrets.put("s", "value")
    engine.caller = Caller(
        workspace=engine.workspace,
        role=Role.MEMBER,
        scopes=frozenset({"read", "write"}),
        actor="somebody",
        key="somebody",
    )
    named = new(input={"x": {"$secret": "s"}}, **KEYED)
    first = await engine.submit(named)
    engine.caller, member = None, engine.caller
    await engine.secrets.put("s", "value", Use(role="ADMIN"))
    engine.caller = member
    assert (await engine.submit(named)).id == first.id
    other = msgspec.structs.replace(named, idempotency_key="other")
    assert await refusal(engine.submit(other)) == "secret_forbidden"


SETTLED: dict[str, Callable[[str], dict[str, Any]]] = {
    "key": lambda _: KEYED,
    "dependency": lambda need: {"depends_on": [need]},
    "turn": lambda _: {"concurrency": Concurrency(key="c", limit=1)},
    "quota": lambda _: {},
}


@pytest.mark.parametrize("mode", ["before", "after"])
@pytest.mark.parametrize("kind", SETTLED)
async def test_submit_with_a_lost_response_is_repeated_by_the_engine(
    engine: Engine,
    raw: Raw,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    mode: str,
) -> None:
    """The connection goes before or after the commit of a submit."""
    need = (await engine.submit(new("need"))).id
    if kind == "quota":
        quota = """quota = '{"pending": 5}', lanes_version = lanes_version + 1"""
        await raw.execute(f"update workspace set {quota}")
        await engine.core.lanes.reload_if_changed(engine.workspace)
    lost, whole = [mode], engine.core.store.transact

    async def transact(script: Any) -> Any:
        if lost and lost[0] == "before":
            raise Unavailable(lost.pop())
        done = await whole(script)
        if lost:
            raise Unavailable(lost.pop())
        return done

    monkeypatch.setattr(engine.core.store, "transact", transact)
    submitted = await engine.submit(new("t", **SETTLED[kind](str(need))))
    assert not lost
    assert submitted.created or kind == "key"
    assert await raw.count("task") == 2
    events = [event.event for event in await engine.events(submitted.id)]
    assert events == ["submitted", *(["ready"] if kind == "turn" else [])]
    waits = kind == "dependency"
    assert (await row_of(engine, submitted.id)).status == ("WAITING" if waits else "PENDING")
