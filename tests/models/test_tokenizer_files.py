"""Tokenizers of SentencePiece and tiktoken become tokenizer.json: the ids of texts are those of the originals."""

from __future__ import annotations

import base64
import io
import json
import random
import re
import shutil
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from llmc.compiler.config import CompileError
from llmc.compiler.store.artifact import copied_files, copy_files
from llmc.models import ModelError
from llmc.models.sources.tokenizer_files import TokenizerFolderFiles
from llmc.runtime.text.chat_template import ChatTemplateError
from llmc.runtime.text.tokenizer import Tokenizer as Runtime

from support.gguf_tokenizers import ODD, real_texts
from support.paths import SHARED

TOKENIZERS = SHARED / "tokenizers"
real = pytest.mark.skipif(not TOKENIZERS.is_dir(), reason=f"no tokenizers at {TOKENIZERS}")
RUN = re.compile(r"(.)\1{2}", re.DOTALL)
WORDS = Tokenizer(WordLevel({"a": 0}, unk_token="a")).to_str()
PART = 8000
"""Of a large vocabulary the first so many tokens are one, too."""
GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
_CASED = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_ENDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
KIMI = "|".join((
    r"[\p{Han}]+", rf"[^\r\n\p{{L}}\p{{N}}]?{_CASED[0]}*{_CASED[1]}+{_ENDS}",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_CASED[0]}+{_CASED[1]}*{_ENDS}", r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+",
))  # fmt: skip


def made_in(folder: Path) -> Tokenizer:
    """What an artifact of the folder has."""
    files = TokenizerFolderFiles(folder)
    out = folder / "artifact"
    out.mkdir()
    copy_files(files, out, copied_files(files, "required"))
    return Tokenizer.from_file(str(out / "tokenizer.json"))


def folder_of(folder: Path, name: str, data: bytes, **settings: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(data)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def odd_texts(count: int) -> list[str]:
    """Pieces of many scripts, spaces, controls and emoji in any order."""
    pieces = [
        *map(chr, range(32, 127)), *" \t\n\r\u00a0\u3000\u200b\u200d\ufeff\x7f", *"éàßø", "a\u0301", "e\u0308",
        "ﬁ", "™", "½", "②", "Ⅷ", "㌀", "ｶﾞ", "か\u3099", "각", "\u1100\u1161\u11a8", "한국", "日本語", "中文", "Привет",
        "שלום", "مرحبا", "ลำ", "क्षि", "👩\u200d👩\u200d👧", "🎉", "🇩🇪", "👍🏽", "<sep>", "<sep", "==", "the ", "of ",
        "--", "  ", "\n\n",
        "~～", "123456", "AbCd", "'s", "'LL", "<0x41>",
    ]  # fmt: skip
    rng = random.Random(1)
    return ["".join(rng.choice(pieces) for _ in range(rng.randint(1, 14))) for _ in range(count)]


def check(ours: Tokenizer, ids_of: Callable[[str], Sequence[int]], texts: Sequence[str]) -> None:
    wrong = []
    for text in texts:
        found, expected = ours.encode(text, add_special_tokens=False).ids, list(ids_of(text))
        if found != expected:
            wrong.append((text[:80], found[:20], expected[:20]))
    assert not wrong[:3], f"{len(wrong)} of {len(texts)} texts differ"


def check_sentence_piece(folder: Path, texts: Sequence[str], texts_of_ids: Sequence[str] = ()) -> Tokenizer:
    sentencepiece = pytest.importorskip("sentencepiece")
    original = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    ours = made_in(folder)
    check(ours, original.encode, texts)
    for text in texts_of_ids:
        ids = original.encode(text)
        assert ours.decode(ids, skip_special_tokens=False) == original.decode(ids)
    return ours


@real
@pytest.mark.parametrize(
    ("name", "tokenizer_class"),
    [
        ("llama2-hf/tokenizer.model", "LlamaTokenizer"),
        pytest.param("baichuan2/tokenizer.model", "BaichuanTokenizer", marks=pytest.mark.slow),
        pytest.param("chatglm3-6b/tokenizer.model", "ChatGLMTokenizer", marks=pytest.mark.slow),
        pytest.param("mistral-7b-instruct-v0.3/tokenizer.model.v3", "LlamaTokenizer", marks=pytest.mark.slow),
    ],
)
def test_real_sentence_piece(name: str, tokenizer_class: str, tmp_path: Path) -> None:
    folder = folder_of(
        tmp_path / "m", "tokenizer.model", (TOKENIZERS / name).read_bytes(), tokenizer_class=tokenizer_class
    )
    texts = [*real_texts()[::2], *odd_texts(500), "a sop, philosophy, eop"]
    ours = check_sentence_piece(folder, texts, texts)
    if tokenizer_class == "ChatGLMTokenizer":
        assert ours.encode("Hi<|user|>").ids == [64790, 64792, *ours.encode("Hi", add_special_tokens=False).ids, 64795]
    else:
        assert ours.encode("Hi").ids[0] == 1
    if tokenizer_class != "LlamaTokenizer" or "llama2" not in name:
        return
    published = Tokenizer.from_file(str(TOKENIZERS / "llama2-hf" / "tokenizer.json"))
    for text in (*ODD, "<s>[INST] Hello [/INST]</s>"):
        assert ours.encode(text).ids == published.encode(text).ids


TRAINED: dict[str, dict[str, Any]] = {
    "bpe": {"model_type": "bpe", "byte_fallback": True, "remove_extra_whitespaces": False},
    "bpe with symbols": {"model_type": "bpe", "byte_fallback": True, "user_defined_symbols": ["<sep>", "=="]},
    "bpe with symbols, no space": {
        "model_type": "bpe", "byte_fallback": True, "add_dummy_prefix": False, "remove_extra_whitespaces": False,
        "user_defined_symbols": ["<sep>", "==", "▁▁", "\t"],
    },
    "unigram": {"model_type": "unigram", "byte_fallback": True},
    "unigram with symbols": {
        "model_type": "unigram", "remove_extra_whitespaces": False, "user_defined_symbols": ["<sep>", "=="],
    },
    "unigram with nfkc": {"model_type": "unigram", "byte_fallback": True, "normalization_rule_name": "nmt_nfkc"},
    "bpe with nfkc": {"model_type": "bpe", "normalization_rule_name": "nfkc"},
}  # fmt: skip


def trained(**options: Any) -> bytes:
    sentencepiece = pytest.importorskip("sentencepiece")
    lines = [line for text in real_texts() if TOKENIZERS.is_dir() for line in text.split("\n")][:1500]
    out = io.BytesIO()
    defaults = {"normalization_rule_name": "identity", "vocab_size": 900, "required_chars": "<>0123456789xABCDEF"}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*lines, *odd_texts(300)]), model_writer=out, minloglevel=2, **{**defaults, **options}
    )
    return out.getvalue()


