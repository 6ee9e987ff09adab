"""Parses files into a draft: definitions, schedules and triggers, not yet linked."""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from tenuto.manifest.decoding import MappingFields, ShapeDecoder
from tenuto.manifest.errors import ManifestErrors, location_prefix
from tenuto.manifest.shapes import LIST_NAMES, UNSUPPORTED_LISTS, Lists, ScheduleShape, TriggerShape
from tenuto.manifest.tasks import field_name, parse_group, parse_task, reference_key
from tenuto.manifest.yaml_nodes import (
    MAX_BYTES,
    Composer,
    Entry,
    Node,
    SourceLocation,
    YamlError,
    decode_text,
    node_of,
)
from tenuto.model import bounds
from tenuto.model.errors import Invalid
from tenuto.model.flows.definition import GroupSpec
from tenuto.model.flows.plan import Spec, target_keys
from tenuto.model.schedules.schedule import ScheduleSpec, check

MAX_FILES = 1_000
MAX_FILE_NAME = 500
Files = Mapping[str, bytes | str]
"""The content of each file, by the file name that errors show."""
_DEFAULT_SCHEDULE = ScheduleSpec(type="immediate")


class Schedule(msgspec.Struct, frozen=True):
    """A schedule of a file: starts `target` at the times of `spec`."""

    name: str
    target: str
    spec: dict[str, Any]
    input: Any = None


class Trigger(msgspec.Struct, frozen=True):
    """A trigger of a file: starts `target` after events named `event`."""

    name: str
    event: str
    target: str
    filter: str | None = None


class ManifestDraft:
    """The parsed content of files, before it is linked with stored definitions."""

    def __init__(self) -> None:
        self.specs: dict[str, Spec] = {}
        self.fields_by_key: dict[str, MappingFields] = {}
        self.schedules: list[tuple[Schedule, SourceLocation]] = []
        self.triggers: list[tuple[Trigger, SourceLocation]] = []
        self.starts: list[str] = []
        self.warnings: list[str] = []

    def start_rules(self) -> Iterator[tuple[str, str, SourceLocation]]:
        """Yields the name, target and location of each schedule and trigger."""
        yield from ((rule.name, rule.target, location) for rule, location in self.schedules)
        yield from ((rule.name, rule.target, location) for rule, location in self.triggers)

    def declared_keys(self) -> set[str]:
        """Returns the keys defined in the files, and the children of their groups."""
        groups = (spec for spec in self.specs.values() if isinstance(spec, GroupSpec))
        return set(self.specs) | {child for group in groups for child in group.children}

    def undefined_keys(self) -> set[str]:
        """Returns the keys that the files refer to but do not define."""
        keys = {key for spec in self.specs.values() for key in target_keys(spec)}
        for fields in self.fields_by_key.values():
            keys |= {reference_key(reference) for reference in _backward_references(fields)}
        keys |= {target for _, target, _ in self.start_rules()}
        return keys - set(self.specs)


def decode_files(files: Files) -> dict[str, str]:
    """Returns the files as text; raises `Invalid` with all files that are not valid text."""
    errors, texts = ManifestErrors(), {}
    for file, content in files.items():
        try:
            texts[file] = decode_text(file, content)
        except YamlError as error:
            errors.add_yaml_error(error)
    errors.raise_if_any()
    return texts


def parse_files(files: Files) -> ManifestDraft:
    """Parses files into a draft; raises `Invalid` with the errors of each definition alone."""
    for file in files:
        bounds.check_text("the name of a file", file, MAX_FILE_NAME)
    if len(files) > MAX_FILES:
        raise Invalid(f"{len(files):,} files exceed the limit of {MAX_FILES:,}", "too_large")
    if sum(len(content) for content in files.values()) > MAX_BYTES:
        raise Invalid(f"the files together exceed {MAX_BYTES:,} bytes", "too_large")
    reader = _DocumentReader()
    composer = Composer()
    for file, content in files.items():
        reader.read_file(composer, file, content)
    reader.errors.raise_if_any()
    reader.draft.warnings += composer.warnings
    return reader.draft


