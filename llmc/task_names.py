"""What a model can be compiled for, as `--task` and `--pooling` name it."""

from __future__ import annotations

TASKS = ("auto", "generate", "embed", "rank", "classify")
"""auto: what the model's files say it is for."""
POOLINGS = ("auto", "mean", "cls", "last")
"""Which rows of a text its embedding is made of: all, the first, the last; auto: as the model's files say."""
