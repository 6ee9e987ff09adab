"""Ids of another workspace are treated like ids that do not exist."""

import re
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any
from uuid import UUID

import msgspec
import pytest
from tests.contract.conftest import (
    AGENT,
    LEASE_S,
    START,
    WORKER,
    Raw,
    claim_one,
    failure,
    new,
    profile,
)
from tests.contract.flows.helpers import group, start, task
from tests.contract.schedules.helpers import cron, defined

from tenuto.engine.agents.registry import AgentRegistry
from tenuto.engine.agents.subtasks import Question
from tenuto.engine.engine import DEFAULT_WORKSPACE, Engine
from tenuto.engine.tasks.edit import TaskChanges
from tenuto.engine.tasks.report import WorkerInfo
from tenuto.model.agents.messages import NewMessage
from tenuto.model.errors import NotFound, TenutoError
from tenuto.model.limits.budgets import Usage
from tenuto.model.tasks.submission import Filter
from tenuto.model.tasks.task import Fence
from tenuto.model.tasks.transcript import Line

GONE = {"state": "killed"}
LATER = START + timedelta(days=1)
USED = Usage(model="m", input_tokens=5, number=1)
TOKEN = "a-token-of-the-claim"


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """What somebody may have heard of another workspace."""

    fence: Fence
    """Of an attempt that runs and has a child."""
    stopping: Fence
    """Of one that is to be cancelled."""
    resting: Fence
    """Of one that is to be paused."""
    lost: Fence
    """Of one that ended unconfirmed."""
    ended: UUID
    waiting: UUID
    agent: UUID
    flow: UUID
    group: UUID
    item: UUID
    schedule: UUID
    trigger: UUID
    worker: str = WORKER
    token: str = TOKEN

    @property
    def task(self) -> UUID:
        return self.fence.task


def invented(existing: Known) -> Known:
    """The same with ids, tokens and names that nobody has."""
    return Known(
        **{
            name: _invented(getattr(existing, name), number)
            for number, name in enumerate(Known.__struct_fields__, start=1)
        }
    )


def _invented(value: Any, number: int) -> Any:
    anonymous = UUID(int=(7 << 76) | (2 << 62) | (1 << 61) | number)
    if isinstance(value, Fence):
        return Fence(anonymous, value.attempt, value.token)
    return anonymous if isinstance(value, UUID) else f"nobody-{value}"


async def owned(engine: Engine) -> Known:
    """A workspace with something of everything."""
    await engine.register_agent(profile())
    await defined(engine, task("job"))
    schedule = await engine.schedules.create("nightly", "job", cron())
    trigger = await engine.triggers.create("on", "thing", "job")
    parent = await running_with_token(engine)
    await engine.spawn(parent, "child", new("child", priority=1))
    await engine.checkpoint(parent, {"n": 1})
    await engine.append(parent, [Line(0, "INFO", "a line")])
    await engine.record_step(parent, "step", 1)
    await engine.used(parent, USED)
    fences = []
    for title in ("stopping", "resting", "lost", "asking", "ended"):
        await engine.submit(new(title, priority=10, tags=("label",)))
        fences.append((await claim_one(engine)).fence)
    stopping, resting, lost, asking, ended = fences
    await engine.cancel(stopping.task)
    await engine.pause(resting.task)
    await engine.time_out(lost, {"state": "unconfirmed"})
    await engine.ask(asking, "ok", Question(kind="approval", title="May it?"))
    [item] = await engine.inbox.list()
    await engine.complete(ended, {"n": 1})
    waiting = await engine.submit(new("waiting", depends_on=(str(parent.task),)))
    children = group("both", "one", "two", order="sequential")
    flow = await start(engine, "both", children, task("one"), task("two"))
    [run] = (await engine.flow_views.groups()).groups
    await engine.mailboxes.send(AGENT, NewMessage(kind="note", body=1))
    return Known(
        fence=parent,
        stopping=stopping,
        resting=resting,
        lost=lost,
        ended=ended.task,
        waiting=waiting.id,
        agent=AGENT,
        flow=flow,
        group=run.id,
        item=item.id,
        schedule=schedule.id,
        trigger=trigger.id,
    )