class _DocumentReader:
    """Parses the documents of files one by one into `draft`, and collects `errors`."""

    def __init__(self) -> None:
        self.draft = ManifestDraft()
        self.errors = ManifestErrors()
        self._decoder = ShapeDecoder(self.errors)

    def read_file(self, composer: Composer, file: str, content: bytes | str) -> None:
        """Parses all documents of a file; adds errors, and a warning for an empty file."""
        is_empty = True
        try:
            for node in composer.documents(file, decode_text(file, content)):
                if node.value is not None:
                    is_empty = False
                    self._read_document(node)
        except YamlError as error:
            self.errors.add_yaml_error(error)
        else:
            if is_empty:
                self.draft.warnings.append(f"{file}: is empty")

    def _read_document(self, node: Node) -> None:
        """Adds the content of a document to the draft: lists, a group, or a task."""
        if not node.is_map:
            self.errors.add(node.location, "", "a document must be a mapping")
        elif any(name in node.value for name in LIST_NAMES) or self._has_unsupported_lists(node):
            self._read_lists(node)
        elif "children" in node.value:
            self._read_group(node, "")
        else:
            self._read_task(node, "")

    def _has_unsupported_lists(self, node: Node) -> bool:
        """True if the document consists of lists of kinds that are not supported yet."""
        return not {"id", "key"} & node.value.keys() and any(
            n in node.value for n in UNSUPPORTED_LISTS
        )

    def _read_lists(self, node: Node) -> None:
        """Adds the items of a document with lists to the draft."""
        for name, entry in node.value.items():
            if name in UNSUPPORTED_LISTS:
                self.errors.add(entry.location, name, "not supported in YAML yet")
        supported = {
            name: entry for name, entry in node.value.items() if name not in UNSUPPORTED_LISTS
        }
        lists = Node(
            {n: Entry(e.location, _without_items(e.node)) for n, e in supported.items()},
            node.location,
        )
        self._decoder.decode_mapping(lists, Lists, "")
        for name, entry in supported.items():
            if name in LIST_NAMES and entry.node.is_list:
                for index, item in enumerate(entry.node.value):
                    getattr(self, f"_read_{name.removesuffix('s')}")(item, f"{name}[{index}]")

    def _read_task(self, node: Node, path: str) -> None:
        """Adds a task and its schedule to the draft."""
        fields, task = parse_task(self._decoder, node, path)
        if task is None:
            return
        self._add_definition(fields, task)
        if (spec := fields.get("schedule")) is not None:
            self._add_schedule(fields, "schedule", spec, task.key or "")

    def _read_group(self, node: Node, path: str) -> None:
        """Adds a group to the draft."""
        fields, group = parse_group(self._decoder, node, path)
        if group is not None:
            self._add_definition(fields, group)

    def _add_definition(self, fields: MappingFields, spec: Spec) -> None:
        """Adds a definition to the draft, or an error if its key is defined already."""
        assert spec.key is not None
        if (first := self.draft.fields_by_key.get(spec.key)) is not None:
            name = field_name(fields, "key")
            first_at = location_prefix(first.node.location)[:-2]
            reason = f"{spec.key!r} is defined twice, first at {first_at}"
            self.errors.add(fields.field_node(name).location, fields.field_path(name), reason)
            return
        self.draft.specs[spec.key] = spec
        self.draft.fields_by_key[spec.key] = fields

    def _read_schedule(self, node: Node, path: str) -> None:
        """Adds an item of the list `schedules` to the draft."""
        fields = self._decoder.decode_mapping(node, ScheduleShape, path)
        if fields is not None and {"name", "target", "schedule"} <= fields.values.keys():
            spec = fields.get("schedule")
            self._add_schedule(fields, "schedule", spec, fields.get("target"), fields.get("name"))

    def _add_schedule(
        self,
        fields: MappingFields,
        field: str,
        spec: ScheduleSpec,
        target: str,
        name: str | None = None,
    ) -> None:
        """Adds a schedule, or a start of the target if immediate without `name`, or an error."""
        if spec.type == "immediate" and name is None:
            self.draft.starts.append(target)
            return
        node = fields.field_node(field)
        try:
            check(spec)
        except Invalid as error:
            error_field = str(error.details.get("field", ""))
            error_node = node.get(error_field)
            path = fields.field_path(field) + (f".{error_field}" if error_node else "")
            self.errors.add_invalid((error_node or node).location, path, error)
            return
        names = {schedule.name for schedule, _ in self.draft.schedules}
        if (name or target) in names:
            self.errors.add(
                node.location, fields.field_path(field), f"{name or target!r} is defined twice"
            )
        times = {
            name: value
            for name, value in msgspec.to_builtins(spec).items()
            if name == "type" or value != getattr(_DEFAULT_SCHEDULE, name)
        }
        new_schedule = Schedule(name or target, target, times, fields.get("input"))
        self.draft.schedules.append((new_schedule, node.location))

    def _read_trigger(self, node: Node, path: str) -> None:
        """Adds an item of the list `triggers`; also an error if its name is defined already."""
        fields = self._decoder.decode_mapping(node, TriggerShape, path)
        if fields is not None and {"name", "event", "target"} <= fields.values.keys():
            names = {trigger.name for trigger, _ in self.draft.triggers}
            if fields.get("name") in names:
                location = fields.field_node("name").location
                self.errors.add(
                    location, fields.field_path("name"), f"{fields.get('name')!r} is defined twice"
                )
            self.draft.triggers.append((Trigger(**fields.values), node.location))


def _without_items(node: Node) -> Node:
    """Returns an empty list instead of a list node; its items are parsed separately."""
    return node_of([], node.location) if node.is_list else node


def _backward_references(fields: MappingFields) -> Iterator[Any]:
    """Yields the references of a definition to its predecessor and its group."""
    for name in ("previous_task", "previous", "group_id", "group"):
        if name in fields:
            yield fields.get(name)


def parse_spec(kind: str, values: Any) -> Spec:
    """Parses plain values with YAML field names into a definition; raises `Invalid`."""
    errors = ManifestErrors()
    decoder = ShapeDecoder(errors)
    try:
        node = node_of(values)
    except YamlError as error:
        raise Invalid(error.reason, error.code, field="spec") from error
    fields, spec = (
        parse_group(decoder, node, "") if kind == "group" else parse_task(decoder, node, "")
    )
    for name in ("schedule", "group_id", "group", "previous_task", "previous"):
        if name in fields:
            errors.add(SourceLocation(), name, "is supported in YAML files only")
    errors.raise_if_any()
    assert spec is not None
    return spec
