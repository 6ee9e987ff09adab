"""How a command reaches the engine: behind a server, or on the database itself."""

import shlex
from collections.abc import Awaitable, Callable
from functools import cache
from typing import TYPE_CHECKING, TypeVar

import click

from tenuto.cli.base import Globals

if TYPE_CHECKING:
    from tenuto.client.client import AsyncClient
    from tenuto.client.remote.engine import AnyEngine
    from tenuto.client.target import Target
    from tenuto.settings import Settings

T = TypeVar("T")

PATIENCE_S = 5.0
"""Seconds that somebody at a terminal waits for a server that does not answer."""


def settings(given: Globals, **flags: object) -> "Settings":
    """The settings of a command that works on the database itself, whatever server there is.

    A flag outweighs whatever the environment says of the same thing.
    """
    from tenuto.client.target import settings_of

    for name in ("url", "token", "workspace"):
        if getattr(given, name) is not None:
            raise click.UsageError(
                f"this command works on the database itself, not through a server;"
                f" leave out --{name}"
            )
    return settings_of(given.database, given.data, **flags)


def target(given: Globals, **flags: str | None) -> "Target":
    """The server or database that a command is for; flags are settings that were said."""
    from tenuto.client.target import resolve_target

    where = (given.url, given.token, given.workspace)
    found = resolve_target(*where, database=given.database, data=given.data, **flags)
    if found.url is not None:
        _warn_of_login()
    return found


@cache
def _warn_of_login() -> None:
    """Say once per command that others can read the token that `login` keeps."""
    from tenuto import private
    from tenuto.cli.render import print_note
    from tenuto.client.target import config_path

    path = config_path()
    if mode := private.exposed(path):
        print_note(
            f"warning: {path} has mode {mode}: others can use the login in it; run: chmod 600"
            f" {shlex.quote(str(path))}"
        )


def actor() -> str:
    """Who the audit trail says it was."""
    import getpass
    import os

    from tenuto.model import bounds

    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return bounds.clean(f"cli:{user}", bounds.MAX_NAME)


def call(given: Globals, work: Callable[["AnyEngine"], Awaitable[T]]) -> T:
    """What `work` answers, given the engine that the command is for."""
    from tenuto import app
    from tenuto.client.target import opened

    chosen = target(given)

    async def main() -> T:
        async with opened(chosen, actor=actor(), deadline_s=PATIENCE_S) as engine:
            return await work(engine)

    return app.run(main())


def ask(given: Globals, work: Callable[["AsyncClient"], Awaitable[T]]) -> T:
    """What `work` answers, given a client of the same."""
    from tenuto.client.client import AsyncClient

    return call(given, lambda engine: work(AsyncClient(engine=engine)))
