"""Tokenizers of real models, to the metadata of a GGUF file and back: the ids of texts are those of the originals."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from llmc.models import ModelError, open_source
from llmc.models.eager import load_model
from llmc.models.sources.gguf.header import GgufFile
from llmc.models.sources.gguf.tokenizer.files import TokenizerFiles
from llmc.models.sources.gguf.tokenizer.vocabulary import read_vocabulary
from llmc.models.tokenizers.pre_tokenizers import PRE_TOKENIZERS

from support.gguf_models import write_gguf
from support.gguf_tokenizers import (
    ODD,
    Types,
    Words,
    added,
    byte_level_words,
    real_texts,
    sentence_piece_words,
    tiktoken_ranks,
    tiktoken_words,
    with_added,
)
from support.paged_reference import PagedRunner
from support.paths import ROOT, SHARED

TOKENIZERS, STORIES = SHARED / "tokenizers", SHARED / "models" / "stories260k"
PART = 20_000
"""Of a large vocabulary the first so many tokens are one, too."""
real = pytest.mark.skipif(not TOKENIZERS.is_dir(), reason="the tokenizers of real models are not here")


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return real_texts()


def files_of(words: Words, folder: Path) -> TokenizerFiles:
    """What our reader makes of the metadata."""
    path = folder / "t.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    words.add(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    metadata = GgufFile(path).metadata
    return TokenizerFiles(metadata, read_vocabulary(metadata, 1 << 20))


def content(files: TokenizerFiles, name: str) -> bytes:
    with files.open(name) as file:
        return file.read()


def tokenizer_of(words: Words, folder: Path) -> Tokenizer:
    return Tokenizer.from_buffer(content(files_of(words, folder), "tokenizer.json"))


def check_equal(ours: Tokenizer, ids_of: Callable[[str], Sequence[int]], texts: list[str]) -> None:
    """Without special tokens, and that ids stand for their texts."""
    wrong = []
    for text in texts:
        found, expected = ours.encode(text, add_special_tokens=False).ids, list(ids_of(text))
        if found != expected:
            wrong.append((text[:80], found[:20], expected[:20]))
    assert not wrong[:3], f"{len(wrong)} of {len(texts)} texts differ"


def ids_of(original: Tokenizer) -> Callable[[str], Sequence[int]]:
    return lambda text: original.encode(text, add_special_tokens=False).ids


def document(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((TOKENIZERS / name / "tokenizer.json").read_text(encoding="utf-8"))
    return found


@real
def test_gpt2(texts: list[str], tmp_path: Path) -> None:
    vocabulary, merges = TOKENIZERS / "gpt2" / "encoder.json", TOKENIZERS / "gpt2" / "vocab.bpe"
    original = Tokenizer(models.BPE.from_file(str(vocabulary), str(merges)))
    original.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    original.decoder = decoders.ByteLevel()
    by_id = {token: text for text, token in json.loads(vocabulary.read_text()).items()}
    lines = merges.read_text(encoding="utf-8").splitlines()[1:]
    more = {50256: ("<|endoftext|>", Types.CONTROL)}
    ours = tokenizer_of(Words("gpt2", with_added(by_id, more), "gpt-2", lines), tmp_path)
    check_equal(ours, ids_of(original), texts)
    for text in texts:
        assert ours.decode(ours.encode(text, add_special_tokens=False).ids, skip_special_tokens=False) == text
    assert ours.encode("a<|endoftext|>b").ids == [64, 50256, 65]


@real
def test_qwen2(texts: list[str], tmp_path: Path) -> None:
    from transformers import Qwen2Tokenizer

    folder = TOKENIZERS / "qwen2-0.5b"
    config = json.loads((folder / "tokenizer_config.json").read_text())
    whole = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    vocabulary = {text: token for text, token in whole.items() if token < PART}
    merges = (folder / "merges.txt").read_text(encoding="utf-8").splitlines()
    lines = [line for line in merges if line and not line.startswith("#version")][: PART - 256]
    pairs: Any = [tuple(line.split(" ")) for line in lines]
    original = Qwen2Tokenizer(vocab=vocabulary, merges=pairs)
    special = [token["content"] for token in config["added_tokens_decoder"].values()]
    more = {PART + i: (text, Types.CONTROL) for i, text in enumerate(special)}
    words = Words(
        "gpt2",
        [*with_added({token: text for text, token in vocabulary.items()}, more), ("[PAD20003]", Types.UNUSED)],
        "qwen2",
        lines,
        roles={"eos": PART + 2, "pad": PART, "bos": PART},
        flags={"add_bos_token": False},
        template=config["chat_template"],
    )
    files = files_of(words, tmp_path)
    ours = Tokenizer.from_buffer(content(files, "tokenizer.json"))
    check_equal(ours, lambda text: original.encode(text, add_special_tokens=False), texts)
    assert ours.encode("<|im_start|>user").ids == [PART + 1, 872]
    assert ours.token_to_id("[PAD20003]") is None
    assert content(files, "chat_template.jinja").decode() == config["chat_template"]
    assert json.loads(content(files, "tokenizer_config.json")) == {
        "bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "add_bos_token": False,
        "add_eos_token": False,
    }  # fmt: skip
    assert json.loads(content(files, "generation_config.json")) == {
        "bos_token_id": PART, "eos_token_id": [PART + 2, PART],
    }  # fmt: skip
    # With named templates, all are in the configuration: a file would take their place.
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    files = files_of(replace(words, template=named), tmp_path)
    assert not files.has("chat_template.jinja")
    assert json.loads(content(files, "tokenizer_config.json"))["chat_template"] == named


@real
def test_llama3(texts: list[str], tmp_path: Path) -> None:
    tiktoken = pytest.importorskip("tiktoken")
    ranks = tiktoken_ranks(TOKENIZERS / "llama3-tiktoken" / "tokenizer.model", PART)
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
        r"\s+(?!\S)|\s+"
    )
    original = tiktoken.Encoding("llama3", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    words = tiktoken_words(ranks, "llama-bpe")
    words.tokens.append(("<|begin_of_text|>", Types.CONTROL))
    words.roles = {"bos": len(ranks)}
    ours = tokenizer_of(words, tmp_path)
    check_equal(ours, original.encode_ordinary, texts)
    # The file does not say, and Llama 3 begins texts so.
    assert ours.encode("").ids == [len(ranks)]


def sentence_piece(name: str) -> tuple[Tokenizer, Words]:
    """The original and its metadata."""
    found = document(name)
    file = {
        "llama2-hf": TOKENIZERS / "llama2-hf" / "tokenizer.model",
        "phi3-mini": TOKENIZERS / "llama2-hf" / "tokenizer.model",
        "mistral-7b-instruct-v0.3": TOKENIZERS / "mistral-7b-instruct-v0.3" / "tokenizer.model.v3",
    }[name]
    words = sentence_piece_words(file, added(found), roles={"bos": 1, "eos": 2, "unk": 0})
    return Tokenizer.from_str(json.dumps(found)), words


@real
@pytest.mark.parametrize("name", ["llama2-hf", pytest.param("phi3-mini", marks=pytest.mark.slow),
                                  pytest.param("mistral-7b-instruct-v0.3", marks=pytest.mark.slow)])  # fmt: skip
def test_sentence_piece(name: str, texts: list[str], tmp_path: Path) -> None:
    original, words = sentence_piece(name)
    ours = tokenizer_of(words, tmp_path)
    if name.startswith("mistral"):
        # Its tokenizer.json puts no space before one; SentencePiece, and so a GGUF, puts one before every text.
        texts = [text for text in texts if not text.startswith(" ")]
    check_equal(ours, ids_of(original), texts)
    assert ours.encode("Hi").ids[0] == 1
    assert json.loads(ours.to_str())["model"]["merges"] == json.loads(original.to_str())["model"]["merges"]
    for text in texts:
        ids = ours.encode(text).ids
        assert ours.decode(ids) == original.decode(ids)


@pytest.mark.skipif(not STORIES.is_dir(), reason=f"{STORIES} is not on this machine")
def test_a_real_model_writes_what_it_wrote(texts: list[str], tmp_path: Path) -> None:
    """Its weights, its tokenizer and its configuration, all from one GGUF."""
    words = sentence_piece_words(STORIES / "tokenizer.model", roles={"bos": 1, "eos": 2, "unk": 0})
    path = write_gguf(STORIES, tmp_path / "s.gguf", "F32", tokenizer=words.add)
    source = open_source(path)
    assert source.config() == open_source(STORIES).config()
    original = Tokenizer.from_file(str(STORIES / "tokenizer.json"))
    with source.model_files().open("tokenizer.json") as file:
        check_equal(Tokenizer.from_buffer(file.read()), ids_of(original), texts)
    case = json.loads((STORIES / "golden_greedy.json").read_text())[0]
    ids, _ = PagedRunner(load_model(path)).greedy(case["prompt_ids"], len(case["greedy_ids"]))
    assert ids == case["greedy_ids"]


def test_without_a_space_before_texts(tmp_path: Path) -> None:
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "x", "y", "▁y", "[A]"]
    kinds = [Types.UNKNOWN, Types.CONTROL, Types.CONTROL, *[Types.BYTE] * 256, *[Types.NORMAL] * 4, Types.USER_DEFINED]
    words = Words(
        "llama",
        list(zip(texts, kinds, strict=True)),
        scores=[0.0] * len(texts),
        roles={"bos": 1, "eos": 2, "unk": 0},
        flags={"add_space_prefix": False, "add_bos_token": False, "add_eos_token": True},
    )
    ours = tokenizer_of(words, tmp_path)
    assert ours.encode("x y[A]z").tokens == ["x", "▁y", "[A]", "<0x7A>", "</s>"]
    assert ours.decode(ours.encode(" x é[A]").ids) == " x é[A]"
    words.flags = {}
    ours = tokenizer_of(words, tmp_path)
    assert ours.encode("x[A]x").tokens == ["<s>", "▁", "x", "[A]", "▁", "x"]
    assert ours.decode(ours.encode("x y").ids) == "x y"


GEMMA4 = {"<pad>": Types.CONTROL, "<eos>": Types.CONTROL, "<bos>": Types.CONTROL, "<unk>": Types.CONTROL,
          "<mask>": Types.CONTROL, "<turn|>": Types.CONTROL, "<|tool_response>": Types.USER_DEFINED}  # fmt: skip
BREAKS = [(left, right) for size in range(2, 6) for left in range(1, size) if (right := size - left)]
"""Line breaks in both parts of a merge, in the order of published files."""


def gemma4_words(texts: Sequence[str], breaks: Sequence[tuple[int, int]] = BREAKS) -> Words:
    """A small vocabulary of its kind, made of `texts`."""
    whole = Tokenizer(models.BPE())
    whole.normalizer = normalizers.Replace(" ", "▁")
    whole.pre_tokenizer = pre_tokenizers.Split(Regex("\n+"), "removed")
    special = [*GEMMA4, *(f"<0x{byte:02X}>" for byte in range(256)), *("\n" * count for count in range(1, 6))]
    whole.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=900, special_tokens=special, show_progress=False))
    found = json.loads(whole.to_str())["model"]
    kinds = {**dict.fromkeys(special[len(GEMMA4) : -5], Types.BYTE), **GEMMA4}
    tokens = [(text, kinds.get(text, Types.NORMAL)) for text in found["vocab"]]
    merges = [*("\n" * left + " " + "\n" * right for left, right in breaks), *map(" ".join, found["merges"])]
    roles = {"bos": 2, "eos": 1, "unk": 3, "pad": 0}
    flags = {"add_bos_token": False, "add_space_prefix": False}
    return Words("gemma4", tokens, merges=merges, scores=[-1000.0] * len(tokens), roles=roles, flags=flags)


def test_gemma_4(tmp_path: Path) -> None:
    from transformers import GemmaTokenizer

    prose = [file.read_text(encoding="utf-8") for file in sorted((ROOT / "docs").glob("g*.md"))]
    words = gemma4_words(prose)
    vocabulary = {text: token for token, (text, _) in enumerate(words.tokens)}
    pairs: Any = [tuple(merge.split(" ")) for merge in words.merges]
    original = GemmaTokenizer(vocab=vocabulary, merges=pairs)
    original.add_tokens(["<turn|>", "<|tool_response>"], special_tokens=True)
    files = files_of(words, tmp_path)
    ours = Tokenizer.from_buffer(content(files, "tokenizer.json"))
    runs = [f"a{chr(10) * count} b" for count in range(1, 40)]
    texts = [*ODD, *prose, *runs, "▁ ▁", "\n \n", "x<turn|>\n<|tool_response> y"]
    check_equal(ours, lambda text: original.encode(text, add_special_tokens=False), texts)
    for text in texts:
        decoded = ours.decode(ours.encode(text).ids[1:], skip_special_tokens=False)
        assert decoded == text.replace("▁", " ")
    assert ours.encode("\n\n\n\n\n").tokens == ["<bos>", "\n" * 5]
    assert ours.encode("<|tool_response>e<turn|>").tokens[1:] == ["<|tool_response>", "e", "<turn|>"]
    assert ours.encode("Ω\u0001").tokens[1:] == ["<0xCE>", "<0xA9>", "<0x01>"]
    assert json.loads(content(files, "generation_config.json")) == {"bos_token_id": 2, "eos_token_id": [1, 5, 6]}
    assert json.loads(content(files, "tokenizer_config.json"))["add_bos_token"] is True


@pytest.mark.parametrize("breaks", [[], [(1, 1)], [pair for pair in BREAKS if set(pair) != {2, 3}]])
def test_line_breaks_that_merges_do_not_join(breaks: list[tuple[int, int]], tmp_path: Path) -> None:
    """llama.cpp takes the tokens whole."""
    with pytest.raises(ModelError, match=r"merges do not make token \d+, of \d line breaks; compile with --no-tok"):
        content(files_of(gemma4_words(["a b"], breaks), tmp_path), "tokenizer.json")


def test_the_examples_tokenizer_and_every_pre_tokenizer(tmp_path: Path) -> None:
    """All of the regular expressions are taken by the library, and no text is lost in them."""
    found = json.loads((ROOT / "examples" / "tiny-chat" / "tokenizer.json").read_text(encoding="utf-8"))
    original = Tokenizer.from_str(json.dumps(found))
    ours = tokenizer_of(byte_level_words(found, "gpt-2"), tmp_path)
    check_equal(ours, ids_of(original), list(ODD))
    for pre in PRE_TOKENIZERS:
        ours = tokenizer_of(byte_level_words(found, pre), tmp_path)
        for text in ODD:
            # One of them composes characters.
            expected = unicodedata.normalize("NFC", text) if PRE_TOKENIZERS[pre].nfc else text
            assert ours.decode(ours.encode(text).ids, skip_special_tokens=False) == expected


PIECES: dict[str, list[str]] = {
    "gpt-2": ["it", "'s", " 1234", " x", "  ", " ABc", "!?"],
    "default": ["it", "'", "s", " ", "123", "4", " x", "  ", " ABc", "!?"],
    "qwen2": ["it", "'s", " ", "1", "2", "3", "4", " x", "  ", " ABc", "!?"],
    "llama-bpe": ["it", "'s", " ", "123", "4", " x", "  ", " ABc", "!?"],
    "starcoder": ["it", "'s", " ", "1", "2", "3", "4", " x", "  ", " ABc", "!?"],
    "falcon": ["it", "'", "s", " ", "123", "4", " x", "  ", " ABc", "!?"],
    "deepseek-llm": ["it", "'", "s", " ", "1234", " x", "  ", " ABc", "!?"],
    "deepseek-coder": ["it", "'", "s", " ", "1", "2", "3", "4", " x", "  ", " ABc", "!?"],
    "deepseek-v3": ["it", "'s", " ", "123", "4", " x", "  ", " ABc", "!?"],
    "tekken": ["it", "'s", " ", "1", "2", "3", "4", " x", "  ", " ABc", "!?"],
    "gpt-4o": ["it's", " ", "123", "4", " x", "  ", " ABc", "!?"],
}


def test_marks_are_parts_of_words_or_not(tmp_path: Path) -> None:
    found = json.loads((ROOT / "examples" / "tiny-chat" / "tokenizer.json").read_text(encoding="utf-8"))
    text = "\u0e01\u0e31\u0e19 \u0301a 12"
    cuts = {}
    for pre in ("qwen2", "qwen35"):
        ours = tokenizer_of(byte_level_words(found, pre), tmp_path)
        cuts[pre] = [text[begin:end] for _, (begin, end) in ours.pre_tokenizer.pre_tokenize_str(text)]
    assert cuts["qwen2"] == ["\u0e01", "\u0e31\u0e19", " \u0301", "a", " ", "1", "2"]
    assert cuts["qwen35"] == ["\u0e01\u0e31\u0e19", " \u0301a", " ", "1", "2"]


def test_cased_letters_are_told_from_others(tmp_path: Path) -> None:
    found = json.loads((ROOT / "examples" / "tiny-chat" / "tokenizer.json").read_text(encoding="utf-8"))
    ours = tokenizer_of(byte_level_words(found, "deepseek-llm"), tmp_path)
    # Of no case, in the list, out of it: a cut is where the kind changes.
    pieces = ours.pre_tokenizer.pre_tokenize_str("àºßéՐրωꝯꞐ")
    assert [end - begin for _, (begin, end) in pieces] == [1, 1, 3, 1, 2, 1]


@pytest.mark.parametrize("pre", PIECES)
def test_texts_are_cut_as_the_models_do(pre: str, tmp_path: Path) -> None:
    found = json.loads((ROOT / "examples" / "tiny-chat" / "tokenizer.json").read_text(encoding="utf-8"))
    ours = tokenizer_of(byte_level_words(found, pre), tmp_path)
    text = "it's 1234 x   ABc!?"
    pieces = [text[begin:end] for _, (begin, end) in ours.pre_tokenizer.pre_tokenize_str(text)]
    assert pieces == PIECES[pre]


WORDS = ["[PAD]", "[unused1]", "[UNK]", "[CLS]", "[SEP]", "un", "##happy", "##ly", "run", "##ning", "!", "é", "e", "中"]


def phantom(text: str) -> str:
    """As llama.cpp's converter marks pieces of BERT's."""
    if text.startswith("[") and text.endswith("]"):
        return text
    return text.removeprefix("##") if text.startswith("##") else f"▁{text}"


def test_word_pieces(tmp_path: Path) -> None:
    original = Tokenizer(models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    original.normalizer = normalizers.BertNormalizer(lowercase=True)
    original.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    kinds = [Types.CONTROL if word in ("[PAD]", "[UNK]", "[CLS]", "[SEP]") else Types.NORMAL for word in WORDS]
    tokens = [(phantom(word), kind) for word, kind in zip(WORDS, kinds, strict=True)]
    roles = {"bos": 3, "sep": 4, "unk": 2, "pad": 0}
    ours = tokenizer_of(Words("bert", tokens, "jina-v2-en", roles=roles), tmp_path)
    for text in ("Unhappyly running!", "É e 中中 zzz", ""):
        assert ours.encode(text, add_special_tokens=False).ids == original.encode(text).ids
    assert ours.encode("run").ids == [3, 8, 4]
    assert ours.encode("run", "un").ids == [3, 8, 4, 5, 4]
    assert ours.encode("run", "un").type_ids == [0, 0, 0, 1, 1]


def test_unigrams_of_an_encoder(tmp_path: Path) -> None:
    pieces = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁a", -1.0), ("b", -2.0), ("▁ab", -4.0)]
    kinds = [Types.CONTROL, Types.CONTROL, Types.CONTROL, Types.UNKNOWN, *[Types.NORMAL] * 3]
    tokens = [(text, kind) for (text, _), kind in zip(pieces, kinds, strict=True)]
    roles = {"bos": 0, "eos": 2, "unk": 3}
    words = Words("t5", tokens, scores=[score for _, score in pieces], roles=roles)
    ours = tokenizer_of(words, tmp_path)
    assert ours.encode("ab  a").ids == [0, 4, 5, 4, 2]
    assert ours.encode("a", "a").ids == [0, 4, 2, 2, 4, 2]


def small(**changes: Any) -> Words:
    fields: dict[str, Any] = {
        "model": "gpt2", "tokens": [("a", Types.NORMAL), ("b", Types.NORMAL), ("ab", Types.NORMAL)], "pre": "gpt-2",
        "merges": ["a b"],
    }  # fmt: skip
    return Words(**{**fields, **changes})


SPM: dict[str, Any] = {"model": "llama", "scores": [0.0, 0.0, -1.0], "merges": []}
BAD: dict[str, tuple[Words, str]] = {
    "model of another kind": (
        small(model="rwkv"),
        r"tokenizer\.ggml\.model is 'rwkv'.*one of gpt2, llama, bert, t5, gemma4",
    ),
    "pieces without an unknown one": (small(model="bert"), "has no unknown token"),
    "unknown pre-tokenizer": (
        small(pre="gpt-9"),
        r"tokenizer\.ggml\.pre is 'gpt-9'.*not one of default, gpt-2, .*no-tok",
    ),
    "no merges": (small(merges=[]), r"lacks the metadata tokenizer\.ggml\.merges"),
    "merges of no tokens": (small(merges=["a b", "ab a"]), r"element 1 of tokenizer\.ggml\.merges is 'ab a'"),
    "half a merge": (small(merges=["ab"]), r"element 0 of tokenizer\.ggml\.merges is 'ab'"),
    "no scores": (small(**{**SPM, "scores": []}), r"lacks the metadata tokenizer\.ggml\.scores"),
    "too few scores": (small(**{**SPM, "scores": [0.0]}), r"scores is an array of 1 where a list of 3 scores"),
    "a score that is no number": (
        small(**{**SPM, "scores": [0.0, float("nan"), 0.0]}),
        r"element 1 of tokenizer\.ggml\.scores is nan",
    ),
    "a byte that is none": (
        small(**SPM, tokens=[("a", Types.NORMAL), ("b", Types.BYTE), ("ab", Types.NORMAL)]),
        "token 'b' has the type of a byte",
    ),
    "a token that is not there": (small(roles={"eos": 3}), r"eos_token_id is 3 where an integer from 0 to 2"),
    "an endless piece": (
        small(**SPM, tokens=[("a", Types.NORMAL), ("b", Types.NORMAL), ("a" * 5000, Types.NORMAL)]),
        "token 2 has 5000 characters",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_metadata_is_one_sentence(case: str, tmp_path: Path) -> None:
    words, message = BAD[case]

    def read() -> None:
        files = files_of(words, tmp_path)
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            assert files.has(name)

    with pytest.raises(ModelError, match=message):
        read()
