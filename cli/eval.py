"""`llmc eval`: accuracy of an artifact; one file per subcommand."""

from __future__ import annotations

import typer

from llmc.cli.eval_kl import KL_HELP, kl_command
from llmc.cli.eval_perplexity import PERPLEXITY_HELP, perplexity_command
from llmc.cli.eval_tasks import TASKS_HELP, tasks_command

_HELP = """Measure the accuracy of an artifact: perplexity of a text, divergence from a reference, tasks.

\b
Examples:
  llmc eval perplexity qwen.llmc --text held-out.txt
  llmc eval kl w4a8.llmc --against f32.llmc --text held-out.txt
  llmc eval tasks qwen.llmc --tasks local_mmlu --data data --limit 50
"""


def register(app: typer.Typer) -> None:
    """Adds the commands to `app`."""
    group = typer.Typer(no_args_is_help=True, help=_HELP, rich_markup_mode=None)
    group.command("perplexity", help=PERPLEXITY_HELP)(perplexity_command)
    group.command("kl", help=KL_HELP)(kl_command)
    group.command("tasks", help=TASKS_HELP)(tasks_command)
    app.add_typer(group, name="eval")
