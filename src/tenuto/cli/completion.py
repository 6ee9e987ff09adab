"""`orchestrate completion`: prints the completion script of a shell."""

import click

from tenuto.cli.base import command

VARIABLE = "_ORCHESTRATE_COMPLETE"


@command("completion", "orchestrate completion bash", "orchestrate completion fish")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the shell completion script.

    For bash and zsh, add it to the shell's start file. For fish, store it as
    ~/.config/fish/completions/orchestrate.fish.
    """
    from click.shell_completion import get_completion_class

    from tenuto.cli.root import cli

    shell_class = get_completion_class(shell)
    assert shell_class is not None
    script = shell_class(cli, {}, "orchestrate", VARIABLE)
    print(script.source_template % script.source_vars())
