"""Tokenizers with code of their own, InternLM's and Kimi's: ids and texts are those of the rules that the code follows.

The rules are written down here once more, over the libraries `sentencepiece` and `tiktoken`.
"""

from __future__ import annotations

import base64
import io
import json
import re
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from llmc.compiler.store.artifact import copied_files, copy_files
from llmc.models.sources.tokenizer_files import TokenizerFolderFiles

from support.gguf_tokenizers import ODD, byte_letters

sentencepiece = pytest.importorskip("sentencepiece")
tiktoken = pytest.importorskip("tiktoken")

SAID = (
    *ODD, "the theme of them", "Das Übermaß, die Straße", "les élèves à Noël", "été naïf", "Ελληνικά κείμενα",
    "हिन्दी में लिखा", "தமிழ் எழுத்து", "ภาษาไทยไม่มีช่องว่าง", "中文与English混排，数字123456和标点。", "漢字かな交じり文",
    "𠀀𠀁 㐀 〇々", "١٢٣٤٥ ५६७ Ⅻ ½ ²", "🏳\ufe0f\u200d🌈 👨\u200d👩\u200d👧 🇨🇳🇩🇪 👍🏿 ☃\ufe0f", "ﷺ ﬁ ①",
    "a\u0301e\u0300 \u1100\u1161", "\u200b\u200d\ufeff\u00ad", "\x00\x01\x07\x1b[0m\x7f\x80\x9f",
    "\t\t\n\r\n \u2028\u2029\u00a0\u3000\u2003 ", "▁▁ ▁a", "<0x41><0xE4>", "I'LL you'Re it'S",
)  # fmt: skip
"""Texts of many scripts, with marks, numbers, emoji, spaces and controls."""
SYMBOLS = (
    " ",
    "  ",
    "\n",
    "\t",
    "<eoh>",
    "<eoa>",
    "[UNUSED_TOKEN_3]",
    "<",
    "|>",
    "▁",
    "é",
    "中",
    "9",
    "'s",
    "A",
    "\x00",
    "🎉",
)
CONTROL = {"<unk>": 0, "<s>": 1, "</s>": 2}


