"""The "gpt2" tokenizers: BPE over the bytes of a text, cut by regular expressions."""

from __future__ import annotations

from typing import Any

from llmc.models.brief import brief
from llmc.models.errors import ModelError
from llmc.models.sources.gguf.metadata import Metadata
from llmc.models.sources.gguf.tokenizer.added import added_tokens
from llmc.models.sources.gguf.tokenizer.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from llmc.models.sources.gguf.tokenizer.vocabulary import Vocabulary

_PRE, _MERGES = "tokenizer.ggml.pre", "tokenizer.ggml.merges"


def pre_tokenizer(metadata: Metadata) -> PreTokenizer:
    """Raises ModelError naming those that are known."""
    name = metadata.text(_PRE, "default")
    found = PRE_TOKENIZERS.get(name)
    if found is None:
        raise ModelError(
            f"{metadata.origin}: metadata {_PRE} is {brief(name)}, which is not one of {', '.join(PRE_TOKENIZERS)}; "
            "compile with --no-tokenizer an artifact that takes token ids alone"
        )
    return found


def byte_level(metadata: Metadata, vocabulary: Vocabulary) -> dict[str, Any]:
    """tokenizer.json without what surrounds a text."""
    pre = pre_tokenizer(metadata)
    cuts = [
        {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
        for expression in pre.expressions
    ]
    bytes_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    ids = vocabulary.ids()
    return {
        "added_tokens": added_tokens(vocabulary),
        "normalizer": {"type": "NFC"} if pre.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*cuts, bytes_level]},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre.ignore_merges,
            "vocab": ids,
            "merges": _merges(metadata, ids),
        },
    }


def _merges(metadata: Metadata, ids: dict[str, int]) -> list[list[str]]:
    """Pairs in the order of merging; both and what they make must be tokens."""
    found = []
    for index, merge in enumerate(metadata.strings(_MERGES)):
        # A first part may begin with a space only in tokenizers that are not of bytes.
        left, space, right = merge.partition(" ")
        if not left or not space or left not in ids or right not in ids or left + right not in ids:
            raise ModelError(
                f"{metadata.origin}: element {index} of {_MERGES} is {brief(merge)}, which does not merge two tokens "
                "into one"
            )
        found.append([left, right])
    return found
