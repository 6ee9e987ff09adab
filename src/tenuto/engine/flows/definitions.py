"""Stores reusable definitions of tasks and groups by key; applies YAML files of them."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Literal, TypeVar
from uuid import UUID

import msgspec

from tenuto.engine.core import Core
from tenuto.engine.flows.advance import Cascade
from tenuto.engine.flows.start import Flows, spec_of
from tenuto.engine.lookup import page_of
from tenuto.engine.schedules.manifest_rules import RuleChange, store_rules
from tenuto.engine.tenancy.secret_use import check_definitions
from tenuto.manifest.decoding import struct_fields
from tenuto.manifest.diff import FieldChange, field_changes, is_same
from tenuto.manifest.documents import Files, ManifestDraft, parse_files
from tenuto.manifest.export import dump, kind_of, to_camel_names, to_plain
from tenuto.manifest.manifest import Manifest, link_draft
from tenuto.manifest.tasks import check_spec
from tenuto.model import bounds
from tenuto.model.errors import Conflict, Invalid, NotFound
from tenuto.model.flows.definition import Goto
from tenuto.model.flows.plan import Spec, find_cycle, target_keys
from tenuto.model.tasks.submission import NewTask
from tenuto.store.protocol import Row, Script, Statement

T = TypeVar("T")
MAX_DEFINITIONS = 100_000
PAGE_SIZE = 500
MAX_TRIES = 5
"""Attempts to apply files while other processes change the same definitions."""
Action = Literal["created", "updated", "unchanged"]


class DefinitionView(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A definition as shown to users; `spec` has the fields of files, named as in REST."""

    id: UUID
    key: str
    kind: Literal["task", "group"]
    title: str
    version: int
    spec: dict[str, Any]
    created_at: datetime
    updated_at: datetime


class DefinitionPage(msgspec.Struct, frozen=True, rename="camel"):
    """One page of definitions, and the cursor of the next page."""

    definitions: list[DefinitionView]
    next_cursor: UUID | None = None


class DefinitionChange(msgspec.Struct, frozen=True, rename="camel"):
    """How applying files changed a definition, field by field."""

    key: str
    kind: Literal["task", "group"]
    action: Action
    version: int
    fields: list[FieldChange] = []


class StartedDefinition(msgspec.Struct, frozen=True, rename="camel"):
    """A definition that files start at once, and its flow; no flow in a dry run."""

    key: str
    flow_id: UUID | None = None


class ApplyResult(msgspec.Struct, frozen=True, rename="camel"):
    """What applying files changed, or in a dry run would change."""

    dry_run: bool
    definitions: list[DefinitionChange]
    started: list[StartedDefinition]
    warnings: list[str]
    rules: list[RuleChange] = []


class _StoredVersion(msgspec.Struct, frozen=True):
    """A stored definition as it was when it was read."""

    id: UUID
    spec: Spec
    version: int


class _DefinitionsChanged(Exception):
    """Another process changed definitions since they were read."""


