"""The tokenizer: long texts as short ones, texts of too many tokens, and a library that panics."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tokenizers import Regex, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from llmc.runtime.request_error import RequestError
from llmc.runtime.text.tokenizer import Tokenizer, TooManyTokens

from support.paths import ROOT


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(ROOT / "examples" / "tiny-chat")


def test_a_long_text_has_the_ids_that_the_library_gives(tokenizer: Tokenizer) -> None:
    backend = Backend.from_file(str(ROOT / "examples" / "tiny-chat" / "tokenizer.json"))
    backend.no_truncation()
    pick = random.Random(1)
    text = "".join(
        pick.choice(["the ", "cat", "\n", "é", "  ", "<|im_start|>", "x", "\U0001f600"]) for _ in range(20_000)
    )
    for special in (True, False):
        ids = tokenizer.encode(text, add_special_tokens=special)
        assert ids == backend.encode(text, add_special_tokens=special).ids
        assert tokenizer.decode(ids) == backend.decode(ids)


@pytest.mark.parametrize("length", [100, 10_000])
def test_more_tokens_than_are_taken_are_counted(tokenizer: Tokenizer, length: int) -> None:
    text = "one " * length
    ids = tokenizer.encode(text)
    assert tokenizer.encode(text, most=len(ids)) == ids
    with pytest.raises(TooManyTokens) as caught:
        tokenizer.encode(text, most=len(ids) - 1)
    assert caught.value.num_tokens == len(ids)


@pytest.mark.parametrize("length", [30, 5000])
def test_a_panic_of_the_library_is_a_request_error(tmp_path: Path, length: int) -> None:
    backend = Backend(BPE({"a": 0}, [], unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"(a+)+$"), "isolated")
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(RequestError, match=r"cannot tokenize the prompt: .*retry-limit"):
        Tokenizer(tmp_path).encode("a" * length + "!")


@pytest.mark.parametrize("length", [1, 5000])
def test_half_a_surrogate_pair_is_not_text(tokenizer: Tokenizer, length: int) -> None:
    with pytest.raises(RequestError, match=r"cannot tokenize the prompt: .*not UTF-8"):
        tokenizer.encode("a" * length + "\udcff")


def test_an_interrupt_is_no_panic(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        def encode(self, *_: object, **__: object) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr(tokenizer, "_backend", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        tokenizer.encode("x")
