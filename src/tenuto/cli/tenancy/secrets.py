"""`orchestrate secret`: values that only running attempts get to see."""

import click

from tenuto.cli.base import Globals, command, group
from tenuto.cli.connection import actor, ask, settings
from tenuto.cli.output import Columns, print_done, tell_list


@group("secret", "orchestrate secret list", "orchestrate secret set api-key --value-file key.txt")
def secret() -> None:
    """Keep values that only running attempts get to see."""


@command("list", "orchestrate secret list")
@click.pass_obj
def list_(given: Globals) -> None:
    """List the secrets by name, without their values."""
    columns: Columns = {
        "NAME": lambda each: each.name,
        "KEY": lambda each: each.key_id,
        "ROLE": lambda each: each.use.role,
        "AGENTS": lambda each: ", ".join(each.use.agents) or "any",
        "DEFINITIONS": lambda each: ", ".join(each.use.definitions) or "any",
        "CHANGED": lambda each: each.updated_at,
        "BY": lambda each: each.created_by,
    }
    found = ask(given, lambda client: client.secrets.list())
    tell_list(given, "secrets", found, columns, wide="NAME")


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
    help="The value's file, less one line end; standard input if not given.",
)
@click.option(
    "--role",
    type=click.Choice(["MEMBER", "ADMIN", "OWNER"]),
    help="The lowest role that may name it and claim its tasks; MEMBER if not given.",
)
@click.option(
    "--agent", "agents", multiple=True, metavar="NAME", help="An agent that gets it; repeatable."
)
@click.option(
    "--definition",
    "definitions",
    multiple=True,
    metavar="KEY",
    help="A definition whose tasks get it; repeatable.",
)
@click.option("--keep-value", is_flag=True, help="Change only who may use it; read no value.")
@click.pass_obj
def set_(
    given: Globals,
    name: str,
    value_file: str,
    role: str | None,
    agents: tuple[str, ...],
    definitions: tuple[str, ...],
    keep_value: bool,
) -> None:
    """Keep a value under a name, in place of any other, and say who may use it.

    The value is read from a file or from standard input, where no other process can see it. With
    --role, --agent or --definition these replace the rule that was there; without them it stays.
    """
    import msgspec

    from tenuto.cli.parse import read_text
    from tenuto.model.tenancy.secret_use import Use

    said = {"role": role, "agents": agents, "definitions": definitions}
    rule = {key: each for key, each in said.items() if each}
    if keep_value and not rule:
        raise click.UsageError("--keep-value changes who may use it: add --role, --agent or so")
    use = msgspec.convert(rule, Use) if rule else None
    value = None if keep_value else read_text("value", value_file).removesuffix("\n")
    ask(given, lambda client: client.secrets.put(name, value, use))
    print_done(given, f"kept {name}", name=name)


@command("delete", "orchestrate secret delete api-key")
@click.argument("name")
@click.pass_obj
def delete(given: Globals, name: str) -> None:
    """Forget a secret; tasks that name it can no longer start."""
    ask(given, lambda client: client.secrets.delete(name))
    print_done(given, f"deleted {name}", name=name)


@command("rotate", "orchestrate secret rotate", "orchestrate secret rotate --keep-key")
@click.option("--keep-key", is_flag=True, help="Make no new key; only seal with the current one.")
@click.pass_obj
def rotate(given: Globals, keep_key: bool) -> None:
    """Make a new key and seal everything with it; older keys stay, for backups.

    Works on the database itself, for all workspaces. With TENUTO_KEYS, put the new key first there
    and restart everything; then this seals anew.
    """
    from tenuto import app
    from tenuto.encryption_keys import add_key

    chosen = settings(given)
    if not chosen.keys and not keep_key:
        add_key(app.key_folder(chosen))

    async def main() -> tuple[str, int]:
        async with app.connect(chosen, actor=actor()) as engine:
            sealed = 0
            while done := await engine.rotating.rotate_once():
                sealed += done
            return app.open_vault(chosen).current, sealed

    key, sealed = app.run(main())
    print_done(given, f"key {key}: {sealed} sealed anew", key=key, sealed=sealed)


for _each in (list_, set_, delete, rotate):
    secret.add_command(_each)
