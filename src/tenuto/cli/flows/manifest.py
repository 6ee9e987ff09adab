"""`orchestrate apply`, `validate`, `export` and `definition`: what may run more than once."""

from typing import TYPE_CHECKING, Any

import click

from tenuto.cli.base import Globals, command, group
from tenuto.cli.connection import ask
from tenuto.cli.output import Columns, print_done, tell_page

if TYPE_CHECKING:
    from uuid import UUID

    from tenuto.engine.flows.definitions import ApplyResult, DefinitionChange, DefinitionPage

_ENDINGS = (".yaml", ".yml")
_MARKS = {"created": ("+", "green"), "updated": ("~", "yellow"), "unchanged": ("=", "bright_black")}
_SHOWN = 200
"""Characters of a value that a line shows."""
_FILES = click.option(
    "-f",
    "--file",
    "paths",
    multiple=True,
    required=True,
    metavar="FILE",
    help="A YAML file, a folder of them, or - for standard input; repeatable.",
)


@command("apply", "orchestrate apply -f flow.yaml", "orchestrate apply -f flows/ --dry-run")
@_FILES
@click.option("--dry-run", is_flag=True, help="Change nothing; show what would change.")
@click.pass_obj
def apply(given: Globals, paths: tuple[str, ...], dry_run: bool) -> None:
    """Make the definitions what YAML files say, all of them or none.

    Prints what changed, field by field. Done again it changes nothing.
    """
    from tenuto.cli.render import print_json, print_note
    from tenuto.model.printable import printable

    files = read_files(paths)
    done = ask(given, lambda client: client.definitions.apply_files(files, dry_run=dry_run))
    if given.json:
        print_json(done)
        return
    for warning in done.warnings:
        print_note(f"warning: {warning}")
    for change in done.definitions:
        _print_change(change)
    for rule in done.rules:
        mark, colour = _MARKS[rule.action]
        print(_painted(printable(f"{mark} {rule.kind} {rule.name} {rule.action}"), colour))
    _print_sum(done)


@command("validate", "orchestrate validate -f flow.yaml", "orchestrate validate -f flows/ --json")
@_FILES
@click.pass_obj
def validate(given: Globals, paths: tuple[str, ...]) -> None:
    """Check YAML files by themselves; needs neither a server nor a database.

    Everything that they refer to has to be in them; `apply --dry-run` also knows what is stored.
    """
    from tenuto.cli.render import print_json, print_note
    from tenuto.manifest.manifest import read

    found = read(read_files(paths))
    counts = {
        "tasks": len(found.tasks),
        "groups": len(found.groups),
        "schedules": len(found.schedules),
        "triggers": len(found.triggers),
    }
    if given.json:
        print_json({"ok": True, **counts, "warnings": found.warnings})
        return
    for warning in found.warnings:
        print_note(f"warning: {warning}")
    print("valid: " + (", ".join(f"{n} {name}" for name, n in counts.items() if n) or "nothing"))


@command("export", "orchestrate export > flows.yaml", "orchestrate export task-200")
@click.argument("keys", nargs=-1, metavar="[KEY]...")
@click.pass_obj
def export(given: Globals, keys: tuple[str, ...]) -> None:
    """Print definitions as YAML that `apply` takes; all of them without keys."""
    from tenuto.cli.render import print_json
    from tenuto.model.printable import printable

    text = ask(given, lambda client: client.definitions.export(keys))
    if given.json:
        print_json({"manifest": text})
    else:
        # The writer of YAML leaves nothing hidden in it, but it may be a stranger's server.
        print(printable(text, lines=True), end="")


@group("definition", "orchestrate definition list", "orchestrate definition show task-200")
def definition() -> None:
    """Look at what may run more than once, and forget it."""


@command("list", "orchestrate definition list --limit 20")
@click.option("--limit", type=click.IntRange(1, 1000), default=50, show_default=True, help="Most.")
@click.option("--cursor", type=click.UUID, metavar="ID", help="Only older than this definition.")
@click.pass_obj
def list_(given: Globals, limit: int, cursor: "UUID | None") -> None:
    """List the definitions, newest first."""
    page: DefinitionPage = ask(given, lambda client: client.definitions.page(limit, cursor))
    columns: Columns = {
        "KEY": lambda each: each.key,
        "KIND": lambda each: each.kind,
        "VERSION": lambda each: each.version,
        "CHANGED": lambda each: each.updated_at,
        "TITLE": lambda each: each.title,
    }
    tell_page(given, page, page.definitions, columns, wide="TITLE")


