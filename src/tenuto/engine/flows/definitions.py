"""Definitions: what may run more than once, by key; files with many of them, applied as one."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Literal, TypeVar
from uuid import UUID

import msgspec

from tenuto.engine.core import Core
from tenuto.engine.flows.advance import Cascade
from tenuto.engine.flows.start import Flows, spec_of
from tenuto.engine.schedules.manifest_rules import RuleChange, keep_rules
from tenuto.engine.tenancy.secret_use import check_definitions
from tenuto.manifest.decoding import fields_of
from tenuto.manifest.diff import FieldChange, changes, same
from tenuto.manifest.documents import Files, ManifestDraft, parse_files
from tenuto.manifest.export import camel, dump, kind_of, to_plain
from tenuto.manifest.manifest import Manifest, link_draft
from tenuto.manifest.tasks import check_spec
from tenuto.model import bounds
from tenuto.model.errors import Conflict, Invalid, NotFound
from tenuto.model.flows.definition import Goto
from tenuto.model.flows.plan import Spec, find_cycle, targets
from tenuto.model.tasks.submission import NewTask
from tenuto.store.protocol import Row, Script, Statement

T = TypeVar("T")
MAX_DEFINITIONS = 100_000
PAGE = 500
TRIES = 5
"""How often files are joined anew with definitions that others change meanwhile."""
Action = Literal["created", "updated", "unchanged"]


class DefinitionView(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A definition as people see it; `spec` has the names of files, as REST spells them."""

    id: UUID
    key: str
    kind: Literal["task", "group"]
    title: str
    version: int
    spec: dict[str, Any]
    created_at: datetime
    updated_at: datetime


class DefinitionPage(msgspec.Struct, frozen=True, rename="camel"):
    """Some definitions and where the next ones begin."""

    definitions: list[DefinitionView]
    next_cursor: UUID | None = None


class DefinitionChange(msgspec.Struct, frozen=True, rename="camel"):
    """What became of a definition that files have, field by field."""

    key: str
    kind: Literal["task", "group"]
    action: Action
    version: int
    fields: list[FieldChange] = []


class StartedDefinition(msgspec.Struct, frozen=True, rename="camel"):
    """A definition that files ask to start at once, and the flow; none in a dry run."""

    key: str
    flow_id: UUID | None = None


class ApplyResult(msgspec.Struct, frozen=True, rename="camel"):
    """What files did, or in a dry run would do."""

    dry_run: bool
    definitions: list[DefinitionChange]
    started: list[StartedDefinition]
    warnings: list[str]
    rules: list[RuleChange] = []


class _StoredVersion(msgspec.Struct, frozen=True):
    """A stored definition, as it was when it was looked at."""

    id: UUID
    spec: Spec
    version: int


class _DefinitionsChanged(Exception):
    """Somebody changed definitions that a decision was made on."""


