"""Stores the schedules and triggers of YAML files, in the transaction of their definitions."""

from typing import Literal
from uuid import UUID

import msgspec

from tenuto.engine.core import Core
from tenuto.engine.schedules import schedules, triggers
from tenuto.manifest.manifest import Manifest
from tenuto.model.schedules.schedule import ScheduleSpec
from tenuto.model.tenancy.access import Caller
from tenuto.store.protocol import Script


class RuleChange(msgspec.Struct, frozen=True):
    """A schedule or trigger of a file, and what was done with it: `created`, `updated`, ..."""

    kind: Literal["schedule", "trigger"]
    name: str
    action: str


def store_rules(
    core: Core,
    workspace: UUID,
    actor: str | None,
    caller: Caller | None,
    manifest: Manifest,
    *,
    dry_run: bool,
) -> Script[list[RuleChange]]:
    """Stores the files' schedules and triggers by name; returns what was done with each.

    In a dry run, only returns what would be done.
    """
    changes = []
    if manifest.schedules:
        schedule_engine = schedules.Schedules(core, workspace, actor, caller)
        desired_schedules = [
            schedules.DesiredSchedule(
                name=declared.name,
                target=declared.target,
                schedule=msgspec.convert(declared.spec, ScheduleSpec),
                input=declared.input,
            )
            for declared in manifest.schedules
        ]
        actions = yield from schedule_engine.put(desired_schedules, dry_run=dry_run)
        changes += [RuleChange("schedule", name, action) for name, action in actions.items()]
    if manifest.triggers:
        trigger_engine = triggers.Triggers(core, workspace, actor)
        desired_triggers = [
            msgspec.convert(declared, triggers.DesiredTrigger, from_attributes=True)
            for declared in manifest.triggers
        ]
        actions = yield from trigger_engine.put(desired_triggers, dry_run=dry_run)
        changes += [RuleChange("trigger", name, action) for name, action in actions.items()]
    return changes
