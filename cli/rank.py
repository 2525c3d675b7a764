"""`llmc rank`: sorts documents by how well they answer a query, with a model that scores pairs."""

# ruff: noqa: B008 (typer declares options as argument defaults)
from __future__ import annotations

from pathlib import Path

import typer

_HELP = """Sort documents by how well they answer a query, with an artifact that was compiled with --task rank.

Documents come from --document, --documents or, with neither, from stdin, one per line; blank lines are skipped.
The output is sorted, best first. Each line has a score and a text, or with --json a JSON object.

\b
Examples:
  llmc rank reranker.llmc --query "What is a bucket?" --documents passages.txt --top-n 5
  llmc rank reranker.llmc --query "capital of France" --document Paris --document Rome
"""


def register(app: typer.Typer) -> None:
    """Adds the command to `app`."""
    app.command("rank", help=_HELP)(rank_command)


def rank_command(
    model: Path = typer.Argument(
        ..., metavar="ARTIFACT|MODEL", help="Artifact, model directory, or ORG/NAME of the hub."
    ),
    query: str = typer.Option(..., metavar="TEXT", help="Query that the documents should answer."),
    document: list[str] = typer.Option([], metavar="TEXT", help="Document; repeatable."),
    documents: Path | None = typer.Option(
        None, metavar="FILE", help="Documents, one per line: FILE.txt, or FILE.jsonl with prompt."
    ),
    instruction: str | None = typer.Option(
        None, metavar="TEXT", help="What to look for, for models that take an instruction."
    ),
    top_n: int | None = typer.Option(None, min=1, metavar="N", help="Show only the N best."),
    truncate: bool = typer.Option(False, "--truncate", help="Cut the end off a document that is too long."),
    threads: int = typer.Option(0, min=0, metavar="N", help="Threads; 0: every CPU of this process."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object per line, with index, score and text."),
) -> None:
    from llmc.cli.embed import write_lines
    from llmc.cli.run import gather_prompts

    flags = ("--document", "--documents")
    items = gather_prompts(document, documents, chat=False, flags=flags, may_be_empty=True)
    texts = [item.text for item in items if item.text is not None]
    if len(texts) != len(items):
        raise typer.BadParameter("documents must be texts: give prompt in each line of the file")
    from llmc import artifact_path
    from llmc.runtime.llm import LLM

    with LLM(artifact_path(model), num_threads=threads) as llm:
        scores = llm.score(query, texts, instruction=instruction, truncate=truncate)
    best = sorted(scores, key=lambda one: -one.score)[:top_n]
    if as_json:
        write_lines(({"index": one.index, "score": one.score, "text": texts[one.index]} for one in best), None)
        return
    for one in best:
        print(f"{one.score:9.4f}  {texts[one.index]}")