class Definitions:
    """The definitions of one workspace, on behalf of one actor."""

    def __init__(self, core: Core, workspace: UUID, flows: Flows) -> None:
        self._core = core
        self._workspace = workspace
        self._flows = flows

    async def put(self, spec: Spec, version: int | None = None) -> DefinitionView:
        """Stores a definition and returns it; `Conflict` if a given `version` is outdated.

        0 means not stored; without `version`, any is replaced. An equal definition keeps its
        version. The definitions it refers to are needed only when a flow starts.
        """
        check_spec(spec)
        _check_acyclic(await self._load_reachable(target_keys(spec)), spec)
        script = lambda: self._store_specs([spec], {}, version=version)  # noqa: E731  a new script per try
        await self._retry_on_change(lambda: self._core.store.transact(script))
        return await self.get(spec.key or "")

    async def get(self, key: str) -> DefinitionView:
        """Returns one definition; raises `NotFound`."""
        return _view(_require_one(await self._core.store.fetch(self._keys_statement([key])), key))

    async def page(self, limit: int = 100, cursor: UUID | None = None) -> DefinitionPage:
        """Returns a page of definitions, newest first."""
        bounds.check_number("limit", limit, 1, bounds.MAX_PAGE)
        rows = await self._load_page(limit + 1, cursor)
        return DefinitionPage(*page_of(rows, limit, _view))

    async def delete(self, key: str, version: int | None = None) -> None:
        """Deletes a definition; raises `NotFound`, or `Conflict` if a given `version` is outdated.

        Its flows continue with their plans. Raises `Forbidden` without the right to delete it.
        """

        def script() -> Script[None]:
            row = _require_one((yield self._keys_statement([key], "definitions_locked")), key)
            _check_version(key, row["version"], version)
            yield from check_definitions(self._workspace, self._flows.caller, [], [key])
            yield Statement("definition_delete", {"id": row["id"]})

        await self._core.store.transact(script)

    async def export(self, keys: Sequence[str] = ()) -> str:
        """Returns definitions as YAML, all without `keys`; raises `NotFound` for an unknown key."""
        if keys:
            rows = await self._core.store.fetch(self._keys_statement(keys))
            specs = {row["key"]: spec_of(row) for row in rows}
            for key in keys:
                if key not in specs:
                    raise NotFound(f"no definition {key!r}")
        else:
            specs = {row["key"]: spec_of(row) for row in await self._load_all()}
        return dump(specs[key] for key in sorted(specs))

    async def load_reachable(self, keys: Iterable[str]) -> dict[str, Spec]:
        """Returns, by key, definitions and all they refer to; those not stored are left out."""
        return {key: stored.spec for key, stored in (await self._load_reachable(keys)).items()}

    async def apply_files(self, files: Files, *, dry_run: bool = False) -> ApplyResult:
        """Stores the files' definitions and rules, starts flows they name; a dry run only reports.

        One transaction. Applying the same files again changes and starts nothing. Raises `Invalid`
        with all errors in the files.
        """
        draft = await asyncio.to_thread(parse_files, files)

        async def try_once() -> ApplyResult:
            related = await self._load_related(draft)
            stored = {
                key: definition.spec
                for key, definition in related.items()
                if key not in draft.specs
            }
            manifest = await asyncio.to_thread(link_draft, draft, stored)
            versions = dict.fromkeys(draft.undefined_keys(), 0)
            versions |= {key: definition.version for key, definition in related.items()}
            return await self._apply(manifest, dry_run, versions)

        return await self._retry_on_change(try_once)

    async def apply(self, manifest: Manifest, *, dry_run: bool = False) -> ApplyResult:
        """Stores a manifest's definitions and rules, starts its flows; a dry run only reports."""
        for spec in manifest.specs.values():
            check_spec(spec)
        return await self._retry_on_change(lambda: self._apply(manifest, dry_run, {}))

    async def _retry_on_change(self, work: Callable[[], Awaitable[T]]) -> T:
        """Repeats work while definitions change; returns its result, or raises `Conflict`."""
        for _ in range(MAX_TRIES):
            try:
                return await work()
            except _DefinitionsChanged:
                continue
        text = f"the definitions were changed by others {MAX_TRIES} times meanwhile; try again"
        raise Conflict(text, "version_conflict")

    async def _apply(
        self, manifest: Manifest, dry_run: bool, versions: Mapping[str, int]
    ) -> ApplyResult:
        """Stores a manifest and starts its flows, unless `dry_run`; returns the changes.

        Raises `_DefinitionsChanged` if `versions`, the ones it was checked with, are outdated.
        """
        flows = {} if dry_run else await self._prepare_flows(manifest)

        def script(cascade: Cascade) -> Script[ApplyResult]:
            specs = list(manifest.specs.values())
            results = yield from self._store_specs(specs, versions, dry_run=dry_run)
            context = (self._core, self._workspace, self._flows.actor, self._flows.caller)
            rules = yield from store_rules(*context, manifest, dry_run=dry_run)
            new = {change.key for change in results if change.action != "unchanged"}
            started = [StartedDefinition(key) for key in manifest.starts if key in new]
            for index, definition in enumerate(started):
                if definition.key in flows:
                    yield from self._flows.start_prepared(cascade, flows[definition.key])
                    started[index] = StartedDefinition(definition.key, flows[definition.key]["id"])
            return ApplyResult(dry_run, results, started, list(manifest.warnings), rules)

        return await self._core.run_with_cascade(script, self._flows.actor)

    async def _prepare_flows(self, manifest: Manifest) -> dict[str, dict[str, Any]]:
        """Creates the lanes of the flows to start; returns their rows, not yet inserted, by key."""
        return {
            key: await self._flows.prepare(
                await self._flows.build_plan(key, dict(manifest.specs)), None, source="apply"
            )
            for key in manifest.starts
        }

    def _store_specs(
        self,
        specs: Sequence[Spec],
        versions: Mapping[str, int],
        *,
        version: int | None = None,
        dry_run: bool = False,
    ) -> Script[list[DefinitionChange]]:
        """Writes definitions that differ; `_DefinitionsChanged` if `versions` are outdated.

        Locks the stored definitions. Raises `_DefinitionsChanged` if `versions`, by key, are
        outdated, `Conflict` if `version` is.
        """
        keys = {spec.key for spec in specs if spec.key is not None}
        rows = yield self._keys_statement(keys | versions.keys(), "definitions_locked")
        stored = {row["key"]: row for row in rows}
        stored_versions = {key: row["version"] for key, row in stored.items()}
        if any(stored_versions.get(key, 0) != version for key, version in versions.items()):
            raise _DefinitionsChanged
        results = []
        for spec in specs:
            row = stored.get(spec.key or "")
            _check_version(spec.key, stored_versions.get(spec.key or "", 0), version)
            results.append(_compare(row, spec))
        changed = [
            spec
            for spec, change in zip(specs, results, strict=True)
            if change.action != "unchanged"
        ]
        changed_keys = [spec.key for spec in changed if spec.key is not None]
        yield from check_definitions(self._workspace, self._flows.caller, changed, changed_keys)
        if not dry_run:
            yield from self._write_rows(specs, results, stored)
        return results

    def _write_rows(
        self,
        specs: Sequence[Spec],
        results: Sequence[DefinitionChange],
        stored: Mapping[str, Row],
    ) -> Script[None]:
        """Inserts and updates as `results` say; `_DefinitionsChanged` if a new key is taken."""
        created, changed = [], []
        for spec, change in zip(specs, results, strict=True):
            cells = (change.kind, encode_spec(spec))
            if change.action == "created":
                created.append((self._core.clock.new_id(), change.key, *cells))
            elif change.action == "updated":
                changed.append((stored[change.key]["id"], *cells))
        params = {"now": self._core.now()}
        if created:
            [count] = yield Statement("definition_count", {"workspace": self._workspace})
            if count["n"] + len(created) > MAX_DEFINITIONS:
                raise Invalid(
                    f"a workspace can have at most {MAX_DEFINITIONS:,} definitions", "too_large"
                )
            insert_params = params | {"workspace": self._workspace}
            inserted = yield Statement("definitions_add", insert_params, {"made": created})
            if len(inserted) < len(created):
                raise _DefinitionsChanged
        if changed:
            yield Statement("definitions_update", params, {"changed": changed})

    def _keys_statement(
        self, keys: Collection[str], query: str = "definitions_by_key"
    ) -> Statement:
        """Returns the statement `query` for definitions by key; raises `Invalid` for a bad key."""
        for key in keys:
            bounds.check_text("key", key, bounds.MAX_TEXT)
        return Statement(query, {"workspace": self._workspace, "keys": sorted(keys)})

    async def _load_page(
        self, limit: int, cursor: UUID | None = None, kind: str | None = None
    ) -> Sequence[Row]:
        """Returns rows of definitions older than `cursor`, newest first, of one kind or all."""
        params = {"workspace": self._workspace, "before": cursor, "kind": kind, "most": limit}
        return await self._core.store.fetch(Statement("definitions", params))

    async def _load_all(self, kind: str | None = None) -> list[Row]:
        """Returns the rows of all definitions, newest first, of one kind or all."""
        rows: list[Row] = []
        cursor = None
        while page := await self._load_page(PAGE_SIZE, cursor, kind):
            rows += page
            cursor = page[-1]["id"]
        return rows

    async def _load_related(self, draft: ManifestDraft) -> dict[str, _StoredVersion]:
        """Returns, by key, stored definitions a draft refers to, and groups containing its keys."""
        loaded = await self._load_reachable(draft.undefined_keys())
        declared = draft.declared_keys()
        group_rows = [row for row in await self._load_all("group") if row["key"] not in loaded]
        parent_keys = [row["key"] for row in group_rows if declared & set(_child_keys(row))]
        return loaded | await self._load_reachable(parent_keys)

    async def _load_reachable(self, keys: Iterable[str]) -> dict[str, _StoredVersion]:
        """Returns, by key, definitions and all they refer to; those not stored are left out."""
        loaded: dict[str, _StoredVersion] = {}
        pending = set(keys)
        while pending:
            rows = await self._core.store.fetch(self._keys_statement(pending))
            fetched = {
                row["key"]: _StoredVersion(row["id"], spec_of(row), row["version"]) for row in rows
            }
            loaded |= fetched
            next_keys = {key for stored in fetched.values() for key in target_keys(stored.spec)}
            pending = next_keys - loaded.keys() - pending
        return loaded


