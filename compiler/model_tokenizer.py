"""A model's tokenizer, for texts that the compiler reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmc.compiler.config import CompileError
from llmc.models.errors import ModelError
from llmc.models.sources.base import ModelFiles

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def tokenizer_of(files: ModelFiles, purpose: str, else_: str) -> Tokenizer:
    """The model's tokenizer, which neither cuts nor pads.

    purpose, else_: what needs it, and what to do without one, for the error. Raises CompileError, and ModelError for a
    damaged one.
    """
    from tokenizers import Tokenizer

    if not files.has("tokenizer.json"):
        raise CompileError(
            f"{files.place('tokenizer.json')} does not exist, and {purpose} needs it; put the tokenizer there or "
            f"{else_}"
        )
    with files.open("tokenizer.json") as file:
        try:
            tokenizer = Tokenizer.from_buffer(file.read())
        except Exception as error:  # the library raises bare Exception
            why = " ".join(str(error).split())[:200]
            raise ModelError(f"{files.place('tokenizer.json')} is not a tokenizer ({why}); download it again") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
