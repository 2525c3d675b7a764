"""`llmc eval tasks`: tasks of lm-evaluation-harness on an artifact or against a server."""

# ruff: noqa: B008 (typer declares options as argument defaults)
from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from llmc.cli.eval_perplexity import HTML, JSON, THREADS
from llmc.output_path import check_outputs
from llmc.runtime.report.page import write_page

if TYPE_CHECKING:
    from llmc.runtime.eval.run_tasks import Score

TASKS_HELP = """Run tasks of lm-evaluation-harness, on an artifact in this process or against a server.

Tasks are those of the harness, those of --include-path, and five local ones: local_mmlu, local_ceval, local_cmmlu,
local_gsm8k and local_humaneval. Local tasks download nothing and read files below --data (docs/evaluation.md).

\b
Examples:
  llmc eval tasks qwen.llmc --tasks local_mmlu,local_gsm8k --data data --limit 50
  llmc eval tasks qwen.llmc --tasks local_mmlu_anatomy --data data --num-fewshot 0 --html anatomy.html
  llmc eval tasks qwen.llmc --tasks mine --include-path my-tasks --json
  llmc eval tasks --base-url http://localhost:8000 --tokenizer qwen.llmc --tasks hellaswag
"""


def tasks_command(
    model: Path | None = typer.Argument(
        None, metavar="ARTIFACT|MODEL", help="Artifact, model directory, .gguf, or ORG/NAME (hub)."
    ),
    tasks: str = typer.Option(..., metavar="LIST", help="Tasks or groups of tasks."),
    data: Path | None = typer.Option(
        None, metavar="DIR", help="Folder with the data of the local_ tasks: mmlu/test, gsm8k, …"
    ),
    include_path: Path | None = typer.Option(None, metavar="DIR", help="Folder with your own tasks, as YAML files."),
    limit: int | None = typer.Option(None, min=1, metavar="N", help="Documents per task; default: all."),
    num_fewshot: int | None = typer.Option(
        None, min=0, metavar="N", help="Examples before each question; default: the task's own number."
    ),
    chat: bool = typer.Option(False, "--chat", help="Apply the chat template."),
    run_code: bool = typer.Option(False, "--run-code", help="Allow tasks to run code that the model writes."),
    base_url: str | None = typer.Option(None, metavar="URL", help="Server to evaluate instead of an artifact."),
    served_model: str | None = typer.Option(
        None, "--model", metavar="NAME", help="Model to request; default: the server's first."
    ),
    tokenizer: Path | None = typer.Option(None, metavar="PATH", help="Artifact or model with the server's tokenizer."),
    threads: int = THREADS,
    html: Path | None = HTML,
    as_json: bool = JSON,
) -> None:
    check_outputs({"--html": html})
    names = tuple(name.strip() for name in tasks.split(",") if name.strip())
    if not names:
        raise typer.BadParameter("--tasks is empty; name a task")
    if (model is None) == (base_url is None):
        raise typer.BadParameter("give either an artifact or --base-url URL")
    if base_url is not None and tokenizer is None:
        raise typer.BadParameter("--base-url needs --tokenizer PATH, the artifact or model that the server runs")
    if base_url is not None and chat:
        raise typer.BadParameter("--chat is for an artifact: tasks ask a server for completions")
    from llmc.runtime.eval.run_tasks import TaskRun, require_harness, run_on_artifact, run_on_server

    require_harness()
    run = TaskRun(names, data, include_path, limit, num_fewshot, chat, run_code)
    if base_url is not None and tokenizer is not None:
        found = run_on_server(base_url, served_model, tokenizer, run)
    else:
        found = run_on_artifact(_artifact(model or Path()), run, threads)
    if html is not None:
        from llmc.runtime.eval.html import tasks_html

        write_page(tasks_html(found, base_url or str(model)), html)
    if as_json:
        print(json.dumps([asdict(score) for score in found], indent=2))
        return
    _print(found)
    if html is not None:
        print(f"wrote {html}")


def _artifact(model: Path) -> Path:
    from llmc.cli.render.compile_progress import progress_bar
    from llmc.model_artifact import artifact_path, given_artifact

    if (given := given_artifact(model)) is not None:
        return given
    # Its progress bars end before those of the harness begin.
    with progress_bar() as progress:
        return artifact_path(model, progress)


def _print(scores: list[Score]) -> None:
    from rich.table import Table

    from llmc.cli.render.tables import print_table

    table = Table()
    for column in ("task", "metric", "filter", "value", "±", "documents"):
        table.add_column(column, justify="left" if column in ("task", "metric", "filter") else "right")
    for one in scores:
        error = "" if one.standard_error is None else f"{one.standard_error:.4f}"
        table.add_row(one.task, one.metric, one.filter, f"{one.value:.4f}", error, f"{one.samples:,}")
    print_table(table)
