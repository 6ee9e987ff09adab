"""Secrets beside results: both are passed on, and no result resolves a secret."""

from typing import Any

import pytest
from tests.contract.conftest import Raw, claim_one, new
from tests.contract.flows.helpers import flow_status, start, task

from tenuto.engine.engine import Engine
from tenuto.engine.schedules.event_matching import TriggerRunner
from tenuto.model.flows.definition import Foreach

CANARY = "flow-canary-91c2"


@pytest.mark.parametrize("own", [True, False])
async def test_input_can_refer_to_a_secret_and_a_result(engine: Engine, own: bool) -> None:
    secret = {"secrets": {"token": CANARY}} if own else {"token": {"$secret": "db"}}
    await engine.secrets.put("db", CANARY)
    first = await engine.submit(new("a"))
    values = {"pages": {"$from": str(first.id), "path": "n"}, **secret}
    await engine.submit(new("b", depends_on=[str(first.id)], input=values))
    await engine.complete((await claim_one(engine)).fence, {"n": [1, 2]})
    work = await claim_one(engine)
    reported = {"secrets": {"token": CANARY}} if own else {"token": CANARY}
    assert work.input == {"pages": [1, 2], **reported}
    assert work.secrets == (CANARY,)


async def test_result_that_names_a_secret_is_data(engine: Engine) -> None:
    await engine.secrets.put("db", CANARY)
    named = {"pages": {"$from": "a"}, "token": {"$secret": "db"}}
    await start(engine, "a", task("a", next="b"), task("b", input=named))
    await engine.complete((await claim_one(engine)).fence, {"$secret": "db"})
    assert (await claim_one(engine)).input == {"pages": {"$secret": "db"}, "token": CANARY}


@pytest.mark.parametrize("item", [{"$secret": "db"}, {"deep": [{"$secret": "db"}]}, {"$from": "a"}])
async def test_foreach_items_of_a_result_resolve_no_secret(engine: Engine, item: Any) -> None:
    await engine.secrets.put("db", CANARY)
    foreach = task("each", control=Foreach(items={"$from": "a"}, template="item"))
    flow = await start(engine, "a", task("a", next="each"), foreach, task("item"))
    await engine.complete((await claim_one(engine)).fence, [1, item])
    assert await flow_status(engine, flow) == "FAILED"
    [failed] = [entry for entry in (await engine.list()).tasks if entry.title == "each"]
    assert (await engine.show(failed.id)).error_class == "reference_invalid"


async def test_event_resolves_no_secret(engine: Engine, raw: Raw) -> None:
    await engine.secrets.put("db", CANARY)
    await engine.definitions.put(task("job"))
    created = await engine.triggers.create("t", "deploy", "job")
    await engine.publish("deploy", {"x": {"$secret": "db"}})
    await TriggerRunner(engine.system).trigger_once()
    assert await raw.count("flow") == 0
    assert "reference" in ((await engine.triggers.get(str(created.id))).last_error or "")
