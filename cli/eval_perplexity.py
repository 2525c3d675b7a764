"""`llmc eval perplexity`: perplexity of an artifact on a text."""

# ruff: noqa: B008 (typer declares options as argument defaults)
from __future__ import annotations

import json
from pathlib import Path

import typer

from llmc.cli.options.sample import read_sample
from llmc.cli.render.compile_progress import progress_bar
from llmc.output_path import check_outputs
from llmc.runtime.report.page import write_page

PERPLEXITY_HELP = """Measure the perplexity of a text with the engine, in windows of --window tokens.

Each token of a window except the first is predicted from those before it in the window. The standard error treats
tokens as independent. A model is compiled first, through the cache.

\b
Examples:
  llmc eval perplexity qwen.llmc --text held-out.txt
  llmc eval perplexity Qwen/Qwen3-0.6B --text held-out.txt --tokens 20000 --window 1024
  llmc eval perplexity qwen.llmc --text held-out.txt --json
  llmc eval perplexity qwen.llmc --text held-out.txt --html perplexity.html
"""
TEXT = typer.Option(..., metavar="FILE", help="UTF-8 text to predict.")
TOKENS = typer.Option(None, min=2, metavar="N", help="Tokens of the text to use; default: all.")
WINDOW = typer.Option(None, min=2, metavar="N", help="Tokens per window; default: 512, or the artifact's limit.")
THREADS = typer.Option(0, min=0, metavar="N", help="Threads; 0: every CPU of this process.")
HTML = typer.Option(None, "--html", metavar="FILE", help="Write a report with distributions to FILE.")
JSON = typer.Option(False, "--json", help="Print the result as JSON on stdout.")


def perplexity_command(
    model: Path = typer.Argument(
        ..., metavar="ARTIFACT|MODEL", help="Artifact, model directory, .gguf, or ORG/NAME (hub)."
    ),
    text: Path = TEXT,
    tokens: int | None = TOKENS,
    window: int | None = WINDOW,
    threads: int = THREADS,
    html: Path | None = HTML,
    as_json: bool = JSON,
) -> None:
    check_outputs({"--html": html})
    sample = read_sample(text)
    from llmc import artifact_path
    from llmc.runtime.eval.perplexity import perplexity

    with progress_bar() as progress:
        found = perplexity(
            artifact_path(model, progress),
            sample,
            window=window,
            max_tokens=tokens,
            num_threads=threads,
            on_window=lambda done, total: progress("score", done, total),
        )
    if html is not None:
        from llmc.runtime.eval.html import perplexity_html

        write_page(perplexity_html(found, str(model), text.name), html)
    if as_json:
        print(json.dumps(found.as_dict(), indent=2))
        return
    print(f"perplexity {found.perplexity:.4f} ± {found.standard_error:.4f}")
    print(
        f"{found.tokens:,} tokens predicted in {found.windows:,} windows of {found.window}, "
        f"{found.seconds:.1f} s, {found.tokens_per_s:,.0f} tokens/s"
    )
    if html is not None:
        print(f"wrote {html}")
