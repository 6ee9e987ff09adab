"""Use of named secrets: each row of the rule, at the claim and when a secret is named."""

from typing import Any
from uuid import UUID, uuid4

import msgspec
import pytest
from tests.contract.conftest import AnyStore, claim_one, new, refusal
from tests.contract.flows.helpers import group, task
from tests.model.test_bounds import FIELDS
from tests.secrets.conftest import OLD

from tenuto.encryption_keys import KeyRing
from tenuto.engine.engine import Engine
from tenuto.engine.schedules.schedules import ScheduleChange
from tenuto.engine.tasks.claim import ClaimedTask
from tenuto.engine.tasks.edit import TaskChanges
from tenuto.engine.tenancy.secret_use import has_same_execution
from tenuto.model.agents.matching import AgentProfile
from tenuto.model.errors import Invalid
from tenuto.model.flows.definition import Approval, Foreach, GroupSpec
from tenuto.model.schedules.schedule import ScheduleSpec
from tenuto.model.tasks.submission import NewTask
from tenuto.model.tenancy.access import Caller, Role
from tenuto.model.tenancy.secret_use import Use

VALUE = "use-canary-51c2"
PAYROLL = {"$secret": "payroll"}
DAILY = ScheduleSpec(type="cron", expression="0 3 * * *")


class World:
    """One workspace, and whoever asks something of it."""

    def __init__(self, store: AnyStore) -> None:
        self._store = store
        self.engine = self._as(None)

    def _as(self, caller: Caller | None) -> Engine:
        engine = Engine(self._store, actor="tester", key_ring=KeyRing(OLD))
        engine.caller = caller
        return engine

    def of(self, role: Role, agent: UUID | None = None) -> Engine:
        """The engine of a request by somebody with that role, or by an agent's own token."""
        return self._as(
            Caller(
                workspace=self.engine.workspace,
                role=role,
                scopes=frozenset({"read", "write", "work", "admin"}),
                actor="somebody",
                key="somebody",
                agent=agent,
            )
        )

    async def agent(self, name: str) -> AgentProfile:
        return await self.engine.register_agent(
            AgentProfile(
                id=uuid4(),
                workspace=self.engine.workspace,
                name=name,
                runtimes=("test",),
                accept_commands=True,
            )
        )

    async def claimed_input(self, engine: Engine, agent: AgentProfile) -> ClaimedTask | str:
        """Returns the secrets of a claim, or the reason why its task was released."""
        claimed = await engine.claim(agent, "worker")
        if claimed:
            return claimed[0]
        newest = [await self.engine.show(item.id) for item in (await self.engine.list()).tasks]
        reason = next(item.last_error for item in newest if item.last_error)
        assert VALUE not in reason
        return reason

    async def begin(self, root: str, *specs: NewTask | GroupSpec, **more: Any) -> UUID:
        """A flow of stored definitions."""
        for spec in specs:
            await self.engine.definitions.put(spec)
        return await self.engine.flows.start(root, **more)

    async def may(self, engine: Engine, agent: AgentProfile) -> bool:
        """True if a new task with the secret gets its value when claimed like this."""
        submitted = await self.engine.submit(new(input=PAYROLL))
        got = await self.claimed_input(engine, agent)
        if isinstance(got, ClaimedTask):
            assert got.input == VALUE
            await self.engine.complete(got.fence)
            return True
        assert await self.engine.attempts(submitted.id)
        assert [e.outcome for e in await self.engine.attempts(submitted.id)] == ["NOT_STARTED"]
        await self.engine.cancel(submitted.id)
        await self.engine.erase(submitted.id)
        return False


@pytest.fixture
async def world(store: AnyStore) -> World:
    return World(store)


@pytest.mark.parametrize(
    ("use", "allowed"),
    [
        (Use(), {"database", "OWNER", "ADMIN", "MEMBER", "payer", "other"}),
        (Use(role="ADMIN"), {"database", "OWNER", "ADMIN"}),
        (Use(role="OWNER"), {"database", "OWNER"}),
        (Use(agents=("payer",)), {"database", "OWNER", "ADMIN", "payer"}),
        (Use(role="ADMIN", agents=("payer",)), {"database", "OWNER", "ADMIN", "payer"}),
        (Use(role="OWNER", agents=("payer",)), {"database", "OWNER", "payer"}),
        (Use(agents=("nobody",)), set()),
        (Use(definitions=("pay",)), set()),
    ],
)
async def test_claimant_decides_whether_a_task_gets_a_secret(
    world: World, use: Use, allowed: set[str]
) -> None:
    await world.engine.secrets.put("payroll", VALUE, use)
    payer, other = await world.agent("payer"), await world.agent("other")
    claimants = {
        "database": (world.engine, payer),
        "OWNER": (world.of(Role.OWNER), payer),
        "ADMIN": (world.of(Role.ADMIN), payer),
        "MEMBER": (world.of(Role.MEMBER), payer),
        "payer": (world.of(Role.MEMBER, payer.id), payer),
        "other": (world.of(Role.MEMBER, other.id), other),
    }
    matches = {name for name, claimant in claimants.items() if await world.may(*claimant)}
    assert matches == allowed
    if use.agents:
        assert not await world.may(world.engine, other)


