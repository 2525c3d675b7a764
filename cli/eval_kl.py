"""`llmc eval kl`: divergence of an artifact's predictions from those of a reference."""

# ruff: noqa: B008 (typer declares options as argument defaults)
from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from llmc.cli.eval_perplexity import HTML, JSON, TEXT, THREADS, TOKENS, WINDOW
from llmc.cli.options.sample import read_sample
from llmc.cli.render.compile_progress import progress_bar
from llmc.output_path import check_outputs
from llmc.runtime.report.page import write_page

if TYPE_CHECKING:
    from llmc.compiler.config import Progress

KL_HELP = """Measure the divergence of an artifact from a reference: KL(reference || artifact) at each token of a text.

Distributions are compared over the whole vocabulary, in nats. The reference is another artifact of the model
(--against), or the model itself (--reference). The latter is compiled in f32 through the cache, which needs the
compiler.

\b
Examples:
  llmc eval kl w4a8.llmc --against f32.llmc --text held-out.txt
  llmc eval kl w4a8.llmc --reference models/qwen2.5-0.5b --text held-out.txt --tokens 5000
  llmc eval kl w4a8.llmc --against f32.llmc --text held-out.txt --json
  llmc eval kl w4a8.llmc --against f32.llmc --text held-out.txt --html kl.html
"""


def kl_command(
    artifact: Path = typer.Argument(..., metavar="ARTIFACT", help="Directory made by llmc compile."),
    against: Path | None = typer.Option(None, metavar="ARTIFACT", help="Reference artifact."),
    reference: Path | None = typer.Option(
        None, metavar="MODEL", help="Model to compare with, compiled in f32: directory, .gguf, or ORG/NAME (hub)."
    ),
    text: Path = TEXT,
    tokens: int | None = TOKENS,
    window: int | None = WINDOW,
    threads: int = THREADS,
    cache_dir: Path | None = typer.Option(None, envvar="LLMC_CACHE_DIR", metavar="DIR", help="Cache of --reference."),
    html: Path | None = HTML,
    as_json: bool = JSON,
) -> None:
    if (against is None) == (reference is None):
        raise typer.BadParameter("give either --against ARTIFACT or --reference MODEL")
    check_outputs({"--html": html})
    sample = read_sample(text)
    from llmc.runtime.eval.divergence import divergence

    with progress_bar() as progress:
        found = divergence(
            artifact,
            against or _compiled(reference or Path(), cache_dir, progress),
            sample,
            window=window,
            max_tokens=tokens,
            num_threads=threads,
            on_step=lambda done, total: progress("compare", done, total),
        )
    if html is not None:
        from llmc.runtime.eval.html import divergence_html

        write_page(divergence_html(found, str(artifact), str(against or reference), text.name), html)
    if as_json:
        print(json.dumps(found.as_dict(), indent=2))
        return
    print(f"mean KL          {found.kl_mean:.6f} ± {found.standard_error:.6f} nats a token")
    print(f"99.9 % quantile  {found.kl_quantile_999:.6f}")
    print(f"largest          {found.kl_max:.6f}")
    print(f"same top token   {found.top1_agreement:.2%}")
    print(f"perplexity       {found.perplexity:.4f}, of the reference {found.reference_perplexity:.4f}")
    print(
        f"{found.tokens:,} tokens in {found.windows:,} windows of {found.window}, "
        f"{found.seconds:.1f} s, {found.tokens_per_s:,.0f} tokens/s"
    )
    if html is not None:
        print(f"wrote {html}")


def _compiled(model: Path, cache_dir: Path | None, progress: Progress) -> Path:
    """The model in f32; taken from the cache, or compiled into it."""
    from llmc.model_artifact import check_model

    check_model(model)
    from llmc.compiler.hub import locate
    from llmc.compiler.pipeline import compile_cached

    found = locate(model, lambda done, total: progress("download", done, total))
    return compile_cached(found.path, progress, found.source, "f32", cache_dir)
