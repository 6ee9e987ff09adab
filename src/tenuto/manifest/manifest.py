"""Links the definitions of files with each other and with stored ones, and checks them."""

from collections.abc import Collection, Iterator, Mapping

import msgspec

from tenuto.manifest.decoding import MappingFields
from tenuto.manifest.documents import Files, ManifestDraft, Schedule, Trigger, parse_files
from tenuto.manifest.errors import ManifestErrors, location_prefix
from tenuto.manifest.shapes import ChildRef
from tenuto.manifest.tasks import check_spec, field_name, reference_key
from tenuto.manifest.yaml_nodes import SourceLocation
from tenuto.model.errors import Invalid
from tenuto.model.flows.definition import GroupSpec
from tenuto.model.flows.plan import Plan, Spec, check_plan, target_keys
from tenuto.model.tasks.submission import NewTask


class Manifest(msgspec.Struct, frozen=True):
    """The content of files: definitions by key, schedules, triggers, and keys to start now."""

    tasks: dict[str, NewTask] = {}
    groups: dict[str, GroupSpec] = {}
    schedules: tuple[Schedule, ...] = ()
    triggers: tuple[Trigger, ...] = ()
    starts: tuple[str, ...] = ()
    """Keys of definitions to start after the apply: `schedule: {type: immediate}`."""
    warnings: tuple[str, ...] = ()

    @property
    def specs(self) -> dict[str, Spec]:
        """All tasks and then all groups, by key."""
        return {**self.tasks, **self.groups}


def read_manifest(files: Files, stored: Mapping[str, Spec] | None = None) -> Manifest:
    """Parses, links and checks files; raises `Invalid` with all errors and their locations.

    `stored` contains the definitions that the files can refer to, and the groups whose children
    the files mention.
    """
    return link_draft(parse_files(files), stored or {})


def link_draft(draft: ManifestDraft, stored: Mapping[str, Spec]) -> Manifest:
    """Links a draft with stored definitions into a manifest; raises `Invalid` with all errors."""
    return _Linker(draft, stored).manifest()