@command("show", "orchestrate definition show task-200")
@click.argument("key")
@click.pass_obj
def show(given: Globals, key: str) -> None:
    """Show a definition: what it is, then what it says."""
    from tenuto.cli.render import moment, print_fields, print_json
    from tenuto.manifest.export import snake, yaml_of

    view = ask(given, lambda client: client.definitions.get(key))
    if given.json:
        print_json(view)
        return
    print_fields(
        [
            ("key", view.key),
            ("kind", view.kind),
            ("version", str(view.version)),
            ("created", moment(view.created_at)),
            ("changed", moment(view.updated_at)),
            ("spec", yaml_of(snake(view.spec))),
        ]
    )


@command("delete", "orchestrate definition delete task-200")
@click.argument("key")
@click.pass_obj
def delete(given: Globals, key: str) -> None:
    """Forget a definition; flows of it go on."""
    ask(given, lambda client: client.definitions.delete(key))
    print_done(given, f"deleted {key}", key=key)


for _each in (list_, show, delete):
    definition.add_command(_each)


def read_files(paths: tuple[str, ...]) -> dict[str, bytes]:
    """What stands in the files, by name; of a folder those that end as YAML does."""
    from tenuto.cli.parse import read_file
    from tenuto.manifest.yaml_nodes import MAX_BYTES

    return {path: read_file(path, MAX_BYTES) for given in paths for path in _files_in(given)}


def _files_in(path: str) -> list[str]:
    from pathlib import Path

    folder = Path(path)
    try:
        if path == "-" or not folder.is_dir():
            return [path]
        found = sorted(str(each) for each in folder.rglob("*") if each.suffix in _ENDINGS)
    except OSError as error:
        raise click.UsageError(f"cannot read {path}: {error.strerror}") from error
    if not found:
        raise click.UsageError(f"{path} has no file that ends in {' or '.join(_ENDINGS)}")
    return found


def _print_change(change: "DefinitionChange") -> None:
    """One definition, and below it how each field changed."""
    from tenuto.model.printable import printable

    mark, colour = _MARKS[change.action]
    told = f"{mark} {change.kind} {change.key} {change.action}"
    print(_painted(printable(told), colour))
    if change.action != "updated":
        return
    for field in change.fields:
        for sign, line in _difference(field.field, field.before, field.after):
            print(_painted(f"    {sign} {printable(line)}", _COLOURS.get(sign)))


_COLOURS = {"-": "red", "+": "green"}


def _difference(field: str, before: Any, after: Any) -> list[tuple[str, str]]:
    """Lines that tell two values apart; of longer text only those lines that differ."""
    if isinstance(before, str) and isinstance(after, str) and "\n" in before + after:
        from difflib import ndiff

        lines = ndiff(before.splitlines(), after.splitlines())
        return [(" ", f"{field}:")] + [
            (line[0], f"  {line[2:]}") for line in lines if line[0] in _COLOURS
        ]
    found = [("-", before), ("+", after)]
    return [(sign, f"{field}: {_short(value)}") for sign, value in found if value is not None]


def _short(value: Any) -> str:
    import msgspec

    text = msgspec.json.encode(value).decode()
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"


def _painted(text: str, colour: str | None) -> str:
    import os

    from tenuto.cli.render import is_terminal

    plain = colour is None or not is_terminal() or os.environ.get("NO_COLOR")
    return text if plain else click.style(text, fg=colour)


def _print_sum(done: "ApplyResult") -> None:
    from tenuto.model.printable import printable

    counts = dict.fromkeys(_MARKS, 0)
    for action in [each.action for each in done.definitions] + [each.action for each in done.rules]:
        counts[action] += 1
    told = ", ".join(f"{count} {action}" for action, count in counts.items())
    print(f"{told} (dry run: nothing was changed)" if done.dry_run else told)
    for each in done.started:
        told = f"would start {each.key}" if done.dry_run else f"started {each.key}: {each.flow_id}"
        print(printable(told))
