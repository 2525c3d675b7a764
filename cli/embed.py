"""`llmc embed`: vectors or labels of texts, with a model for them."""

# ruff: noqa: B008 (typer declares options as argument defaults)
from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import typer

from llmc.cli.render.terminal_text import json_text
from llmc.output_path import check_outputs
from llmc.replaced_file import write_replaced
from llmc.runtime.offline.prompts import Prompt, PromptError

_HELP = """Compute the vector or the labels of each text with an artifact or a model (downloaded, compiled, cached).

Texts come from --prompt, --prompts or, with neither, from stdin, one per line; blank lines are skipped. Each text gives
one JSON object per line on stdout, in the order of the texts. It has "embedding", or "label" and "scores" if the model
was compiled to classify.

\b
Examples:
  llmc embed minilm.llmc --prompt "A short text."
  llmc embed minilm.llmc --prompts texts.jsonl -o vectors.jsonl
  cat lines.txt | llmc embed qwen3-embedding.llmc --dimensions 256
"""


def register(app: typer.Typer) -> None:
    """Adds the command to `app`."""
    app.command("embed", help=_HELP)(embed_command)


def embed_command(
    model: Path = typer.Argument(
        ..., metavar="ARTIFACT|MODEL", help="Artifact, model directory, or ORG/NAME of the hub."
    ),
    prompt: list[str] = typer.Option([], "-p", "--prompt", metavar="TEXT", help="Text; repeatable."),
    prompts: Path | None = typer.Option(
        None, metavar="FILE", help="Texts, one per line: FILE.txt, or FILE.jsonl (prompt or prompt_token_ids)."
    ),
    output: Path | None = typer.Option(None, "-o", "--output", metavar="FILE", help="Write the lines to FILE."),
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace FILE of --output."),
    dimensions: int | None = typer.Option(None, min=1, metavar="N", help="Keep only the first N numbers of a vector."),
    truncate: bool = typer.Option(False, "--truncate", help="Cut the end off a text that is too long."),
    threads: int = typer.Option(0, min=0, metavar="N", help="Threads; 0: every CPU of this process."),
) -> None:
    from llmc.cli.run import gather_prompts

    if output is not None and output.is_file() and not overwrite:
        raise typer.BadParameter(f"{output} exists: pass --overwrite to replace it", param_hint="--output")
    check_outputs({"--output": output})
    items = gather_prompts(prompt, prompts, chat=False, may_be_empty=True)
    from llmc import artifact_path
    from llmc.runtime.llm import LLM

    with LLM(artifact_path(model), num_threads=threads) as llm:
        texts = [_given(index, item) for index, item in enumerate(items)]
        lines: Iterable[dict[str, Any]]
        if llm.task == "classify":
            if dimensions is not None:
                raise typer.BadParameter("--dimensions is for vectors, and this model gives labels: leave it out")
            found = llm.classify(texts, truncate=truncate)
            lines = ({"index": one.index, "label": one.label, "scores": one.scores} for one in found)
        else:
            vectors = llm.embed(texts, dimensions=dimensions, truncate=truncate)
            lines = ({"index": one.index, "embedding": one.vector.tolist()} for one in vectors)
        write_lines(({**items[line["index"]].as_record(), **line} for line in lines), output)


def _given(index: int, item: Prompt) -> Any:
    if item.text is None and item.token_ids is None:
        raise PromptError(f"prompt {index} has messages: give prompt or prompt_token_ids")
    return item.text if item.text is not None else list(item.token_ids or ())


def write_lines(lines: Iterable[dict[str, Any]], output: Path | None) -> None:
    """Writes one JSON object per line to a file or to stdout."""
    if output is None:
        sys.stdout.write("".join(json_text(line) + "\n" for line in lines))
    else:
        write_replaced(output, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
