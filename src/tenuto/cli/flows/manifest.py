"""`orchestrate apply`, `validate`, `export` and `definition`: definitions and YAML files."""

from typing import TYPE_CHECKING, Any

import click

from tenuto.cli.base import GlobalOptions, command, cursor_option, group
from tenuto.cli.connection import call_client
from tenuto.cli.output import columns
from tenuto.cli.shared_commands import Resource

if TYPE_CHECKING:
    from tenuto.engine.flows.definitions import ApplyResult, DefinitionChange

_SUFFIXES = (".yaml", ".yml")
_MARKS = {"created": ("+", "green"), "updated": ("~", "yellow"), "unchanged": ("=", "bright_black")}
_MAX_VALUE_CHARS = 200
"""Maximum number of characters of a value in a line."""
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
def apply(options: GlobalOptions, paths: tuple[str, ...], dry_run: bool) -> None:
    """Create or update definitions from YAML files, all of them or none.

    Prints the changes, field by field. Applying the same files again changes nothing.
    """
    from tenuto.cli.render import print_json, print_note
    from tenuto.model.printable import printable

    files = read_files(paths)
    result = call_client(
        options, lambda client: client.definitions.apply_files(files, dry_run=dry_run)
    )
    if options.json:
        print_json(result)
        return
    for warning in result.warnings:
        print_note(f"warning: {warning}")
    for change in result.definitions:
        _print_change(change)
    for rule in result.rules:
        mark, colour = _MARKS[rule.action]
        print(_colorize(printable(f"{mark} {rule.kind} {rule.name} {rule.action}"), colour))
    _print_totals(result)


@command("validate", "orchestrate validate -f flow.yaml", "orchestrate validate -f flows/ --json")
@_FILES
@click.pass_obj
def validate(options: GlobalOptions, paths: tuple[str, ...]) -> None:
    """Check YAML files without a server or database.

    The files must contain every definition they refer to; `apply --dry-run` also uses stored ones.
    """
    from tenuto.cli.render import print_json, print_note
    from tenuto.manifest.manifest import read_manifest

    manifest = read_manifest(read_files(paths))
    counts = {
        "tasks": len(manifest.tasks),
        "groups": len(manifest.groups),
        "schedules": len(manifest.schedules),
        "triggers": len(manifest.triggers),
    }
    if options.json:
        print_json({"ok": True, **counts, "warnings": manifest.warnings})
        return
    for warning in manifest.warnings:
        print_note(f"warning: {warning}")
    print("valid: " + (", ".join(f"{n} {name}" for name, n in counts.items() if n) or "nothing"))


@command("export", "orchestrate export > flows.yaml", "orchestrate export task-200")
@click.argument("keys", nargs=-1, metavar="[KEY]...")
@click.pass_obj
def export(options: GlobalOptions, keys: tuple[str, ...]) -> None:
    """Print definitions as YAML for `apply`; without keys, all of them."""
    from tenuto.cli.render import print_json
    from tenuto.model.printable import printable

    text = call_client(options, lambda client: client.definitions.export(keys))
    if options.json:
        print_json({"manifest": text})
    else:
        # The YAML writer escapes control characters, but the server may not be trusted.
        print(printable(text, lines=True), end="")


_DEFINITIONS = Resource("definition", lambda client: client.definitions, {}, "task-200", "KEY")


@group("definition", "orchestrate definition list", "orchestrate definition show task-200")
def definition() -> None:
    """List, show and delete definitions: reusable tasks and groups."""


@command("show", "orchestrate definition show task-200")
@click.argument("key")
@click.pass_obj
def show(options: GlobalOptions, key: str) -> None:
    """Show a definition with its fields."""
    from tenuto.cli.render import format_time, print_fields, print_json
    from tenuto.manifest.export import to_snake_names, to_yaml

    view = call_client(options, lambda client: client.definitions.get(key))
    if options.json:
        print_json(view)
        return
    print_fields(
        [
            ("key", view.key),
            ("kind", view.kind),
            ("version", str(view.version)),
            ("created", format_time(view.created_at)),
            ("changed", format_time(view.updated_at)),
            ("spec", to_yaml(to_snake_names(view.spec))),
        ]
    )


