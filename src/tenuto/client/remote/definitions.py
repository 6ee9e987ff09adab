"""Definitions over HTTP, with the methods of `Definitions`."""

from collections.abc import Sequence
from uuid import UUID

from tenuto.client.remote.http import path_segment
from tenuto.client.remote.resource import RemoteResource
from tenuto.engine.flows.definitions import ApplyResult, DefinitionPage, DefinitionView
from tenuto.manifest.documents import Files, decode_files, parse_spec
from tenuto.manifest.export import dump, kind_of, to_camel_names, to_plain, to_snake_names
from tenuto.model.flows.plan import Spec

PAGE_SIZE = 500
APPLY_WAIT_S = 120.0
"""Additional seconds for the server to apply many files."""


class RemoteDefinitions(RemoteResource):
    """The definitions of the token's workspace."""

    async def put(self, spec: Spec, version: int | None = None) -> DefinitionView:
        """Creates or replaces the spec's definition; `Conflict` if it does not have the `version`.

        `None` accepts any version; 0 means that the key must not exist.
        """
        body = {"kind": kind_of(spec), "spec": to_camel_names(to_plain(spec))}
        path = f"definitions/{path_segment(spec.key)}"
        return await self._call(DefinitionView, "PUT", path, body, version=version)

    async def get(self, key: str) -> DefinitionView:
        """Returns one definition; raises `NotFound`."""
        return await self._call(DefinitionView, "GET", f"definitions/{path_segment(key)}")

    async def page(self, limit: int = 100, cursor: UUID | None = None) -> DefinitionPage:
        """Returns a page of definitions, newest first."""
        params = {"limit": limit, "cursor": cursor}
        return await self._call(DefinitionPage, "GET", "definitions", params=params)

    async def delete(self, key: str, version: int | None = None) -> None:
        """Deletes a definition, `Conflict` if `version` is outdated; its flows keep their plans."""
        path = f"definitions/{path_segment(key)}"
        await self._call(type(None), "DELETE", path, version=version)

    async def export(self, keys: Sequence[str] = ()) -> str:
        """Returns definitions (all, without keys) as YAML that loads back to equal ones."""
        views = [await self.get(key) for key in keys] if keys else await self._load_all()
        specs = {view.key: parse_spec(view.kind, to_snake_names(view.spec)) for view in views}
        return dump(specs[key] for key in sorted(specs))

    async def apply_files(self, files: Files, *, dry_run: bool = False) -> ApplyResult:
        """Applies YAML files, all or nothing; applying the same files again changes nothing."""
        texts = decode_files(files)
        body = {"files": texts, "dryRun": dry_run}
        path = "definitions/apply"
        return await self._call(
            ApplyResult, "POST", path, body, repeatable=dry_run, wait_s=APPLY_WAIT_S
        )

    async def _load_all(self) -> list[DefinitionView]:
        """Returns all definitions of the workspace."""
        page = await self.page(PAGE_SIZE)
        views = list(page.definitions)
        while page.next_cursor is not None:
            page = await self.page(PAGE_SIZE, page.next_cursor)
            views += page.definitions
        return views