async def running_with_token(engine: Engine) -> Fence:
    """The fence of a task that was claimed with a token of the caller's."""
    await engine.submit(new("parent", priority=10))
    [work] = await engine.claim(profile(), WORKER, 1, LEASE_S, TOKEN)
    return work.fence


Call = Callable[[Engine, Known], Awaitable[Any]]

CALLS: dict[str, Call] = {
    "begin": lambda e, k: e.begin(k.fence, "session"),
    "heartbeat": lambda e, k: e.heartbeat([k.fence], 3600),
    "worker_heartbeat": lambda e, k: e.worker_heartbeat(
        WorkerInfo(k.worker, "host", 1), [k.fence], 3600
    ),
    "record_worker": lambda e, k: e.record_worker(
        WorkerInfo(k.worker, "h", 1, ["a"], 1, "RUNNING"), k.agent
    ),
    "confirm_gone_sessions": lambda e, k: e.confirm_gone_sessions(
        k.worker, "host", lambda _worker, _task: False
    ),
    "progress": lambda e, k: e.progress(k.fence, 50, "step"),
    "checkpoint": lambda e, k: e.checkpoint(k.fence, {"n": 2}),
    "append": lambda e, k: e.append(k.fence, [Line(1, "INFO", "foreign")]),
    "steps": lambda e, k: e.steps(k.task),
    "record_step": lambda e, k: e.record_step(k.fence, "other", 2),
    "spawn": lambda e, k: e.spawn(k.fence, "another", new("foreign")),
    "wait": lambda e, k: e.wait(k.fence),
    "wait for one": lambda e, k: e.wait(k.fence, ["child"]),
    "ask": lambda e, k: e.ask(k.fence, "other", Question(kind="question", title="?")),
    "complete": lambda e, k: e.complete(k.fence, {"n": 2}),
    "complete with usage": lambda e, k: e.complete(k.fence, {"n": 2}, usage=USED),
    "complete again": lambda e, k: e.complete(Fence(k.ended, 1, k.fence.token)),
    "fail": lambda e, k: e.fail(k.fence, failure()),
    "fail with usage": lambda e, k: e.fail(k.fence, failure(), usage=USED),
    "used": lambda e, k: e.used(k.fence, Usage(model="m", input_tokens=5, number=2)),
    "not_started": lambda e, k: e.not_started(k.fence, failure()),
    "time_out": lambda e, k: e.time_out(k.fence),
    "park": lambda e, k: e.park(k.fence, "approval", wait_until=LATER),
    "release": lambda e, k: e.release(k.fence),
    "confirm_cancel": lambda e, k: e.confirm_cancel(k.stopping, GONE),
    "confirm_pause": lambda e, k: e.confirm_pause(k.resting, GONE),
    "confirm_gone": lambda e, k: e.confirm_gone(k.lost, GONE),
    "confirm_cancel of a lost one": lambda e, k: e.confirm_cancel(k.lost, GONE),
    "claimed": lambda e, k: e.claimed(k.agent, k.token),
    "cancel": lambda e, k: e.cancel(k.task),
    "pause": lambda e, k: e.pause(k.task),
    "resume": lambda e, k: e.resume(k.resting.task),
    "start": lambda e, k: e.start(k.waiting),
    "retry": lambda e, k: e.retry(k.ended),
    "retry with all": lambda e, k: e.retry(k.ended, cascade=True),
    "assign": lambda e, k: e.assign(k.task, None),
    "archive": lambda e, k: e.archive(k.ended),
    "reprioritise": lambda e, k: e.reprioritise(k.waiting, 9),
    "edit": lambda e, k: e.edit(k.task, TaskChanges(title="foreign", tags=("x",))),
    "erase": lambda e, k: e.erase(k.ended),
    "rerun": lambda e, k: e.rerun(k.ended),
    "act by parent": lambda e, k: e.act("cancel", Filter(parent=k.task)),
    "act by agent": lambda e, k: e.act("cancel", Filter(agent=k.agent)),
    "find": lambda e, k: e.find(str(k.task)),
    "list by parent": lambda e, k: e.list(Filter(parent=k.task)),
    "list by agent": lambda e, k: e.list(Filter(agent=k.agent)),
    "show": lambda e, k: e.show(k.task),
    "attempts": lambda e, k: e.attempts(k.lost.task),
    "events": lambda e, k: e.events(k.task),
    "transcript": lambda e, k: e.transcript(k.task),
    "logs": lambda e, k: e.logs(k.task),
    "explain": lambda e, k: e.explain(k.waiting),
    "terminate_agent": lambda e, k: e.terminate_agent(k.agent, graceful=False),
    "explain_agent": lambda e, k: e.explain_agent(k.agent),
    "drain_worker": lambda e, k: e.drain_worker(k.worker),
    "publish": lambda e, k: e.publish("thing", {"n": 1}, k.task),
    "submit below": lambda e, k: e.submit(new("t", parent=k.task)),
    "submit many below": lambda e, k: e.submit_many([new("t"), new("t", parent=k.task)]),
    "submit for an agent": lambda e, k: e.submit(new("t", target_agent=k.agent)),
    "submit a flow below": lambda e, k: e.submit(new("t", parent=k.task, next="job")),
    "submit depending": lambda e, k: e.submit(new("t", depends_on=(str(k.task),))),
    "submit blocking": lambda e, k: e.submit(new("t", blocks=(str(k.waiting),))),
    "submit into a group": lambda e, k: e.submit(new("t", group=str(k.group))),
    "rerun_flow": lambda e, k: e.rerun_flow(k.flow),
    "flow cancel": lambda e, k: e.flows.cancel(k.flow),
    "flow pause": lambda e, k: e.flows.pause(k.flow),
    "flow resume": lambda e, k: e.flows.resume(k.flow),
    "flow revive": lambda e, k: e.flows.revive(k.flow),
    "group cancel": lambda e, k: e.flows.cancel_group(k.group),
    "group pause": lambda e, k: e.flows.pause_group(k.group),
    "group resume": lambda e, k: e.flows.resume_group(k.group),
    "flow show": lambda e, k: e.flow_views.show(k.flow),
    "flow tasks": lambda e, k: e.flow_views.tasks(k.flow),
    "flow graph": lambda e, k: e.flow_views.graph(k.flow),
    "group show": lambda e, k: e.flow_views.group(k.group),
    "group graph": lambda e, k: e.flow_views.group_graph(k.group),
    "groups of a flow": lambda e, k: e.flow_views.groups(flow=k.flow),
    "inbox show": lambda e, k: e.inbox.show(k.item),
    "inbox answer": lambda e, k: e.inbox.answer(k.item, approve=True),
    "inbox dismiss": lambda e, k: e.inbox.dismiss(k.item, "no"),
    "schedule get": lambda e, k: e.schedules.get(k.schedule),
    "schedule next": lambda e, k: e.schedules.next(k.schedule),
    "schedule pause": lambda e, k: e.schedules.pause(k.schedule),
    "schedule resume": lambda e, k: e.schedules.resume(k.schedule),
    "schedule delete": lambda e, k: e.schedules.delete(k.schedule),
    "trigger get": lambda e, k: e.triggers.get(k.trigger),
    "trigger pause": lambda e, k: e.triggers.pause(k.trigger),
    "trigger resume": lambda e, k: e.triggers.resume(k.trigger),
    "trigger delete": lambda e, k: e.triggers.delete(k.trigger),
    "mail": lambda e, k: e.mailboxes.send(k.agent, NewMessage(kind="note")),
    "mail page": lambda e, k: e.mailboxes.page(k.agent),
    "mail take": lambda e, k: e.mailboxes.dequeue(k.agent),
    "agent show": lambda e, k: AgentRegistry(e.core, e.workspace).show(k.agent),
    "agent claimant": lambda e, k: AgentRegistry(e.core, e.workspace).profile_for_claim(k.agent),
    "agent seen": lambda e, k: AgentRegistry(e.core, e.workspace).record_heartbeat(k.agent),
    "agent health": lambda e, k: AgentRegistry(e.core, e.workspace).health(k.agent),
    "agent end": lambda e, k: AgentRegistry(e.core, e.workspace).drain(k.agent, None, "b"),
    "agent forget": lambda e, k: AgentRegistry(e.core, e.workspace).delete(k.agent),
}
_ID = re.compile(r"[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}")


