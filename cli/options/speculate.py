"""--speculate and --draft of `llmc run` and `llmc serve`, checked before anything is opened."""

from __future__ import annotations

from pathlib import Path

import typer

from llmc.runtime.request_error import RequestError
from llmc.runtime.speculation import SPECULATE_METAVAR, Speculation, parse_speculation

__all__ = ["DRAFT_HELP", "SPECULATE_HELP", "SPECULATE_METAVAR", "check_speculation"]

SPECULATE_HELP = (
    "Guess next tokens: ngram from prompt and output, draft with --draft; ngram:K guesses at most K per step. Default: "
    "off, or draft with --draft. See docs/speculation.md."
)
DRAFT_HELP = "Artifact of a smaller model with the same tokenizer that guesses next tokens."


def check_speculation(text: str | None, draft: Path | None) -> Speculation:
    """Raises BadParameter for values that no engine supports."""
    if draft is not None and not (draft / "graphs.bin").is_file():
        raise typer.BadParameter(f"--draft {draft} is not an artifact: compile it first, llmc compile {draft} -o OUT")
    try:
        return parse_speculation(text, draft, "--speculate")
    except RequestError as error:
        raise typer.BadParameter(str(error)) from error