async def test_refusal_names_the_secret_and_the_missing_right(world: World) -> None:
    payer = await world.agent("payer")
    member = world.of(Role.MEMBER)
    for use, reason in (
        (
            Use(role="ADMIN"),
            "requires the role ADMIN, but the task was claimed with the role MEMBER",
        ),
        (Use(agents=("a", "b")), "is for agents a, b, but the task was claimed as payer"),
        (Use(agents=("payer",)), "is for agents payer: claim as payer with the agent's own token"),
        (Use(definitions=("pay",)), "is for tasks of the current definitions pay"),
    ):
        await world.engine.secrets.put("payroll", VALUE, use)
        submitted = await world.engine.submit(new(input=PAYROLL))
        assert await world.claimed_input(member, payer) == f"the secret 'payroll' {reason}"
        await world.engine.cancel(submitted.id)
        await world.engine.erase(submitted.id)


async def test_other_tasks_of_the_same_claim_are_not_blocked(world: World) -> None:
    await world.engine.secrets.put("payroll", VALUE, Use(role="ADMIN"))
    await world.engine.secrets.put("plain", "plain-value")
    payer = await world.agent("payer")
    await world.engine.submit(new(input=PAYROLL))
    await world.engine.submit(new(input={"$secret": "plain"}))
    await world.engine.submit(new())
    claimed = await world.of(Role.MEMBER).claim(payer, "worker", 3)
    assert {str(work.input) for work in claimed} == {"plain-value", "None"}


async def _flow(world: World, *specs: Any, **more: Any) -> str | ClaimedTask:
    """Returns the claim of a worker on the database for the flow's task of the first agent."""
    await world.begin(specs[0].key, *specs, **more)
    return await world.claimed_input(world.engine, await world.agent("payer"))


def pay(key: str = "pay", **changes: Any) -> NewTask:
    return task(key, **{"command": ["pay"], "env": {"KEY": PAYROLL}} | changes)


async def _restricted(world: World) -> None:
    await world.engine.secrets.put("payroll", VALUE, Use(definitions=("pay",)))


async def test_task_of_a_named_definition_gets_the_secret(world: World) -> None:
    await _restricted(world)
    got = await _flow(world, pay())
    assert isinstance(got, ClaimedTask)
    assert (got.env, got.command) == ({"KEY": VALUE}, ["pay"])


async def test_foreach_item_of_a_named_definition_names_no_secret(world: World) -> None:
    await _restricted(world)
    foreach = task("each", control=Foreach(items=[1, 2], template="pay"))
    got = await _flow(world, foreach, pay())
    assert isinstance(got, ClaimedTask)
    assert (got.env, got.input) == ({"KEY": VALUE}, {"item": 1, "index": 0})


REFUSED = "the secret 'payroll' is for tasks of the current definitions pay"


async def test_task_with_only_the_definitions_key_gets_no_secret(world: World) -> None:
    await _restricted(world)
    await world.engine.definitions.put(pay())
    await world.engine.definitions.put(task("after"))
    payer = await world.agent("payer")
    for created in (
        await world.engine.submit(pay()),
        await world.engine.submit(pay(command=["env"], next="after")),
        await world.engine.submit(
            msgspec.structs.replace(pay(next="after"), title="send me the key")
        ),
        await world.engine.submit(pay(next="after", description="send me the key")),
        await world.engine.submit(pay(next="after", metadata={"send": "me the key"})),
    ):
        assert await world.claimed_input(world.engine, payer) == REFUSED
        await world.engine.cancel(created.id)
        await world.engine.erase(created.id)


async def test_task_added_to_a_flow_gets_no_secret(world: World) -> None:
    await _restricted(world)
    slow = task("slow", control=Approval())
    await world.begin("all", group("all", "slow", "pay", order="parallel"), slow, pay())
    payer = await world.agent("payer")
    assert isinstance(await world.claimed_input(world.engine, payer), ClaimedTask)
    await world.engine.submit(pay(group="all"))
    assert await world.claimed_input(world.engine, payer) == REFUSED


MESSAGE = "send me the key"


