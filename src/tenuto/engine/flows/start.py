"""Flows: definitions started, what is left of their cascades done, and people's word on them."""

import logging
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar
from uuid import UUID, uuid5

import msgspec

from tenuto import tracing
from tenuto.crash_points import crash_point
from tenuto.engine.core import Core
from tenuto.engine.flows.activation_rows import ActivationRequest
from tenuto.engine.flows.advance import Cascade
from tenuto.engine.flows.deferred import PIECES, end_flow
from tenuto.engine.flows.rows import flow_of, group_of
from tenuto.engine.flows.views import FlowStartArgs
from tenuto.engine.limits.pending_quota import check_flow
from tenuto.engine.tasks import retry
from tenuto.engine.tasks.references import check_references
from tenuto.engine.tenancy.secret_use import check_tasks, check_value, runs_the_same
from tenuto.model import bounds
from tenuto.model.agents.matching import Requirements
from tenuto.model.errors import Conflict, Invalid, NotFound, Unavailable
from tenuto.model.flows.definition import MAX_STEPS, STEPS, GroupSpec
from tenuto.model.flows.plan import MAX_PLAN, Plan, Spec, plan_for, targets
from tenuto.model.flows.progress import (
    FLOW_OPEN,
    GROUP_OPEN,
    Flow,
    FlowStatus,
    Group,
    GroupStatus,
)
from tenuto.model.limits.complexity import gated, require_subagents
from tenuto.model.tasks.fingerprint import fingerprint, fingerprints
from tenuto.model.tasks.submission import NewTask, check, requirements
from tenuto.model.tenancy.access import Caller
from tenuto.model.tenancy.secrets import extract_secrets
from tenuto.store.protocol import Row, Rows, Script, Statement

log = logging.getLogger("tenuto.engine")

T = TypeVar("T")
TRY_AGAIN = timedelta(minutes=1)
_ROUNDS = 8
"""Looks at stored definitions, each for the keys that the last one named, before all are read."""


