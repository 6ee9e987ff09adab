"""Definitions behind a server: the calls of the engine's own."""

from collections.abc import Sequence
from uuid import UUID

from tenuto.client.remote.http import ApiRequest, ServerConnection, part
from tenuto.client.remote.worker import V1
from tenuto.engine.flows.definitions import ApplyResult, DefinitionPage, DefinitionView
from tenuto.manifest.documents import Files, spec_from, texts_of
from tenuto.manifest.export import camel, dump, kind_of, snake, to_plain
from tenuto.model.flows.plan import Spec

PAGE = 500
APPLY_S = 120.0
"""Seconds more that the server may take for many files at once."""


class RemoteDefinitions:
    """The definitions of a token's workspace."""

    def __init__(self, link: ServerConnection) -> None:
        self._link = link

    async def put(self, spec: Spec, version: int | None = None) -> DefinitionView:
        """Keep a definition under its key, if what is there still has the version; 0 is nothing."""
        body = {"kind": kind_of(spec), "spec": camel(to_plain(spec))}
        path = f"{V1}/definitions/{part(spec.key)}"
        ask = ApiRequest(method="PUT", path=path, body=body, headers=_if(version), repeatable=True)
        return await self._link.ask(DefinitionView, ask)

    async def get(self, key: str) -> DefinitionView:
        """One definition."""
        ask = ApiRequest(method="GET", path=f"{V1}/definitions/{part(key)}", repeatable=True)
        return await self._link.ask(DefinitionView, ask)

    async def page(self, limit: int = 100, cursor: UUID | None = None) -> DefinitionPage:
        """The definitions, newest first."""
        params = {"limit": limit, "cursor": cursor}
        ask = ApiRequest(method="GET", path=f"{V1}/definitions", params=params, repeatable=True)
        return await self._link.ask(DefinitionPage, ask)

    async def delete(self, key: str, version: int | None = None) -> None:
        """Forget a definition, if it still has the version; flows of it go on with their plan."""
        path = f"{V1}/definitions/{part(key)}"
        await self._link.ask(
            type(None), ApiRequest(method="DELETE", path=path, headers=_if(version))
        )

    async def export(self, keys: Sequence[str] = ()) -> str:
        """Definitions as YAML that loads back to equal ones; all of them without keys."""
        views = [await self.get(key) for key in keys] if keys else await self._all()
        specs = {view.key: spec_from(view.kind, snake(view.spec)) for view in views}
        return dump(specs[key] for key in sorted(specs))

    async def apply_files(self, files: Files, *, dry_run: bool = False) -> ApplyResult:
        """Do what files ask for, all of it or nothing; done again it changes nothing."""
        texts = texts_of(files)
        body = {"files": texts, "dryRun": dry_run}
        path = f"{V1}/definitions/apply"
        ask = ApiRequest(method="POST", path=path, body=body, repeatable=dry_run, wait_s=APPLY_S)
        return await self._link.ask(ApplyResult, ask)

    async def _all(self) -> list[DefinitionView]:
        page = await self.page(PAGE)
        found = list(page.definitions)
        while page.next_cursor is not None:
            page = await self.page(PAGE, page.next_cursor)
            found += page.definitions
        return found


def _if(version: int | None) -> dict[str, str]:
    return {} if version is None else {"If-Match": f'"{version}"'}