async def answer(call: Call, engine: Engine, existing: Known) -> str:
    """Returns the response to a caller without the ids in it."""
    try:
        reported = repr(await call(engine, existing))
    except TenutoError as error:
        reported = f"{type(error).__name__} {error.code} {error.message}"
    return _ID.sub("(id)", reported).replace("nobody-", "")


async def rows_of(raw: Raw, workspace: UUID) -> dict[str, list[str]]:
    """Everything that is stored of a workspace."""
    tables = [
        name
        for name in sorted(await raw.counts())
        if name not in ("cursor", "schema_migration", "leader", "gateway", "app_user", "session")
    ]
    result = {}
    for table in tables:
        column = "id" if table == "workspace" else "workspace"
        rows = await raw.fetch(f"select * from {table} where {column} = '{workspace}'")
        result[table] = sorted(map(repr, rows))
    return result


async def test_id_of_another_workspace_is_treated_as_missing(engine: Engine, raw: Raw) -> None:
    existing = await owned(engine)
    other = Engine(engine.store, workspace=await raw.workspace(2), actor="b")
    before = await rows_of(raw, DEFAULT_WORKSPACE)
    anonymous = invented(existing)
    wrong: dict[str, Any] = {}
    for name, call in CALLS.items():
        unknown = await answer(call, other, anonymous)
        others = await answer(call, other, existing)
        if others != unknown:
            wrong[name] = (unknown, others)
        after = await rows_of(raw, DEFAULT_WORKSPACE)
        changed = [table for table, rows in after.items() if rows != before[table]]
        if changed:
            wrong[f"{name} changes"] = changed
            before = after
    assert wrong == {}