@real
@pytest.mark.parametrize("case", [
    *(pytest.param(name, marks=() if name in ("bpe with symbols", "unigram") else pytest.mark.slow)
      for name in TRAINED)
])  # fmt: skip
def test_every_kind_of_sentence_piece(case: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "m", "tokenizer.model", trained(**TRAINED[case]))
    texts = [*ODD, *real_texts(), *odd_texts(1500)]
    if "unigram" not in case:
        check_sentence_piece(folder, texts)
        return
    # It adds scores in float32, so that rounding decides in which order a run of one character has the same pieces.
    parts = [text[at : at + 200] for text in texts for at in range(0, len(text), 200)]
    texts = [text for text in parts if RUN.search(text) is None]
    assert len(texts) > 0.8 * len(parts)
    check_sentence_piece(folder, texts)


def test_tokens_that_were_added(tmp_path: Path) -> None:
    """By either file; those of tokenizer_config.json may be control tokens."""
    folder = folder_of(
        tmp_path / "m",
        "tokenizer.model",
        small_spm(),
        tokenizer_class="LlamaTokenizer",
        add_eos_token=True,
        added_tokens_decoder={
            "263": {"content": "<|user|>", "special": True},
            "1": {"content": "<s>", "special": True},
        },
    )
    (folder / "added_tokens.json").write_text(json.dumps({"[X]": 264}))
    ours = made_in(folder)
    assert ours.encode("ab<|user|>a[X]").tokens == ["<s>", "▁", "ab", "<|user|>", "▁", "a", "[X]", "</s>"]
    assert ours.token_to_id("[X]") == 264
    assert ours.decode(ours.encode("ab<|user|>").ids) == "ab"


def small_spm(model_type: int = 2, pieces: Sequence[tuple[str, int]] = ()) -> bytes:
    """A message with control tokens, bytes, three letters' worth of pieces and no table."""

    def field(number: int, value: bytes | int) -> bytes:
        if isinstance(value, int):
            return (
                bytes([number << 3 & 0xFF | 0, value]) if number < 16 else bytes([0x80 | number << 3 & 0x7F, 1, value])
            )
        return bytes([number << 3 | 2, len(value)]) + value

    listed = [("<unk>", 2), ("<s>", 3), ("</s>", 3), *((f"<0x{byte:02X}>", 6) for byte in range(256))]
    listed = [*listed, *(pieces or (("▁", 1), ("a", 1), ("ab", 1), ("b", 1)))]
    message = b"".join(field(1, field(1, text.encode()) + field(3, kind)) for text, kind in listed)
    return message + field(2, field(3, model_type)) + field(3, field(4, 0))


