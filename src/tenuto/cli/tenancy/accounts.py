"""`orchestrate workspace`, `user` and `token`: who may do what."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from tenuto.cli.base import Globals, command, group
from tenuto.cli.connection import ask
from tenuto.cli.output import Columns, in_future, print_done, print_one, tell_list, words

if TYPE_CHECKING:
    from datetime import datetime
    from uuid import UUID

    from tenuto.client.client import AsyncClient
    from tenuto.engine.tenancy.views import MemberView, WorkspaceView

ROLES = click.Choice(["OWNER", "ADMIN", "MEMBER", "VIEWER"], case_sensitive=False)
_WORKSPACE: Columns = {
    "id": lambda each: each.id,
    "name": lambda each: each.name,
    "role": lambda each: each.role,
    "tasks a minute": lambda each: each.quota.tasks_per_minute,
    "tasks pending": lambda each: each.quota.pending,
    "tasks running": lambda each: each.quota.running,
    "created": lambda each: each.created_at,
}
_USER: Columns = {
    "id": lambda each: each.id,
    "name": lambda each: each.name,
    "role": lambda each: each.role,
    "disabled": lambda each: each.disabled,
    "created": lambda each: each.created_at,
}


@group("workspace", "orchestrate workspace list", "orchestrate workspace create staging")
def workspace() -> None:
    """Make and limit workspaces: tenants that see nothing of each other."""


@command("list", "orchestrate workspace list")
@click.pass_obj
def workspace_list(given: Globals) -> None:
    """List the workspaces that you belong to."""
    found = ask(given, lambda client: client.workspaces.list())
    columns: Columns = {
        "ID": lambda each: each.id,
        "ROLE": lambda each: each.role,
        "NAME": lambda each: each.name,
    }
    tell_list(given, "workspaces", found, columns, wide="NAME")


@command("create", "orchestrate workspace create staging")
@click.argument("name")
@click.pass_obj
def workspace_create(given: Globals, name: str) -> None:
    """Make a workspace that is yours; without a login its owner's token is printed, once."""
    made = ask(given, lambda client: client.workspaces.create(name))
    fields = {title: _of_workspace(show) for title, show in _WORKSPACE.items()}
    print_one(given, made, fields | {"token": lambda each: each.token})


