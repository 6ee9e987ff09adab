"""Starts and controls flows: start, pause, resume, cancel, retry; runs their deferred work."""

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
from tenuto.engine.flows import groups
from tenuto.engine.flows.activation_rows import ActivationRequest
from tenuto.engine.flows.advance import Cascade
from tenuto.engine.flows.deferred import RUNNERS, cancel_flow
from tenuto.engine.flows.rows import flow_of, group_of
from tenuto.engine.flows.views import FlowStartArgs
from tenuto.engine.limits.pending_quota import check_new_flow
from tenuto.engine.tasks import retry
from tenuto.engine.tasks.references import check_references
from tenuto.engine.tenancy.secret_use import check_tasks, check_value, has_same_execution
from tenuto.model import bounds
from tenuto.model.agents.matching import Requirements
from tenuto.model.errors import Conflict, Invalid, NotFound, Unavailable
from tenuto.model.flows.definition import DEFAULT_STEPS, MAX_STEPS, GroupSpec
from tenuto.model.flows.groups import GROUP_OPEN, Group, GroupStatus
from tenuto.model.flows.plan import MAX_PLAN, Plan, Spec, build_plan, target_keys
from tenuto.model.flows.progress import FLOW_OPEN, Flow, FlowStatus
from tenuto.model.limits.complexity import with_required_capability, with_subagent_capability
from tenuto.model.tasks.fingerprint import fingerprint, fingerprints
from tenuto.model.tasks.submission import NewTask, check, requirements
from tenuto.model.tenancy.access import Caller
from tenuto.model.tenancy.secrets import extract_secrets
from tenuto.store.protocol import Row, Rows, Script, Statement

log = logging.getLogger("tenuto.engine")

