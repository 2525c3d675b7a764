"""`llmc completion`: scripts that teach a shell the command line."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

_HELP = """Print a script that completes commands, options, choices and paths in a shell.

The script is made from this version's commands: print it again after an update. Completing starts no Python.

\b
Examples:
  source <(llmc completion bash)
  llmc completion bash > ~/.local/share/bash-completion/completions/llmc
  llmc completion zsh > ~/.zfunc/_llmc
  llmc completion fish > ~/.config/fish/completions/llmc.fish
"""


class Shell(StrEnum):
    """Shells that a script can be printed for."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def register(app: typer.Typer) -> None:
    """Adds the command to the llmc application."""
    app.command("completion", help=_HELP)(completion)


def completion(shell: Annotated[Shell, typer.Argument(help="The shell that reads the script.")]) -> None:
    # Imported here: the application imports this module.
    from llmc.cli.main import build_app
    from llmc.cli.render.completion import bash, fish, zsh
    from llmc.cli.render.completion.words import command_words

    scripts = {Shell.BASH: bash.script, Shell.ZSH: zsh.script, Shell.FISH: fish.script}
    typer.echo(scripts[shell](command_words(typer.main.get_command(build_app()))), nl=False)
