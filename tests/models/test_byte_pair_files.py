"""vocab.json and merges.txt become tokenizer.json: the ids of texts are those of transformers' classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import CodeGenTokenizer, GPT2Tokenizer, PreTrainedTokenizerBase, Qwen2Tokenizer

from llmc.compiler.config import CompileError
from llmc.compiler.store.artifact import copied_files, copy_files
from llmc.models import ModelError
from llmc.models.sources.byte_pair_files import BYTE_PAIR_FILES
from llmc.models.sources.tokenizer_files import TokenizerFolderFiles
from llmc.models.tokenizers.byte_level import BYTE_LETTERS

from support.gguf_tokenizers import real_texts
from support.paths import SHARED

TOKENIZERS = SHARED / "tokenizers"
real = pytest.mark.skipif(not TOKENIZERS.is_dir(), reason=f"no tokenizers at {TOKENIZERS}")
END = "<|endoftext|>"
PART = 8000
"""Of a large vocabulary the first so many tokens are one, too."""
Files = dict[str, Any]


def write(folder: Path, files: Files) -> Path:
    folder.mkdir()
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def made_in(folder: Path) -> Tokenizer:
    """What an artifact of the folder has."""
    files = TokenizerFolderFiles(folder)
    out = folder / "artifact"
    out.mkdir()
    copy_files(files, out, copied_files(files, "required"))
    return Tokenizer.from_file(str(out / "tokenizer.json"))


def part_of(folder: Path, vocabulary: str, merges: str) -> tuple[list[str], str]:
    """(tokens by id, merges.txt) of the first tokens."""
    ids = json.loads((folder / vocabulary).read_text(encoding="utf-8"))
    tokens = sorted(ids, key=ids.__getitem__)[:PART]
    known, lines = set(tokens), (folder / merges).read_text(encoding="utf-8").split("\n")
    return tokens, "\n".join(line for line in lines if line.startswith("#v") or line.replace(" ", "") in known)


def by_text(tokens: list[str]) -> dict[str, int]:
    return {text: number for number, text in enumerate(tokens)}


def token(content: str, **flags: bool) -> dict[str, Any]:
    """As the files of older versions of transformers state a token."""
    return {"__type": "AddedToken", "content": content, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": True, **flags}  # fmt: skip


def gpt2() -> Files:
    tokens, merges = part_of(TOKENIZERS / "gpt2", "encoder.json", "vocab.bpe")
    return {
        "vocab.json": by_text([*tokens, END]), "merges.txt": merges, "config.json": {"model_type": "gpt2"},
        "tokenizer_config.json": {"model_max_length": 1024},
    }  # fmt: skip


def opt() -> Files:
    tokens, merges = part_of(TOKENIZERS / "gpt2", "encoder.json", "vocab.bpe")
    roles = {"bos_token": token("</s>"), "eos_token": token("</s>"), "unk_token": token("</s>")}
    return {
        "vocab.json": by_text(["<s>", "<pad>", "</s>", "<unk>", *tokens]), "merges.txt": merges,
        "tokenizer_config.json": {
            **roles, "pad_token": token("<pad>"), "add_bos_token": True, "add_prefix_space": False,
            "errors": "replace", "tokenizer_class": "GPT2Tokenizer",
        },
        "special_tokens_map.json": {
            **{role: {k: v for k, v in one.items() if k != "__type"} for role, one in roles.items()},
            "pad_token": "<pad>",
        },
    }  # fmt: skip


def codegen() -> Files:
    """Runs of spaces and tabs are tokens that only added_tokens.json lists."""
    files = gpt2()
    runs = [" " * count for count in range(31, 1, -1)] + ["\t" * count for count in range(9, 1, -1)]
    files["added_tokens.json"] = {text: PART + 1 + number for number, text in enumerate(runs)}
    files["tokenizer_config.json"] = {
        "bos_token": END, "eos_token": END, "unk_token": END, "add_prefix_space": False,
        "tokenizer_class": "CodeGenTokenizer",
    }  # fmt: skip
    files["special_tokens_map.json"] = {"bos_token": END, "eos_token": END, "unk_token": END}
    return files


def spaced() -> Files:
    """With flags of added tokens that few checkpoints have, and a space before every text."""
    files = gpt2()
    flags: dict[str, Any] = {"single_word": True, "lstrip": False, "rstrip": False, "normalized": False}
    files["tokenizer_config.json"] = {
        "tokenizer_class": "GPT2TokenizerFast", "add_prefix_space": True, "bos_token": "[B]", "unk_token": None,
        "mask_token": token("[M]", lstrip=True, special=True), "image_token": "[I]", "add_eos_token": True,
        "additional_special_tokens": ["[X]"],
        "added_tokens_decoder": {
            str(PART): {"content": END, **flags, "special": True},
            str(PART + 1): {"content": "wxyz", **flags, "special": False},
            str(PART + 2): {"content": "[W]", **flags, "lstrip": True, "rstrip": True, "special": False},
        },
    }  # fmt: skip
    return files


def qwen2() -> Files:
    tokens, merges = part_of(TOKENIZERS / "qwen2-0.5b", "vocab.json", "merges.txt")
    settings = json.loads((TOKENIZERS / "qwen2-0.5b" / "tokenizer_config.json").read_text(encoding="utf-8"))
    listed = settings["added_tokens_decoder"].values()
    settings["added_tokens_decoder"] = {str(PART + number): one for number, one in enumerate(listed)}
    return {"vocab.json": by_text(tokens), "merges.txt": merges, "tokenizer_config.json": settings}


KINDS: dict[str, tuple[Any, type[PreTrainedTokenizerBase]]] = {
    "gpt2": (gpt2, GPT2Tokenizer),
    "opt": (opt, GPT2Tokenizer),
    "codegen": (codegen, CodeGenTokenizer),
    "spaced": (spaced, GPT2Tokenizer),
    "qwen2": (qwen2, Qwen2Tokenizer),
}
ODD = [
    END, f"a{END}b {END} c", "</s>x<pad> <unk><s>", "<|im_start|>user\nHi<|im_end|>\n", "    x\n\t\t\ty   \t  z",
    " " * 70, "[B] [M][I]x [X]", "a wxyz, wxyzwxyz [W]  the", "e\u0301 \u1100\u1161\u11a8 ﬁ ™",
    "🇩🇪👍🏽👩\u200d👩\u200d👧", "क्षि ลำ مرحبا",
    "\u00a0\u3000\u200b\ufeff\x7f\x00", "'S 'll'LL", "x" * 300,
]  # fmt: skip


@real
@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_texts_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    files, original_class = KINDS[kind]
    folder = write(tmp_path / "m", files())
    original, ours = original_class.from_pretrained(folder), made_in(folder)
    assert ours.get_vocab() == original.get_vocab()
    wrong = []
    for text in [*ODD, *real_texts()]:
        for added in (True, False):
            found, expected = (
                ours.encode(text, add_special_tokens=added).ids,
                original.encode(text, add_special_tokens=added),
            )
            if found != expected:
                wrong.append((text[:60], found[:20], expected[:20]))
        for skipped in (True, False):
            assert ours.decode(expected, skip_special_tokens=skipped) == original.decode(
                expected, skip_special_tokens=skipped, clean_up_tokenization_spaces=False
            )
    assert not wrong[:3], f"{len(wrong)} texts differ"
    pair = ours.encode("a", "b").ids
    assert pair == original("a", "b")["input_ids"]
    if kind == "opt":
        assert pair == [2, *ours.encode("a", add_special_tokens=False).ids, 2, *ours.encode("b").ids[1:]]


def small(**changed: Any) -> Files:
    tokens = [*BYTE_LETTERS, "ab", END]
    return {
        "vocab.json": by_text(tokens), "merges.txt": "#version: 0.2\na b\n",
        "tokenizer_config.json": {"tokenizer_class": "GPT2Tokenizer"}, **changed,
    }  # fmt: skip


BAD: dict[str, tuple[Files, str]] = {
    "of other code": (
        small(**{"tokenizer_config.json": {"tokenizer_class": "BartTokenizer"}}),
        "tokenizer_class 'BartTokenizer', not one of GPT2Tokenizer.*save_pretrained.*--no-tokenizer",
    ),
    "of an unknown model": (
        small(**{"tokenizer_config.json": {}, "config.json": {"model_type": "bart"}}),
        "model_type 'bart', without a tokenizer_class, not one of gpt2",
    ),
    "no ids": (small(**{"vocab.json": {"a": 0, "b": 2}}), "ids of its 2 tokens are not 0, 1, 2"),
    "no tokens": (small(**{"vocab.json": {}}), "ids of its 0 tokens"),
    "no JSON": (small(**{"vocab.json": "{"}), "is not valid JSON"),
    "half a merge": (small(**{"merges.txt": "a b\nab"}), "line 2 does not merge two tokens"),
    "a merge to nothing": (small(**{"merges.txt": "b a"}), "line 1 does not merge two tokens"),
    "a bad id": (small(**{"added_tokens.json": {"x": -1}}), "-1 is not a token id"),
    "an id far away": (small(**{"added_tokens.json": {"x": 1 << 40}}), "1099511627776 is not a token id"),
    "an id of another": (small(**{"added_tokens.json": {"x": 3}}), "token 'x' has the id 3, which vocab.json contra"),
    "another id": (small(**{"added_tokens.json": {"ab": 300}}), "token 'ab' has the id 300, which vocab.json contra"),
    "a list": (
        small(**{"tokenizer_config.json": {"tokenizer_class": "GPT2Tokenizer", "added_tokens_decoder": [1]}}),
        "which is no object",
    ),
    "spaces in Qwen": (
        small(**{"tokenizer_config.json": {"tokenizer_class": "Qwen2Tokenizer", "add_prefix_space": True}}),
        "add_prefix_space is true",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_used_is_said_at_compile_time(case: str, tmp_path: Path) -> None:
    files, said = BAD[case]
    with pytest.raises((CompileError, ModelError), match=said):
        made_in(write(tmp_path / "m", files))


def test_one_of_the_files_is_not_enough(tmp_path: Path) -> None:
    for number, name in enumerate(BYTE_PAIR_FILES):
        folder = write(tmp_path / str(number), {name: "{}"})
        assert not TokenizerFolderFiles(folder).has("tokenizer.json")
