"""tiktoken files: one token per line, its bytes in base64 and its rank, which is the merge priority."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass

from llmc.models.errors import ModelError
from llmc.models.tokenizers.byte_level import BYTE_LETTERS
from llmc.models.tokenizers.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from llmc.models.tokenizers.vocabulary import CONTROL, NORMAL, Vocabulary

_MAX_TOKENS, _MAX_TOKEN_BYTES = 1 << 22, 1024


@dataclass(frozen=True)
class Encoding:
    """Facts in a tokenizer's own code, besides the file. special: control tokens after the file's. num_reserved: how
    many follow these, each named <|reserved_token_ID|>. prefix: tokens that begin every text."""

    pre: PreTokenizer
    special: tuple[str, ...] = ()
    num_reserved: int = 0
    bos: str | None = None
    prefix: tuple[str, ...] = ()


def _llama3() -> tuple[str, ...]:
    named = {0: "<|begin_of_text|>", 1: "<|end_of_text|>", 6: "<|start_header_id|>", 7: "<|end_header_id|>"}
    named[9] = "<|eot_id|>"
    reserved = (f"<|reserved_special_token_{i}|>" for i in range(256))
    return tuple(named.get(i) or next(reserved) for i in range(256))


_GLM4 = (
    "<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>", "<|assistant|>",
    "<|observation|>",
)  # fmt: skip
_QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205)))
ENCODINGS = {
    "QWenTokenizer": Encoding(PRE_TOKENIZERS["qwen2"].merging_whole_first(), _QWEN),
    "TikTokenTokenizer": Encoding(PRE_TOKENIZERS["kimi-k2"], num_reserved=256),
    "ChatGLM4Tokenizer": Encoding(PRE_TOKENIZERS["dbrx"].merging_whole_first(), _GLM4, prefix=("[gMASK]", "<sop>")),
    "": Encoding(PRE_TOKENIZERS["llama-bpe"], _llama3(), bos="<|begin_of_text|>"),
}
"""By tokenizer_class in tokenizer_config.json; without one, Llama 3's, as Meta publishes it."""


def is_tiktoken(data: bytes) -> bool:
    """Whether a file named tokenizer.model is tiktoken's: SentencePiece's begins with a byte that base64 lacks."""
    return data[:1] not in (b"", b"\n")


def read_ranks(data: bytes, origin: str) -> list[bytes]:
    """The bytes of tokens, by rank. Raises ModelError."""
    found: dict[int, bytes] = {}
    lines = [line for line in data.splitlines() if line.strip()]
    for number, line in enumerate(lines, 1):
        try:
            token, rank = line.split()
            found[int(rank)] = base64.b64decode(token, validate=True)
        except (ValueError, binascii.Error):
            raise ModelError(f"{origin}: line {number} is not a token with its rank; download it again") from None
        if len(found[int(rank)]) > _MAX_TOKEN_BYTES:
            raise ModelError(f"{origin}: line {number} has a token of {len(found[int(rank)])} bytes; download it again")
    if not 256 <= len(found) <= _MAX_TOKENS or set(found) != set(range(len(lines))):
        raise ModelError(f"{origin}: the ranks of its {len(lines)} tokens are not 0, 1, 2, …; download it again")
    ranks = [found[rank] for rank in range(len(found))]
    if not {bytes([byte]) for byte in range(256)} <= set(ranks):
        raise ModelError(f"{origin}: some byte is not a token; download it again")
    return ranks


def tiktoken_vocabulary(ranks: Sequence[bytes], encoding: Encoding, origin: str) -> Vocabulary:
    reserved = range(len(ranks) + len(encoding.special), len(ranks) + len(encoding.special) + encoding.num_reserved)
    special = (*encoding.special, *(f"<|reserved_token_{token}|>" for token in reserved))
    texts = (*map(_letters, ranks), *special)
    kinds = (NORMAL,) * len(ranks) + (CONTROL,) * len(special)
    bos = None if encoding.bos is None else texts.index(encoding.bos)
    return Vocabulary(texts, kinds, origin, bos)


def tiktoken_merges(ranks: Sequence[bytes]) -> list[tuple[str, str]]:
    """All ways to form a token from two, by rank."""
    known = set(ranks)
    return [
        (_letters(token[:at]), _letters(token[at:]))
        for token in ranks
        for at in range(1, len(token))
        if token[:at] in known and token[at:] in known
    ]


def _letters(token: bytes) -> str:
    return "".join([BYTE_LETTERS[byte] for byte in token])