def encode_spec(spec: Spec) -> str:
    """Returns a definition as stored JSON, without fields that have their default."""
    fields = {}
    for field in struct_fields(type(spec)):
        value = getattr(spec, field.name)
        default = field.default
        if field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        if field.required or value != default:
            fields[field.name] = value
    return msgspec.json.encode(fields).decode()


class _Children(msgspec.Struct):
    children: list[str] = []


def _child_keys(row: Row) -> list[str]:
    """Returns the keys of the children of the group in a row."""
    return msgspec.json.decode(row["spec"], type=_Children).children


def _view(row: Row) -> DefinitionView:
    """Returns the definition in a row, as users see it."""
    spec = spec_of(row)
    return DefinitionView(
        id=row["id"],
        key=row["key"],
        kind=row["kind"],
        title=spec.title,
        version=row["version"],
        spec=to_camel_names(to_plain(spec)),
        created_at=row["created_at"],
        updated_at=row["updated_at"],
    )


def _require_one(rows: Sequence[Row], key: str) -> Row:
    """Returns the first row; raises `NotFound` if there is none."""
    if not rows:
        raise NotFound(f"no definition {key!r}")
    return rows[0]


def _check_version(key: str | None, stored: int, expected: int | None) -> None:
    """Raises `Conflict` if `expected` is given and is not the stored version."""
    if expected is not None and stored != expected:
        text = f"definition {key!r} has version {stored}, not {expected}; read it again"
        raise Conflict(text, "version_conflict")


