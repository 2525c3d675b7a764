"""Pre-tokenizer and merges in GGUF metadata."""

from __future__ import annotations

import math

from llmc.models.brief import brief
from llmc.models.errors import ModelError
from llmc.models.sources.gguf.metadata import Metadata
from llmc.models.tokenizers.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer

_CHARSMAP = "tokenizer.ggml.precompiled_charsmap"
_PRE, _MERGES, _SCORES = "tokenizer.ggml.pre", "tokenizer.ggml.merges", "tokenizer.ggml.scores"


def pre_tokenizer(metadata: Metadata) -> PreTokenizer:
    """The file's pre-tokenizer. Raises ModelError naming the known ones."""
    name = metadata.text(_PRE, "default")
    found = PRE_TOKENIZERS.get(name)
    if found is None:
        raise ModelError(
            f"{metadata.origin}: metadata {_PRE} is {brief(name)}, which is not one of {', '.join(PRE_TOKENIZERS)}; "
            "compile with --no-tokenizer an artifact that takes token ids alone"
        )
    return found


def read_merges(metadata: Metadata, ids: dict[str, int]) -> list[list[str]]:
    """Pairs in merge order; both parts and their result must be tokens."""
    found = []
    for index, merge in enumerate(metadata.strings(_MERGES)):
        # A first part may begin with a space only in tokenizers that do not work on bytes.
        left, space, right = merge.partition(" ")
        if not left or not space or left not in ids or right not in ids or left + right not in ids:
            raise ModelError(
                f"{metadata.origin}: element {index} of {_MERGES} is {brief(merge)}, which does not merge two tokens "
                "into one"
            )
        found.append([left, right])
    return found


def read_scores(metadata: Metadata, count: int) -> list[float]:
    array = metadata.array(_SCORES)
    if array is None:
        raise metadata.missing(_SCORES)
    scores = array.numbers()
    if len(scores) != count:
        raise metadata.wrong(_SCORES, f"a list of {count} scores")
    odd = next((token for token, score in enumerate(scores) if not math.isfinite(score)), None)
    if odd is not None:
        raise ModelError(
            f"{metadata.origin}: element {odd} of {_SCORES} is {scores[odd]}, which is not a finite number"
        )
    return scores


def read_charsmap(metadata: Metadata) -> bytes:
    """A compiled table of replacements; empty if there is none."""
    array = metadata.array(_CHARSMAP)
    if array is None:
        return b""
    numbers = array.integers()
    if not all(0 <= number < 256 for number in numbers):
        raise metadata.wrong(_CHARSMAP, "a list of bytes")
    return bytes(numbers)
