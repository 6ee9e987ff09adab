"""What commands of a resource share: columns by name, and commands that call one method."""

from types import SimpleNamespace

import click
from click.testing import CliRunner

from tenuto.cli.base import Command, GlobalOptions, add_options, reason_option
from tenuto.cli.output import columns
from tenuto.cli.shared_commands import Resource

GARDENS = Resource(
    "garden", lambda client: client.gardens, columns("name"), "roses", "GARDEN", click.INT
)


def run(command: Command, *words: str) -> tuple[int, str]:
    result = CliRunner().invoke(command, words, obj=GlobalOptions())
    return result.exit_code, result.output


def test_a_column_shows_the_attribute_of_its_heading_or_path() -> None:
    item = SimpleNamespace(last_error="x", id=1, use=SimpleNamespace(role="ADMIN"))
    headings = columns("ID, LAST ERROR, role: use.role")
    assert {name: show(item) for name, show in headings.items()} == {
        "ID": 1,
        "LAST ERROR": "x",
        "role": "ADMIN",
    }


def test_a_shared_command_teaches_how_to_name_an_item() -> None:
    water = GARDENS.item_command("water", "Water a garden.", reason_option)
    code, text = run(water, "--help")
    assert code == 0
    assert "Water a garden." in text
    assert "--reason TEXT" in text
    assert "orchestrate garden water roses" in text
    for command in (water, GARDENS.delete_command("Delete a garden.")):
        code, text = run(command, "roses")
        assert (code, "Invalid value for 'GARDEN'" in text) == (2, True)


def test_options_stand_in_the_given_order() -> None:
    @click.command()
    @add_options(click.option("--first"), click.option("--second"))
    def both(first: str, second: str) -> None:
        """Takes two options."""

    assert [param.name for param in both.params] == ["first", "second"]
