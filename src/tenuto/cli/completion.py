"""`orchestrate completion`: what a shell reads to complete commands."""

import click

from tenuto.cli.base import command

VARIABLE = "_ORCHESTRATE_COMPLETE"


@command("completion", "orchestrate completion bash", "orchestrate completion fish")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print what makes a shell complete commands and options.

    bash and zsh read it from their start files, fish from
    ~/.config/fish/completions/orchestrate.fish.
    """
    from click.shell_completion import get_completion_class

    from tenuto.cli.root import cli

    kind = get_completion_class(shell)
    assert kind is not None
    found = kind(cli, {}, "orchestrate", VARIABLE)
    print(found.source_template % found.source_vars())