class Definitions:
    """The definitions of one workspace, on behalf of one actor."""

    def __init__(self, core: Core, workspace: UUID, flows: Flows) -> None:
        self._core = core
        self._workspace = workspace
        self._flows = flows

    async def put(self, spec: Spec, version: int | None = None) -> DefinitionView:
        """Keep a definition under its key, if what is there still has the version; 0 is nothing.

        One that says what is there already leaves it as it is. What it refers to may come later:
        only a start needs everything.
        """
        check_spec(spec)
        _check_circle(await self._reach(targets(spec)), spec)
        script = lambda: self._put([spec], {}, version=version)  # noqa: E731  made anew each time
        await self._insist(lambda: self._core.store.transact(script))
        return await self.get(spec.key or "")

    async def get(self, key: str) -> DefinitionView:
        """One definition."""
        return _view(_found(await self._core.store.fetch(self._keyed([key])), key))

    async def page(self, limit: int = 100, cursor: UUID | None = None) -> DefinitionPage:
        """The definitions, newest first."""
        bounds.number("limit", limit, 1, bounds.MAX_PAGE)
        rows = await self._page(limit + 1, cursor)
        views = [_view(row) for row in rows[:limit]]
        return DefinitionPage(views, views[-1].id if len(rows) > limit else None)

    async def delete(self, key: str, version: int | None = None) -> None:
        """Forget a definition, if it still has the version; flows of it go on with their plan."""

        def script() -> Script[None]:
            row = _found((yield self._keyed([key], "definitions_locked")), key)
            _check_version(key, row["version"], version)
            yield from check_definitions(self._workspace, self._flows.caller, [], [key])
            yield Statement("definition_remove", {"id": row["id"]})

        await self._core.store.transact(script)

    async def export(self, keys: Sequence[str] = ()) -> str:
        """Definitions as YAML that loads back to equal ones; all of them without keys."""
        if keys:
            rows = await self._core.store.fetch(self._keyed(keys))
            found = {row["key"]: spec_of(row) for row in rows}
            for key in keys:
                if key not in found:
                    raise NotFound(f"no definition {key!r}")
        else:
            found = {row["key"]: spec_of(row) for row in await self._all()}
        return dump(found[key] for key in sorted(found))

    async def reach(self, keys: Iterable[str]) -> dict[str, Spec]:
        """What is stored under the keys, and everything that it leads to."""
        return {key: known.spec for key, known in (await self._reach(keys)).items()}

    async def apply_files(self, files: Files, *, dry_run: bool = False) -> ApplyResult:
        """Do what files ask for, all of it or nothing; raises `Invalid` with every fault in them.

        Done again it changes nothing.
        """
        draft = await asyncio.to_thread(parse_files, files)

        async def once() -> ApplyResult:
            known = await self._around(draft)
            stored = {key: each.spec for key, each in known.items() if key not in draft.specs}
            manifest = await asyncio.to_thread(link_draft, draft, stored)
            seen = dict.fromkeys(draft.wanted(), 0)
            seen |= {key: each.version for key, each in known.items()}
            return await self._apply(manifest, dry_run, seen)

        return await self._insist(once)

    async def apply(self, manifest: Manifest, *, dry_run: bool = False) -> ApplyResult:
        """Store what a manifest has in one transaction, then start what it asks for."""
        for spec in manifest.specs.values():
            check_spec(spec)
        return await self._insist(lambda: self._apply(manifest, dry_run, {}))

    async def _insist(self, work: Callable[[], Awaitable[T]]) -> T:
        for _ in range(TRIES):
            try:
                return await work()
            except _DefinitionsChanged:
                continue
        raise Conflict("others keep changing these definitions", "version_conflict")

    async def _apply(
        self, manifest: Manifest, dry_run: bool, seen: Mapping[str, int]
    ) -> ApplyResult:
        """Apply a manifest that was checked against what has these versions; 0 is nothing."""
        flows = {} if dry_run else await self._prepared(manifest)

        def script(cascade: Cascade) -> Script[ApplyResult]:
            specs = list(manifest.specs.values())
            found = yield from self._put(specs, seen, dry_run=dry_run)
            place = (self._core, self._workspace, self._flows.actor, self._flows.caller)
            rules = yield from keep_rules(*place, manifest, dry_run=dry_run)
            new = {change.key for change in found if change.action != "unchanged"}
            started = [StartedDefinition(key) for key in manifest.starts if key in new]
            for index, each in enumerate(started):
                if each.key in flows:
                    yield from self._flows.begin(cascade, flows[each.key])
                    started[index] = StartedDefinition(each.key, flows[each.key]["id"])
            return ApplyResult(dry_run, found, started, list(manifest.warnings), rules)

        return await self._core.run_with_cascade(script, self._flows.actor)

    async def _prepared(self, manifest: Manifest) -> dict[str, dict[str, Any]]:
        """The flows that are started with what is stored, should it be new."""
        return {
            key: await self._flows.prepare(
                await self._flows.plan(key, dict(manifest.specs)), None, source="apply"
            )
            for key in manifest.starts
        }

    def _put(
        self,
        specs: Sequence[Spec],
        seen: Mapping[str, int],
        *,
        version: int | None = None,
        dry_run: bool = False,
    ) -> Script[list[DefinitionChange]]:
        """Write what differs from what is stored; says of each what became of it."""
        keys = {spec.key for spec in specs if spec.key is not None}
        rows = yield self._keyed(keys | seen.keys(), "definitions_locked")
        stored = {row["key"]: row for row in rows}
        there = {key: row["version"] for key, row in stored.items()}
        if any(there.get(key, 0) != version for key, version in seen.items()):
            raise _DefinitionsChanged
        found = []
        for spec in specs:
            row = stored.get(spec.key or "")
            _check_version(spec.key, there.get(spec.key or "", 0), version)
            found.append(_change(row, spec))
        changed = [
            spec for spec, change in zip(specs, found, strict=True) if change.action != "unchanged"
        ]
        written = [spec.key for spec in changed if spec.key is not None]
        yield from check_definitions(self._workspace, self._flows.caller, changed, written)
        if not dry_run:
            yield from self._write(specs, found, stored)
        return found

    def _write(
        self,
        specs: Sequence[Spec],
        found: Sequence[DefinitionChange],
        stored: Mapping[str, Row],
    ) -> Script[None]:
        made, changed = [], []
        for spec, change in zip(specs, found, strict=True):
            cells = (change.kind, encoded(spec))
            if change.action == "created":
                made.append((self._core.clock.new_id(), change.key, *cells))
            elif change.action == "updated":
                changed.append((stored[change.key]["id"], *cells))
        params = {"now": self._core.now()}
        if made:
            [count] = yield Statement("definition_count", {"workspace": self._workspace})
            if count["n"] + len(made) > MAX_DEFINITIONS:
                raise Invalid(
                    f"a workspace has at most {MAX_DEFINITIONS:,} definitions", "too_large"
                )
            there = params | {"workspace": self._workspace}
            added = yield Statement("definitions_add", there, {"made": made})
            if len(added) < len(made):
                raise _DefinitionsChanged
        if changed:
            yield Statement("definitions_set", params, {"changed": changed})

    def _keyed(self, keys: Collection[str], query: str = "definitions_keyed") -> Statement:
        for key in keys:
            bounds.text("key", key, bounds.MAX_TEXT)
        return Statement(query, {"workspace": self._workspace, "keys": sorted(keys)})

    async def _page(
        self, most: int, cursor: UUID | None = None, kind: str | None = None
    ) -> Sequence[Row]:
        params = {"workspace": self._workspace, "before": cursor, "kind": kind, "most": most}
        return await self._core.store.fetch(Statement("definitions", params))

    async def _all(self, kind: str | None = None) -> list[Row]:
        rows: list[Row] = []
        cursor = None
        while page := await self._page(PAGE, cursor, kind):
            rows += page
            cursor = page[-1]["id"]
        return rows

    async def _around(self, draft: ManifestDraft) -> dict[str, _StoredVersion]:
        """What is stored of all that a draft touches: what it leads to, and groups around it."""
        known = await self._reach(draft.wanted())
        inside = draft.declared_keys()
        above = [row for row in await self._all("group") if row["key"] not in known]
        homes = [row["key"] for row in above if inside & set(_children(row))]
        return known | await self._reach(homes)

    async def _reach(self, keys: Iterable[str]) -> dict[str, _StoredVersion]:
        known: dict[str, _StoredVersion] = {}
        todo = set(keys)
        while todo:
            rows = await self._core.store.fetch(self._keyed(todo))
            fresh = {
                row["key"]: _StoredVersion(row["id"], spec_of(row), row["version"]) for row in rows
            }
            known |= fresh
            said = {key for each in fresh.values() for key in targets(each.spec)}
            todo = said - known.keys() - todo
        return known