T = TypeVar("T")
RETRY_DELAY = timedelta(minutes=1)
_MAX_ROUNDS = 8
"""Reads of definitions by the keys named in the last read; then all definitions are read."""
_KEY_USED = "the idempotency key was used before for another task; choose a new key"


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
        """Starts a flow of a definition; returns its id, or the earlier one's with this `fire_key`.

        Raises `Invalid` for an unknown key. `steps` limits the jumps of the flow's goto tasks.
        """
        plan = await self.build_plan(key)
        return await self.start_plan(
            plan, input, steps=steps, priority=priority, source=source, fire_key=fire_key
        )

    async def check_quota(self) -> None:
        """Raises `TooMany` if another flow would exceed the workspace's quota of pending tasks."""
        await self._core.store.transact(
            lambda: check_new_flow(self._workspace, self._core.lanes.ceiling)
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
        """Starts a flow of a plan; returns its id, or the earlier one's with this `fire_key`.

        Creates the plan's lanes. Raises `Forbidden` if the caller may not use a secret in `input`.
        """
        await self._core.read(check_value(self._workspace, self.caller, input))
        params = self._build_flow_row(plan, input, steps, priority, source, fire_key)
        params["rerun_of"] = rerun_of
        await self._check_and_create_lanes(plan)
        return await self._run(lambda cascade: self._start_or_existing(cascade, params))

    async def rerun(self, flow: UUID, origin: FlowStartArgs, steps: int | None) -> UUID:
        """Starts a rerun of `flow` with the arguments in `origin`; returns the new flow's id.

        Raises `Forbidden` if the caller may not use the secrets of a planned task that differs from
        the stored definition of its key.
        """
        tasks = origin.plan.tasks
        stored = await self._load_specs(sorted(tasks))
        changed = [
            task for key, task in tasks.items() if not has_same_execution(task, stored.get(key))
        ]
        await self._core.read(check_tasks(self._workspace, self.caller, changed))
        return await self.start_plan(
            origin.plan,
            origin.input,
            steps=steps,
            priority=origin.priority,
            source="rerun",
            rerun_of=flow,
        )

    def _start_or_existing(self, cascade: Cascade, params: dict[str, Any]) -> Script[UUID]:
        """Inserts and queues a flow; returns its id, or that of the flow with its `fire_key`."""
        if (yield from self.start_prepared(cascade, params)):
            flow: UUID = params["id"]
            return flow
        fire = {"workspace": self._workspace, "fire_key": params["fire_key"]}
        rows = yield Statement("flow_by_fire_key", fire)
        if not rows:
            text = f"a flow with the id {params['id']} exists already"
            raise Conflict(text, "idempotency_conflict")
        earlier: UUID = rows[0]["id"]
        return earlier

    async def prepare(
        self, plan: Plan, flow_input: Any, *, source: str, fire_key: str | None = None
    ) -> dict[str, Any]:
        """Caches a plan, creates its lanes; returns a flow's row for `start_prepared` to insert."""
        params = self._build_flow_row(plan, flow_input, None, None, source, fire_key)
        await self._check_and_create_lanes(plan)
        return params

    async def _check_and_create_lanes(self, plan: Plan) -> None:
        """Creates the lanes of a plan; raises `NotFound` for an unknown agent or parent task."""
        await check_references(self._core, self._workspace, plan.tasks.values())
        await self._core.lanes.ensure(_required_lanes(plan, self._workspace))

    def _build_flow_row(
        self,
        plan: Plan,
        flow_input: Any,
        steps: int | None,
        priority: int | None,
        source: str | None,
        fire_key: str | None,
    ) -> dict[str, Any]:
        """Returns a flow's row to insert, caches its plan; `Invalid` for wrong numbers or input."""
        bounds.check_number("steps", DEFAULT_STEPS if steps is None else steps, 1, MAX_STEPS)
        if priority is not None:
            bounds.check_number("priority", priority, 1, 10)
        params = {
            "id": self._core.clock.new_id(),
            "workspace": self._workspace,
            "key": plan.root,
            "title": plan.spec(plan.root).title,
            "plan": msgspec.json.encode(plan).decode(),
            "input": encode_input(flow_input),
            "steps": DEFAULT_STEPS if steps is None else steps,
            "priority": priority,
            "source": source,
            "fire_key": fire_key,
            "rerun_of": None,
            "trace_id": tracing.current_traceparent(),
            "actor": self.actor,
            "now": self._core.now(),
        }
        self._core.plans.cache_new_flow(plan, params)
        return params

    def start_prepared(self, cascade: Cascade, params: dict[str, Any]) -> Script[bool]:
        """Inserts a flow, queues its root; does nothing and returns `False` for a used `fire_key`.

        Raises `TooMany` if the flow would exceed the workspace's quota of pending tasks.
        """
        if not (yield Statement("flow_insert", params)):
            return False
        yield from check_new_flow(self._workspace, self._core.lanes.ceiling)
        cascade.request_activation(
            ActivationRequest(flow=params["id"], group=None, slot=0, key=params["key"])
        )
        return True

    async def submit_as_flow(self, new: NewTask) -> tuple[UUID, bool]:
        """Starts a flow whose root is this task; returns the task's id, and `False` if it existed.

        Submits with the same idempotency key or id create one flow. Raises `Conflict` if the first
        had another task, and `Invalid` for a task with dependencies.
        """
        check(new)
        if new.depends_on or new.blocks:
            text = "a task with next or control cannot have dependencies; use next of those tasks"
            raise Invalid(text, field="dependsOn")
        task = new.id or self._core.clock.new_id()
        fire_key = _submit_fire_key(new)
        key = new.key or f"task-{uuid5(self._workspace, fire_key) if fire_key else task}"
        definition = msgspec.structs.replace(
            new, id=None, key=key, idempotency_key=None, group=None
        )
        if fire_key is not None and (
            existing := await self._core.read(self._existing_root_task(fire_key, definition))
        ):
            return existing, False
        _check_no_secret_values(new)
        await check_references(self._core, self._workspace, [new])
        plan = await self.build_plan(key, {key: definition})
        params = self._build_flow_row(plan, None, None, None, "submit", fire_key)
        await self._core.lanes.ensure(_required_lanes(plan, self._workspace))

        def script(cascade: Cascade) -> Script[tuple[UUID, bool]]:
            if not (yield Statement("flow_insert", params)):
                assert fire_key is not None
                if (earlier := (yield from self._existing_root_task(fire_key, definition))) is None:
                    raise Conflict(_KEY_USED, "idempotency_conflict")
                return earlier, False
            yield from check_new_flow(self._workspace, self._core.lanes.ceiling)
            cascade.request_activation(
                ActivationRequest(flow=params["id"], group=None, slot=0, key=key, id=task)
            )
            return task, True

        return await self._run(script)

    def _existing_root_task(self, fire_key: str, definition: NewTask) -> Script[UUID | None]:
        """Returns the root task of the flow with `fire_key`, if any; `Conflict` if it differs."""
        params = {"workspace": self._workspace, "fire_key": fire_key}
        rows = yield Statement("flow_root_by_fire_key", params)
        if rows and not _is_same_submit(rows[0]["plan"], definition):
            raise Conflict(_KEY_USED, "idempotency_conflict")
        return rows[0]["id"] if rows else None

    async def add_to_group(self, name: str, new: NewTask) -> tuple[UUID, bool]:
        """Adds a task to a group's open run; returns its id, and `False` if it existed already.

        `name` is the run's id, or a key. Calls with the same id or idempotency key create one task,
        even if the run has finished meanwhile. Raises `NotFound`, or `Conflict` for a finished run.
        """
        check(new)
        _check_no_secret_values(new)
        existing = await self._core.read(self._existing_child(new))
        if existing is not None:
            return existing, False
        await check_references(self._core, self._workspace, [new])
        group = await self.find_open_group(name)
        await self._core.lanes.ensure({requirements(new, self._workspace)})

        def script(cascade: Cascade) -> Script[tuple[UUID, bool]]:
            current = yield from self._lock_group(group)
            existing = yield from self._existing_child(new)
            if existing is not None:
                return existing, False
            if current.status not in GROUP_OPEN:
                raise Conflict(f"group {group} is {current.status}; no task can be added")
            yield from check_new_flow(self._workspace, self._core.lanes.ceiling)
            return (yield from cascade.add_child(current, new)), True

        return await self._run(script)

    def _existing_child(self, new: NewTask) -> Script[UUID | None]:
        """Returns the task with the id or idempotency key, or `None`; `Conflict` if it differs."""
        if new.id is None and new.idempotency_key is None:
            return None
        identity = [(new.id or self._core.clock.new_id(), new.idempotency_key)]
        rows = yield Statement(
            "submitted_before", {"workspace": self._workspace}, {"wanted": identity}
        )
        if any(row["fingerprint"] not in fingerprints(new) for row in rows):
            raise Conflict(
                "the idempotency key or id was used before for another task", "idempotency_conflict"
            )
        return rows[0]["id"] if rows else None

    async def build_plan(self, key: str, unstored: dict[str, Spec] | None = None) -> Plan:
        """Returns the plan of a key, with the complexity rules applied; `Invalid` if it cannot run.

        `unstored` has definitions, by key, that replace or complete the stored ones.
        """
        specs: dict[str, Spec] = dict(unstored or {})
        missing = {key} - set(specs)
        read_keys: set[str] = set(specs)
        for spec in specs.values():
            missing |= set(target_keys(spec)) - read_keys
        rounds = 0
        while missing:
            rounds += 1
            read_all = rounds > _MAX_ROUNDS
            fetched = await self._load_specs(None if read_all else sorted(missing))
            for name, spec in fetched.items():
                specs.setdefault(name, spec)
            if read_all:
                break
            read_keys |= missing
            missing = {name for spec in fetched.values() for name in target_keys(spec)} - read_keys
        plan = build_plan(key, specs.get)
        rules = await self._core.lanes.complexity(self._workspace)
        tasks = {name: with_required_capability(new, rules) for name, new in plan.tasks.items()}
        return msgspec.structs.replace(plan, tasks=tasks)

    async def _load_specs(self, keys: list[str] | None) -> dict[str, Spec]:
        """Returns stored definitions by key, leaves out unknown keys; `None`: up to `MAX_PLAN`."""
        for key in keys or ():
            bounds.check_text("key", key, bounds.MAX_TEXT)
        params = {"workspace": self._workspace, "keys": keys, "most": MAX_PLAN}
        rows = await self._core.store.fetch(Statement("definition_specs", params))
        return {row["key"]: spec_of(row) for row in rows}

    async def cancel(self, flow: UUID, reason: str | None = None) -> None:
        """Cancels a flow and its open tasks; kills sessions. `Conflict` if it has finished."""

        def script(cascade: Cascade) -> Script[None]:
            current = yield from self._lock_flow(flow)
            if current.status not in FLOW_OPEN:
                raise Conflict(f"flow {flow} is {current.status} and cannot be cancelled")
            yield from cancel_flow(cascade, current, reason, self._core.now())

        await self._run(script)

    async def pause(self, flow: UUID) -> None:
        """Pauses a flow; its sessions stop after a checkpoint. `Conflict` if it is not RUNNING."""
        await self._change_flow_status(flow, FlowStatus.RUNNING, FlowStatus.PAUSED, "pause")

    async def resume(self, flow: UUID) -> None:
        """Resumes a flow and its paused tasks; raises `Conflict` if the flow is not PAUSED."""
        await self._change_flow_status(flow, FlowStatus.PAUSED, FlowStatus.RUNNING, "resume")

    async def _change_flow_status(
        self, flow: UUID, source: FlowStatus, target: FlowStatus, action: str
    ) -> None:
        """Changes the status, or `Conflict` if not `source`; defers `action` on the open tasks.

        Then runs due deferred work, of all workspaces.
        """

        def script(cascade: Cascade) -> Script[None]:
            current = yield from self._lock_flow(flow)
            if current.status is not source:
                raise Conflict(f"flow {flow} is {current.status}; cannot {action} it")
            after = msgspec.structs.replace(current, status=target)
            yield from cascade.write_flow(after, f"flow_{action}d")
            cascade.defer(action, flow, self._workspace, {"of": "flow"})

        await self._run(script)
        await self.run_deferred_once()

    async def cancel_group(self, group: UUID, reason: str | None = None) -> None:
        """Cancels a group run and its open tasks and groups; `Conflict` if the run has finished."""

        def script(cascade: Cascade) -> Script[None]:
            current = yield from self._lock_group(group)
            if current.status not in GROUP_OPEN:
                raise Conflict(f"group {group} is {current.status} and cannot be cancelled")
            yield from groups.stop_group(cascade, current, GroupStatus.CANCELLED, reason)

        await self._run(script)

    async def pause_group(self, group: UUID) -> None:
        """Pauses a group run and its open tasks, also nested; `Conflict` if it is not RUNNING."""
        await self._change_group_status(group, GroupStatus.RUNNING, GroupStatus.PAUSED, "pause")

    async def resume_group(self, group: UUID) -> None:
        """Resumes a group run and its paused tasks; raises `Conflict` if the run is not PAUSED."""
        await self._change_group_status(group, GroupStatus.PAUSED, GroupStatus.RUNNING, "resume")

    async def _change_group_status(
        self, group: UUID, source: GroupStatus, target: GroupStatus, action: str
    ) -> None:
        """Changes the status, or `Conflict` if not `source`; defers `action` on the open tasks.

        Then runs due deferred work, of all workspaces.
        """

        def script(cascade: Cascade) -> Script[None]:
            current = yield from self._lock_group(group)
            if current.status is not source:
                raise Conflict(f"group {group} is {current.status}; cannot {action} it")
            after = msgspec.structs.replace(current, status=target)
            yield from cascade.write_group(after, f"group_{action}d")
            cascade.defer(action, group, self._workspace, {"of": "group"})

        await self._run(script)
        await self.run_deferred_once()

    async def find_open_group(self, name: str) -> UUID:
        """Returns an id in `name` unchecked; for a key, its newest open run, or `NotFound`."""
        with suppress(ValueError):
            return UUID(name)
        bounds.check_text("group", name, bounds.MAX_TEXT)
        params = {"workspace": self._workspace, "key": name}
        rows = await self._core.store.fetch(Statement("group_live", params))
        if not rows:
            raise NotFound(f"group {name!r} has no open run; start it, or give the id of a run")
        group: UUID = rows[0]["id"]
        return group

    def _lock_flow(self, flow: UUID) -> Script[Flow]:
        """Locks and returns a flow of the workspace; raises `NotFound`."""
        rows = yield Statement("flows_locked", {"ids": [flow]})
        if not rows or rows[0]["workspace"] != self._workspace:
            raise NotFound(f"no flow {flow}")
        return flow_of(rows[0])

    def _lock_group(self, group: UUID) -> Script[Group]:
        """Locks and returns a group run of the workspace; raises `NotFound`."""
        rows = yield Statement("groups_locked", {"ids": [group]})
        if not rows or rows[0]["workspace"] != self._workspace:
            raise NotFound(f"no group {group}")
        return group_of(rows[0])

    async def revive(self, flow: UUID) -> int:
        """Retries a flow's failed and cancelled tasks, many of them later; returns how many now.

        Raises `Conflict` if the flow is COMPLETED or a task waits for one that stays failed.
        """

        def script(cascade: Cascade) -> Script[int]:
            current = yield from self._lock_flow(flow)
            if current.status is FlowStatus.COMPLETED:
                raise Conflict(f"flow {flow} is COMPLETED; it has no failed tasks to retry")
            return (yield from retry.retry_failed(cascade, current, self._core.now()))

        return await self._run(script)

    async def run_deferred_once(self, limit: int = 20, workspace: UUID | None = None) -> int:
        """Runs up to `limit` due rows of deferred work, postpones failing ones; returns how many.

        Without `workspace`, runs those of all workspaces. Logs failures, but raises `Unavailable`.
        """
        params = {"now": self._core.now(), "workspace": workspace, "most": limit}

        def load_due() -> Script[Rows]:
            rows: Rows = yield Statement("deferred_due", params)
            return rows

        done = 0
        for row in await self._core.store.transact(load_due):
            try:
                done += await self._run_deferred(row["id"])
            except Unavailable:
                raise
            except Exception:
                # One failing row must not block the others.
                log.exception(
                    "deferred work %s of %s failed; it is retried in %s",
                    row["kind"],
                    row["subject"],
                    RETRY_DELAY,
                )
                await self._postpone(row["id"])
        return done

    async def _postpone(self, work: UUID) -> None:
        """Makes failed deferred work due again after `RETRY_DELAY`."""
        params = {"id": work, "at": self._core.now() + RETRY_DELAY}

        def script() -> Script[None]:
            yield Statement("deferred_postpone", params)

        await self._core.store.transact_one(script)

    async def _run_deferred(self, work: UUID) -> int:
        """Runs and deletes a row of deferred work; returns 1, or 0 if another process has it."""

        def script(cascade: Cascade) -> Script[int]:
            rows = yield Statement("deferred_lock", {"id": work})
            if not rows:
                return 0
            yield Statement("deferred_delete", {"ids": [work]})
            yield from RUNNERS[rows[0]["kind"]](cascade, rows[0])
            return 1

        crash_point("flow.before_piece")
        return await self._run(script)

    async def _run(self, script: Callable[[Cascade], Script[T]]) -> T:
        """Runs a script with a cascade in one transaction, then sends hints; returns its result."""
        return await self._core.run_with_cascade(script, self.actor)


def spec_of(row: Row) -> Spec:
    """Returns the definition of a task or group in a row."""
    if row["kind"] == "group":
        return msgspec.json.decode(row["spec"], type=GroupSpec)
    return msgspec.json.decode(row["spec"], type=NewTask)


def _is_same_submit(stored: str, new: NewTask) -> bool:
    """True if the root of a stored plan, in JSON, is an equal task.

    The rest of the plan may differ, and so may the capability that the complexity rules added.
    """
    plan = msgspec.json.decode(stored, type=Plan)
    root = plan.tasks.get(plan.root)
    accepted = map(fingerprint, (new, with_subagent_capability(new)))
    return root is not None and fingerprint(root) in accepted


def _check_no_secret_values(new: NewTask) -> None:
    """Raises `Invalid` if a task's input contains secret values: plans are stored as written."""
    if extract_secrets(new.input)[1]:
        text = "the input of a flow's task must name secrets, not contain their values"
        raise Invalid(text, "secret_in_definition")


def _submit_fire_key(new: NewTask) -> str | None:
    """Returns a `fire_key` made of the task's idempotency key, else of its id, else `None`."""
    if new.idempotency_key is not None:
        return f"submit:{new.idempotency_key}"
    return None if new.id is None else f"submit-id:{new.id}"


def encode_input(value: Any) -> str | None:
    """Returns a flow's input as JSON, `None` for `None`; `Invalid` for secret values or no JSON."""
    if extract_secrets(value)[1]:
        text = "the input of a flow must name secrets, not contain their values"
        raise Invalid(text, "secret_in_definition")
    return bounds.to_json_text("input", value)


def _required_lanes(plan: Plan, workspace: UUID) -> set[Requirements]:
    """Returns the requirements of all tasks of a plan."""
    return {requirements(new, workspace) for new in plan.tasks.values()}
