"""Incremental detokenization and stop strings, with tokenizers trained here."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from llmc.runtime.text.detokenizer import Detokenizer, OutputText, StopStrings

CORPUS = [
    "Once upon a time there was a little fox.",
    "The fox saw the sea, and the sea saw the fox.",
    "naïve café €",
] * 4


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=alphabet, special_tokens=["<s>"], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def byte_fallback() -> Tokenizer:
    """The form of Llama's tokenizer: metaspace text with byte tokens for what the vocabulary lacks."""
    words = ["<s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghijklmnopqrstuvwxyzOT,."]
    tokenizer = Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


TOKENIZERS = {"byte_level": byte_level(), "byte_fallback": byte_fallback()}
# Private-use and replacement characters aside, any text; much of it needs several byte tokens a character.
texts = st.text(
    alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd▁"), min_size=1, max_size=24
)


def decoder(tokenizer: Tokenizer) -> Callable[[Sequence[int]], str]:
    return lambda ids: tokenizer.decode(list(ids))


@pytest.mark.parametrize("name", list(TOKENIZERS))
@settings(max_examples=150, deadline=None)
@given(text=texts)
def test_pieces_join_to_the_whole_and_are_whole_characters(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text).ids
    detokenizer = Detokenizer(decoder(tokenizer))
    pieces = [detokenizer.push(token) for token in ids]
    assert all("\ufffd" not in piece for piece in pieces)
    assert "".join(pieces) + detokenizer.finish() == tokenizer.decode(ids)


@pytest.mark.parametrize("name", list(TOKENIZERS))
def test_space_after_the_prompt_is_kept(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    prompt, full = tokenizer.encode("the fox").ids, tokenizer.encode("the fox saw the sea").ids
    assert full[: len(prompt)] == prompt
    detokenizer = Detokenizer(decoder(tokenizer), prompt)
    assert "".join(detokenizer.push(token) for token in full[len(prompt) :]) == " saw the sea"


@pytest.mark.parametrize("name", list(TOKENIZERS))
def test_character_cut_off_at_the_end_is_dropped(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode("a 🦊").ids[:-1]
    detokenizer = Detokenizer(decoder(tokenizer))
    assert "".join(map(detokenizer.push, ids)) + detokenizer.finish() in ("a ", "a")


@pytest.mark.parametrize("name", list(TOKENIZERS))
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_random_ids_never_fail(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    token = st.integers(0, tokenizer.get_vocab_size() - 1)
    prompt, ids = data.draw(st.lists(token, max_size=12)), data.draw(st.lists(token, min_size=1, max_size=40))
    detokenizer = Detokenizer(decoder(tokenizer), prompt)
    assert isinstance("".join(map(detokenizer.push, ids)) + detokenizer.finish(), str)


@given(
    st.lists(st.text(alphabet="ab", max_size=3), max_size=12),
    st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_stop_strings_agree_with_a_search_of_the_whole(pieces: list[str], stops: list[str]) -> None:
    whole, found, shown = "", None, ""
    finder = StopStrings(stops)
    for piece in pieces:
        whole += piece
        text, found = finder.push(piece)
        shown += text
        # Nothing shown may ever have to be taken back.
        assert whole.startswith(shown)
        if found is not None:
            break
    else:
        shown += finder.finish()
    ends = [whole.find(stop) for stop in stops if stop in whole]
    assert (found is None) == (not ends)
    assert shown == (whole[: min(ends)] if ends else whole)


def test_stop_string_across_tokens_ends_the_text() -> None:
    tokenizer = TOKENIZERS["byte_fallback"]
    output = OutputText(decoder(tokenizer), [], ["the sea"], min_tokens=0)
    shown = ""
    for token in tokenizer.encode("fox saw the sea and more").ids:
        shown += output.push(token)
        assert "the s" not in shown
    assert output.stop_reason == "the sea"
    assert shown + output.finish() == "fox saw "


def test_stop_before_min_tokens_is_let_through() -> None:
    tokenizer = TOKENIZERS["byte_fallback"]
    output = OutputText(decoder(tokenizer), [], ["a"], min_tokens=6)
    shown = "".join(output.push(token) for token in tokenizer.encode("abcabcabc").ids)
    assert (shown + output.finish(), output.stop_reason) == ("abcabc", "a")


@pytest.mark.parametrize("name", list(TOKENIZERS))
def test_a_shown_end_reads_on_from_the_text(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    *tokens, end = tokenizer.encode("the sea and the fox").ids
    output = OutputText(decoder(tokenizer), [], ["fox"], min_tokens=0)
    shown = "".join(output.push(token) for token in tokens)
    assert shown + output.finish(end) == decoder(tokenizer)([*tokens, end])
    assert output.stop_reason is None


def test_held_back_text_comes_at_the_end() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    output = OutputText(decoder(tokenizer), [], ["fox!"], min_tokens=0)
    shown = "".join(output.push(token) for token in tokenizer.encode("the fox").ids)
    assert shown + output.finish() == "the fox"
