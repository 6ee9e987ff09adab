"""Rules of files: schedules and triggers, stored in the transaction of their definitions."""

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
    """What became of a schedule or a trigger that files have."""

    kind: Literal["schedule", "trigger"]
    name: str
    action: str


def keep_rules(
    core: Core,
    workspace: UUID,
    actor: str | None,
    caller: Caller | None,
    manifest: Manifest,
    *,
    dry_run: bool,
) -> Script[list[RuleChange]]:
    """Make schedules and triggers what files say, by name; in a dry run only say what changes."""
    found = []
    if manifest.schedules:
        by_time = schedules.Schedules(core, workspace, actor, caller)
        timed = [
            schedules.DesiredSchedule(
                name=each.name,
                target=each.target,
                schedule=msgspec.convert(each.spec, ScheduleSpec),
                input=each.input,
            )
            for each in manifest.schedules
        ]
        done = yield from (by_time.compare(timed) if dry_run else by_time.put(timed))
        found += [RuleChange("schedule", name, action) for name, action in done.items()]
    if manifest.triggers:
        by_event = triggers.Triggers(core, workspace, actor)
        told = [
            triggers.DesiredTrigger(
                name=each.name, event=each.event, target=each.target, filter=each.filter
            )
            for each in manifest.triggers
        ]
        done = yield from (by_event.compare(told) if dry_run else by_event.put(told))
        found += [RuleChange("trigger", name, action) for name, action in done.items()]
    return found
