"""Finds the server or database to use, from options, the environment or the stored login."""

import os
import tomllib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import UUID

import msgspec

from tenuto import private
from tenuto.model import bounds
from tenuto.model.errors import Invalid, Unavailable
from tenuto.settings import Settings, expand_home, load

if TYPE_CHECKING:
    from tenuto.client.remote.engine import AnyEngine

URL, TOKEN, WORKSPACE = "TENUTO_URL", "TENUTO_TOKEN", "TENUTO_WORKSPACE"
CONFIG_FILE = "config.toml"


class Login(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The login that `orchestrate login` stores. Environment variables take precedence."""

    url: str | None = None
    """The server of commands, clients and workers, as `http://host:8484`; `None`: the database."""
    token: str | None = None
    """The token for that server."""
    workspace: str | None = None
    """The id of the workspace there, for a user with several; `None`: the first one."""


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """The server at `url` with a token; without a URL, the database of `settings`."""

    url: str | None = None
    token: str | None = None
    workspace: UUID | None = None
    settings: Settings = Settings()


def config_path() -> Path:
    """Returns the path of the file that stores the login."""
    base = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return expand_home("XDG_CONFIG_HOME", base) / "tenuto" / CONFIG_FILE


def read_login() -> Login:
    """Returns the stored login, an empty one if there is none; `Invalid` if it cannot be read."""
    path = config_path()
    try:
        return msgspec.convert(tomllib.loads(path.read_text()), Login)
    except FileNotFoundError:
        return Login()
    except (OSError, ValueError, msgspec.ValidationError) as error:
        raise Invalid(f"cannot read {path}: {error}") from error
    except RecursionError as error:
        raise Invalid(f"cannot read {path}: it is nested too deeply") from error


def write_login(login: Login) -> Path:
    """Replaces the stored login, in a file that only its owner can read; returns the path."""
    path = config_path()
    fields = msgspec.structs.asdict(login)
    lines = [
        f"{name} = {msgspec.json.encode(value).decode()}\n"
        for name, value in fields.items()
        if value is not None
    ]
    try:
        private.make_folder(path.parent)
        new_path = path.with_suffix(".new")
        new_path.unlink(missing_ok=True)
        with open(new_path, "x", opener=private.opener) as file:
            file.writelines(lines)
        new_path.replace(path)
    except OSError as error:
        raise Unavailable(f"cannot write {path}: {error}") from error
    return path


def delete_login() -> None:
    """Deletes the stored login, if there is one."""
    config_path().unlink(missing_ok=True)


def resolve_target(
    url: str | None = None,
    token: str | None = None,
    workspace: str | None = None,
    *,
    database: str | None = None,
    data: str | None = None,
    **flags: str | None,
) -> Target:
    """Returns the server or database to use: from options, else environment, else login.

    A given database or data folder means that one and no server. The login's token is sent to the
    login's server only.
    """
    settings = load_settings(database, data, **flags)
    if url is None and (database is not None or data is not None):
        return _database_target(settings, token, workspace)
    login = read_login()
    server_url = url or os.environ.get(URL)
    if not server_url:
        if login.url is None or settings.database or settings.data:
            return _database_target(settings, token, workspace)
        server_url = login.url
    matching_login = login if (login.url or "").rstrip("/") == server_url.rstrip("/") else Login()
    return Target(
        url=check_url(server_url),
        token=token or os.environ.get(TOKEN) or matching_login.token,
        workspace=parse_workspace_id(
            workspace or os.environ.get(WORKSPACE) or matching_login.workspace
        ),
        settings=settings,
    )


def check_url(url: str) -> str:
    """Returns the URL; raises `Invalid` if it cannot be parsed (scheme and host: unchecked)."""
    import httpx2  # noqa: PLC0415  not needed without a server

    bounds.check_text("url", url, bounds.MAX_TEXT)
    try:
        httpx2.URL(url)
    except httpx2.InvalidURL as error:
        raise Invalid(f"{url[:100]!r} is not a valid server URL: {error}") from error
    return url


def _database_target(settings: Settings, token: str | None, workspace: str | None) -> Target:
    """Returns the database target; raises `Invalid` if an option is given that needs a server.

    Otherwise a command for one workspace would change tasks of another. A workspace in the
    environment belongs to the server URL there, so it is allowed if that URL is set. A token in
    the environment is ignored.
    """
    if workspace is not None or (os.environ.get(WORKSPACE) and not os.environ.get(URL)):
        hint = f"unset {WORKSPACE}" if workspace is None else "omit the workspace"
        raise Invalid(f"a workspace needs a server; give its URL, or {hint}")
    if token is not None:
        raise Invalid("a token needs a server; give its URL, or omit the token")
    return Target(settings=settings)


def load_settings(database: str | None, data: str | None, **flags: object) -> Settings:
    """Returns the settings; options take precedence over the environment.

    A given data folder also overrides a database in the environment.
    """
    if database is None and data is not None:
        database = ""  # use the given data folder, not a database of the environment
    return load({"database": database, "data": data, **flags})


def parse_workspace_id(text: str | None) -> UUID | None:
    """Returns the id, or `None` for `None`; raises `Invalid` if the text is not an id."""
    try:
        return None if text is None else UUID(text)
    except ValueError:
        raise Invalid(f"{text!r} is not a workspace id", field="workspace") from None


@asynccontextmanager
async def open_engine(
    target: Target,
    *,
    actor: str | None = None,
    deadline_s: float | None = None,
    listen: bool = False,
) -> AsyncIterator["AnyEngine"]:
    """Opens the engine of a target, on its database or over HTTP.

    On a database, `actor` is recorded in the audit trail, and `listen` subscribes to hints.
    """
    if target.url is None:
        from tenuto import app  # noqa: PLC0415  not needed for a server

        async with app.connect(target.settings, actor=actor, listen=listen) as engine:
            yield engine
        return
    from tenuto.client.remote.engine import connect_to_server  # noqa: PLC0415
    from tenuto.client.remote.http import DEADLINE_S  # noqa: PLC0415  not needed without a server

    timeout_s = DEADLINE_S if deadline_s is None else deadline_s
    async with connect_to_server(
        target.url, target.token, target.workspace, deadline_s=timeout_s
    ) as remote_engine:
        yield remote_engine
