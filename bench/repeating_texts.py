"""Texts that repeat their prompts more or less, from local data sets: (prompt, answer) as token ids.

    edit     a Python function of HumanEval, and the same function with a variable renamed
    summary  paragraphs of WikiText-2, and every second of their sentences, each behind other words
    answer   a question of GSM8K, and its answer, which repeats little of it
    article  a line, and some paragraphs of WikiText-2 that have nothing to do with it

Ids are renumbered by first use, since the model has fewer tokens than the tokenizer.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path

KINDS = ("edit", "summary", "answer", "article")
Pair = tuple[list[int], list[int]]


def pairs(kind: str, folder: Path, tokenizer_folder: Path, count: int, most: int) -> list[Pair]:
    """The first `count` pairs with at most `most` tokens together and at least 64 in the answer. Raises ValueError if
    there are fewer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    numbers: dict[int, int] = {}

    def ids(text: str) -> list[int]:
        return [
            numbers.setdefault(token, len(numbers) + 1) for token in tokenizer.encode(text, add_special_tokens=False)
        ]

    found: list[Pair] = []
    for prompt, answer in {"edit": _edits, "summary": _summaries, "answer": _answers, "article": _articles}[kind](
        folder
    ):
        pair = ids(prompt), ids(answer)
        if len(pair[1]) >= 64 and len(pair[0]) + len(pair[1]) <= most:
            found.append(pair)
        if len(found) == count:
            return found
    raise ValueError(f"{folder} has {len(found)} texts of kind {kind} that fit, of {count}")


def _edits(folder: Path) -> Iterator[tuple[str, str]]:
    with gzip.open(folder / "humaneval" / "HumanEval.jsonl.gz", "rt", encoding="utf-8") as file:
        for line in file:
            task = json.loads(line)
            code = task["prompt"] + task["canonical_solution"]
            name = re.search(r"def \w+\(\s*(\w+)", code)
            if name is not None:
                yield f"Rename {name[1]}:\n{code}", re.sub(rf"\b{name[1]}\b", "given_values", code)


def _summaries(folder: Path) -> Iterator[tuple[str, str]]:
    (path,) = (folder / "wikitext-2-raw").glob("*.txt")
    for paragraph in path.read_text(encoding="utf-8").split("\n"):
        sentences = [one.strip() for one in paragraph.split(" . ") if one.strip()]
        if len(sentences) >= 5 and not paragraph.startswith(" ="):
            kept = [f"The text says that {one}" for one in sentences[::2]]
            yield paragraph, " . ".join(kept)


def _articles(folder: Path) -> Iterator[tuple[str, str]]:
    (path,) = (folder / "wikitext-2-raw").glob("*.txt")
    lines = [line for line in path.read_text(encoding="utf-8").split("\n") if len(line) > 400]
    for start in range(0, len(lines), 4):
        yield "Write an article .", "\n".join(lines[start : start + 4])


def _answers(folder: Path) -> Iterator[tuple[str, str]]:
    for line in (folder / "gsm8k" / "test.jsonl").read_text(encoding="utf-8").splitlines():
        task = json.loads(line)
        yield task["question"], task["answer"]
