"""Definitions: make, look, change, forget, and apply files with many of them."""

from typing import Any, Literal
from uuid import UUID

from litestar import Response, delete, get, post, put
from litestar.params import FromPath, FromQuery, JSONBody

from tenuto.api.routes.bodies import Written
from tenuto.api.routes.tasks import IfMatch, Limit, version_of
from tenuto.api.service import InjectedContext
from tenuto.engine.flows.definitions import ApplyResult, DefinitionPage, DefinitionView
from tenuto.manifest.documents import spec_from
from tenuto.manifest.export import snake
from tenuto.model.errors import Conflict, Invalid

UNNAMED = "manifest.yaml"
"""What errors call a text that came without a name."""


class DefinitionBody(Written):
    """A definition to be: `spec` has the fields that files have, in camelCase."""

    spec: dict[str, Any]
    kind: Literal["task", "group"] = "task"


class ApplyBody(Written):
    """YAML: one text, or several by the names that errors call them."""

    manifest: str | None = None
    files: dict[str, str] | None = None
    dry_run: bool = False

    def texts(self) -> dict[str, str]:
        """The texts by name."""
        if (self.manifest is None) == (self.files is None):
            raise Invalid("give either manifest or files", field="manifest")
        return {UNNAMED: self.manifest} if self.manifest is not None else self.files or {}


@get("/definitions")
async def definitions(
    desk: InjectedContext, limit: Limit = 100, cursor: FromQuery[UUID | None] = None
) -> DefinitionPage:
    """What may run more than once, newest first."""
    return await desk.engine.definitions.page(limit, cursor)


@post("/definitions")
async def make(desk: InjectedContext, data: JSONBody[DefinitionBody]) -> Response[DefinitionView]:
    """A new definition under the key in its spec; a key that is taken is refused."""
    spec = spec_from(data.kind, snake(data.spec))
    try:
        view = await desk.engine.definitions.put(spec, 0)
    except Conflict as error:
        if error.code != "version_conflict":
            raise
        raise Conflict(f"there is a definition {spec.key!r} already", "name_taken") from error
    return _shown(view, status=201)


@get("/definitions/{key:path}")
async def show(desk: InjectedContext, key: FromPath[str]) -> Response[DefinitionView]:
    """One definition."""
    return _shown(await desk.engine.definitions.get(_key(key)))


@put("/definitions/{key:path}")
async def keep(
    desk: InjectedContext,
    key: FromPath[str],
    data: JSONBody[DefinitionBody],
    if_match: IfMatch = None,
) -> Response[DefinitionView]:
    """Keep a definition under the key, in place of what is there."""
    said = snake(data.spec)
    name = _key(key)
    if said.get("id", said.get("key", name)) != name:
        raise Invalid("the spec has another key than the path", field="key")
    spec = spec_from(data.kind, {"id": name} | said)
    return _shown(await desk.engine.definitions.put(spec, version_of(if_match)))


@delete("/definitions/{key:path}")
async def forget(desk: InjectedContext, key: FromPath[str], if_match: IfMatch = None) -> None:
    """Forget a definition; flows of it go on."""
    await desk.engine.definitions.delete(_key(key), version_of(if_match))


@post("/definitions/apply", status_code=200)
async def apply(desk: InjectedContext, data: JSONBody[ApplyBody]) -> ApplyResult:
    """Do what YAML asks for, all of it or nothing; done again it changes nothing."""
    return await desk.engine.definitions.apply_files(data.texts(), dry_run=data.dry_run)


def _key(path: str) -> str:
    """A key may hold slashes, so it is the rest of the path, which begins with one."""
    return path.removeprefix("/")


def _shown(view: DefinitionView, status: int = 200) -> Response[DefinitionView]:
    return Response(view, status_code=status, headers={"ETag": f'"{view.version}"'})


HANDLERS = [definitions, make, show, keep, forget, apply]
