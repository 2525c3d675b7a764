"""What a model can be compiled for, as `--task` names it."""

from __future__ import annotations

TASKS = ("auto", "generate", "embed", "rank", "classify")
"""auto: what the model's files say it is for."""
