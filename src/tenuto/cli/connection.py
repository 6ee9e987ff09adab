"""Connects a command to the engine: through a server, or directly on the database."""

import shlex
from collections.abc import Awaitable, Callable
from functools import cache
from typing import TYPE_CHECKING, TypeVar

import click

from tenuto.cli.base import GlobalOptions

if TYPE_CHECKING:
    from tenuto.client.client import AsyncClient
    from tenuto.client.remote.engine import AnyEngine
    from tenuto.client.target import Target
    from tenuto.settings import Settings

T = TypeVar("T")

SERVER_TIMEOUT_S = 5.0
"""Seconds that a command waits for a server that does not respond."""


def settings(options: GlobalOptions, **flags: object) -> "Settings":
    """Returns the settings of a command on the database; `UsageError` for options of a server.

    A flag overrides the environment variable of the same setting.
    """
    from tenuto.client.target import load_settings

    for name in ("url", "token", "workspace"):
        if getattr(options, name) is not None:
            raise click.UsageError(
                f"--{name} is not allowed: this command works directly on the database, not"
                " through a server"
            )
    return load_settings(options.database, options.data, **flags)


def target(options: GlobalOptions, **flags: str | None) -> "Target":
    """Returns the server or database of a command; warns if others can read the stored login.

    `flags` override settings.
    """
    from tenuto.client.target import resolve_target

    server = (options.url, options.token, options.workspace)
    resolved = resolve_target(*server, database=options.database, data=options.data, **flags)
    if resolved.url is not None:
        _warn_if_login_exposed()
    return resolved


@cache
def _warn_if_login_exposed() -> None:
    """Warns once per command if other users can read the login file."""
    from tenuto import private
    from tenuto.cli.render import print_note
    from tenuto.client.target import config_path

    path = config_path()
    if mode := private.mode_if_exposed(path):
        print_note(
            f"warning: {path} has mode {mode}: other users can read the login in it; run: chmod"
            f" 600 {shlex.quote(str(path))}"
        )


def audit_actor() -> str:
    """Returns the name that the audit trail records for this user: `cli:USER`."""
    import getpass
    import os

    from tenuto.model import bounds

    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return bounds.make_storable(f"cli:{user}", bounds.MAX_NAME)


def call_engine(options: GlobalOptions, operation: Callable[["AnyEngine"], Awaitable[T]]) -> T:
    """Runs `operation` with the engine of the command's target and returns its result."""
    from tenuto import app
    from tenuto.client.target import open_engine

    chosen = target(options)

    async def main() -> T:
        async with open_engine(chosen, actor=audit_actor(), deadline_s=SERVER_TIMEOUT_S) as engine:
            return await operation(engine)

    return app.run(main())


def call_client(options: GlobalOptions, operation: Callable[["AsyncClient"], Awaitable[T]]) -> T:
    """Runs `operation` with a client of the command's target and returns its result."""
    from tenuto.client.client import AsyncClient

    return call_engine(options, lambda engine: operation(AsyncClient(engine=engine)))
