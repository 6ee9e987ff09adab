"""`orchestrate workspace`, `user` and `token`: workspaces, users with roles, API tokens."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from tenuto.cli.base import GlobalOptions, command, group
from tenuto.cli.connection import call_client
from tenuto.cli.output import (
    Columns,
    parse_future_time,
    print_done,
    print_list,
    print_one,
    split_commas,
)

if TYPE_CHECKING:
    from datetime import datetime
    from uuid import UUID

    from tenuto.client.client import AsyncClient
    from tenuto.engine.tenancy.views import MemberView, WorkspaceView

ROLES = click.Choice(["OWNER", "ADMIN", "MEMBER", "VIEWER"], case_sensitive=False)
_WORKSPACE: Columns = {
    "id": lambda workspace: workspace.id,
    "name": lambda workspace: workspace.name,
    "role": lambda workspace: workspace.role,
    "tasks per minute": lambda workspace: workspace.quota.tasks_per_minute,
    "pending tasks": lambda workspace: workspace.quota.pending,
    "running tasks": lambda workspace: workspace.quota.running,
    "created": lambda workspace: workspace.created_at,
}
_USER: Columns = {
    "id": lambda user: user.id,
    "name": lambda user: user.name,
    "role": lambda user: user.role,
    "disabled": lambda user: user.disabled,
    "created": lambda user: user.created_at,
}


@group("workspace", "orchestrate workspace list", "orchestrate workspace create staging")
def workspace() -> None:
    """Create workspaces and set quotas. A workspace is a tenant, isolated from all others."""


@command("list", "orchestrate workspace list")
@click.pass_obj
def workspace_list(options: GlobalOptions) -> None:
    """List the workspaces that you belong to."""
    workspaces = call_client(options, lambda client: client.workspaces.list())
    columns: Columns = {
        "ID": lambda workspace: workspace.id,
        "ROLE": lambda workspace: workspace.role,
        "NAME": lambda workspace: workspace.name,
    }
    print_list(options, "workspaces", workspaces, columns, wide="NAME")


@command("create", "orchestrate workspace create staging")
@click.argument("name")
@click.pass_obj
def workspace_create(options: GlobalOptions, name: str) -> None:
    """Create a workspace that you own; without a login, the owner's token is printed, once."""
    created = call_client(options, lambda client: client.workspaces.create(name))
    fields = {title: _from_new_workspace(show) for title, show in _WORKSPACE.items()}
    print_one(options, created, fields | {"token": lambda created: created.token})


