"""A small vocabulary, the compiler of constraints over it, and random texts that keep to one."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from llmc.runtime.guided.compiler import GuideCompiler, TokenGuide

from support.paths import ROOT

TOKENIZER = (ROOT / "examples/tiny-english/tokenizer.json").read_text(encoding="utf-8")


NUM_TOKENS, EOS = 2048, 1


# More logits than tokens, as in models whose vocabulary is padded.
COMPILER = GuideCompiler(TOKENIZER, NUM_TOKENS + 100, [EOS])


# Taken in this order they end any JSON: a string, an object, an array, an element, a number.
ENDING = [COMPILER._tokenizer.tokenize_str(text)[0] for text in ('"', "}", "]", ",", "0")]


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "ü", '"', 3, None, True]}, "maxItems": 3},
        "address": {
            "type": "object",
            "properties": {"zip": {"type": "string", "pattern": "^[0-9]{5}$"}, "lat": {"type": "number"}},
            "required": ["zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "address"],
    "additionalProperties": False,
}


def allowed(guide: TokenGuide) -> list[int]:
    """Ids of the tokens that a mask allows."""
    bits = np.unpackbits(guide.mask().view(np.uint8), bitorder="little")
    return [int(token) for token in np.flatnonzero(bits)]


def random_text(
    guide: TokenGuide,
    seed: int,
    num_free: int = 25,
    limit: int = 1000,
    *,
    compiler: GuideCompiler = COMPILER,
    eos: int = EOS,
    ending: Sequence[int] = ENDING,
) -> str:
    """A text of random tokens that the guide allows; after num_free tokens those are taken that lead to the end."""
    rng = random.Random(seed)
    tokens: list[int] = []
    while len(tokens) < limit:
        choices = allowed(guide)
        if tokens and eos in choices and (guide.finished or len(tokens) >= num_free or rng.random() < 0.3):
            guide.accept(eos)
            assert guide.finished
            assert allowed(guide) == [eos]
            return bytes(compiler._tokenizer.decode_bytes(tokens)).decode("utf-8")
        if len(tokens) < num_free:
            token = rng.choice([token for token in choices if token != eos])
        else:
            token = next((token for token in ending if token in choices), choices[0])
        tokens.append(token)
        guide.accept(token)
    raise AssertionError(f"no end after {limit} tokens: {compiler._tokenizer.decode_str(tokens)[:500]}")
