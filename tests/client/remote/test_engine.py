"""The remote engine returns the same results as the engine itself."""

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import msgspec
import pytest
from tests.api.conftest import Api

from tenuto.client.remote.engine import AnyEngine, RemoteEngine, connect_to_server
from tenuto.engine.agents.subtasks import Child, Question, WaitResult
from tenuto.engine.engine import Engine
from tenuto.engine.tasks.claim import ClaimedTask
from tenuto.engine.tasks.edit import TaskChanges
from tenuto.engine.tasks.report import WorkerInfo
from tenuto.model.agents.matching import AgentProfile
from tenuto.model.errors import Conflict, Invalid, NotFound, TenutoError, Unauthenticated
from tenuto.model.limits.budgets import Budget
from tenuto.model.tasks.commands import Escalation, Failure
from tenuto.model.tasks.retry import ErrorClass, RetryPolicy
from tenuto.model.tasks.submission import FIELDS, Filter, NewTask
from tenuto.model.tasks.task import Fence
from tenuto.model.tasks.transcript import Line
from tenuto.store.protocol import Statement

WORKER = "host:1:worker"
EVERYTHING = NewTask(
    title="Everything",
    description="all fields",
    prompt="do it",
    system_prompt="be brief",
    model="m",
    max_turns=3,
    conversation="c",
    task_type="build",
    agent_type="coder",
    command=["echo", "a b"],
    cwd="/tmp",
    env={"A": "b"},
    priority=8,
    tags=["x", "y"],
    task_tags=["python"],
    capabilities=["git"],
    container="box",
    region="eu",
    estimate_minutes=5,
    max_attempts=7,
    retry=RetryPolicy(base_s=2.0, multiplier=3.0, cap_s=60.0, jitter=0.1),
    timeout_s=60,
    queue_ttl_s=3600,
    lease_s=30,
    run_at=datetime.now(UTC).replace(microsecond=0) + timedelta(days=1),
    input={"a": [1, None, "x"]},
    metadata={"k": True},
    idempotency_key="once",
    trace_id="t",
    source="s",
    complexity="Hard",
    escalation=Escalation("why", "what"),
    budget=Budget(tokens=7),
    key="k",
)
APART = {"id", "target_agent", "runtime", "parent", "depends_on", "blocks"} | {
    "on_dependency_failure",
    "next",
    "group",
    "control",
    "concurrency",
}
"""Fields that refer to something else, or exclude others; tests of their own send them."""


def an_agent(engine: AnyEngine, **more: Any) -> AgentProfile:
    fields = {"name": "tester", "runtimes": ("test",), **more}
    return AgentProfile(id=engine.clock.new_id(), workspace=engine.workspace, **fields)


async def claimed(engine: AnyEngine, new: NewTask | None = None, **agent: Any) -> ClaimedTask:
    """A task that an attempt holds."""
    await engine.submit(new or NewTask(title="x"))
    profile = await engine.register_agent(an_agent(engine, **agent))
    [work] = await engine.claim(profile, WORKER)
    return work


async def test_every_field_of_a_submit_arrives(far: RemoteEngine, near: Engine) -> None:
    submitted = await far.submit(EVERYTHING)
    assert submitted.created
    again = await far.submit(EVERYTHING)
    assert (again.id, again.created) == (submitted.id, False)
    assert await near.submit(EVERYTHING) == again
    view = await near.show(submitted.id)
    assert view.created_by == "token:bootstrap"
    asked = EVERYTHING.__struct_fields__
    shown = {name: getattr(view, name) for name in view.__struct_fields__ if name in asked}
    structs = ("id", "retry", "escalation", "budget")
    expected = {name: getattr(EVERYTHING, name) for name in shown if name not in structs}
    expected["depends_on"] = list(EVERYTHING.depends_on)
    assert {name: shown[name] for name in expected} == expected
    assert view.retry == {"base_s": 2.0, "multiplier": 3.0, "cap_s": 60.0, "jitter": 0.1}