def _from_new_workspace(show: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Adapts a column of a workspace to the result of its creation."""
    return lambda created: show(created.workspace)


async def _resolve_workspace(client: "AsyncClient", workspace_id: "UUID | None") -> "UUID":
    """Returns the given workspace id, or that of the caller's workspace."""
    return workspace_id or (await client.access.me()).workspace_id


@command("show", "orchestrate workspace show")
@click.argument("workspace_id", type=click.UUID, required=False, metavar="[ID]")
@click.pass_obj
def workspace_show(options: GlobalOptions, workspace_id: "UUID | None") -> None:
    """Show a workspace and its quota; default: your own."""

    async def read(client: "AsyncClient") -> "WorkspaceView":
        return await client.workspaces.get(await _resolve_workspace(client, workspace_id))

    print_one(options, call_client(options, read), _WORKSPACE)


@command("quota", "orchestrate workspace quota --tasks-per-minute 600 --pending 10000 --running 50")
@click.argument("workspace_id", type=click.UUID, required=False, metavar="[ID]")
@click.option(
    "--tasks-per-minute",
    type=click.IntRange(0),
    metavar="N",
    help="New tasks per minute; no limit if not given.",
)
@click.option(
    "--pending", type=click.IntRange(0), metavar="N", help="Pending tasks; no limit if not given."
)
@click.option(
    "--running", type=click.IntRange(0), metavar="N", help="Running tasks; no limit if not given."
)
@click.pass_obj
def workspace_quota(
    options: GlobalOptions, /, workspace_id: "UUID | None", **limits: int | None
) -> None:
    """Set the quota of a workspace; default: your own."""

    async def change(client: "AsyncClient") -> "WorkspaceView":
        return await client.workspaces.quota(
            await _resolve_workspace(client, workspace_id), **limits
        )

    print_one(options, call_client(options, change), _WORKSPACE)


for _command in (workspace_list, workspace_create, workspace_show, workspace_quota):
    workspace.add_command(_command)


@group("user", "orchestrate user list", "orchestrate user create ann --role ADMIN")
def user() -> None:
    """Manage users and their roles."""


@command("list", "orchestrate user list --json")
@click.pass_obj
def user_list(options: GlobalOptions) -> None:
    """List the members of the workspace."""
    users = call_client(options, lambda client: client.users.list())
    columns: Columns = {
        "ID": lambda user: user.id,
        "ROLE": lambda user: user.role,
        "NAME": lambda user: user.name,
    }
    print_list(options, "users", users, columns, wide="NAME")


@command(
    "create",
    "orchestrate user create ann",
    "orchestrate user create ann --password-file secret.txt",
)
@click.argument("name")
@click.option("--role", type=ROLES, default="MEMBER", show_default=True, help="Role of the user.")
@click.option(
    "--password-file",
    metavar="FILE",
    help="File with the password; - is standard input. Default: prompt.",
)
@click.pass_obj
def user_create(options: GlobalOptions, name: str, role: str, password_file: str | None) -> None:
    """Create a user who is a member of the workspace and can log in."""
    from tenuto.cli.tenancy.login import read_password

    password = read_password(password_file)
    created = call_client(options, lambda client: client.users.create(name, password, role.upper()))
    print_one(options, created, _USER)


async def _find_user_id(client: "AsyncClient", name: str) -> "UUID":
    from tenuto.model.errors import NotFound

    for user in await client.users.list():
        if name in (user.name, str(user.id)):
            return user.id
    raise NotFound(f"no user {name!r}")


@command("update", "orchestrate user update ann --role VIEWER")
@click.argument("name")
@click.option("--role", type=ROLES, required=True, help="New role.")
@click.pass_obj
def user_update(options: GlobalOptions, name: str, role: str) -> None:
    """Change a member's role."""

    async def change(client: "AsyncClient") -> "MemberView":
        return await client.users.update(await _find_user_id(client, name), role.upper())

    print_one(options, call_client(options, change), _USER)


@command("delete", "orchestrate user delete ann")
@click.argument("name")
@click.pass_obj
def user_delete(options: GlobalOptions, name: str) -> None:
    """Remove a user from the workspace."""

    async def delete_user(client: "AsyncClient") -> None:
        await client.users.delete(await _find_user_id(client, name))

    call_client(options, delete_user)
    print_done(options, f"deleted {name}")


@command(
    "password",
    "orchestrate user password",
    "orchestrate user password --password-file old.txt --new-password-file new.txt",
)
@click.option(
    "--password-file", metavar="FILE", help="File with the current password. Default: prompt."
)
@click.option(
    "--new-password-file", metavar="FILE", help="File with the new password. Default: prompt."
)
@click.pass_obj
def user_password(
    options: GlobalOptions, password_file: str | None, new_password_file: str | None
) -> None:
    """Change your own password. This ends all your logins: log in again."""
    from tenuto.cli.tenancy.login import read_password

    password = read_password(password_file, "current password")
    new = read_password(new_password_file, "new password", twice=True)
    call_client(options, lambda client: client.access.change_password(password, new))
    print_done(options, "changed; log in again")


for _command in (user_list, user_create, user_update, user_delete, user_password):
    user.add_command(_command)


@group("token", "orchestrate token list", "orchestrate token create ci --scope read --scope write")
def token() -> None:
    """Create and revoke API tokens of the workspace."""


@command("list", "orchestrate token list")
@click.pass_obj
def token_list(options: GlobalOptions) -> None:
    """List tokens (never their values)."""
    tokens = call_client(options, lambda client: client.tokens.list())
    columns: Columns = {
        "ID": lambda token: token.id,
        "ROLE": lambda token: token.role,
        "SCOPES": lambda token: token.scopes,
        "CHILDREN": lambda token: token.below,
        "BY": lambda token: token.created_by,
        "EXPIRES": lambda token: token.expires_at,
        "NAME": lambda token: token.name,
    }
    print_list(options, "tokens", tokens, columns, wide="NAME")


@command(
    "create",
    "orchestrate token create ci",
    "orchestrate token create watch --role VIEWER --scope read",
)
@click.argument("name")
@click.option("--role", type=ROLES, default="MEMBER", show_default=True, help="Role of the token.")
@click.option(
    "--scope", "scopes", multiple=True, help="read, write, work, admin; default: the first 3."
)
@click.option(
    "--expires", type=parse_future_time, metavar="TIME", help="Expiry: +30d, or ISO 8601."
)
@click.pass_obj
def token_create(
    options: GlobalOptions,
    name: str,
    role: str,
    scopes: tuple[str, ...],
    expires: "datetime | None",
) -> None:
    """Create a token and print it; it is shown only once."""
    from tenuto.cli.render import print_json
    from tenuto.model.printable import printable

    created = call_client(
        options,
        lambda client: client.tokens.create(
            name, role=role.upper(), scopes=split_commas(scopes) or None, expires_at=expires
        ),
    )
    if options.json:
        print_json(created)
    else:
        print(printable(created.token))


@command("revoke", "orchestrate token revoke 0198c0de-0000-7000-8000-000000000000")
@click.argument("token_id", metavar="ID|NAME")
@click.pass_obj
def token_revoke(options: GlobalOptions, token_id: str) -> None:
    """Revoke a token, and all tokens created with it, immediately."""
    from tenuto.model.errors import NotFound

    async def revoke(client: "AsyncClient") -> int:
        tokens = await client.tokens.list()
        matches = [token for token in tokens if token_id in (token.name, str(token.id))]
        if len(matches) != 1:
            raise NotFound(f"{'more than one' if matches else 'no'} token {token_id!r}")
        await client.tokens.revoke(matches[0].id)
        return matches[0].below

    below = call_client(options, revoke)
    more = f" and {below} tokens created with it" if below else ""
    print_done(options, f"revoked {token_id}{more}", below=below)


for _command in (token_list, token_create, token_revoke):
    token.add_command(_command)
