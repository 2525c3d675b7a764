"""Rewrites the engine's errors with flags of the command line in place of API options."""

from __future__ import annotations

import re

# Names in llmc.h and LLM; if two mean the same, the command line has one flag.
_FLAGS = {
    "kv_bytes or num_blocks": "--kv-bytes",
    "kv_bytes": "--kv-bytes",
    "num_states": "--num-states",
    "max_num_seqs": "--max-num-seqs",
    "max_tokens_per_step": "--max-num-batched-tokens",
    "max_waiting": "--max-queue",
    "The option threads of a device of kind 'cpu'": "--threads",
}
_NAMES = re.compile("|".join(rf"(?<!\w){re.escape(name)}(?!\w)" for name in _FLAGS))


def in_flags(message: str) -> str:
    """An error of the engine with flags in place of its options."""
    return _NAMES.sub(lambda found: _FLAGS[found[0]], message)