async def stored(engine: Engine, task: UUID) -> dict[str, Any]:
    """Returns the stored columns and labels of a task's request."""
    expected = Statement("task_show", {"id": task, "workspace": engine.workspace})
    row = (await engine.core.store.fetch(expected))[0]
    labels = await engine.query.labels([task])
    return {name: row[name] for name, field in FIELDS.items() if field.column} | labels[task]


async def test_what_is_stored_is_the_same_near_and_far(far: RemoteEngine, near: Engine) -> None:
    plain = NewTask(title="")
    unset = {name for name in FIELDS if getattr(EVERYTHING, name) == getattr(plain, name)}
    assert unset == APART
    asked = msgspec.structs.replace(EVERYTHING, idempotency_key=None)
    one, other = (await far.submit(asked)).id, (await near.submit(asked)).id
    assert await stored(near, one) == await stored(near, other)


async def test_direct_and_remote_engine_return_the_same(far: RemoteEngine, near: Engine) -> None:
    work = await claimed(far, NewTask(title="one", tags=["t"], max_attempts=1, input={"a": 1}))
    fence = work.fence
    await far.progress(fence, 40, "half")
    assert await far.checkpoint(fence, {"n": 1}) == 1
    await far.append(fence, [Line(0, "INFO", "hello"), Line(1, "ERROR", "oh")])
    await near.submit_many([NewTask(title="two", priority=9), NewTask(title="three")])

    async def same() -> None:
        calls: list[Any] = [
            lambda e: e.show(fence.task),
            lambda e: e.attempts(fence.task),
            lambda e: e.events(fence.task),
            lambda e: e.events(fence.task, 1, 1),
            lambda e: e.transcript(fence.task),
            lambda e: e.transcript(fence.task, (1, 0)),
            lambda e: e.logs(fence.task, "WARN"),
            lambda e: e.explain(fence.task),
            lambda e: e.list(),
            lambda e: e.list(Filter(status=("RUNNING", "DEAD"), tags=("t",)), 1),
            lambda e: e.list(Filter(priority=9, since=work.lease_until - timedelta(days=1))),
            lambda e: e.list(Filter(min_priority=6, text="TW", task_type="default")),
            lambda e: e.act("cancel", Filter(priority=9), dry_run=True),
            lambda e: e.act("cancel", Filter(min_priority=6), dry_run=True),
            lambda e: e.counts(),
            lambda e: e.workers(),
            lambda e: e.steps(fence.task),
            lambda e: e.find(str(fence.task)[:30]),
        ]
        for call in calls:
            assert await call(far) == await call(near)

    await same()
    await far.worker_heartbeat(WorkerInfo(WORKER, "host", 1, ["tester"], 1), [fence], 20)
    await far.record_step(fence, "s", [1])
    child = await far.spawn(fence, "c", NewTask(title="child"))
    await same()
    assert (await near.show(child)).parent == fence.task
    await far.fail(fence, Failure(message="boom", error_class=ErrorClass.INVALID_INPUT, stack="s"))
    await same()
    assert (await far.show(fence.task)).status in ("FAILED", "DEAD")


async def test_every_filter_selects_the_same_remotely(far: RemoteEngine, near: Engine) -> None:
    parent = (await near.submit(NewTask(title="parent"))).id
    before = near.clock.now()
    work = await claimed(near, NewTask(title="child", parent=parent, tags=["a"], priority=9))
    after = near.clock.now()
    await near.submit(NewTask(title="later", task_type="build"))
    agent = (await near.show(work.fence.task)).agent
    filters = {
        "status": Filter(status=("RUNNING", "DEAD")),
        "tags": Filter(tags=("a",)),
        "min_priority": Filter(min_priority=6),
        "priority": Filter(priority=9),
        "task_type": Filter(task_type="build"),
        "agent": Filter(agent=agent),
        "parent": Filter(parent=parent),
        "since": Filter(since=before),
        "until": Filter(until=after),
        "text": Filter(text="LAT"),
    }
    assert set(filters) == set(Filter.__struct_fields__)
    for name, where in filters.items():
        expected = await near.list(where)
        assert 0 < len(expected.tasks) < 3, name
        assert await far.list(where) == expected, name
        picked = [task.id for task in expected.tasks]
        assert (await far.act("cancel", where, dry_run=True)).done == picked, name


