"""`orchestrate secret`: encrypted values that only running attempts can read."""

import click

from tenuto.cli.base import GlobalOptions, command, group
from tenuto.cli.connection import audit_actor, call_client, settings
from tenuto.cli.output import Columns, columns, print_done
from tenuto.cli.shared_commands import Resource

_COLUMNS: Columns = {
    **columns("NAME, KEY: key_id, ROLE: use.role"),
    "AGENTS": lambda secret: ", ".join(secret.use.agents) or "any",
    "DEFINITIONS": lambda secret: ", ".join(secret.use.definitions) or "any",
    **columns("CHANGED: updated_at, BY: created_by"),
}
_SECRETS = Resource("secret", lambda client: client.secrets, _COLUMNS, "api-key")


@group("secret", "orchestrate secret list", "orchestrate secret set api-key --value-file key.txt")
def secret() -> None:
    """Store encrypted values that only running attempts can read."""


@command(
    "set",
    "orchestrate secret set api-key --value-file key.txt",
    "orchestrate secret set payroll --role ADMIN --agent payer --value-file key.txt",
    "orchestrate secret set deploy-key --definition deploy --keep-value",
)
@click.argument("name")
@click.option(
    "--value-file",
    default="-",
    metavar="FILE",
    help="File with the value (a final newline is dropped); default: standard input.",
)
@click.option(
    "--role",
    type=click.Choice(["MEMBER", "ADMIN", "OWNER"]),
    help="Lowest role that may refer to it and claim tasks with it; default: MEMBER.",
)
@click.option(
    "--agent",
    "agents",
    multiple=True,
    metavar="NAME",
    help="Only this agent may use it; repeatable.",
)
@click.option(
    "--definition",
    "definitions",
    multiple=True,
    metavar="KEY",
    help="Only tasks of this definition may use it; repeatable.",
)
@click.option("--keep-value", is_flag=True, help="Change only the access rule, not the value.")
@click.pass_obj
def set_(
    options: GlobalOptions,
    name: str,
    value_file: str,
    role: str | None,
    agents: tuple[str, ...],
    definitions: tuple[str, ...],
    keep_value: bool,
) -> None:
    """Create or replace a secret, and set its access rule.

    The value is read from a file or from standard input, so that no other process can see it.
    --role, --agent and --definition together replace the access rule; without them it stays.
    """
    import msgspec

    from tenuto.cli.parse import read_text
    from tenuto.model.tenancy.secret_use import Use

    restrictions = {"role": role, "agents": agents, "definitions": definitions}
    rule = {key: value for key, value in restrictions.items() if value}
    if keep_value and not rule:
        raise click.UsageError("--keep-value requires --role, --agent or --definition")
    use = msgspec.convert(rule, Use) if rule else None
    value = None if keep_value else read_text("value", value_file).removesuffix("\n")
    call_client(options, lambda client: client.secrets.put(name, value, use))
    print_done(options, f"stored {name}", name=name)


@command("rotate", "orchestrate secret rotate", "orchestrate secret rotate --keep-key")
@click.option("--keep-key", is_flag=True, help="Create no new key; encrypt with the current one.")
@click.pass_obj
def rotate(options: GlobalOptions, keep_key: bool) -> None:
    """Create a new encryption key and encrypt everything with it; old keys stay, for backups.

    Works directly on the database, for all workspaces. With TENUTO_KEYS: put the new key first in
    it, restart all processes, then run this command to encrypt everything again.
    """
    from tenuto import app
    from tenuto.encryption_keys import add_key

    chosen = settings(options)
    if not chosen.keys and not keep_key:
        add_key(app.key_folder(chosen))

    async def reencrypt_all() -> tuple[str, int]:
        async with app.connect(chosen, actor=audit_actor()) as engine:
            reencrypted = 0
            while count := await engine.key_rotator.rotate_once():
                reencrypted += count
            return app.open_key_ring(chosen).current, reencrypted

    key, sealed = app.run(reencrypt_all())
    print_done(options, f"key {key}: {sealed} values encrypted again", key=key, sealed=sealed)


secret.add_commands(
    _SECRETS.list_command(
        "List the secrets by name, without their values.", "secrets", _COLUMNS, wide="NAME"
    ),
    set_,
    _SECRETS.delete_command(
        "Delete a secret; tasks that refer to it can no longer start.", json_name="name"
    ),
    rotate,
)
