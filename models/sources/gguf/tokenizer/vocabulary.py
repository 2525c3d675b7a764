"""Tokens of a GGUF file with their kinds, and those that begin and end texts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from llmc.models.brief import brief
from llmc.models.errors import ModelError
from llmc.models.sources.gguf.metadata import Metadata
from llmc.models.tokenizers.sentence_piece import SPACE
from llmc.models.tokenizers.vocabulary import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, Vocabulary
from llmc.models.tokenizers.word_piece import is_whole

MODEL = "tokenizer.ggml.model"
TOKENS = "tokenizer.ggml.tokens"
GEMMA4 = "gemma4"
"""The value of MODEL for its tokenizer."""
# Control tokens that always end a turn or a text, according to llama.cpp.
_ENDS = frozenset({
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>", "<EOT>",
})  # fmt: skip
# The same of Gemma 4, some of which are no control tokens.
_ENDS_OF_GEMMA4 = frozenset({"<eos>", "<turn|>", "<|tool_response>"})


def has_tokenizer(metadata: Metadata) -> bool:
    """Whether the file has a tokenizer; some contain only a model."""
    return metadata.has(TOKENS) or metadata.text(MODEL, "none") not in ("none", "no_vocab")


def read_vocabulary(metadata: Metadata, size: int) -> Vocabulary:
    """size: rows of the embedding. Raises ModelError."""
    texts = tuple(metadata.strings(TOKENS))
    origin = metadata.origin
    if not 1 <= len(texts) <= size:
        raise ModelError(f"{origin}: metadata {TOKENS} has {len(texts)} tokens where token_embd.weight has {size} rows")
    kinds = _kinds(metadata, len(texts))

    def token(name: str) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        # llama.cpp writes the largest unsigned number for "none".
        if not metadata.has(key) or metadata.integer(key, minimum=-1, maximum=(1 << 32) - 1) in (-1, (1 << 32) - 1):
            return None
        return metadata.integer(key, minimum=0, maximum=len(texts) - 1)

    eos = token("eos")
    model = metadata.text(MODEL, "none")
    if model == "bert":
        # Converters name only the separator and the first token.
        return Vocabulary(texts, kinds, origin, _of(token, "cls", "bos"), _of(token, "seperator", "eos"),
                          token("unknown"), token("padding"))  # fmt: skip
    special, ends_of = {CONTROL}, _ENDS
    if model == GEMMA4:
        special, ends_of = {CONTROL, USER_DEFINED}, _ENDS_OF_GEMMA4
    by_text = [
        i for i, (text, kind) in enumerate(zip(texts, kinds, strict=True)) if kind in special and text in ends_of
    ]
    ends = [i for i in (eos, token("eot"), token("eom"), *by_text) if i is not None]
    return Vocabulary(
        texts, kinds, origin, token("bos"), eos, token("unknown"), token("padding"), tuple(dict.fromkeys(ends))
    )


def _of(token: Callable[[str], int | None], name: str, other: str) -> int | None:
    """The id of the token with a role, under either name."""
    return token(other) if (found := token(name)) is None else found


def as_pieces(vocabulary: Vocabulary) -> Vocabulary:
    """Word-initial pieces, marked by SentencePiece's space in files, lose it; other pieces get BERT's marks."""

    def text(token: int) -> str:
        found = vocabulary.texts[token]
        if vocabulary.kinds[token] in (CONTROL, UNKNOWN, USER_DEFINED) or is_whole(found):
            return found
        return found.removeprefix(SPACE) if found.startswith(SPACE) else f"##{found}"

    return replace(vocabulary, texts=tuple(map(text, range(len(vocabulary.texts)))))


def _kinds(metadata: Metadata, count: int) -> tuple[int, ...]:
    key = "tokenizer.ggml.token_type"
    array = metadata.array(key)
    if array is None:
        return (NORMAL,) * count
    kinds = array.integers()
    if len(kinds) != count:
        raise metadata.wrong(key, f"a list of {count} types")
    # 0 is unused by converters, and llama.cpp treats it as no kind.
    unknown = next((kind for kind in kinds if not 0 <= kind <= BYTE), None)
    if unknown is not None:
        raise ModelError(f"{metadata.origin}: metadata {key} has the type {brief(unknown)}, which is not one of 0 to 6")
    return tuple(kinds)
