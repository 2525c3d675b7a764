"""Tokenizers of other formats as the metadata of a GGUF file, written as llama.cpp's converter writes them."""

from __future__ import annotations

import base64
import gzip
import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf

from support.paths import SHARED

Types = gguf.TokenType


@dataclass
class Words:
    """tokens: text and type by id. others: special tokens by role, such as bos."""

    model: str
    tokens: list[tuple[str, Types]]
    pre: str | None = None
    merges: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    roles: Mapping[str, int] = field(default_factory=dict)
    flags: Mapping[str, bool] = field(default_factory=dict)
    template: str | Sequence[Mapping[str, str]] | None = None

    def add(self, writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model(self.model)
        if self.pre is not None:
            writer.add_tokenizer_pre(self.pre)
        writer.add_token_list([text for text, _ in self.tokens])
        writer.add_token_types([kind for _, kind in self.tokens])
        if self.scores:
            writer.add_token_scores(self.scores)
        if self.merges:
            writer.add_token_merges(self.merges)
        for role, token in self.roles.items():
            getattr(writer, f"add_{role}_token_id")(token)
        for flag, value in self.flags.items():
            getattr(writer, f"add_{flag}")(value)
        if self.template is not None:
            writer.add_chat_template(self.template)


def added(document: Mapping[str, Any]) -> dict[int, tuple[str, Types]]:
    """Tokens that tokenizer.json adds."""
    return {
        token["id"]: (token["content"], Types.CONTROL if token["special"] else Types.USER_DEFINED)
        for token in document["added_tokens"]
    }


def with_added(texts: Mapping[int, str], more: Mapping[int, tuple[str, Types]]) -> list[tuple[str, Types]]:
    size = max(*texts, *more) + 1 if more else max(texts) + 1
    return [
        more.get(i) or ((texts[i], Types.NORMAL) if i in texts else (f"[PAD{i}]", Types.UNUSED)) for i in range(size)
    ]


def byte_level_words(document: Mapping[str, Any], pre: str, **more: Any) -> Words:
    """Of a tokenizer.json of byte-level BPE."""
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in document["model"]["merges"]]
    texts = {token: text for text, token in document["model"]["vocab"].items()}
    return Words("gpt2", with_added(texts, added(document)), pre, merges, **more)


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Number and value of each field of a protobuf message."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(data):
        key = varint()
        match key & 7:
            case 0:
                yield key >> 3, varint()
            case 1:
                at += 8
            case 2:
                size = varint()
                yield key >> 3, data[at : at + size]
                at += size
            case 5:
                yield key >> 3, struct.unpack_from("<f", data, at)[0]
                at += 4


def sentence_piece_words(file: Path, more: Mapping[int, tuple[str, Types]] | None = None, **others: Any) -> Words:
    """Of SentencePiece's tokenizer.model; more: tokens that are others, or none of its."""
    found: list[tuple[str, Types]] = []
    scores = []
    for number, piece in _fields(file.read_bytes()):
        if number == 1:
            values = dict(_fields(piece))
            found.append((values.get(1, b"").decode(), Types(values.get(3, 1))))
            scores.append(values.get(2, 0.0))
    for token, entry in sorted((more or {}).items()):
        if token < len(found):
            found[token] = entry if found[token][1] not in (Types.CONTROL, Types.UNKNOWN) else found[token]
        else:
            found.append(entry)
            scores.append(-1000.0)
    # User-defined tokens are found in the text as it is.
    found = [(text.replace("▁", " ") if kind is Types.USER_DEFINED else text, kind) for text, kind in found]
    return Words("llama", found, "default", scores=scores, **others)


def tiktoken_ranks(file: Path, count: int) -> dict[bytes, int]:
    """Of the first tokens."""
    pairs = (line.split() for line in file.read_bytes().splitlines()[:count])
    return {base64.b64decode(token): int(rank) for token, rank in pairs}


def tiktoken_words(ranks: Mapping[bytes, int], pre: str) -> Words:
    """Merges of every token: the two parts that the tokens before it make of its bytes."""
    letters = byte_letters()

    def text(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) > 1:
            parts = [bytes([byte]) for byte in token]
            while len(parts) > 2:
                of = [ranks.get(left + right, rank) for left, right in pairwise(parts)]
                best = min(range(len(of)), key=of.__getitem__)
                if of[best] >= rank:
                    break
                parts[best : best + 2] = [parts[best] + parts[best + 1]]
            if len(parts) == 2:
                merges.append(f"{text(parts[0])} {text(parts[1])}")
    return Words("gpt2", with_added({rank: text(token) for token, rank in ranks.items()}, {}), pre, merges)


def byte_letters() -> list[str]:
    """GPT-2's letter of each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]


ODD = (
    "", " ", "  two  spaces ", "\n\n \t\n", "it's We'LL I'D they've", "1234567890 3.14159 ٣٤٥", "naïve café ÀÉÎ",
    "日本語のテキストと中文字符", "한국어 텍스트", "Привет, мир!", "שלום עולם",
    "👩‍👩‍👧 emoji 🎉🎉", "a\u0301 combining",
    "def f(x):\n    return x  # ok\r\n\tpass\r\n", "CamelCaseWords HTTPServer", "!!!???... --- ___ $$ <=> ~|^",
    "x" * 300, "\u00a0nbsp\u3000wide", "ﬁ ligature ™ ½", "tail space ",
)  # fmt: skip
"""Texts that tokenizers cut differently."""


def real_texts() -> list[str]:
    """Prose, problems and programs."""
    folder = SHARED / "eval"
    prose = (folder / "wikitext-2-raw" / "wikitext2-raw-test.txt").read_text(encoding="utf-8")
    problems = (folder / "gsm8k" / "test.jsonl").read_text(encoding="utf-8").splitlines()[:30]
    with gzip.open(folder / "humaneval" / "HumanEval.jsonl.gz", "rt", encoding="utf-8") as file:
        programs = [json.loads(line) for line in file]
    return [
        *ODD,
        *(prose[at : at + 2000] for at in range(0, 60_000, 2000)),
        *(json.loads(line)["question"] for line in problems),
        *(program["prompt"] + program["canonical_solution"] for program in programs[:30]),
    ]


Adder = Callable[[gguf.GGUFWriter], None]