@real
@pytest.mark.parametrize(
    ("name", "tokenizer_class", "pattern", "file"),
    [
        ("qwen1-7b", "QWenTokenizer", GPT4 % "", "qwen.tiktoken"),
        ("llama3-tiktoken", "", GPT4 % "{1,3}", "tokenizer.model"),
        ("llama3-tiktoken", "TikTokenTokenizer", KIMI, "tiktoken.model"),
        ("llama3-tiktoken", "ChatGLM4Tokenizer", GPT4 % "{1,3}", "tokenizer.model"),
    ],
)
@pytest.mark.parametrize("count", [PART, pytest.param(1 << 30, marks=pytest.mark.slow)], ids=["part", "whole"])
def test_tiktoken(name: str, tokenizer_class: str, pattern: str, file: str, count: int, tmp_path: Path) -> None:
    tiktoken = pytest.importorskip("tiktoken")
    lines = (TOKENIZERS / name / "tokenizer.model").read_bytes().splitlines(keepends=True)[:count]
    folder = folder_of(tmp_path / "m", file, b"".join(lines), tokenizer_class=tokenizer_class)
    ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, lines)}
    original = tiktoken.Encoding("it", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    ours = made_in(folder)

    def ids_of(text: str) -> list[int]:
        composed = unicodedata.normalize("NFC", text) if tokenizer_class == "QWenTokenizer" else text
        return list(original.encode_ordinary(composed))

    texts = [*real_texts()[::2], *odd_texts(500)] if count == PART else [*real_texts(), *odd_texts(3000)]
    check(ours, ids_of, texts)
    for text in texts:
        ids = ids_of(text)
        assert ours.decode(ids, skip_special_tokens=False) == original.decode(ids)
    special, number, before = {
        "QWenTokenizer": ("<|im_start|>", 1, []),
        "": ("<|eot_id|>", 9, [0]),
        "TikTokenTokenizer": (f"<|reserved_token_{len(ranks) + 9}|>", 9, []),
        "ChatGLM4Tokenizer": ("<|user|>", 7, [2, 4]),
    }[tokenizer_class]
    assert ours.encode(special, add_special_tokens=False).ids == [len(ranks) + number]
    assert ours.encode("").ids == [len(ranks) + token for token in before]


def test_a_tokenizer_json_goes_first(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "m", "tokenizer.model", b"nothing")
    shutil.copy(Path(__file__).parents[2] / "examples" / "tiny-english" / "tokenizer.json", folder)
    assert made_in(folder).get_vocab_size() == 2048


def ranks_file(*lines: str) -> bytes:
    every_byte = [f"{base64.b64encode(bytes([byte])).decode()} {byte}" for byte in range(256)]
    return "\n".join([*every_byte, *lines]).encode()


BAD: dict[str, tuple[str, bytes, dict[str, Any], str]] = {
    "cut off": ("tokenizer.model", small_spm()[:-3], {}, "is not a SentencePiece model .*it ends within a number"),
    "empty": ("tokenizer.model", b"", {}, "it has 0 pieces"),
    "of words": ("tokenizer.model", small_spm(3), {}, "made of words, which is not supported.*--no-tokenizer"),
    "a byte that is none": ("tokenizer.model", small_spm(2, [("b", 6)]), {}, "token 'b' has the type of a byte"),
    "a kind that is none": ("tokenizer.model", small_spm(2, [("b", 9)]), {}, "a piece is of type 9"),
    "code of its own": (
        "tokenizer.model", small_spm(), {"tokenizer_class": "TelechatTokenizer"},
        "tokenizer_class 'TelechatTokenizer', not one of LlamaTokenizer.*no tokenizer.json.*--no-tokenizer",
    ),
    "half a line": ("qwen.tiktoken", ranks_file("YWI="), {}, "line 257 is not a token with its rank"),
    "a rank too many": ("qwen.tiktoken", ranks_file("YWI= 300"), {}, "ranks of its 257 tokens are not 0, 1, 2"),
    "of other code": (
        "tiktoken.model", ranks_file("YWI= 256"), {"tokenizer_class": "Mine"},
        "tokenizer_class 'Mine', not one of QWen",
    ),
    "a bad id": (
        "tokenizer.model", small_spm(), {"added_tokens_decoder": {"x": {"content": "y"}}}, "'x' is not a token id",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_used_is_said_at_compile_time(case: str, tmp_path: Path) -> None:
    name, data, settings, said = BAD[case]
    files = TokenizerFolderFiles(folder_of(tmp_path / "m", name, data, **settings))
    for tokenizer in ("required", "auto"):
        with pytest.raises((CompileError, ModelError), match=said):
            copied_files(files, tokenizer)
    assert "tokenizer.json" not in copied_files(files, "none")


def test_files_that_are_not_converted_are_named(tmp_path: Path) -> None:
    files = TokenizerFolderFiles(folder_of(tmp_path / "m", "vocab.json", b"{}"))
    with pytest.raises(CompileError, match=r"tokenizer.json is missing, and llmc makes none of vocab.json.*--no-tok"):
        copied_files(files, "auto")
    assert copied_files(files, "none") == []


def test_the_template_of_a_processor_becomes_the_template_file(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "m", "chat_template.json", json.dumps({"chat_template": "{{ messages }}"}).encode())
    files = TokenizerFolderFiles(folder)
    out = tmp_path / "out"
    out.mkdir()
    names = [name for name in copied_files(files, "auto") if name == "chat_template.jinja"]
    copy_files(files, out, names)
    assert (out / "chat_template.jinja").read_text() == "{{ messages }}"
    (folder / "chat_template.jinja").write_text("newer")
    assert files.open("chat_template.jinja").read() == b"newer"
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.json").write_text("{}")
    with pytest.raises(ModelError, match=r"chat_template.json lacks the field 'chat_template'"):
        TokenizerFolderFiles(folder).open("chat_template.jinja")


MESSAGES, A_TOOL = [{"role": "user", "content": "Hi"}], [{"type": "function", "function": {"name": "f"}}]
NAMED = {"tool_use": "{{ tools | length }} tools", "rag": "{{ documents[0].text }}", "long": "a\r\nb"}


@pytest.mark.parametrize("default", ["chat_template.jinja", "chat_template.json", "default", None])
def test_named_templates_are_chosen_as_by_transformers(default: str | None, tmp_path: Path) -> None:
    """The files take the place of what tokenizer_config.json lists."""
    listed = [{"name": name, "template": "old"} for name in ("default", "rag", "gone")]
    folder = folder_of(tmp_path / "m", "tokenizer.json", WORDS.encode(), chat_template=listed, bos_token="a")
    (folder / "additional_chat_templates").mkdir()
    for name, template in {**NAMED, **({"default": "plain"} if default == "default" else {})}.items():
        (folder / "additional_chat_templates" / f"{name}.jinja").write_bytes(template.encode())
    (folder / "additional_chat_templates" / "README.md").write_text("of these")
    if default == "chat_template.jinja":
        (folder / default).write_text("plain")
    elif default == "chat_template.json":
        (folder / default).write_text(json.dumps({"chat_template": "plain"}))
    reference = PreTrainedTokenizerFast.from_pretrained(folder)
    made_in(folder)
    ours = Runtime(folder / "artifact")
    assert ours.bos_token == "a"
    assert ours.apply_chat_template(MESSAGES, tools=A_TOOL) == "1 tools"
    assert reference.apply_chat_template(MESSAGES, tools=A_TOOL, tokenize=False) == "1 tools"
    documents = [{"title": "t", "text": "found"}]
    rag = Runtime(folder / "artifact", "rag").apply_chat_template(MESSAGES, documents=documents)
    given: dict[str, Any] = {"chat_template": "rag", "documents": documents}
    assert rag == reference.apply_chat_template(MESSAGES, tokenize=False, **given) == "found"
    long = Runtime(folder / "artifact", "long").apply_chat_template(MESSAGES)
    assert long == reference.apply_chat_template(MESSAGES, chat_template="long", tokenize=False) == "a\nb"
    assert Runtime(folder / "artifact", "gone").apply_chat_template(MESSAGES) == "gone"  # a template of its own
    if default is None:
        with pytest.raises(ChatTemplateError, match="no default chat template, only long, rag, tool_use"):
            ours.apply_chat_template(MESSAGES)
    else:
        assert ours.apply_chat_template(MESSAGES) == "plain"


def test_a_named_template_that_is_no_text_is_named(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "m", "tokenizer.json", WORDS.encode())
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelError, match=r"rag.jinja is not UTF-8 text"):
        made_in(folder)