async def test_every_edit_arrives(far: RemoteEngine, near: Engine) -> None:
    task = (await near.submit(NewTask(title="x"))).id
    changes = TaskChanges(
        title="y", description="d", metadata={"m": 1}, tags=("a",), priority=9, status="PAUSED"
    )
    assert set(changes.changed_fields()) == set(TaskChanges.__struct_fields__)
    await far.edit(task, changes)
    view = await near.show(task)
    assert {name: getattr(view, name) for name in changes.changed_fields()} == {
        **msgspec.structs.asdict(changes),
        "tags": ["a"],
    }


async def test_commands_of_users_arrive(far: RemoteEngine, near: Engine) -> None:
    task = (await far.submit(NewTask(title="x"))).id
    await far.pause(task, "why")
    assert (await near.show(task)).status == "PAUSED"
    await far.resume(task)
    await far.reprioritise(task, 9)
    view = await far.show(task)
    changes = TaskChanges(title="y", description=None, tags=("a",), metadata={"m": 1})
    await far.edit(task, changes, view.version)
    with pytest.raises(Conflict) as refused:
        await far.edit(task, changes, view.version)
    assert refused.value.code == "version_conflict"
    view = await near.show(task)
    assert (view.title, view.priority, view.tags, view.metadata) == ("y", 9, ["a"], {"m": 1})
    assert (await far.act("cancel", Filter(tags=("a",)), dry_run=True)).done == [task]
    assert (await far.act("cancel", Filter(tags=("a",)), reason="r")).done == [task]
    refused_all = await far.act("cancel", Filter(tags=("a",)))
    assert list(refused_all.refused) == [str(task)]
    again = await far.rerun(task)
    assert (await near.show(again.id)).rerun_of == task
    await far.retry(task)
    await far.cancel(task, "enough")
    await far.archive(task)
    await far.erase(task)
    assert (await near.show(task)).archived_at is not None


async def test_secret_can_be_a_variable(far: RemoteEngine) -> None:
    await far.secrets.put("token", "s3cret-value")
    env: dict[str, str | dict[str, str]] = {"PLAIN": "x", "TOKEN": {"$secret": "token"}}
    work = await claimed(far, NewTask(title="x", env=env))
    assert work.env == {"PLAIN": "x", "TOKEN": "s3cret-value"}
    assert work.secrets == ("s3cret-value",)
    await far.complete(work.fence, "it is s3cret-value")
    assert (await far.show(work.fence.task)).output == "it is ***"


async def test_outcomes_of_attempts_arrive(far: RemoteEngine, near: Engine) -> None:
    async def ended(work: ClaimedTask) -> str:
        return (await near.show(work.fence.task)).status

    work = await claimed(far, name="a")
    await far.complete(work.fence, {"r": 1}, "done")
    await far.complete(work.fence, {"r": 1}, "done")
    assert (await near.show(work.fence.task)).output == {"r": 1}
    work = await claimed(far, name="b")
    await far.release(work.fence)
    assert await ended(work) == "PENDING"
    await near.cancel(work.fence.task)
    work = await claimed(far, name="c")
    await far.not_started(work.fence, Failure(message="no such program"))
    assert (await near.attempts(work.fence.task))[0].outcome == "NOT_STARTED"
    work = await claimed(far, NewTask(title="t", max_attempts=1), name="d")
    await far.time_out(work.fence, {"state": "killed"})
    assert (await near.attempts(work.fence.task))[0].receipt == {"state": "killed"}
    work = await claimed(far, name="e")
    await far.cancel(work.fence.task)
    with pytest.raises(Conflict, match="cancelled"):
        await far.record_step(work.fence, "k", 1)
    heartbeat = await far.worker_heartbeat(WorkerInfo(WORKER, "host", 1), [work.fence], 20)
    assert heartbeat.held[work.fence.task].cancel
    await far.confirm_cancel(work.fence, {"state": "killed"})
    assert await ended(work) == "CANCELLED"
    work = await claimed(far, name="f")
    await far.pause(work.fence.task)
    assert await far.checkpoint(work.fence, "last", 5) == 5
    await far.confirm_pause(work.fence, {"state": "ended"})
    assert await ended(work) == "PAUSED"
    work = await claimed(far, name="g")
    await far.park(work.fence, "input", wait_until=far.clock.now() + timedelta(hours=1))
    assert await ended(work) == "WAITING"


