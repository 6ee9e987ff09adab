"""Usage, budgets and concurrency keys through a server."""

from tenuto.client.flows import InboxItems
from tenuto.client.remote.engine import RemoteEngine
from tenuto.engine.engine import Engine
from tenuto.model.agents.matching import AgentProfile
from tenuto.model.limits.budgets import Budget, Usage
from tenuto.model.limits.concurrency import Concurrency
from tenuto.model.tasks.commands import Failure
from tenuto.model.tasks.submission import NewTask


async def test_remote_worker_reports_its_usage(far: RemoteEngine, near: Engine) -> None:
    profile = AgentProfile(
        id=near.clock.new_id(), workspace=near.workspace, name="local", runtimes=("test",)
    )
    agent = await far.register_agent(profile)
    tasks = [
        (await far.submit(NewTask(title=f"t{n}", budget=Budget(tokens=100)))).id for n in range(3)
    ]
    claimed = {work.fence.task: work.fence for work in await far.claim(agent, "w", 3, 20)}
    await far.used(claimed[tasks[0]], Usage(model="m", input_tokens=10, cost_usd=0.5, number=1))
    await far.used(claimed[tasks[0]], Usage(model="m", input_tokens=10, cost_usd=0.5, number=1))
    await far.complete(claimed[tasks[0]], {"ok": 1}, usage=Usage(output_tokens=5))
    await far.fail(claimed[tasks[1]], Failure(message="boom"), usage=Usage(output_tokens=7))
    await far.used(claimed[tasks[2]], Usage(input_tokens=101))
    assert await far.spending() == await near.spending()
    stats = await far.spending()
    assert (stats.input_tokens, stats.output_tokens, stats.cost_usd) == (111, 12, 0.5)
    await far.confirm_pause(claimed[tasks[2]], {"state": "killed"})
    inbox = InboxItems(far)
    [item] = [entry async for entry in inbox.list()]
    answered = await inbox.approve(item.id, "fine", Budget(tokens=500))
    assert (answered.kind, answered.status) == ("budget", "APPROVED")
    view = await far.show(tasks[2])
    assert (view.status, view.budget) == ("PENDING", {"tokens": 500, "costUsd": None})
    assert view == await near.show(tasks[2])


async def test_concurrency_key_is_sent_unchanged(far: RemoteEngine) -> None:
    concurrency = Concurrency("deploy", 2, "cancel_new")
    submitted = await far.submit(NewTask(title="t", concurrency=concurrency))
    assert (await far.show(submitted.id)).concurrency == {
        "key": "deploy",
        "limit": 2,
        "policy": "cancel_new",
    }
