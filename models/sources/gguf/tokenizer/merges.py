"""Pre-tokenizer and merges in GGUF metadata."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from llmc.models.brief import brief
from llmc.models.errors import ModelError
from llmc.models.sources.gguf.metadata import Metadata
from llmc.models.tokenizers.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from llmc.models.tokenizers.vocabulary import NORMAL, Vocabulary

_CHARSMAP = "tokenizer.ggml.precompiled_charsmap"
_MOST_BREAKS = 64  # of a token that is joined here
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


def check_line_breaks(metadata: Metadata, vocabulary: Vocabulary, merges: Sequence[Sequence[str]]) -> None:
    """llama.cpp takes a run of line breaks that is a token of Gemma 4 whole, whatever the merges make of it. Raises
    ModelError if they do not make the token, which no tokenizer.json can say."""
    ranks = {(left, right): rank for rank, (left, right) in enumerate(merges) if not (left + right).strip("\n")}
    for token, (text, kind) in enumerate(zip(vocabulary.texts, vocabulary.kinds, strict=True)):
        if kind == NORMAL and text and not text.strip("\n") and not _makes(ranks, text):
            raise ModelError(
                f"{metadata.origin}: {_MERGES} do not make token {token}, of {len(text)} line breaks; compile with "
                "--no-tokenizer an artifact that takes token ids alone"
            )


def _makes(ranks: Mapping[tuple[str, str], int], text: str) -> bool:
    """Whether the merges join all characters; the best pair first, of equal ones the leftmost."""
    if len(text) > _MOST_BREAKS:
        return False
    parts = list(text)
    while found := [(ranks[pair], at) for at, pair in enumerate(pairwise(parts)) if pair in ranks]:
        _, at = min(found)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return len(parts) == 1


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
