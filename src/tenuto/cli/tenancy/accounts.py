"""`orchestrate workspace`, `user` and `token`: workspaces, users with roles, API tokens."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from tenuto.cli.base import GlobalOptions, command, group
from tenuto.cli.connection import call_client
from tenuto.cli.output import columns, parse_future_time, print_done, print_value, split_commas
from tenuto.cli.shared_commands import Resource, print_result

if TYPE_CHECKING:
    from datetime import datetime
    from uuid import UUID

    from tenuto.client.client import AsyncClient
    from tenuto.engine.tenancy.views import MemberView, WorkspaceView

ROLES = click.Choice(["OWNER", "ADMIN", "MEMBER", "VIEWER"], case_sensitive=False)
_WORKSPACE = columns(
    "id, name, role, tasks per minute: quota.tasks_per_minute, pending tasks: quota.pending,"
    " running tasks: quota.running, created: created_at"
)
_USER = columns("id, name, role, disabled, created: created_at")
_WORKSPACES = Resource("workspace", lambda client: client.workspaces, _WORKSPACE, "staging")
_USERS = Resource("user", lambda client: client.users, _USER, "ann")
_TOKENS = Resource("token", lambda client: client.tokens, {}, "ci")


@group("workspace", "orchestrate workspace list", "orchestrate workspace create staging")
def workspace() -> None:
    """Create workspaces and set quotas. A workspace is a tenant, isolated from all others."""


@command("create", "orchestrate workspace create staging")
@click.argument("name")
@click.pass_obj
def workspace_create(options: GlobalOptions, name: str) -> None:
    """Create a workspace that you own; without a login, the owner's token is printed, once."""
    fields = {title: _from_new_workspace(show) for title, show in _WORKSPACE.items()}
    print_result(options, lambda client: client.workspaces.create(name), fields | columns("token"))


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

    async def read_workspace(client: "AsyncClient") -> "WorkspaceView":
        return await client.workspaces.get(await _resolve_workspace(client, workspace_id))

    print_result(options, read_workspace, _WORKSPACE)


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

    async def set_quota(client: "AsyncClient") -> "WorkspaceView":
        return await client.workspaces.quota(
            await _resolve_workspace(client, workspace_id), **limits
        )

    print_result(options, set_quota, _WORKSPACE)


workspace.add_commands(
    _WORKSPACES.list_command(
        "List the workspaces that you belong to.", "workspaces", columns("ID, ROLE, NAME")
    ),
    workspace_create,
    workspace_show,
    workspace_quota,
)


@group("user", "orchestrate user list", "orchestrate user create ann --role ADMIN")
def user() -> None:
    """Manage users and their roles."""


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
    print_result(options, lambda client: client.users.create(name, password, role.upper()), _USER)


async def _find_user_id(client: "AsyncClient", name: str) -> "UUID":
    """Returns the id of the workspace's user with that name or id; raises `NotFound`."""
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

    async def change_role(client: "AsyncClient") -> "MemberView":
        return await client.users.update(await _find_user_id(client, name), role.upper())

    print_result(options, change_role, _USER)


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


user.add_commands(
    _USERS.list_command(
        "List the members of the workspace.",
        "users",
        columns("ID, ROLE, NAME"),
        example="orchestrate user list --json",
    ),
    user_create,
    user_update,
    user_delete,
    user_password,
)


@group("token", "orchestrate token list", "orchestrate token create ci --scope read --scope write")
def token() -> None:
    """Create and revoke API tokens of the workspace."""


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
    created = call_client(
        options,
        lambda client: client.tokens.create(
            name, role=role.upper(), scopes=split_commas(scopes) or None, expires_at=expires
        ),
    )
    print_value(options, created, created.token)


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


token.add_commands(
    _TOKENS.list_command(
        "List tokens (never their values).",
        "tokens",
        columns("ID, ROLE, SCOPES, CHILDREN: below, BY: created_by, EXPIRES: expires_at, NAME"),
    ),
    token_create,
    token_revoke,
)
