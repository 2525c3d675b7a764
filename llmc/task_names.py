"""Tasks and poolings, as `--task` and `--pooling` name them."""

from __future__ import annotations

TASKS = ("auto", "generate", "embed", "rank", "classify")
"""auto: the task according to the model's files."""
POOLINGS = ("auto", "mean", "cls", "last")
"""Rows of a text that its embedding is made from: all, the first, the last. auto: according to the model's files."""