def _compare(row: Row | None, spec: Spec) -> DefinitionChange:
    """Returns how `spec` differs from the stored definition; created, if `row` is `None`."""
    key, kind = spec.key or "", kind_of(spec)
    if row is None:
        return DefinitionChange(key, kind, "created", 1, field_changes(None, spec))
    before = spec_of(row)
    if is_same(before, spec):
        return DefinitionChange(key, kind, "unchanged", row["version"])
    return DefinitionChange(key, kind, "updated", row["version"] + 1, field_changes(before, spec))


def _check_acyclic(stored: Mapping[str, _StoredVersion], spec: Spec) -> None:
    """Raises `Invalid` if a definition refers back to itself other than by a goto."""

    def next_keys(key: str) -> Sequence[str]:
        """Returns the keys that a definition leads to, other than by a goto."""
        current = spec if key == spec.key else stored[key].spec if key in stored else None
        if current is None:
            return []
        if isinstance(current, NewTask) and isinstance(current.control, Goto):
            current = msgspec.structs.replace(current, control=None)
        return list(target_keys(current))

    if cycle := find_cycle([spec.key or ""], next_keys):
        path = " -> ".join(cycle if len(cycle) <= 10 else [*cycle[:8], "...", cycle[-1]])
        raise Invalid(f"cyclic definitions: {path}", "dependency_cycle")
