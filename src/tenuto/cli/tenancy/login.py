"""`orchestrate login` and `logout`: which server commands are for."""

import sys
from typing import TYPE_CHECKING

import click

from tenuto.cli.base import Globals, command
from tenuto.cli.connection import PATIENCE_S
from tenuto.cli.output import print_done

if TYPE_CHECKING:
    from tenuto.engine.tenancy.views import CallerView


@command(
    "login",
    "orchestrate login http://tenuto.example:8484 --name ann",
    "orchestrate login http://tenuto.example:8484 --name ann --workspace staging",
    "orchestrate login http://127.0.0.1:8484 --token tnt_...",
)
@click.argument("server", required=False, metavar="[URL]")
@click.option("--name", help="Who you are there; asked for if not given.")
@click.option(
    "--password-file", metavar="FILE", help="The password's file; - is standard input. Else asked."
)
@click.pass_obj
def login(given: Globals, server: str | None, name: str | None, password_file: str | None) -> None:
    """Remember a server and a token for it, in a file that only you may read.

    With --token that token is kept, otherwise the one that name and password give. It is what
    commands use that name neither a server nor a database.

    Names are unique within a workspace. --workspace, its id or its name, says whose user you are;
    without it you are a user of the first workspace.
    """
    from tenuto import app
    from tenuto.client.target import Login, address, write_login

    url = server or given.url
    if url is None:
        raise click.UsageError("name the server: orchestrate login http://host:8484")
    if server is not None and given.url not in (None, server):
        raise click.UsageError("the argument and --url name different servers")
    address(url)
    password = None
    if given.token is None:
        name = name or click.prompt("name", err=True)
        password = read_password(password_file)
    token, me = app.run(_check(url, given.token, name, password, given.workspace))
    path = write_login(Login(url.rstrip("/"), token, str(me.workspace_id)))
    print_done(
        given,
        f"{me.actor} on {url} ({me.role}); kept in {path}",
        url=url,
        actor=me.actor,
        role=me.role,
        workspaceId=me.workspace_id,
    )


def read_password(file: str | None, what: str = "password", *, twice: bool = False) -> str:
    """A password from a file, or from whoever sits at the terminal; `twice` asks to repeat it."""
    if file is None:
        if sys.stdin is None or not sys.stdin.isatty():
            raise click.UsageError("there is nobody to ask: give --password-file or --token")
        asked: str = click.prompt(what, hide_input=True, err=True, confirmation_prompt=twice)
        return asked
    from tenuto.cli.parse import read_text

    return read_text("password", file).removesuffix("\n")


async def _check(
    url: str, token: str | None, name: str | None, password: str | None, workspace: str | None
) -> "tuple[str, CallerView]":
    """The token, and who bears it as the server says."""
    from tenuto.client.accounts import Access
    from tenuto.client.remote.engine import reach
    from tenuto.client.target import as_id

    if token is not None:
        chosen = as_id(workspace)
    else:
        assert name is not None
        assert password is not None
        async with reach(url, deadline_s=PATIENCE_S) as nobody:
            made = await Access(nobody).login(name, password, workspace)
        token, chosen = made.token, made.workspace_id
    async with reach(url, token, chosen, deadline_s=PATIENCE_S) as engine:
        return token, await Access(engine).me()


@command("logout", "orchestrate logout")
@click.pass_obj
def logout(given: Globals) -> None:
    """Forget the remembered server; a login by password ends there, too."""
    from tenuto import app
    from tenuto.cli.render import print_note
    from tenuto.client.target import forget_login, read_login
    from tenuto.model.errors import Conflict, Unauthenticated, Unavailable

    known = read_login()
    if known.url is None or known.token is None:
        print_done(given, "nobody is logged in")
        return
    try:
        app.run(_end(known.url, known.token))
    except (Conflict, Unauthenticated):
        pass  # a program's token, or a login that has ended already
    except Unavailable as error:
        print_note(f"note: the login may live on there: {error}")
    forget_login()
    print_done(given, f"logged out of {known.url}")


async def _end(url: str, token: str) -> None:
    from tenuto.client.accounts import Access
    from tenuto.client.remote.engine import reach

    async with reach(url, token, deadline_s=PATIENCE_S) as engine:
        await Access(engine).logout()