async def test_waits_reach_the_engine(far: RemoteEngine, near: Engine) -> None:
    work = await claimed(far, name="a")
    fence = work.fence
    child = await far.spawn(fence, "child", NewTask(title="child", agent_type="nobody"))
    assert await far.wait(fence, [], 5) == WaitResult(parked=False)
    [late] = (await far.wait(fence, ["child"], 0, "now")).children
    assert late == Child(child, "child", "PENDING")
    question = Question(kind="question", title="which?", default=3)
    assert (await far.wait(fence)).parked
    await near.cancel(child)
    [work] = await far.claim(await far.register_agent(an_agent(far, name="a")), WORKER, 1)
    [ended] = (await far.wait(work.fence)).children
    assert ended.status == "CANCELLED"
    assert (await far.ask(work.fence, "q", question)).parked
    [item] = await far.inbox.list()
    await far.inbox.dismiss(item.id, "this one")
    [work] = await far.claim(await far.register_agent(an_agent(far, name="a")), WORKER, 1)
    assert (await far.ask(work.fence, "q", question)).answer["answer"] == "this one"


async def test_repeated_claim_returns_the_same_tasks(far: RemoteEngine, near: Engine) -> None:
    await near.submit_many([NewTask(title=f"{number}") for number in range(3)])
    agent = await far.register_agent(an_agent(far))
    token = far.clock.new_token()
    first = await far.claim(agent, WORKER, 2, token=token)
    again = await far.claim(agent, WORKER, 2, token=token)
    assert [work.fence for work in first] == [work.fence for work in again]
    assert len(await far.claim(agent, WORKER, 5)) == 1


async def test_lost_attempts_are_reported_per_attempt(far: RemoteEngine, near: Engine) -> None:
    work = await claimed(far)
    old = work.fence
    await near.release(old)
    profile = await far.register_agent(an_agent(far))
    [second] = await far.claim(profile, WORKER)
    heartbeat = await far.worker_heartbeat(WorkerInfo(WORKER, "host", 1), [second.fence, old], 20)
    assert heartbeat.lost == [old]
    assert list(heartbeat.held) == [old.task]
    for write in (
        far.progress(old, 1),
        far.checkpoint(old, 1),
        far.complete(old),
        far.record_step(old, "k", 1),
    ):
        with pytest.raises(Conflict) as refused:
            await write
        assert refused.value.code == "lease_lost"


async def test_agent_name_keeps_its_agent(far: RemoteEngine, near: Engine) -> None:
    first = await far.register_agent(an_agent(far, accept_commands=True, runtimes=()))
    second = await near.register_agent(an_agent(near, accept_commands=True, runtimes=()))
    assert first.id == second.id
    assert msgspec.structs.replace(first, version=0) == msgspec.structs.replace(second, version=0)


async def test_agent_token_is_enough_to_work(api: Api, far: RemoteEngine) -> None:
    existing = await far.register_agent(an_agent(far, name="dev"))
    token = await api.token(scopes=("work",), agent=existing.id)
    await far.submit(NewTask(title="x"))
    async with connect_to_server(api.url, token) as worker:
        agent = await worker.register_agent(an_agent(worker, name="whatever"))
        assert (agent.id, agent.name) == (existing.id, "dev")
        [work] = await worker.claim(agent, WORKER)
        await worker.worker_heartbeat(WorkerInfo(WORKER, "host", 1), [work.fence], 20)
        await worker.progress(work.fence, 10, "on")
        assert await worker.steps(work.fence.task) == {}
        await worker.complete(work.fence, 1)
        other = await far.register_agent(an_agent(far, name="other"))
        with pytest.raises(NotFound):
            await worker.claim(other, WORKER)
        with pytest.raises(TenutoError):
            await worker.show(work.fence.task)


