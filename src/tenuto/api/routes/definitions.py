"""Routes for definitions: create, list, read, replace, delete, and apply YAML files."""

from typing import Any, Literal
from uuid import UUID

from litestar import Response
from litestar.params import FromPath, FromQuery, JSONBody

from tenuto.api.operation import READ, WRITE, operation
from tenuto.api.routes.flow_bodies import StrictBody
from tenuto.api.routes.tasks import IfMatch, Limit, version_of
from tenuto.api.service import InjectedContext
from tenuto.engine.flows.definitions import ApplyResult, DefinitionPage, DefinitionView
from tenuto.manifest.documents import parse_spec
from tenuto.manifest.export import to_snake_names
from tenuto.model.errors import Conflict, Invalid

UNNAMED = "manifest.yaml"
"""The file name in errors about a manifest without a name."""


class DefinitionBody(StrictBody):
    """A definition to store; `spec` has the fields of a YAML file, in camelCase."""

    spec: dict[str, Any]
    kind: Literal["task", "group"] = "task"


class ApplyBody(StrictBody):
    """YAML to apply: one text, or several by file name; errors contain the file name."""

    manifest: str | None = None
    files: dict[str, str] | None = None
    dry_run: bool = False

    def texts(self) -> dict[str, str]:
        """Returns the texts by file name; `Invalid` unless one of `manifest`, `files` is set."""
        if (self.manifest is None) == (self.files is None):
            raise Invalid("exactly one of manifest and files is required", field="manifest")
        return {UNNAMED: self.manifest} if self.manifest is not None else self.files or {}


@operation("GET", "/definitions", READ)
async def list_definitions(
    ctx: InjectedContext, limit: Limit = 100, cursor: FromQuery[UUID | None] = None
) -> DefinitionPage:
    """Returns the definitions, newest first."""
    return await ctx.engine.definitions.page(limit, cursor)


@operation("POST", "/definitions", WRITE)
async def create_definition(
    ctx: InjectedContext, data: JSONBody[DefinitionBody]
) -> Response[DefinitionView]:
    """Creates a definition under the key in its spec; an existing key is refused."""
    spec = parse_spec(data.kind, to_snake_names(data.spec))
    try:
        view = await ctx.engine.definitions.put(spec, 0)
    except Conflict as error:
        if error.code != "version_conflict":
            raise
        raise Conflict(
            f"a definition {spec.key!r} exists already; choose another key", "name_taken"
        ) from error
    return _definition_response(view, status=201)


@operation("GET", "/definitions/{key:path}", READ)
async def get_definition(ctx: InjectedContext, key: FromPath[str]) -> Response[DefinitionView]:
    """Returns one definition; the header `ETag` has its version."""
    return _definition_response(await ctx.engine.definitions.get(_key_from_path(key)))


@operation("PUT", "/definitions/{key:path}", WRITE)
async def put_definition(
    ctx: InjectedContext,
    key: FromPath[str],
    data: JSONBody[DefinitionBody],
    if_match: IfMatch = None,
) -> Response[DefinitionView]:
    """Creates or replaces the definition with this key.

    With the header `If-Match` the change is refused if the definition has another version.
    """
    fields = to_snake_names(data.spec)
    path_key = _key_from_path(key)
    if fields.get("id", fields.get("key", path_key)) != path_key:
        raise Invalid(f"the key in the spec must be {path_key[:100]!r} as in the path", field="key")
    spec = parse_spec(data.kind, {"id": path_key} | fields)
    return _definition_response(await ctx.engine.definitions.put(spec, version_of(if_match)))


@operation("DELETE", "/definitions/{key:path}", WRITE)
async def delete_definition(
    ctx: InjectedContext, key: FromPath[str], if_match: IfMatch = None
) -> None:
    """Deletes a definition; its running flows continue."""
    await ctx.engine.definitions.delete(_key_from_path(key), version_of(if_match))


@operation("POST", "/definitions/apply", WRITE, status_code=200)
async def apply_definitions(ctx: InjectedContext, data: JSONBody[ApplyBody]) -> ApplyResult:
    """Applies YAML manifests, all or nothing; applying them again changes nothing."""
    return await ctx.engine.definitions.apply_files(data.texts(), dry_run=data.dry_run)


def _key_from_path(path: str) -> str:
    """Returns the key in a path without the leading slash; keys may contain slashes."""
    return path.removeprefix("/")


def _definition_response(view: DefinitionView, status: int = 200) -> Response[DefinitionView]:
    """Returns the response, with the definition's version as `ETag`."""
    return Response(view, status_code=status, headers={"ETag": f'"{view.version}"'})