def encoded(spec: Spec) -> str:
    """A definition as it is stored: what is as it would be anyway is left out."""
    fields = {}
    for each in fields_of(type(spec)):
        value = getattr(spec, each.name)
        default = each.default
        if each.default_factory is not msgspec.NODEFAULT:
            default = each.default_factory()
        if each.required or value != default:
            fields[each.name] = value
    return msgspec.json.encode(fields).decode()


class _Children(msgspec.Struct):
    children: list[str] = []


def _children(row: Row) -> list[str]:
    return msgspec.json.decode(row["spec"], type=_Children).children


def _view(row: Row) -> DefinitionView:
    spec = spec_of(row)
    return DefinitionView(
        id=row["id"],
        key=row["key"],
        kind=row["kind"],
        title=spec.title,
        version=row["version"],
        spec=camel(to_plain(spec)),
        created_at=row["created_at"],
        updated_at=row["updated_at"],
    )


def _found(rows: Sequence[Row], key: str) -> Row:
    if not rows:
        raise NotFound(f"no definition {key!r}")
    return rows[0]


def _check_version(key: str | None, there: int, wanted: int | None) -> None:
    if wanted is not None and there != wanted:
        raise Conflict(f"definition {key!r} has version {there}, not {wanted}", "version_conflict")


def _change(row: Row | None, spec: Spec) -> DefinitionChange:
    """What a definition does to what is stored under its key."""
    key, kind = spec.key or "", kind_of(spec)
    if row is None:
        return DefinitionChange(key, kind, "created", 1, changes(None, spec))
    before = spec_of(row)
    if same(before, spec):
        return DefinitionChange(key, kind, "unchanged", row["version"])
    return DefinitionChange(key, kind, "updated", row["version"] + 1, changes(before, spec))


def _check_circle(known: Mapping[str, _StoredVersion], spec: Spec) -> None:
    """Raise `Invalid` when a definition leads back to itself other than by a jump."""

    def onward(key: str) -> Sequence[str]:
        here = spec if key == spec.key else known[key].spec if key in known else None
        if here is None:
            return []
        if isinstance(here, NewTask) and isinstance(here.control, Goto):
            here = msgspec.structs.replace(here, control=None)
        return list(targets(here))

    if circle := find_cycle([spec.key or ""], onward):
        shown = " -> ".join(circle if len(circle) <= 10 else [*circle[:8], "...", circle[-1]])
        raise Invalid(f"these lead back to themselves: {shown}", "dependency_cycle")
