"""`llmc buckets`: plan, try and show ladders, and import those of other servers; one file per subcommand."""

from __future__ import annotations

import typer

from llmc.cli.buckets_import import IMPORT_HELP, import_command
from llmc.cli.buckets_misses import MISSES_HELP, misses_command
from llmc.cli.buckets_plan import PLAN_HELP, plan_command
from llmc.cli.buckets_replan import REPLAN_HELP, replan_command
from llmc.cli.buckets_scale import SCALE_HELP, scale_command
from llmc.cli.buckets_show import SHOW_HELP, show_command
from llmc.cli.buckets_simulate import SIMULATE_HELP, simulate_command

_HELP = """Plan, simulate, show and import ladders of buckets.

\b
Examples:
  llmc buckets plan --trace trace.jsonl --max-model-len 4096 -o buckets.toml
  llmc buckets simulate --trace trace.jsonl --buckets buckets.toml --buckets qwen.llmc --html report.html
  llmc buckets show buckets.toml --trace trace.jsonl
  llmc buckets misses misses.jsonl
  llmc buckets replan --url http://127.0.0.1:8000
  llmc buckets import --from-vllm-env --max-num-seqs 64 --max-model-len 4096 --max-num-batched-tokens 2048
"""


def register(app: typer.Typer) -> None:
    """Adds the commands to `app`."""
    group = typer.Typer(no_args_is_help=True, help=_HELP, rich_markup_mode=None)
    group.command("plan", help=PLAN_HELP)(plan_command)
    group.command("simulate", help=SIMULATE_HELP)(simulate_command)
    group.command("scale", help=SCALE_HELP)(scale_command)
    group.command("show", help=SHOW_HELP)(show_command)
    group.command("replan", help=REPLAN_HELP)(replan_command)
    group.command("import", help=IMPORT_HELP)(import_command)
    group.command("misses", help=MISSES_HELP)(misses_command)
    app.add_typer(group, name="buckets")
