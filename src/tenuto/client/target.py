"""Where to: a server's address or a database's, from what was said, the environment, or a login."""

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
from tenuto.settings import Settings, expanded, load

if TYPE_CHECKING:
    from tenuto.client.remote.engine import AnyEngine

URL, TOKEN, WORKSPACE = "TENUTO_URL", "TENUTO_TOKEN", "TENUTO_WORKSPACE"
CONFIG = "config.toml"


class Login(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `orchestrate login` remembers, and the environment outweighs."""

    url: str | None = None
    """The server of commands, clients and workers, as `http://host:8484`; else the database."""
    token: str | None = None
    """The key to that server."""
    workspace: str | None = None
    """The id of the workspace there, for a login that has several; else its first."""


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """A server with a token, or without a URL the database of the settings."""

    url: str | None = None
    token: str | None = None
    workspace: UUID | None = None
    settings: Settings = Settings()


def config_path() -> Path:
    """The file that `login` writes."""
    base = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return expanded("XDG_CONFIG_HOME", base) / "tenuto" / CONFIG


def read_login() -> Login:
    """What was remembered; nothing when nobody has logged in."""
    path = config_path()
    try:
        return msgspec.convert(tomllib.loads(path.read_text()), Login)
    except FileNotFoundError:
        return Login()
    except (OSError, ValueError, msgspec.ValidationError) as error:
        raise Invalid(f"cannot read {path}: {error}") from error
    except RecursionError as error:
        raise Invalid(f"cannot read {path}: it is nested too deep") from error


def write_login(login: Login) -> Path:
    """Remember a login where nobody else may read it."""
    path = config_path()
    given = msgspec.structs.asdict(login)
    lines = [
        f"{name} = {msgspec.json.encode(value).decode()}\n"
        for name, value in given.items()
        if value is not None
    ]
    try:
        private.make_folder(path.parent)
        fresh = path.with_suffix(".new")
        fresh.unlink(missing_ok=True)
        with open(fresh, "x", opener=private.opener) as file:
            file.writelines(lines)
        fresh.replace(path)
    except OSError as error:
        raise Unavailable(f"cannot write {path}: {error}") from error
    return path


def forget_login() -> None:
    """Remember nothing."""
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
    """What is meant: said outweighs the environment and settings, and those the login.

    Whoever names a database or a folder means that, and no server. The login's token goes to the
    login's server only.
    """
    settings = settings_of(database, data, **flags)
    if url is None and (database is not None or data is not None):
        return _near(settings, token, workspace)
    login = read_login()
    named = url or os.environ.get(URL)
    if not named:
        if login.url is None or settings.database or settings.data:
            return _near(settings, token, workspace)
        named = login.url
    own = login if (login.url or "").rstrip("/") == named.rstrip("/") else Login()
    return Target(
        url=address(named),
        token=token or os.environ.get(TOKEN) or own.token,
        workspace=as_id(workspace or os.environ.get(WORKSPACE) or own.workspace),
        settings=settings,
    )


def address(url: str) -> str:
    """A server's address; `Invalid` when no host can be called so."""
    import httpx2  # noqa: PLC0415  not needed without a server

    bounds.text("url", url, bounds.MAX_TEXT)
    try:
        httpx2.URL(url)
    except httpx2.InvalidURL as error:
        raise Invalid(f"{url[:100]!r} is not a server's address: {error}") from error
    return url


def _near(settings: Settings, token: str | None, workspace: str | None) -> Target:
    """The database itself; `Invalid` when something was said that only a server knows.

    Otherwise a command for one workspace would change tasks of another. What the environment says
    of a workspace goes with the server that it names; its token does no harm here.
    """
    if workspace is not None or (os.environ.get(WORKSPACE) and not os.environ.get(URL)):
        said = f"unset {WORKSPACE}" if workspace is None else "leave the workspace out"
        raise Invalid(f"a workspace is chosen on a server: name its address, or {said}")
    if token is not None:
        raise Invalid("a token is for a server: name its address, or leave the token out")
    return Target(settings=settings)


def settings_of(database: str | None, data: str | None, **flags: object) -> Settings:
    """The settings in force; what is said outweighs whatever the environment says of it."""
    if database is None and data is not None:
        database = ""  # the folder that was asked for, not a database named elsewhere
    return load({"database": database, "data": data, **flags})


def as_id(text: str | None) -> UUID | None:
    try:
        return None if text is None else UUID(text)
    except ValueError:
        raise Invalid(f"{text!r} is not a workspace's id", field="workspace") from None


@asynccontextmanager
async def opened(
    target: Target,
    *,
    actor: str | None = None,
    deadline_s: float | None = None,
    listen: bool = False,
) -> AsyncIterator["AnyEngine"]:
    """An engine there. On a database, the trail names the actor, and hints are heard if wanted."""
    if target.url is None:
        from tenuto import app  # noqa: PLC0415  not needed for a server

        async with app.connect(target.settings, actor=actor, listen=listen) as near:
            yield near
        return
    from tenuto.client.remote.engine import reach  # noqa: PLC0415
    from tenuto.client.remote.http import DEADLINE_S  # noqa: PLC0415  not needed without a server

    limit = DEADLINE_S if deadline_s is None else deadline_s
    async with reach(target.url, target.token, target.workspace, deadline_s=limit) as far:
        yield far
