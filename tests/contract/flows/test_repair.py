"""Repair of flows by coordinators: damage that only an internal error can cause."""

import pytest
from tests.contract.conftest import ManualClock, Raw, failure, new, status
from tests.contract.flows.helpers import WORKER, flow_status, group, start, statuses, task, worked

from tenuto.engine.engine import Engine
from tenuto.engine.flows.repair import FlowRepair
from tenuto.model.agents.matching import AgentProfile


async def test_cycle_is_detected_and_failed(engine: Engine, raw: Raw) -> None:
    one = (await engine.submit(new())).id
    two = (await engine.submit(new(depends_on=[str(one)]))).id
    outside = (await engine.submit(new(depends_on=[str(two)]))).id
    free = (await engine.submit(new())).id
    await engine.pause(one)
    created = f"insert into task_dependency (task, needs, workspace, met) select '{one}', '{two}',"
    no = "0" if raw.path is not None else "false"
    await raw.execute(f"{created} workspace, {no} from task where id = '{one}'")
    await raw.execute(f"update task set unmet = 1 where id = '{one}'")
    await raw.execute(f"update task set awaited = 2 where id = '{two}'")
    assert await FlowRepair(engine.system).fail_cycles_once("mender") == 2
    assert [await status(engine, item) for item in (one, two, outside)] == ["FAILED"] * 3
    assert (await engine.show(one)).error_class == "dependency_cycle"
    assert await status(engine, free) == "PENDING"
    assert await FlowRepair(engine.system).fail_cycles_once("mender") == 0


async def test_wrong_counter_is_corrected(
    engine: Engine, agent: AgentProfile, raw: Raw, clock: ManualClock
) -> None:
    flow = await start(
        engine,
        "g",
        group("g", "a", "b", order="parallel", next="end"),
        *(task(key) for key in ("a", "b", "end")),
    )
    await raw.execute("update task_group set open = open + 1")
    await worked(engine, agent)
    assert await flow_status(engine, flow) == "RUNNING"
    clock.advance(minutes=6)
    assert await FlowRepair(engine.system).recount_once("mender") == 1
    assert await worked(engine, agent) == ["end"]
    assert await flow_status(engine, flow) == "COMPLETED"
    assert await FlowRepair(engine.system).recount_once("mender") == 0


async def test_pending_outcomes_are_not_a_wrong_counter(
    engine: Engine, agent: AgentProfile, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many have failed with one, more than are counted at once, and one still runs."""
    monkeypatch.setattr("tenuto.engine.flows.advance.MAX_CASCADE_ROWS", 2)
    keys = [f"c{number}" for number in range(4)]
    flow = await start(
        engine,
        "g",
        group("g", "a", "slow", *keys, order="parallel", join="all_done"),
        task("a"),
        task("slow"),
        *(task(key, depends_on=["a"]) for key in keys),
    )
    claimed = {work.key: work for work in await engine.claim(agent, WORKER, 2)}
    await engine.fail(claimed["a"].fence, failure(retryable=False))
    clock.advance(minutes=6)
    await engine.heartbeat([claimed["slow"].fence])
    assert await FlowRepair(engine.system).recount_once("mender") == 0
    while await engine.flows.run_deferred_once():
        pass
    assert (await statuses(engine, flow))["g"] == ["RUNNING"]
    await engine.complete(claimed["slow"].fence)
    assert await flow_status(engine, flow) == "COMPLETED"