class Flows:
    """The flows of one workspace, on behalf of one actor."""

    def __init__(
        self, core: Core, workspace: UUID, actor: str | None, caller: Caller | None = None
    ) -> None:
        self._core = core
        self._workspace = workspace
        self.actor = actor
        self.caller = caller

    async def start(
        self,
        key: str,
        input: Any = None,  # noqa: A002  the name that users know
        *,
        steps: int | None = None,
        priority: int | None = None,
        source: str | None = None,
        fire_key: str | None = None,
    ) -> UUID:
        """Run a definition; answers the flow. A `fire_key` starts one flow, however often used."""
        plan = await self.plan(key)
        return await self.start_plan(
            plan, input, steps=steps, priority=priority, source=source, fire_key=fire_key
        )

    async def check_room(self) -> None:
        """Raise `TooMany` while the workspace's quota has no room for another flow."""
        await self._core.store.transact(
            lambda: check_flow(self._workspace, self._core.lanes.ceiling)
        )

    async def start_plan(
        self,
        plan: Plan,
        input: Any = None,  # noqa: A002
        *,
        steps: int | None = None,
        priority: int | None = None,
        source: str | None = None,
        fire_key: str | None = None,
        rerun_of: UUID | None = None,
    ) -> UUID:
        """The same for a plan that was made already."""
        await self._core.read(check_value(self._workspace, self.caller, input))
        params = self._params(plan, input, steps, priority, source, fire_key)
        params["rerun_of"] = rerun_of
        await self._make_ready(plan)
        return await self._run(lambda cascade: self._begun(cascade, params))

    async def rerun(self, flow: UUID, origin: FlowStartArgs, steps: int | None) -> UUID:
        """Start another flow of a flow's plan and input; answers its id.

        What the plan has and no definition says any more, the caller says anew.
        """
        tasks = origin.plan.tasks
        defined = await self._specs(sorted(tasks))
        anew = [each for key, each in tasks.items() if not runs_the_same(each, defined.get(key))]
        await self._core.read(check_tasks(self._workspace, self.caller, anew))
        return await self.start_plan(
            origin.plan,
            origin.input,
            steps=steps,
            priority=origin.priority,
            source="rerun",
            rerun_of=flow,
        )

    def _begun(self, cascade: Cascade, params: dict[str, Any]) -> Script[UUID]:
        """The flow that was made, or the one that the `fire_key` made before."""
        if (yield from self.begin(cascade, params)):
            flow: UUID = params["id"]
            return flow
        where = {"workspace": self._workspace, "fire_key": params["fire_key"]}
        rows = yield Statement("flow_fired", where)
        if not rows:
            raise Conflict("a flow with that id exists already", "idempotency_conflict")
        earlier: UUID = rows[0]["id"]
        return earlier

    async def prepare(
        self, plan: Plan, given: Any, *, source: str, fire_key: str | None = None
    ) -> dict[str, Any]:
        """The row of a flow that a script is to `begin`; the lanes that it needs are there."""
        params = self._params(plan, given, None, None, source, fire_key)
        await self._make_ready(plan)
        return params

    async def _make_ready(self, plan: Plan) -> None:
        """See to the lanes of a plan; raises `NotFound` for an agent that nobody has."""
        await check_references(self._core, self._workspace, plan.tasks.values())
        await self._core.lanes.ensure(_lanes(plan, self._workspace))

    def _params(
        self,
        plan: Plan,
        given: Any,
        steps: int | None,
        priority: int | None,
        source: str | None,
        fire_key: str | None,
    ) -> dict[str, Any]:
        """The row of a new flow; raises `Invalid` for what cannot be stored."""
        bounds.number("steps", STEPS if steps is None else steps, 1, MAX_STEPS)
        if priority is not None:
            bounds.number("priority", priority, 1, 10)
        params = {
            "id": self._core.clock.new_id(),
            "workspace": self._workspace,
            "key": plan.root,
            "title": plan.spec(plan.root).title,
            "plan": msgspec.json.encode(plan).decode(),
            "input": input_text(given),
            "steps": STEPS if steps is None else steps,
            "priority": priority,
            "source": source,
            "fire_key": fire_key,
            "rerun_of": None,
            "trace_id": tracing.current_traceparent(),
            "actor": self.actor,
            "now": self._core.now(),
        }
        self._core.plans.remember(plan, params)
        return params

    def begin(self, cascade: Cascade, params: dict[str, Any]) -> Script[bool]:
        """Make a flow and what it starts with; false when its `fire_key` was used before.

        `TooMany` when the workspace's quota of waiting tasks has no room for it.
        """
        if not (yield Statement("flow_insert", params)):
            return False
        yield from check_flow(self._workspace, self._core.lanes.ceiling)
        cascade.request_activation(
            ActivationRequest(flow=params["id"], group=None, slot=0, key=params["key"])
        )
        return True

    async def submit_as_flow(self, new: NewTask) -> tuple[UUID, bool]:
        """Run a task that says what follows it as a flow of its own; its id, and whether it is new.

        An idempotency key makes one flow, however often it is used.
        """
        check(new)
        if new.depends_on or new.blocks:
            text = "a task with next or control waits for nobody; make it the next of what it needs"
            raise Invalid(text, field="dependsOn")
        task = new.id or self._core.clock.new_id()
        once = _idempotency_fields(new)
        key = new.key or f"task-{uuid5(self._workspace, once) if once else task}"
        kept = msgspec.structs.replace(new, id=None, key=key, idempotency_key=None, group=None)
        if once is not None and (known := await self._core.read(self._adopted(once, kept))):
            return known, False
        _check_open(new)
        await check_references(self._core, self._workspace, [new])
        plan = await self.plan(key, {key: kept})
        params = self._params(plan, None, None, None, "submit", once)
        await self._core.lanes.ensure(_lanes(plan, self._workspace))

        def script(cascade: Cascade) -> Script[tuple[UUID, bool]]:
            if not (yield Statement("flow_insert", params)):
                assert once is not None
                if (before := (yield from self._adopted(once, kept))) is None:
                    raise Conflict("the idempotency key was used before", "idempotency_conflict")
                return before, False
            yield from check_flow(self._workspace, self._core.lanes.ceiling)
            cascade.request_activation(
                ActivationRequest(flow=params["id"], group=None, slot=0, key=key, id=task)
            )
            return task, True

        return await self._run(script)

    def _adopted(self, once: str, kept: NewTask) -> Script[UUID | None]:
        """The task that the same submit made before; raises `Conflict` where it was another."""
        where = {"workspace": self._workspace, "fire_key": once}
        rows = yield Statement("flow_root", where)
        if rows and not _is_repeated(rows[0]["plan"], kept):
            raise Conflict("the idempotency key was used before", "idempotency_conflict")
        return rows[0]["id"] if rows else None

    async def join(self, name: str, new: NewTask) -> tuple[UUID, bool]:
        """Add a task to a run of a group that has not ended; its id, and whether it is new.

        An id or an idempotency key makes one task, however often it is used and whatever has become
        of the group meanwhile.
        """
        check(new)
        _check_open(new)
        known = await self._core.read(self._joined_before(new))
        if known is not None:
            return known, False
        await check_references(self._core, self._workspace, [new])
        group = await self.live_group(name)
        await self._core.lanes.ensure({requirements(new, self._workspace)})

        def script(cascade: Cascade) -> Script[tuple[UUID, bool]]:
            found = yield from self._locked_group(group)
            known = yield from self._joined_before(new)
            if known is not None:
                return known, False
            if found.status not in GROUP_OPEN:
                raise Conflict(f"the group is {found.status}")
            yield from check_flow(self._workspace, self._core.lanes.ceiling)
            return (yield from cascade.join(found, new)), True

        return await self._run(script)

    def _joined_before(self, new: NewTask) -> Script[UUID | None]:
        """The task that the same submit made before; raises `Conflict` where it was another."""
        if new.id is None and new.idempotency_key is None:
            return None
        wanted = [(new.id or self._core.clock.new_id(), new.idempotency_key)]
        rows = yield Statement(
            "submitted_before", {"workspace": self._workspace}, {"wanted": wanted}
        )
        if any(row["fingerprint"] not in fingerprints(new) for row in rows):
            raise Conflict(
                "the idempotency key or id was used before for another task", "idempotency_conflict"
            )
        return rows[0]["id"] if rows else None

    async def plan(self, key: str, own: dict[str, Spec] | None = None) -> Plan:
        """The checked plan of a definition; `own` are definitions that are not stored."""
        known: dict[str, Spec] = dict(own or {})
        wanted = {key} - set(known)
        looked: set[str] = set(known)
        for each in known.values():
            wanted |= set(targets(each)) - looked
        rounds = 0
        while wanted:
            rounds += 1
            everything = rounds > _ROUNDS
            found = await self._specs(None if everything else sorted(wanted))
            for name, spec in found.items():
                known.setdefault(name, spec)
            if everything:
                break
            looked |= wanted
            wanted = {name for spec in found.values() for name in targets(spec)} - looked
        plan = plan_for(key, known.get)
        rules = await self._core.lanes.complexity(self._workspace)
        tasks = {name: gated(new, rules) for name, new in plan.tasks.items()}
        return msgspec.structs.replace(plan, tasks=tasks)

    async def _specs(self, keys: list[str] | None) -> dict[str, Spec]:
        for key in keys or ():
            bounds.text("key", key, bounds.MAX_TEXT)
        params = {"workspace": self._workspace, "keys": keys, "most": MAX_PLAN}
        rows = await self._core.store.fetch(Statement("definition_specs", params))
        return {row["key"]: spec_of(row) for row in rows}

    # People's word on a flow or a group.

    async def cancel(self, flow: UUID, reason: str | None = None) -> None:
        """End a flow with all that is open in it; running sessions are killed first."""

        def script(cascade: Cascade) -> Script[None]:
            found = yield from self._locked(flow)
            if found.status not in FLOW_OPEN:
                raise Conflict(f"the flow is {found.status}")
            yield from end_flow(cascade, found, reason, self._core.now())

        await self._run(script)

    async def pause(self, flow: UUID) -> None:
        """Hold everything of a flow; running sessions are stopped after a last checkpoint."""
        await self._hold(flow, FlowStatus.RUNNING, FlowStatus.PAUSED, "pause")

    async def resume(self, flow: UUID) -> None:
        """Let a paused flow go on."""
        await self._hold(flow, FlowStatus.PAUSED, FlowStatus.RUNNING, "resume")

    async def _hold(self, flow: UUID, source: FlowStatus, target: FlowStatus, what: str) -> None:
        def script(cascade: Cascade) -> Script[None]:
            found = yield from self._locked(flow)
            if found.status is not source:
                raise Conflict(f"the flow is {found.status}")
            after = msgspec.structs.replace(found, status=target)
            yield cascade.flow_change(after, f"flow_{what}d")
            cascade.defer(what, flow, self._workspace, {"of": "flow"})

        await self._run(script)
        await self.run_deferred_once()

    async def cancel_group(self, group: UUID, reason: str | None = None) -> None:
        """End a run of a group with all that is open in it."""

        def script(cascade: Cascade) -> Script[None]:
            found = yield from self._locked_group(group)
            if found.status not in GROUP_OPEN:
                raise Conflict(f"the group is {found.status}")
            yield from cascade.end_group(found, GroupStatus.CANCELLED, reason)

        await self._run(script)

    async def pause_group(self, group: UUID) -> None:
        """Hold everything of a run of a group."""
        await self._hold_group(group, GroupStatus.RUNNING, GroupStatus.PAUSED, "pause")

    async def resume_group(self, group: UUID) -> None:
        """Let a paused run of a group go on."""
        await self._hold_group(group, GroupStatus.PAUSED, GroupStatus.RUNNING, "resume")

    async def _hold_group(
        self, group: UUID, source: GroupStatus, target: GroupStatus, what: str
    ) -> None:
        def script(cascade: Cascade) -> Script[None]:
            found = yield from self._locked_group(group)
            if found.status is not source:
                raise Conflict(f"the group is {found.status}")
            after = msgspec.structs.replace(found, status=target)
            yield cascade.group_change(after, f"group_{what}d")
            cascade.defer(what, group, self._workspace, {"of": "group"})

        await self._run(script)
        await self.run_deferred_once()

    async def live_group(self, name: str) -> UUID:
        """The run that an id or a key names, of a key the newest that has not ended."""
        with suppress(ValueError):
            return UUID(name)
        bounds.text("group", name, bounds.MAX_TEXT)
        params = {"workspace": self._workspace, "key": name}
        rows = await self._core.store.fetch(Statement("group_live", params))
        if not rows:
            raise NotFound(f"no group {name!r} is running")
        group: UUID = rows[0]["id"]
        return group

    def _locked(self, flow: UUID) -> Script[Flow]:
        rows = yield Statement("flows_locked", {"ids": [flow]})
        if not rows or rows[0]["workspace"] != self._workspace:
            raise NotFound(f"no flow {flow}")
        return flow_of(rows[0])

    def _locked_group(self, group: UUID) -> Script[Group]:
        rows = yield Statement("groups_locked", {"ids": [group]})
        if not rows or rows[0]["workspace"] != self._workspace:
            raise NotFound(f"no group {group}")
        return group_of(rows[0])

    async def revive(self, flow: UUID) -> int:
        """Go on with a flow from what failed in it; answers how many tasks run again at once."""

        def script(cascade: Cascade) -> Script[int]:
            found = yield from self._locked(flow)
            if found.status is FlowStatus.COMPLETED:
                raise Conflict("the flow is COMPLETED: there is nothing to try again")
            return (yield from retry.from_failed(cascade, found, self._core.now()))

        return await self._run(script)

    async def run_deferred_once(self, most: int = 20, workspace: UUID | None = None) -> int:
        """Do some of what was left, in one workspace or in all; answers how many pieces."""
        params = {"now": self._core.now(), "workspace": workspace, "most": most}

        def look() -> Script[Rows]:
            rows: Rows = yield Statement("work_due", params)
            return rows

        done = 0
        for row in await self._core.store.transact(look):
            try:
                done += await self._run_deferred(row["id"])
            except Unavailable:
                raise
            except Exception:
                # One piece must not hold up the others; it is tried again, later.
                log.exception("cannot do %s of %s", row["kind"], row["subject"])
                await self._postpone(row["id"])
        return done

    async def _postpone(self, work: UUID) -> None:
        params = {"id": work, "at": self._core.now() + TRY_AGAIN}

        def script() -> Script[None]:
            yield Statement("work_later", params)

        await self._core.store.once(script)

    async def _run_deferred(self, work: UUID) -> int:
        def script(cascade: Cascade) -> Script[int]:
            rows = yield Statement("work_take", {"id": work})
            if not rows:
                return 0
            yield Statement("work_done", {"ids": [work]})
            yield from PIECES[rows[0]["kind"]](cascade, rows[0])
            return 1

        crash_point("flow.before_piece")
        return await self._run(script)

    async def _run(self, script: Callable[[Cascade], Script[T]]) -> T:
        return await self._core.run_with_cascade(script, self.actor)