definition.add_commands(
    _DEFINITIONS.page_command(
        columns("KEY, KIND, VERSION, CHANGED: updated_at, TITLE"),
        50,
        cursor_option("definitions"),
        example="orchestrate definition list --limit 20",
    ),
    show,
    _DEFINITIONS.delete_command(
        "Delete a definition; its running flows continue.", json_name="key"
    ),
)


def read_files(paths: tuple[str, ...]) -> dict[str, bytes]:
    """Returns the content of files by path; a folder stands for its .yaml and .yml files."""
    from tenuto.cli.parse import read_file
    from tenuto.manifest.yaml_nodes import MAX_BYTES

    return {path: read_file(path, MAX_BYTES) for name in paths for path in _yaml_files(name)}


def _yaml_files(path: str) -> list[str]:
    """Returns the path itself, or the YAML files below the folder; `UsageError` if it has none."""
    from pathlib import Path

    folder = Path(path)
    try:
        if path == "-" or not folder.is_dir():
            return [path]
        files = sorted(str(file) for file in folder.rglob("*") if file.suffix in _SUFFIXES)
    except OSError as error:
        raise click.UsageError(f"cannot read {path}: {error.strerror}") from error
    if not files:
        raise click.UsageError(f"{path} contains no file that ends in {' or '.join(_SUFFIXES)}")
    return files


def _print_change(change: "DefinitionChange") -> None:
    """Prints a changed definition and, for an update, each changed field below it."""
    from tenuto.model.printable import printable

    mark, colour = _MARKS[change.action]
    text = f"{mark} {change.kind} {change.key} {change.action}"
    print(_colorize(printable(text), colour))
    if change.action != "updated":
        return
    for field in change.fields:
        for sign, line in _difference(field.field, field.before, field.after):
            print(_colorize(f"    {sign} {printable(line)}", _COLOURS.get(sign)))


_COLOURS = {"-": "red", "+": "green"}


def _difference(field: str, before: Any, after: Any) -> list[tuple[str, str]]:
    """Returns (sign, line) pairs; for text of several lines only the lines that differ."""
    if isinstance(before, str) and isinstance(after, str) and "\n" in before + after:
        from difflib import ndiff

        lines = ndiff(before.splitlines(), after.splitlines())
        return [(" ", f"{field}:")] + [
            (line[0], f"  {line[2:]}") for line in lines if line[0] in _COLOURS
        ]
    values = [("-", before), ("+", after)]
    return [
        (sign, f"{field}: {_format_value(value)}") for sign, value in values if value is not None
    ]


def _format_value(value: Any) -> str:
    """Formats a value as JSON, cut to `_MAX_VALUE_CHARS`."""
    import msgspec

    text = msgspec.json.encode(value).decode()
    return text if len(text) <= _MAX_VALUE_CHARS else f"{text[: _MAX_VALUE_CHARS - 1]}…"


def _colorize(text: str, colour: str | None) -> str:
    """Returns the text in the colour; unchanged without a terminal or with NO_COLOR."""
    import os

    from tenuto.cli.render import is_terminal

    plain = colour is None or not is_terminal() or os.environ.get("NO_COLOR")
    return text if plain else click.style(text, fg=colour)


def _print_totals(result: "ApplyResult") -> None:
    """Prints the number of changes by action, and the flows that were started."""
    from tenuto.model.printable import printable

    counts = dict.fromkeys(_MARKS, 0)
    for action in [change.action for change in result.definitions] + [
        change.action for change in result.rules
    ]:
        counts[action] += 1
    text = ", ".join(f"{count} {action}" for action, count in counts.items())
    print(f"{text} (dry run: nothing was changed)" if result.dry_run else text)
    for flow in result.started:
        text = (
            f"would start {flow.key}" if result.dry_run else f"started {flow.key}: {flow.flow_id}"
        )
        print(printable(text))
