"""`orchestrate login` and `logout`: store and delete the login to a server."""

import sys
from typing import TYPE_CHECKING

import click

from tenuto.cli.base import GlobalOptions, command
from tenuto.cli.connection import SERVER_TIMEOUT_S
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
@click.option("--name", help="Your user name; default: prompt.")
@click.option(
    "--password-file",
    metavar="FILE",
    help="File with the password; - is standard input. Default: prompt.",
)
@click.pass_obj
def login(
    options: GlobalOptions, server: str | None, name: str | None, password_file: str | None
) -> None:
    """Log in to a server and store the token in a file that only you can read.

    The token is the one given by --token, or a new one for name and password. Commands use this
    login if they are given neither a server nor a database.

    User names are unique within a workspace. --workspace (id or name) selects the workspace of the
    user; default: the first workspace.
    """
    from tenuto import app
    from tenuto.client.target import Login, check_url, write_login

    url = server or options.url
    if url is None:
        raise click.UsageError("a server URL is required: orchestrate login http://host:8484")
    if server is not None and options.url not in (None, server):
        raise click.UsageError("the argument and --url name different servers; give one of them")
    check_url(url)
    password = None
    if options.token is None:
        name = name or click.prompt("name", err=True)
        password = read_password(password_file)
    token, me = app.run(_authenticate(url, options.token, name, password, options.workspace))
    path = write_login(Login(url.rstrip("/"), token, str(me.workspace_id)))
    print_done(
        options,
        f"logged in to {url} as {me.actor} ({me.role}); stored in {path}",
        url=url,
        actor=me.actor,
        role=me.role,
        workspaceId=me.workspace_id,
    )


def read_password(file: str | None, label: str = "password", *, twice: bool = False) -> str:
    """Reads a password from a file, or asks on the terminal; `UsageError` if there is none.

    `twice` asks to repeat it.
    """
    if file is None:
        if sys.stdin is None or not sys.stdin.isatty():
            raise click.UsageError(
                "cannot ask for the password: stdin is not a terminal; give --password-file or"
                " --token"
            )
        password: str = click.prompt(label, hide_input=True, err=True, confirmation_prompt=twice)
        return password
    from tenuto.cli.parse import read_text

    return read_text("password", file).removesuffix("\n")


async def _authenticate(
    url: str, token: str | None, name: str | None, password: str | None, workspace: str | None
) -> "tuple[str, CallerView]":
    """Returns a token and its owner; without a `token` logs in with name and password."""
    from tenuto.client.accounts import Access
    from tenuto.client.remote.engine import connect_to_server
    from tenuto.client.target import parse_workspace_id

    if token is not None:
        workspace_id = parse_workspace_id(workspace)
    else:
        assert name is not None
        assert password is not None
        async with connect_to_server(url, deadline_s=SERVER_TIMEOUT_S) as anonymous:
            login = await Access(anonymous).login(name, password, workspace)
        token, workspace_id = login.token, login.workspace_id
    async with connect_to_server(url, token, workspace_id, deadline_s=SERVER_TIMEOUT_S) as engine:
        return token, await Access(engine).me()


@command("logout", "orchestrate logout")
@click.pass_obj
def logout(options: GlobalOptions) -> None:
    """Delete the stored login; a login by password is ended on the server, too."""
    from tenuto import app
    from tenuto.cli.render import print_note
    from tenuto.client.target import delete_login, read_login
    from tenuto.model.errors import Conflict, Unauthenticated, Unavailable

    saved = read_login()
    if saved.url is None or saved.token is None:
        print_done(options, "not logged in")
        return
    try:
        app.run(_log_out(saved.url, saved.token))
    except (Conflict, Unauthenticated):
        pass  # an API token, or a login that has already ended
    except Unavailable as error:
        print_note(f"note: the login may still be valid on the server: {error}")
    delete_login()
    print_done(options, f"logged out of {saved.url}")


async def _log_out(url: str, token: str) -> None:
    """Ends the token's login at the server; the stored login stays."""
    from tenuto.client.accounts import Access
    from tenuto.client.remote.engine import connect_to_server

    async with connect_to_server(url, token, deadline_s=SERVER_TIMEOUT_S) as engine:
        await Access(engine).logout()
