"""Records the traffic of a server as a trace: arrival times and lengths of requests, never their text.

The format is llmc's own JSONL, which `llmc buckets plan` and `llmc bench serve` read.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from llmc.regular_file import open_regular

from .line_file import LineFile

if TYPE_CHECKING:
    from .requests import EngineRequest, RequestRecord

PREFIX_BLOCK = 128
_HEADER = json.dumps({"llmc_trace": 1, "prefix_block": PREFIX_BLOCK})
_MAX_PREFIX_IDS = 8192  # keeps a line below the reader's limit


class TraceFileError(ValueError):
    """The file to record into is something else than a trace; the message is one sentence."""


class TraceRecorder:
    """Appends a line for each request that the engine finished, and for failed and cancelled ones that got a token.

    on_submit is optional; with it the lines show which prompts share a prefix. max_bytes: a larger file is renamed to
    FILE.1. Raises OSError when the file cannot be opened, and TraceFileError when it is not a trace.
    """

    def __init__(self, path: Path, max_bytes: int | None = None) -> None:
        _check_is_trace(path)
        self._file = LineFile(path, max_bytes=max_bytes, header=_HEADER)
        self._prefixes = _PrefixIds()
        self._pending: dict[str, list[int]] = {}
        self._lock = threading.Lock()
        self._epoch_s = time.time() - time.monotonic_ns() / 1e9

    def on_submit(self, request: EngineRequest) -> None:
        """Records the hashes of a prompt's leading blocks."""
        ids = self._prefixes.of(request.prompt_token_ids)
        if ids:
            with self._lock:
                self._pending[request.request_id] = ids

    def on_record(self, record: RequestRecord) -> None:
        """Writes the line of a request that ended."""
        with self._lock:
            prefix_ids = self._pending.pop(record.request_id, None)
        if record.num_output_tokens == 0 and any(reason != "stop" for reason in record.finish_reasons):
            return  # refused, cancelled or failed before its first token: no evidence about lengths
        # A trace has one output length per request: the average of its continuations.
        outputs = max(1, len(record.finish_reasons))
        line: dict[str, Any] = {
            "arrival_s": round(self._epoch_s + record.arrival_ns / 1e9, 6),
            "prompt_tokens": record.num_prompt_tokens,
            "output_tokens": -(-record.num_output_tokens // outputs),
        }
        if prefix_ids:
            line["prefix_ids"] = prefix_ids
        self._file.write(json.dumps(line, separators=(",", ":")))

    def reopen(self) -> None:
        """Opens the path again after a rotator renamed the file."""
        self._file.reopen()

    def close(self) -> None:
        self._file.close()


class _PrefixIds:
    """Ids of leading blocks that reveal only equal prefixes: hashes under a key that exists only in this process."""

    def __init__(self) -> None:
        self._key = os.urandom(32)

    def of(self, token_ids: Sequence[int]) -> list[int]:
        """One id per full block, covering all tokens up to the block's end."""
        count = min(len(token_ids) // PREFIX_BLOCK, _MAX_PREFIX_IDS)
        data = np.asarray(token_ids[: count * PREFIX_BLOCK], np.int32).tobytes()
        chain = blake2b(key=self._key, digest_size=8)
        ids = []
        for start in range(0, len(data), PREFIX_BLOCK * 4):
            chain.update(data[start : start + PREFIX_BLOCK * 4])
            ids.append(int.from_bytes(chain.digest(), "little", signed=True) & (2**53 - 1))
        return ids


def _check_is_trace(path: Path) -> None:
    try:
        with open_regular(path) as file:
            first = file.readline(4096)
    except FileNotFoundError:
        return
    except OSError as error:
        raise TraceFileError(f"cannot continue the trace {path}: {error.strerror or error}") from None
    if first and first.strip() != _HEADER.encode():
        raise TraceFileError(f"{path} exists and is not a trace that llmc recorded: choose another file")
