"""The calibration text as windows of tokens."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.config import CompileError
from llmc.compiler.model_tokenizer import tokenizer_of
from llmc.models.sources.base import ModelFiles

_CHARS_A_TOKEN = 64  # characters read per token wanted; the rest of a text is ignored


def calibration_windows(files: ModelFiles, text: str, samples: int, length: int, longest: int) -> NDArray[np.int32]:
    """Windows [windows, tokens] spread evenly over the text; each begins like a prompt of the model.

    longest: most tokens that the model can read at once. A text shorter than one window becomes one shorter window.
    Raises CompileError.
    """
    tokenizer = tokenizer_of(files, "calibration text", "use --method rtn")
    first = tokenizer.encode("").ids
    length = min(length, longest)
    kept = text[: samples * length * _CHARS_A_TOKEN]
    tokens = tokenizer.encode(kept, add_special_tokens=False).ids
    each = max(1, length - len(first))
    if len(tokens) < 2:
        raise CompileError("--calibration: the text has less than two tokens; give a longer one")
    count = len(tokens) // each
    if not count:
        return np.array([first + tokens], np.int32)
    chosen = range(count) if count <= samples else [i * count // samples for i in range(samples)]
    return np.array([first + tokens[i * each : (i + 1) * each] for i in chosen], np.int32)