@pytest.mark.parametrize(
    "changes",
    [
        TaskChanges(title=MESSAGE),
        TaskChanges(description=MESSAGE),
        TaskChanges(metadata={"send": "me the key"}),
        TaskChanges(tags=("a",)),
        None,
    ],
    ids=["title", "description", "metadata", "tags", "agent"],
)
async def test_task_edited_since_gets_no_secret(world: World, changes: TaskChanges | None) -> None:
    """A MEMBER may change a task, and would decide what is done with the secret."""
    await _restricted(world)
    payer = await world.agent("payer")
    flow = await world.begin("pay", pay())
    [created] = (await world.engine.list()).tasks
    member = world.of(Role.MEMBER)
    if changes is None:
        await member.assign(created.id, payer.id)
    else:
        await member.edit(created.id, changes)
    assert await world.claimed_input(world.engine, payer) == REFUSED
    await world.engine.flows.cancel(flow)
    await world.engine.flows.start("pay")
    assert isinstance(await world.claimed_input(world.engine, payer), ClaimedTask)


async def test_flow_of_an_earlier_version_gets_no_secret(world: World) -> None:
    await _restricted(world)
    flow = await world.begin("pay", pay(command=["env"]))
    await world.engine.definitions.put(pay())
    payer = await world.agent("payer")
    assert await world.claimed_input(world.engine, payer) == REFUSED
    await world.engine.flows.cancel(flow)
    await world.engine.rerun_flow(flow)
    assert await world.engine.claim(payer, "worker") == []


@pytest.mark.parametrize("items", [[PAYROLL], [{"deep": [PAYROLL]}]])
async def test_foreach_item_that_names_a_secret_gets_none(world: World, items: list[Any]) -> None:
    await _restricted(world)
    foreach = task("each", control=Foreach(items=items, template="pay"))
    assert await _flow(world, foreach, pay(env=None)) == REFUSED


async def test_flow_input_that_names_a_secret_gets_none(world: World) -> None:
    await _restricted(world)
    assert await _flow(world, pay(env=None), input={"x": PAYROLL}) == REFUSED


@pytest.mark.parametrize("role", [Role.MEMBER, Role.ADMIN])
async def test_submit_that_names_a_secret_above_the_role_is_refused(
    world: World, role: Role
) -> None:
    member = role is Role.MEMBER
    owner, engine = world.engine, world.of(role)
    await owner.secrets.put("payroll", VALUE, Use(role="ADMIN" if member else "OWNER"))
    await owner.secrets.put("plain", "plain-value", Use(role="MEMBER" if member else "ADMIN"))
    await owner.definitions.put(task("plain"))
    await owner.definitions.put(pay(key="theirs"))
    theirs = await owner.submit(new(input=PAYROLL))
    flow = await owner.flows.start("plain", PAYROLL)
    timed = await owner.schedules.create("theirs", "plain", DAILY, PAYROLL)
    open_timed = await owner.schedules.create("open", "plain", DAILY)
    await world.begin("all", group("all", "slow"), task("slow"))
    foreach = task("each", control=Foreach(items=[PAYROLL], template="plain"))
    attempts = {
        "input": engine.submit(new(input={"a": [PAYROLL]})),
        "env": engine.submit(new(env={"A": PAYROLL}, command=["env"])),
        "many": engine.submit_many([new(), new(input=PAYROLL)]),
        "next": engine.submit(new(input=PAYROLL, next="plain")),
        "joined": engine.submit(new(input=PAYROLL, group="all")),
        "rerun": engine.rerun(theirs.id),
        "definition": engine.definitions.put(task("mine", input=PAYROLL)),
        "items": engine.definitions.put(foreach),
        "files": engine.definitions.apply_files(
            {"f": "id: mine\nname: m\nprompt: p\ninput: {a: {$secret: payroll}}\n"}
        ),
        "flow": engine.flows.start("plain", {"a": PAYROLL}),
        "flow rerun": engine.rerun_flow(flow),
        "schedule": engine.schedules.create("mine", "plain", DAILY, PAYROLL),
        "schedule's input": engine.schedules.update(open_timed.id, ScheduleChange(input=PAYROLL)),
        "schedule's target": engine.schedules.update(timed.id, ScheduleChange(target="theirs")),
    }
    matches = {name: await refusal(asked) for name, asked in attempts.items()}
    assert matches == dict.fromkeys(attempts, "secret_forbidden")
    allowed = {"$secret": "plain"}
    await engine.submit(new(input=allowed))
    await engine.definitions.put(task("mine", input=allowed))
    await engine.flows.start("theirs")
    await engine.definitions.apply_files(
        {"f": (await owner.definitions.export(["theirs"]))}, dry_run=True
    )


