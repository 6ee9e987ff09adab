"""What files say, each thing by itself: documents read into definitions that are still apart."""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from tenuto.manifest.decoding import MappingFields, ShapeDecoder
from tenuto.manifest.errors import ManifestErrors, prefix
from tenuto.manifest.shapes import LISTS, NOT_YET, Lists, ScheduleShape, TriggerShape
from tenuto.manifest.tasks import group_of, key_of, name_of, task_of
from tenuto.manifest.yaml_nodes import (
    MAX_BYTES,
    Composer,
    Entry,
    Node,
    SourceLocation,
    YamlError,
    decoded,
    node_of,
)
from tenuto.model import bounds
from tenuto.model.errors import Invalid
from tenuto.model.flows.definition import GroupSpec
from tenuto.model.flows.plan import Spec, targets
from tenuto.model.schedules.schedule import ScheduleSpec, check

MAX_FILES = 1_000
MAX_FILE_NAME = 500
Files = Mapping[str, bytes | str]
"""What stands in each file, by the name that errors call it."""
_ANY_TIME = ScheduleSpec(type="immediate")


class Schedule(msgspec.Struct, frozen=True):
    """When something is to be started by time."""

    name: str
    target: str
    spec: dict[str, Any]
    input: Any = None


class Trigger(msgspec.Struct, frozen=True):
    """After which events something is to be started."""

    name: str
    event: str
    target: str
    filter: str | None = None


class ManifestDraft:
    """What files say, before it is joined with what is stored."""

    def __init__(self) -> None:
        self.specs: dict[str, Spec] = {}
        self.given: dict[str, MappingFields] = {}
        self.schedules: list[tuple[Schedule, SourceLocation]] = []
        self.triggers: list[tuple[Trigger, SourceLocation]] = []
        self.starts: list[str] = []
        self.warnings: list[str] = []

    def start_rules(self) -> Iterator[tuple[str, str, SourceLocation]]:
        """Name, target and place of everything that starts something."""
        yield from ((each.name, each.target, place) for each, place in self.schedules)
        yield from ((each.name, each.target, place) for each, place in self.triggers)

    def declared_keys(self) -> set[str]:
        """The keys that are defined here, or children of a group that is."""
        groups = (spec for spec in self.specs.values() if isinstance(spec, GroupSpec))
        return set(self.specs) | {child for group in groups for child in group.children}

    def wanted(self) -> set[str]:
        """The keys that are spoken of but not defined here."""
        said = {key for spec in self.specs.values() for key in targets(spec)}
        for given in self.given.values():
            said |= {key_of(each) for each in _links(given)}
        said |= {target for _, target, _ in self.start_rules()}
        return said - set(self.specs)


def texts_of(files: Files) -> dict[str, str]:
    """The files as text; raises `Invalid` with all that are none."""
    faults, texts = ManifestErrors(), {}
    for file, content in files.items():
        try:
            texts[file] = decoded(file, content)
        except YamlError as error:
            faults.unreadable(error)
    faults.raise_any()
    return texts


def parse_files(files: Files) -> ManifestDraft:
    """What the files say, each thing checked by itself."""
    for file in files:
        bounds.text("the name of a file", file, MAX_FILE_NAME)
    if len(files) > MAX_FILES:
        raise Invalid(f"{len(files):,} files; at most {MAX_FILES:,} are read", "too_large")
    if sum(len(content) for content in files.values()) > MAX_BYTES:
        raise Invalid(f"the files are larger than {MAX_BYTES:,} bytes together", "too_large")
    drafting = _DocumentReader()
    composer = Composer()
    for file, content in files.items():
        drafting.file(composer, file, content)
    drafting.faults.raise_any()
    drafting.draft.warnings += composer.warnings
    return drafting.draft