class Rules(Protocol):
    """What a tokenizer's code does. special: ids of special tokens by text."""

    special: Mapping[str, int]

    @property
    def parts(self) -> list[tuple[int, ...]]:
        """Ids of which answers consist, in any order; bytes make whole characters."""

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of an answer, without special tokens."""


class InternLM:
    """Special tokens are cut out of a text, the longest first. SentencePiece encodes each part between them on its own,
    and <s> begins all. It decodes an answer in one go."""

    def __init__(self, model: bytes, special: Mapping[str, int]) -> None:
        self.special = special
        self._pieces = sentencepiece.SentencePieceProcessor(model_proto=model)
        self._cuts = re.compile("(" + "|".join(map(re.escape, sorted(special, key=len, reverse=True))) + ")")

    @property
    def parts(self) -> list[tuple[int, ...]]:
        bytes_of = [tuple(self._pieces.piece_to_id(f"<0x{one:02X}>") for one in text.encode()) for text in "\x07ß漢🎉"]
        others = [(one,) for one in range(self._pieces.get_piece_size()) if not self._unwritten(one)]
        return [*others, *bytes_of, *((one,) for one in self.special.values())]

    def _unwritten(self, one: int) -> bool:
        return bool(self._pieces.is_byte(one) or self._pieces.is_unused(one))

    def encode(self, text: str) -> list[int]:
        ids = [self._pieces.bos_id()]
        for part in self._cuts.split(text):
            ids += [self.special[part]] if part in self.special else self._pieces.encode(part)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        known = set(self.special.values())
        return str(self._pieces.decode([one for one in ids if one not in known]))


class Kimi:
    """tiktoken with 256 special tokens behind the ranks: those that tokenizer_config.json names, and between them
    <|reserved_token_ID|>. All of them are taken out of a text, and nothing is put before it."""

    PATTERN = "|".join((
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+",
    ))  # fmt: skip

    def __init__(self, ranks: Mapping[bytes, int], named: Mapping[str, int], shown: Sequence[str]) -> None:
        """named: special tokens of tokenizer_config.json. shown: those of them that answers show."""
        names = {number: text for text, number in named.items()}
        self.special: Mapping[str, int] = {
            names.get(number, f"<|reserved_token_{number}|>"): number for number in range(len(ranks), len(ranks) + 256)
        }
        self._hidden = {number for text, number in self.special.items() if text not in shown}
        self._encoding = tiktoken.Encoding(
            "kimi", pat_str=self.PATTERN, mergeable_ranks=dict(ranks), special_tokens=dict(self.special)
        )

    @property
    def parts(self) -> list[tuple[int, ...]]:
        return [(one,) for one in range(self._encoding.n_vocab)]

    def encode(self, text: str) -> list[int]:
        return list(self._encoding.encode(text, allowed_special="all"))

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._encoding.decode([one for one in ids if one not in self._hidden]))


def made(folder: Path, name: str, data: bytes, config: Mapping[str, Any]) -> Tokenizer:
    """What an artifact has of a checkpoint with these files."""
    folder.mkdir()
    (folder / name).write_bytes(data)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    files, out = TokenizerFolderFiles(folder), folder / "artifact"
    out.mkdir()
    copy_files(files, out, copied_files(files, "required"))
    return Tokenizer.from_file(str(out / "tokenizer.json"))


def added(names: Mapping[str, int], shown: Sequence[str] = ()) -> dict[str, Any]:
    """added_tokens_decoder of tokenizer_config.json."""
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    return {str(number): {"content": text, **flags, "special": text not in shown} for text, number in names.items()}


def pieces(*symbols: str, add_dummy_prefix: bool) -> bytes:
    """A small BPE of SentencePiece with bytes to fall back on. symbols: pieces that its authors gave."""
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*SAID, *SAID]), model_writer=out, minloglevel=2, model_type="bpe", vocab_size=700,
        byte_fallback=True, character_coverage=0.98, normalization_rule_name="identity", split_digits=True,
        remove_extra_whitespaces=False, add_dummy_prefix=add_dummy_prefix, user_defined_symbols=list(symbols),
    )  # fmt: skip
    return out.getvalue()


def ranks() -> dict[bytes, int]:
    """Of a small byte-level BPE, some of whose tokens join what the rules keep apart."""
    small = Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    small.pre_tokenizer = level
    trainer = trainers.BpeTrainer(
        vocab_size=900, min_frequency=1, initial_alphabet=level.alphabet(), show_progress=False
    )
    small.train_from_iterator(SAID, trainer)
    byte_of = {letter: byte for byte, letter in enumerate(byte_letters())}
    return {bytes(byte_of[letter] for letter in text): number for text, number in small.get_vocab().items()}


def internlm(folder: Path) -> tuple[Tokenizer, Rules]:
    """The chat model's marks are SentencePiece's own symbols. A null character is a piece, which is never made."""
    null = b"\x0a\x01\0\x15" + struct.pack("<f", -1.0)
    model = pieces("<eoh>", "<eoa>", add_dummy_prefix=False) + b"\x0a" + bytes([len(null)]) + null
    config = {"tokenizer_class": "InternLMTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>",
              "pad_token": "</s>"}  # fmt: skip
    return made(folder, "tokenizer.model", model, config), InternLM(model, CONTROL)


def internlm2(folder: Path) -> tuple[Tokenizer, Rules]:
    """Unused symbols of SentencePiece got other texts."""
    unused = [f"[UNUSED_TOKEN_{number}]" for number in range(4)]
    model = pieces(*unused, add_dummy_prefix=True)
    first = sentencepiece.SentencePieceProcessor(model_proto=model).piece_to_id(unused[0])
    marks = {text: first + number for number, text in enumerate(("<|plugin|>", "<|im_end|>", "<|im_start|>"))}
    config = {
        "tokenizer_class": "InternLM2Tokenizer", "bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True,
        "add_eos_token": False, "decode_with_prefix_space": False, "additional_special_tokens": list(marks),
        "added_tokens_decoder": added({**CONTROL, **marks}),
    }  # fmt: skip
    return made(folder, "tokenizer.model", model, config), InternLM(model, {**CONTROL, **marks})


def internlm3(folder: Path) -> tuple[Tokenizer, Rules]:
    """Marks follow the pieces."""
    model = pieces(add_dummy_prefix=False)
    size = sentencepiece.SentencePieceProcessor(model_proto=model).get_piece_size()
    marks = {"<|im_start|>": size, "<|im_end|>": size + 1, "<|plugin|>": size + 5}
    config = {"tokenizer_class": "InternLM3Tokenizer", "bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True,
              "added_tokens_decoder": added({**CONTROL, **marks})}  # fmt: skip
    return made(folder, "tokenizer.model", model, config), InternLM(model, {**CONTROL, **marks})


def kimi(folder: Path) -> tuple[Tokenizer, Rules]:
    """Some special tokens are named, and of these some are shown in answers."""
    found = ranks()
    names = ("[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", None, "<|im_system|>", None,
             "<|tool_calls_section_begin|>", "<|tool_call_begin|>")  # fmt: skip
    named = {name: len(found) + number for number, name in enumerate(names) if name is not None}
    named |= {"[UNK]": len(found) + 254, "[PAD]": len(found) + 255}
    shown = ("<|tool_calls_section_begin|>", "<|tool_call_begin|>")
    config = {"tokenizer_class": "TikTokenTokenizer", "bos_token": "[BOS]", "eos_token": "[EOS]", "pad_token": "[PAD]",
              "unk_token": "[UNK]", "additional_special_tokens": ["<|im_end|>", "<|im_user|>"],
              "added_tokens_decoder": added(named, shown)}  # fmt: skip
    data = b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in found.items())
    return made(folder, "tiktoken.model", data, config), Kimi(found, named, shown)


@pytest.fixture(scope="module", params=[internlm, internlm2, internlm3, kimi], ids=lambda make: make.__name__)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Rules]:
    """What llmc made, and the rules."""
    found: tuple[Tokenizer, Rules] = request.param(tmp_path_factory.mktemp("checkpoint") / "m")
    return found


@st.composite
def texts(draw: st.DrawFn, rules: Rules) -> str:
    """Of special tokens and parts of them, of what is in other texts, and of any characters."""
    marks = sorted(rules.special)
    part = st.one_of(
        st.sampled_from(marks),
        st.builds(lambda text, size: text[:size], st.sampled_from(marks), st.integers(1, 12)),
        st.sampled_from([*SYMBOLS, *SAID]),
        st.builds(
            lambda text, at, size: text[at : at + size], st.sampled_from(SAID), st.integers(0, 20), st.integers(1, 6)
        ),
        st.text(max_size=5),
    )
    return "".join(draw(st.lists(part, max_size=8)))


def check(pair: tuple[Tokenizer, Rules], text: str) -> None:
    ours, rules = pair
    ids = ours.encode(text).ids
    assert ids == rules.encode(text)
    assert ours.decode(ids) == rules.decode(ids)


def test_texts_of_many_scripts(pair: tuple[Tokenizer, Rules]) -> None:
    marks = sorted(pair[1].special)
    for number, text in enumerate(SAID):
        mark = marks[number % len(marks)]
        for around in ("", mark):
            check(pair, f"{around}{text}")
            check(pair, f"{text}{around} {text}{around}{around}")


@settings(max_examples=60)
@given(data=st.data())
def test_any_text(pair: tuple[Tokenizer, Rules], data: st.DataObject) -> None:
    check(pair, data.draw(texts(pair[1])))


@settings(max_examples=60)
@given(data=st.data())
def test_any_ids(pair: tuple[Tokenizer, Rules], data: st.DataObject) -> None:
    """Of tokens in any order, as a model may write them; bytes make whole characters."""
    ours, rules = pair
    ids = [one for part in data.draw(st.lists(st.sampled_from(rules.parts), max_size=12)) for one in part]
    assert ours.decode(ids) == rules.decode(ids)