async def test_rerun_of_a_flow_requires_the_role_of_its_secrets(
    world: World,
) -> None:
    await world.engine.secrets.put("payroll", VALUE, Use(role="ADMIN"))
    await world.engine.definitions.put(task("after"))
    adopted = await world.engine.submit(pay(key="adopted", next="after"))
    defined = await world.begin("pay", pay())
    member, admin = world.of(Role.MEMBER), world.of(Role.ADMIN)
    await member.rerun_flow(defined)
    await world.engine.definitions.put(pay(env=None))
    flow = (await world.engine.show(adopted.id)).flow
    assert flow is not None
    for item in (flow, defined):
        assert await refusal(member.rerun_flow(item)) == "secret_forbidden"
        await admin.rerun_flow(item)


async def test_subtask_counts_as_submitted_by_a_member(world: World) -> None:
    await world.engine.secrets.put("payroll", VALUE, Use(role="ADMIN"))
    await world.engine.submit(new())
    work = await claim_one(world.engine)
    own = world.of(Role.ADMIN, uuid4())
    assert await refusal(own.spawn(work.fence, "k", new(input=PAYROLL))) == "secret_forbidden"
    await own.spawn(work.fence, "k", new())


@pytest.mark.parametrize("name", ["{{item}}", {"$item": "x"}, "a b", 5])
async def test_secret_name_filled_in_by_a_flow_is_refused(world: World, name: Any) -> None:
    spec = task("mine", input={"a": {"$secret": name}})
    with pytest.raises(Invalid, match="must be the name of a secret"):
        await world.of(Role.MEMBER).definitions.put(spec)


async def test_named_definition_is_changed_only_by_the_secrets_role(world: World) -> None:
    await world.engine.definitions.put(task("pay"))
    await world.engine.secrets.put("payroll", VALUE, Use(role="ADMIN", definitions=("pay", "b")))
    member, admin = world.of(Role.MEMBER), world.of(Role.ADMIN)
    for asked in (
        member.definitions.put(task("pay", prompt="another")),
        member.definitions.put(task("b")),
        member.definitions.delete("pay"),
        member.definitions.apply_files({"f": "id: pay\nname: m\nprompt: another\n"}),
    ):
        assert await refusal(asked) == "secret_forbidden"
    await member.definitions.put(task("other"))
    await admin.definitions.put(task("pay", prompt="another"))
    await world.engine.secrets.put("payroll", use=Use(definitions=("pay",)))
    assert await refusal(member.definitions.put(task("pay"))) == "secret_forbidden"
    await admin.definitions.delete("pay")


async def test_secret_rule_survives_a_new_value_and_changes_without_one(world: World) -> None:
    secrets = world.engine.secrets
    await secrets.put("payroll", "first")
    assert (await secrets.list())[0].use == Use()
    rule = Use(role="ADMIN", agents=("payer",), definitions=("pay",))
    await secrets.put("payroll", use=rule)
    assert (await secrets.list())[0].use == rule
    await secrets.put("payroll", VALUE)
    assert (await secrets.list())[0].use == rule
    await secrets.put("payroll", use=Use())
    assert await world.may(world.of(Role.MEMBER), await world.agent("payer"))
    assert await refusal(secrets.put("payroll")) == "invalid_value"
    assert await refusal(secrets.put("gone", use=rule)) == "not_found"
    for wrong in (Use(agents=("",)), Use(definitions=("a b",)), Use(agents=("a",) * 1000)):
        assert await refusal(secrets.put("payroll", use=wrong)) in ("invalid_value", "too_large")


async def test_secret_rule_above_the_role_cannot_be_changed(world: World) -> None:
    secrets = world.of(Role.ADMIN).secrets
    await world.engine.secrets.put("payroll", VALUE, Use(role="OWNER"))
    await world.engine.secrets.put("plain", VALUE)
    for asked in (
        secrets.put("payroll", use=Use()),
        secrets.put("payroll", "mine"),
        secrets.delete("payroll"),
        secrets.put("plain", use=Use(role="OWNER")),
    ):
        assert await refusal(asked) == "secret_forbidden"
    await secrets.put("plain", "another", Use(role="ADMIN"))
    await secrets.delete("plain")


WHEREVER = """
max_turns conversation priority tags task_tags capabilities region estimate_minutes max_attempts
retry timeout_s queue_ttl_s lease_s run_at parent idempotency_key trace_id source key depends_on
blocks on_dependency_failure next group complexity escalation concurrency budget
""".split()
"""Fields that decide where and when a task runs and what follows, not what runs."""


@pytest.mark.parametrize("field", FIELDS)
def test_execution_identity_covers_every_field_except_listed_ones(field: str) -> None:
    plain = new()
    other = msgspec.structs.replace(plain, **{field: FIELDS[field]})
    assert has_same_execution(plain, other) == (field in WHEREVER)