class _DocumentReader:
    """Goes through the files."""

    def __init__(self) -> None:
        self.draft = ManifestDraft()
        self.faults = ManifestErrors()
        self._reader = ShapeDecoder(self.faults)

    def file(self, composer: Composer, file: str, content: bytes | str) -> None:
        empty = True
        try:
            for node in composer.documents(file, decoded(file, content)):
                if node.value is not None:
                    empty = False
                    self._document(node)
        except YamlError as error:
            self.faults.unreadable(error)
        else:
            if empty:
                self.draft.warnings.append(f"{file}: holds nothing")

    def _document(self, node: Node) -> None:
        if not node.is_map:
            self.faults.note(node.place, "", "a document is a mapping")
        elif any(name in node.value for name in LISTS) or self._is_refused(node):
            self._lists(node)
        elif "children" in node.value:
            self._group(node, "")
        else:
            self._task(node, "")

    def _is_refused(self, node: Node) -> bool:
        """Whether the document is one of lists, all of a kind that is not stored yet."""
        return not {"id", "key"} & node.value.keys() and any(n in node.value for n in NOT_YET)

    def _lists(self, node: Node) -> None:
        for name, entry in node.value.items():
            if name in NOT_YET:
                self.faults.note(entry.place, name, "not supported in YAML yet")
        known = {name: entry for name, entry in node.value.items() if name not in NOT_YET}
        listed = Node({n: Entry(e.place, _shallow(e.node)) for n, e in known.items()}, node.place)
        self._reader.mapping(listed, Lists, "")
        for name, entry in known.items():
            if name in LISTS and entry.node.is_list:
                for at, item in enumerate(entry.node.value):
                    getattr(self, f"_{name.removesuffix('s')}")(item, f"{name}[{at}]")

    def _task(self, node: Node, where: str) -> None:
        given, task = task_of(self._reader, node, where)
        if task is None:
            return
        self._define(given, task)
        if (spec := given.get("schedule")) is not None:
            self._time(given, "schedule", spec, task.key or "")

    def _group(self, node: Node, where: str) -> None:
        given, group = group_of(self._reader, node, where)
        if group is not None:
            self._define(given, group)

    def _define(self, given: MappingFields, spec: Spec) -> None:
        assert spec.key is not None
        if (first := self.draft.given.get(spec.key)) is not None:
            name = name_of(given, "key")
            why = f"{spec.key!r} is defined twice, first at {prefix(first.node.place)[:-2]}"
            self.faults.note(given.at(name).place, given.way(name), why)
            return
        self.draft.specs[spec.key] = spec
        self.draft.given[spec.key] = given

    def _schedule(self, node: Node, where: str) -> None:
        given = self._reader.mapping(node, ScheduleShape, where)
        if given is not None and {"name", "target", "schedule"} <= given.values.keys():
            spec = given.get("schedule")
            self._time(given, "schedule", spec, given.get("target"), given.get("name"))

    def _time(
        self,
        given: MappingFields,
        field: str,
        spec: ScheduleSpec,
        target: str,
        name: str | None = None,
    ) -> None:
        """Note when something is to be started; one without a name of its own has its target's."""
        if spec.type == "immediate" and name is None:
            self.draft.starts.append(target)
            return
        place = given.at(field)
        try:
            check(spec)
        except Invalid as error:
            said = str(error.details.get("field", ""))
            at = place.get(said)
            where = given.way(field) + (f".{said}" if at else "")
            self.faults.refused((at or place).place, where, error)
            return
        named = {each.name for each, _ in self.draft.schedules}
        if (name or target) in named:
            self.faults.note(place.place, given.way(field), f"{name or target!r} stands twice")
        times = {
            name: value
            for name, value in msgspec.to_builtins(spec).items()
            if name == "type" or value != getattr(_ANY_TIME, name)
        }
        made = Schedule(name or target, target, times, given.get("input"))
        self.draft.schedules.append((made, place.place))

    def _trigger(self, node: Node, where: str) -> None:
        given = self._reader.mapping(node, TriggerShape, where)
        if given is not None and {"name", "event", "target"} <= given.values.keys():
            named = {each.name for each, _ in self.draft.triggers}
            if given.get("name") in named:
                place = given.at("name").place
                self.faults.note(place, given.way("name"), f"{given.get('name')!r} stands twice")
            self.draft.triggers.append((Trigger(**given.values), node.place))


def _shallow(node: Node) -> Node:
    """A list without what is in it, which is read by itself."""
    return node_of([], node.place) if node.is_list else node


def _links(given: MappingFields) -> Iterator[Any]:
    """What a definition says of those before and above it."""
    for name in ("previous_task", "previous", "group_id", "group"):
        if name in given:
            yield given.get(name)


def spec_from(kind: str, said: Any) -> Spec:
    """A definition from plain values under the names that files have; raises `Invalid`."""
    faults = ManifestErrors()
    reader = ShapeDecoder(faults)
    try:
        node = node_of(said)
    except YamlError as error:
        raise Invalid(error.why, error.code, field="spec") from error
    given, spec = group_of(reader, node, "") if kind == "group" else task_of(reader, node, "")
    for name in ("schedule", "group_id", "group", "previous_task", "previous"):
        if name in given:
            faults.note(SourceLocation(), name, "is understood in files only")
    faults.raise_any()
    assert spec is not None
    return spec