def test_every_call_with_an_id_is_covered() -> None:
    """A method of the engine that takes an id or a fence stands in the table."""
    hints = ("UUID", "Fence")
    taking = {
        name
        for name, method in vars(Engine).items()
        if callable(method)
        and not name.startswith("_")
        and any(
            hint in str(kind)
            for key, kind in method.__annotations__.items()
            if key != "return"
            for hint in hints
        )
    }
    assert taking - {call.split()[0] for call in CALLS} == set()


async def test_reference_of_a_task_must_exist_in_its_workspace(engine: Engine, raw: Raw) -> None:
    existing = await owned(engine)
    anonymous = invented(existing)
    assert (await engine.submit(new(parent=existing.task, target_agent=existing.agent))).created
    before = await raw.count("task")
    for wrong, field in (
        (new(parent=anonymous.task), "parentId"),
        (new(target_agent=anonymous.agent), "targetAgentId"),
    ):
        with pytest.raises(NotFound) as caught:
            await engine.submit(wrong)
        assert caught.value.details["field"] == field
    with pytest.raises(NotFound):
        await engine.spawn(existing.fence, "of nobody", new(target_agent=anonymous.agent))
    await defined(engine, task("lost", target_agent=anonymous.agent), task("first", next="lost"))
    for key in ("lost", "first"):
        with pytest.raises(NotFound):
            await engine.flows.start(key)
    assert await raw.count("task") == before