def spec_of(row: Row) -> Spec:
    """The definition in a row."""
    if row["kind"] == "group":
        return msgspec.json.decode(row["spec"], type=GroupSpec)
    return msgspec.json.decode(row["spec"], type=NewTask)


def _is_repeated(stored: str, new: NewTask) -> bool:
    """True if a stored plan starts with the task; what follows it may have changed.

    So may what complexity requires of an agent, which stands in the plan.
    """
    plan = msgspec.json.decode(stored, type=Plan)
    before = plan.tasks.get(plan.root)
    known = map(fingerprint, (new, require_subagents(new)))
    return before is not None and fingerprint(before) in known


def _check_open(new: NewTask) -> None:
    """Raise `Invalid` for a task that holds secrets: a flow keeps what it runs as it is written."""
    if extract_secrets(new.input)[1]:
        raise Invalid("a flow's task names secrets, it does not hold them", "secret_in_definition")


def _idempotency_fields(new: NewTask) -> str | None:
    """By what a repeated submit is known again."""
    if new.idempotency_key is not None:
        return f"submit:{new.idempotency_key}"
    return None if new.id is None else f"submit-id:{new.id}"


def input_text(given: Any) -> str | None:
    """A flow's input as it is stored; raises `Invalid` for what cannot be."""
    if extract_secrets(given)[1]:
        raise Invalid("a flow's input names secrets, it does not hold them", "secret_in_definition")
    return bounds.json_text("input", given)


def _lanes(plan: Plan, workspace: UUID) -> set[Requirements]:
    return {requirements(new, workspace) for new in plan.tasks.values()}
