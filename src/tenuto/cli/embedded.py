"""How a command reaches the engine: on the database itself, without a server."""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from tenuto.cli.base import Globals

if TYPE_CHECKING:
    from tenuto.engine.engine import Engine
    from tenuto.settings import Settings

T = TypeVar("T")


def settings(given: Globals, **flags: object) -> "Settings":
    """The settings in force; a flag outweighs whatever the environment says of the same thing."""
    from tenuto.settings import load

    database = given.database
    if database is None and given.data is not None:
        database = ""  # the folder that was asked for, not a database named elsewhere
    return load({"database": database, "data": given.data, **flags})


def actor() -> str:
    """Who the audit trail says it was."""
    import getpass
    import os

    from tenuto.model import limits

    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return limits.clean(f"cli:{user}", limits.MAX_NAME)


def call(given: Globals, work: Callable[["Engine"], Awaitable[T]]) -> T:
    """What `work` answers, given an engine on the database of the settings."""
    from tenuto import app

    chosen = settings(given)

    async def main() -> T:
        async with app.connect(chosen, actor=actor()) as engine:
            return await work(engine)

    return app.run(main())