def _of_workspace(show: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda made: show(made.workspace)


async def _this(client: "AsyncClient", chosen: "UUID | None") -> "UUID":
    """The workspace that was named, or the caller's."""
    return chosen or (await client.access.me()).workspace_id


@command("show", "orchestrate workspace show")
@click.argument("workspace_id", type=click.UUID, required=False, metavar="[ID]")
@click.pass_obj
def workspace_show(given: Globals, workspace_id: "UUID | None") -> None:
    """Show your workspace and what it may use."""

    async def read(client: "AsyncClient") -> "WorkspaceView":
        return await client.workspaces.get(await _this(client, workspace_id))

    print_one(given, ask(given, read), _WORKSPACE)


@command("quota", "orchestrate workspace quota --tasks-per-minute 600 --pending 10000 --running 50")
@click.argument("workspace_id", type=click.UUID, required=False, metavar="[ID]")
@click.option(
    "--tasks-per-minute",
    type=click.IntRange(0),
    metavar="N",
    help="New tasks; no limit if not given.",
)
@click.option(
    "--pending", type=click.IntRange(0), metavar="N", help="Waiting tasks; no limit if not given."
)
@click.option(
    "--running", type=click.IntRange(0), metavar="N", help="Running tasks; no limit if not given."
)
@click.pass_obj
def workspace_quota(given: Globals, /, workspace_id: "UUID | None", **limits: int | None) -> None:
    """Say what your workspace may use."""

    async def change(client: "AsyncClient") -> "WorkspaceView":
        return await client.workspaces.quota(await _this(client, workspace_id), **limits)

    print_one(given, ask(given, change), _WORKSPACE)


for _each in (workspace_list, workspace_create, workspace_show, workspace_quota):
    workspace.add_command(_each)


@group("user", "orchestrate user list", "orchestrate user create ann --role ADMIN")
def user() -> None:
    """Make users and say as what they belong to the workspace."""


@command("list", "orchestrate user list --json")
@click.pass_obj
def user_list(given: Globals) -> None:
    """List who belongs to the workspace."""
    found = ask(given, lambda client: client.users.list())
    columns: Columns = {
        "ID": lambda each: each.id,
        "ROLE": lambda each: each.role,
        "NAME": lambda each: each.name,
    }
    tell_list(given, "users", found, columns, wide="NAME")


@command(
    "create",
    "orchestrate user create ann",
    "orchestrate user create ann --password-file secret.txt",
)
@click.argument("name")
@click.option("--role", type=ROLES, default="MEMBER", show_default=True, help="What they may do.")
@click.option(
    "--password-file", metavar="FILE", help="The password's file; - is standard input. Else asked."
)
@click.pass_obj
def user_create(given: Globals, name: str, role: str, password_file: str | None) -> None:
    """Make a user who belongs to the workspace and may log in."""
    from tenuto.cli.tenancy.login import read_password

    password = read_password(password_file)
    made = ask(given, lambda client: client.users.create(name, password, role.upper()))
    print_one(given, made, _USER)


async def _user(client: "AsyncClient", name: str) -> "UUID":
    from tenuto.model.errors import NotFound

    for each in await client.users.list():
        if name in (each.name, str(each.id)):
            return each.id
    raise NotFound(f"no user {name!r}")


@command("update", "orchestrate user update ann --role VIEWER")
@click.argument("name")
@click.option("--role", type=ROLES, required=True, help="What they may do.")
@click.pass_obj
def user_update(given: Globals, name: str, role: str) -> None:
    """Change what a member may do."""

    async def change(client: "AsyncClient") -> "MemberView":
        return await client.users.update(await _user(client, name), role.upper())

    print_one(given, ask(given, change), _USER)


@command("delete", "orchestrate user delete ann")
@click.argument("name")
@click.pass_obj
def user_delete(given: Globals, name: str) -> None:
    """Take somebody out of the workspace."""

    async def order(client: "AsyncClient") -> None:
        await client.users.delete(await _user(client, name))

    ask(given, order)
    print_done(given, f"deleted {name}")


@command(
    "password",
    "orchestrate user password",
    "orchestrate user password --password-file old.txt --new-password-file new.txt",
)
@click.option("--password-file", metavar="FILE", help="The present password's file. Else asked.")
@click.option("--new-password-file", metavar="FILE", help="The new password's file. Else asked.")
@click.pass_obj
def user_password(given: Globals, password_file: str | None, new_password_file: str | None) -> None:
    """Change your own password. All your logins end: log in again."""
    from tenuto.cli.tenancy.login import read_password

    password = read_password(password_file, "present password")
    new = read_password(new_password_file, "new password", twice=True)
    ask(given, lambda client: client.access.change_password(password, new))
    print_done(given, "changed; log in again")


for _each in (user_list, user_create, user_update, user_delete, user_password):
    user.add_command(_each)


@group("token", "orchestrate token list", "orchestrate token create ci --scope read --scope write")
def token() -> None:
    """Make and end the keys of programs to the workspace."""


@command("list", "orchestrate token list")
@click.pass_obj
def token_list(given: Globals) -> None:
    """List tokens, without themselves."""
    found = ask(given, lambda client: client.tokens.list())
    columns: Columns = {
        "ID": lambda each: each.id,
        "ROLE": lambda each: each.role,
        "SCOPES": lambda each: each.scopes,
        "BELOW": lambda each: each.below,
        "BY": lambda each: each.created_by,
        "EXPIRES": lambda each: each.expires_at,
        "NAME": lambda each: each.name,
    }
    tell_list(given, "tokens", found, columns, wide="NAME")


@command(
    "create",
    "orchestrate token create ci",
    "orchestrate token create watch --role VIEWER --scope read",
)
@click.argument("name")
@click.option("--role", type=ROLES, default="MEMBER", show_default=True, help="What it may do.")
@click.option(
    "--scope", "scopes", multiple=True, help="read, write, work, admin; else the first 3."
)
@click.option("--expires", type=in_future, metavar="TIME", help="When it ends: +30d, or ISO 8601.")
@click.pass_obj
def token_create(
    given: Globals, name: str, role: str, scopes: tuple[str, ...], expires: "datetime | None"
) -> None:
    """Make a token and print it; it is shown once."""
    from tenuto.cli.render import print_json
    from tenuto.model.printable import printable

    made = ask(
        given,
        lambda client: client.tokens.create(
            name, role=role.upper(), scopes=words(scopes) or None, expires_at=expires
        ),
    )
    if given.json:
        print_json(made)
    else:
        print(printable(made.token))


@command("revoke", "orchestrate token revoke 0198c0de-0000-7000-8000-000000000000")
@click.argument("token_id", metavar="ID|NAME")
@click.pass_obj
def token_revoke(given: Globals, token_id: str) -> None:
    """End a token and all that were made with it, at once."""
    from tenuto.model.errors import NotFound

    async def order(client: "AsyncClient") -> int:
        known = await client.tokens.list()
        named = [each for each in known if token_id in (each.name, str(each.id))]
        if len(named) != 1:
            raise NotFound(f"{'more than one' if named else 'no'} token {token_id!r}")
        await client.tokens.revoke(named[0].id)
        return named[0].below

    below = ask(given, order)
    more = f" and {below} made with it" if below else ""
    print_done(given, f"revoked {token_id}{more}", below=below)


for _each in (token_list, token_create, token_revoke):
    token.add_command(_each)