class _Linker:
    """Resolves the references between definitions."""

    def __init__(self, draft: ManifestDraft, stored: Mapping[str, Spec]) -> None:
        self._draft = draft
        self._stored = stored
        self._specs = dict(draft.specs)
        self._warnings = list(draft.warnings)
        self._errors = ManifestErrors()

    def manifest(self) -> Manifest:
        """Returns the linked and checked manifest; raises `Invalid` with all errors."""
        for key, fields in self._draft.fields_by_key.items():
            self._link_previous(key, fields)
            self._add_to_group(key, fields)
        self._check_targets()
        self._errors.raise_if_any()
        self._check_plan()
        self._errors.raise_if_any()
        return Manifest(
            {key: spec for key, spec in self._specs.items() if isinstance(spec, NewTask)},
            {key: spec for key, spec in self._specs.items() if isinstance(spec, GroupSpec)},
            tuple(rule for rule, _ in self._draft.schedules),
            tuple(rule for rule, _ in self._draft.triggers),
            tuple(self._draft.starts),
            tuple(self._warnings),
        )

    def _find_spec(self, key: str) -> Spec | None:
        """Returns the definition of the files with this key, else the stored one, else `None`."""
        return self._specs.get(key) or self._stored.get(key)

    def _link_previous(self, key: str, fields: MappingFields) -> None:
        """Sets `next` of the definition that `previous_task` names, or adds an error."""
        for name in ("previous_task", "previous"):
            if name not in fields:
                continue
            previous = reference_key(fields.get(name))
            location, path = fields.field_node(name).location, fields.field_path(name)
            spec = self._find_spec(previous)
            if spec is None:
                reason = f"{key!r} refers to {previous!r}, which is not defined"
                self._errors.add(location, path, reason, "target_unknown")
            elif spec.next not in (None, key):
                self._errors.add(
                    location, path, f"{previous!r} has next {spec.next!r} already, not {key!r}"
                )
            elif spec.next is None and previous not in self._specs:
                reason = f"{previous!r} is stored without next; set next: {key} in its definition"
                self._errors.add(location, path, reason)
            elif spec.next is None:
                self._specs[previous] = msgspec.structs.replace(spec, next=key)

    def _add_to_group(self, key: str, fields: MappingFields) -> None:
        """Appends the task to the group that `group_id` names; creates a missing group."""
        name = field_name(fields, "group")
        if name not in fields or isinstance(self._specs[key], GroupSpec):
            return
        group_key = fields.get(name)
        group = self._find_spec(group_key)
        if group is None:
            self._warnings.append(
                f"{location_prefix(fields.field_node(name).location)}{fields.field_path(name)}:"
                f" there is no group {group_key!r}; it is created as an empty sequential group"
            )
            group = GroupSpec(title=group_key, key=group_key)
        if not isinstance(group, GroupSpec):
            self._errors.add(
                fields.field_node(name).location,
                fields.field_path(name),
                f"{group_key!r} is a task, not a group",
            )
            return
        if key not in group.children:
            group = msgspec.structs.replace(group, children=(*group.children, key))
            self._specs[group_key] = group
        try:
            check_spec(group)
        except Invalid as error:
            self._errors.add_invalid(
                fields.field_node(name).location, fields.field_path(name), error
            )

    def _check_targets(self) -> None:
        """Adds an error for each reference to a missing key or to a key of the other kind."""
        for key, spec in self._specs.items():
            for target in target_keys(spec):
                if self._find_spec(target) is None:
                    location, path = self._reference_location(key, target)
                    reason = f"{key!r} refers to {target!r}, which is not defined"
                    self._errors.add(location, path, reason, "target_unknown")
        for name, target, location in self._draft.start_rules():
            if self._find_spec(target) is None:
                reason = f"{name!r} refers to {target!r}, which is not defined"
                self._errors.add(location, "", reason, "target_unknown")
        for fields in self._draft.fields_by_key.values():
            for name, ref in _typed_references(fields):
                target_spec = self._find_spec(ref.child_id)
                is_group = isinstance(target_spec, GroupSpec)
                if (
                    target_spec is not None
                    and ref.kind
                    and is_group != (ref.kind.lower() == "group")
                ):
                    reason = f"{ref.child_id!r} is a {'group' if is_group else 'task'}"
                    self._errors.add(
                        fields.field_node(name).location, fields.field_path(name), reason
                    )

    def _check_plan(self) -> None:
        """Adds the first error that makes the plan invalid: a cycle, too deep nesting, ..."""
        reachable: dict[str, Spec] = {}
        pending = [*self._specs, *self._stored]
        while pending:
            key = pending.pop()
            if key not in reachable:
                # A stored definition can refer to one that was deleted since; a dummy replaces it.
                reachable[key] = self._find_spec(key) or NewTask(title=key, key=key)
                pending += target_keys(reachable[key])
        tasks = {key: spec for key, spec in reachable.items() if isinstance(spec, NewTask)}
        groups = {key: spec for key, spec in reachable.items() if isinstance(spec, GroupSpec)}
        try:
            check_plan(Plan("", tasks, groups))
        except Invalid as error:
            fields = self._draft.fields_by_key.get(
                _first_key_in(error, self._draft.fields_by_key) or ""
            )
            location = SourceLocation() if fields is None else fields.node.location
            self._errors.add(
                location, "" if fields is None else fields.path, str(error), error.code
            )

    def _reference_location(self, key: str, target: str) -> tuple[SourceLocation, str]:
        """Returns the location and path where a definition refers to another one."""
        fields = self._draft.fields_by_key.get(key)
        if fields is None:
            return SourceLocation(), ""
        for name, value in fields.values.items():
            if value == target or (isinstance(value, ChildRef) and value.child_id == target):
                return fields.field_node(name).location, fields.field_path(name)
            if isinstance(value, list) and name in ("children", "depends_on"):
                for index, reference in enumerate(value):
                    if reference_key(reference) == target:
                        node = fields.field_node(name).value[index]
                        return node.location, f"{fields.field_path(name)}[{index}]"
        return fields.node.location, fields.path


def _typed_references(fields: MappingFields) -> Iterator[tuple[str, ChildRef]]:
    """Yields the field name and the reference of each reference that gives a kind."""
    for name in ("children", "next", "next_task", "previous", "previous_task"):
        value = fields.get(name)
        for reference in value if isinstance(value, list) else [value]:
            if isinstance(reference, ChildRef):
                yield name, reference


def _first_key_in(error: Invalid, keys: Collection[str]) -> str | None:
    """Returns the first key that an error mentions and that is in `keys`; `None` without one."""
    words = [str(error.details.get("key", "")), *error.message.split()]
    return next((word.strip("'\",") for word in words if word.strip("'\",") in keys), None)
