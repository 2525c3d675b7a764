"""Which tokens a head may guess: the more there are, the longer it takes to choose one."""

from __future__ import annotations

import json

import numpy as np

from llmc.compiler.config import CompileError
from llmc.compiler.model_tokenizer import tokenizer_of
from llmc.models.config import ModelConfig
from llmc.models.sources.base import ModelFiles

_ADDED_SHARE = 8
"""At most one in so many tokens is an added one, such as those around messages."""

_MOST_CHARS = 1 << 24
"""Characters of a text that are counted."""


def choose_tokens(files: ModelFiles, model: ModelConfig, count: int, text: str) -> tuple[int, ...]:
    """`count` tokens of the model, ascending: those that end a text, those added to its tokenizer, the most frequent
    ones of `text`, and the lowest ids, which most tokenizers give to what was frequent in their own texts.

    Raises CompileError unless the model has more tokens, and ModelError for a tokenizer that cannot be read.
    """
    vocab, ends = model.vocab_size, [token for token in model.eos_token_ids if token < model.vocab_size]
    if not len(ends) < count < vocab:
        raise CompileError(
            f"--draft-vocab {count} is not a part of the model's {vocab} tokens; give a smaller number, or leave it out"
            if count >= vocab
            else f"--draft-vocab {count} has no room beside the tokens that end a text ({len(ends)}); give a larger one"
        )
    added = sorted(token for token in _added(files) if token < vocab)[: count // _ADDED_SHARE]
    frequent: list[int] = []
    if text:
        tokenizer = tokenizer_of(files, "--draft-vocab-text", "leave it out")
        counts = np.bincount(tokenizer.encode(text[:_MOST_CHARS], add_special_tokens=False).ids, minlength=vocab)[
            :vocab
        ]
        frequent = [int(token) for token in np.argsort(-counts, kind="stable") if counts[token]]
    chosen: dict[int, None] = {}
    for tokens in (ends, added, frequent, range(vocab)):
        chosen.update(dict.fromkeys(tokens))
    return tuple(sorted(list(chosen)[:count]))


def _added(files: ModelFiles) -> list[int]:
    """Ids that tokenizer.json adds to its vocabulary; none without the file."""
    if not files.has("tokenizer.json"):
        return []
    with files.open("tokenizer.json") as file:
        try:
            tokens = json.load(file)["added_tokens"]
            return [int(token["id"]) for token in tokens if token["id"] >= 0]
        except (KeyError, TypeError, ValueError, OverflowError):
            return []  # a damaged tokenizer is refused when it is copied
