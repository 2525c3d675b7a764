"""What `--dataset` names: random tokens, a trace or a file of prompts."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from llmc.buckets.trace import Trace, read_trace
from llmc.buckets.trace_text import STDIN, is_packed
from llmc.regular_file import open_regular
from llmc.runtime.loadgen.error import BenchError
from llmc.runtime.offline.prompts import read_file

_PROMPT_KEYS = ("prompt", "prompt_token_ids", "messages")

Source = Trace | list[Any] | None


def read_dataset(name: str) -> Source:
    """None for random tokens, a Trace, or the prompts of a file. Raises BenchError, PromptError or TraceError."""
    if name == "random":
        return None
    path = Path(name)
    try:
        if path == STDIN or is_packed(path):
            return read_trace(path)
        with io.TextIOWrapper(open_regular(path), encoding="utf-8-sig") as lines:
            first = next((line for line in lines if line.strip()), "")
    except OSError as error:
        raise BenchError(f'cannot read --dataset {path}: {error.strerror or error}; "random" needs no file') from error
    except UnicodeDecodeError as error:
        raise BenchError(f"--dataset {path} is not UTF-8 text: it is neither a prompts file nor a trace") from error
    if path.suffix == ".txt" or (first.startswith("{") and any(f'"{key}"' in first for key in _PROMPT_KEYS)):
        return [_prompt(item) for item in read_file(path)]
    return read_trace(path)


def _prompt(item: Any) -> Any:
    if item.messages is not None:
        return list(item.messages)
    return item.text if item.token_ids is None else list(item.token_ids)
