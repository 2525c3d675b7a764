"""A tokenizer of words, of any size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers


def save_words(folder: Path, count: int, special: Sequence[str] = ("[UNK]",)) -> None:
    """Writes tokenizer.json: special tokens, [UNK] among them, then w0, w1, …, `count` in all."""
    words = {word: i for i, word in enumerate((*special, *(f"w{i}" for i in range(count - len(special)))))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
