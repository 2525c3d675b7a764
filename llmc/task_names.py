"""Tasks, poolings and prompts, as `--task`, `--pooling` and `--rank-prompt` name them."""

from __future__ import annotations

TASKS = ("auto", "generate", "embed", "rank", "classify")
"""auto: the task according to the model's files."""
POOLINGS = ("auto", "mean", "cls", "last")
"""Rows of a text that its embedding is made from: all, the first, the last. auto: according to the model's files."""
RANK_PROMPTS = ("auto", "none", "qwen3-reranker")
"""Prompts around a query and a document. none: the tokenizer's own pair. auto: according to the model's files."""
