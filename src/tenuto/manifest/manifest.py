"""Files as one set of definitions: joined with each other and what is stored, and checked."""

from collections.abc import Collection, Iterator, Mapping

import msgspec

from tenuto.manifest.decoding import MappingFields
from tenuto.manifest.documents import Files, ManifestDraft, Schedule, Trigger, parse_files
from tenuto.manifest.errors import ManifestErrors, prefix
from tenuto.manifest.shapes import ChildRef
from tenuto.manifest.tasks import check_spec, key_of, name_of
from tenuto.manifest.yaml_nodes import SourceLocation
from tenuto.model.errors import Invalid
from tenuto.model.flows.definition import GroupSpec
from tenuto.model.flows.plan import Plan, Spec, check_plan, targets
from tenuto.model.tasks.submission import NewTask


class Manifest(msgspec.Struct, frozen=True):
    """What files ask for: definitions by key, when to start them, and which to start now."""

    tasks: dict[str, NewTask] = {}
    groups: dict[str, GroupSpec] = {}
    schedules: tuple[Schedule, ...] = ()
    triggers: tuple[Trigger, ...] = ()
    starts: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def specs(self) -> dict[str, Spec]:
        """Tasks and groups together, in the order of the files."""
        return {**self.tasks, **self.groups}


def read(files: Files, stored: Mapping[str, Spec] | None = None) -> Manifest:
    """What the files ask for; raises `Invalid` with every fault and its place.

    `stored` has the definitions that the files may refer to, and the groups that have children
    which the files speak of.
    """
    return link_draft(parse_files(files), stored or {})


def link_draft(draft: ManifestDraft, stored: Mapping[str, Spec]) -> Manifest:
    """The draft joined with what is stored, checked as a whole."""
    return _Linker(draft, stored).manifest()


class _Linker:
    """Follows what definitions say of each other."""

    def __init__(self, draft: ManifestDraft, stored: Mapping[str, Spec]) -> None:
        self._draft = draft
        self._stored = stored
        self._specs = dict(draft.specs)
        self._warnings = list(draft.warnings)
        self._faults = ManifestErrors()

    def manifest(self) -> Manifest:
        for key, given in self._draft.given.items():
            self._follow(key, given)
            self._join(key, given)
        self._check_targets()
        self._faults.raise_any()
        self._check_whole()
        self._faults.raise_any()
        return Manifest(
            {key: spec for key, spec in self._specs.items() if isinstance(spec, NewTask)},
            {key: spec for key, spec in self._specs.items() if isinstance(spec, GroupSpec)},
            tuple(each for each, _ in self._draft.schedules),
            tuple(each for each, _ in self._draft.triggers),
            tuple(self._draft.starts),
            tuple(self._warnings),
        )

    def _find(self, key: str) -> Spec | None:
        return self._specs.get(key) or self._stored.get(key)

    def _follow(self, key: str, given: MappingFields) -> None:
        """`previous_task: X` says that X leads here."""
        for name in ("previous_task", "previous"):
            if name not in given:
                continue
            before = key_of(given.get(name))
            place, where = given.at(name).place, given.way(name)
            spec = self._find(before)
            if spec is None:
                why = f"{key!r} refers to {before!r}, which is not defined"
                self._faults.note(place, where, why, "target_unknown")
            elif spec.next not in (None, key):
                self._faults.note(place, where, f"{before!r} leads to {spec.next!r} instead")
            elif spec.next is None and before not in self._specs:
                why = f"{before!r} is stored without a next; say there that {key!r} follows"
                self._faults.note(place, where, why)
            elif spec.next is None:
                self._specs[before] = msgspec.structs.replace(spec, next=key)

    def _join(self, key: str, given: MappingFields) -> None:
        """`group_id: G` puts a task behind the children that G has."""
        name = name_of(given, "group")
        if name not in given or isinstance(self._specs[key], GroupSpec):
            return
        home = given.get(name)
        group = self._find(home)
        if group is None:
            self._warnings.append(
                f"{prefix(given.at(name).place)}{given.way(name)}: there is no group {home!r};"
                " an empty sequential one is made"
            )
            group = GroupSpec(title=home, key=home)
        if not isinstance(group, GroupSpec):
            self._faults.note(given.at(name).place, given.way(name), f"{home!r} is a task")
            return
        if key not in group.children:
            group = msgspec.structs.replace(group, children=(*group.children, key))
            self._specs[home] = group
        try:
            check_spec(group)
        except Invalid as error:
            self._faults.refused(given.at(name).place, given.way(name), error)

    def _check_targets(self) -> None:
        """Everything that is named is there, and is what it is said to be."""
        for key, spec in self._specs.items():
            for target in targets(spec):
                if self._find(target) is None:
                    place, where = self._said(key, target)
                    why = f"{key!r} refers to {target!r}, which is not defined"
                    self._faults.note(place, where, why, "target_unknown")
        for name, target, place in self._draft.start_rules():
            if self._find(target) is None:
                why = f"{name!r} refers to {target!r}, which is not defined"
                self._faults.note(place, "", why, "target_unknown")
        for given in self._draft.given.values():
            for name, ref in _references(given):
                found = self._find(ref.child_id)
                is_group = isinstance(found, GroupSpec)
                if found is not None and ref.kind and is_group != (ref.kind.lower() == "group"):
                    why = f"{ref.child_id!r} is a {'group' if is_group else 'task'}"
                    self._faults.note(given.at(name).place, given.way(name), why)

    def _check_whole(self) -> None:
        """No circles, no child in two groups, nothing too deep."""
        reached: dict[str, Spec] = {}
        todo = [*self._specs, *self._stored]
        while todo:
            key = todo.pop()
            if key not in reached:
                # What is stored may refer to something that was deleted since.
                reached[key] = self._find(key) or NewTask(title=key, key=key)
                todo += targets(reached[key])
        tasks = {key: spec for key, spec in reached.items() if isinstance(spec, NewTask)}
        groups = {key: spec for key, spec in reached.items() if isinstance(spec, GroupSpec)}
        try:
            check_plan(Plan("", tasks, groups))
        except Invalid as error:
            given = self._draft.given.get(_meant(error, self._draft.given) or "")
            place = SourceLocation() if given is None else given.node.place
            self._faults.note(place, "" if given is None else given.where, str(error), error.code)

    def _said(self, key: str, target: str) -> tuple[SourceLocation, str]:
        """Where a definition names another one."""
        given = self._draft.given.get(key)
        if given is None:
            return SourceLocation(), ""
        for name, value in given.values.items():
            if value == target or (isinstance(value, ChildRef) and value.child_id == target):
                return given.at(name).place, given.way(name)
            if isinstance(value, list) and name in ("children", "depends_on"):
                for at, each in enumerate(value):
                    if key_of(each) == target:
                        return given.at(name).value[at].place, f"{given.way(name)}[{at}]"
        return given.node.place, given.where


def _references(given: MappingFields) -> Iterator[tuple[str, ChildRef]]:
    """The references that say what they refer to, with the field that has them."""
    for name in ("children", "next", "next_task", "previous", "previous_task"):
        value = given.get(name)
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, ChildRef):
                yield name, each


def _meant(error: Invalid, known: Collection[str]) -> str | None:
    """The first key of ours that a refusal speaks of."""
    words = [str(error.details.get("key", "")), *error.message.split()]
    return next((word.strip("'\",") for word in words if word.strip("'\",") in known), None)