async def test_remote_worker_claims_nothing_that_it_cannot_run(
    api: Api, far: RemoteEngine, near: Engine
) -> None:
    allowed = an_agent(near, name="dev", runtimes=("http",), accept_commands=True)
    existing = await near.register_agent(allowed, managed=True)
    await near.submit(NewTask(title="x", task_type="other"))
    await near.submit(NewTask(title="y", command=["true"]))
    own = await api.token(scopes=("work",), agent=existing.id)
    for token in (own, await api.token()):
        async with connect_to_server(api.url, token) as worker:
            brought = an_agent(worker, name="dev", runtimes=("function",), task_types=("mine",))
            agent = await worker.register_agent(brought)
            assert await worker.claim(agent, WORKER, 10) == []
            more = an_agent(worker, name="dev", runtimes=("function",), task_types=("other",))
            [work] = await worker.claim(await worker.register_agent(more), WORKER, 10)
            await worker.release(work.fence)


async def test_agent_token_sweeps_only_sessions_of_its_agent(
    api: Api, far: RemoteEngine, near: Engine
) -> None:
    own = await claimed(far, name="dev")
    profile = await far.register_agent(an_agent(far, name="dev"))
    other = NewTask(title="y", task_type="other")
    others = await claimed(far, other, name="other", task_types=("other",))
    for work in (own, others):
        await near.cancel(work.fence.task)
    assert await near.maintenance.expire_worker(WORKER, "test") == 2
    token = await api.token(scopes=("work",), agent=profile.id)
    asked = []

    def runs(worker: str, task: UUID) -> bool:
        asked.append((worker, task))
        return False

    async with connect_to_server(api.url, token) as worker:
        assert await worker.confirm_gone_sessions("host:2:next", "host", runs) == 1
        assert await worker.confirm_gone_sessions("host:2:next", "host", runs) == 0
    assert asked == [(WORKER, own.fence.task)]
    assert (
        await far.confirm_gone_sessions("host:2:next", "host", runs) == 1
    )  # the other agent's was left alone


async def test_objects_of_another_workspace_are_not_found(api: Api, far: RemoteEngine) -> None:
    work = await claimed(far)
    untrusted = await api.token(workspace=await api.workspace("elsewhere"))
    fence = Fence(work.fence.task, work.fence.attempt, "0" * 32)
    async with connect_to_server(api.url, untrusted) as other:
        for call in (
            other.show(fence.task),
            other.steps(fence.task),
            other.events(fence.task),
            other.confirm_gone(fence, {}),
        ):
            with pytest.raises(NotFound):
                await call
        with pytest.raises(NotFound):
            await other.find(str(fence.task)[:30])
        with pytest.raises(TenutoError):
            await other.spawn(fence, "k", NewTask(title="x"))


async def test_invalid_calls_are_refused_equally(far: RemoteEngine, near: Engine, api: Api) -> None:
    anonymous = uuid4()
    calls: list[Any] = [
        lambda e: e.show(anonymous),
        lambda e: e.cancel(anonymous),
        lambda e: e.find("zz"),
        lambda e: e.submit(NewTask(title="")),
        lambda e: e.submit(NewTask(title="x", priority=99)),
        lambda e: e.list(Filter(status=("NONE",))),
        lambda e: e.logs(anonymous, "LOUD"),
        lambda e: e.complete(Fence(anonymous, 1, "x")),
    ]
    for call in calls:
        reports = []
        for engine in (near, far):
            with pytest.raises(TenutoError) as refused:
                await call(engine)
            reports.append((type(refused.value), refused.value.code, refused.value.message))
        assert reports[0] == reports[1]
    async with connect_to_server(api.url, "tnt_nobody") as untrusted:
        with pytest.raises(Unauthenticated):
            await untrusted.show(UUID(int=1))
    async with connect_to_server(api.url) as nameless:
        with pytest.raises(Unauthenticated):
            await nameless.counts()
    with pytest.raises(Invalid):
        async with connect_to_server("ftp://x"):
            pass
