"""Sampling on a device: its stages, and the sizes that kernels and devices must agree on (FORMAT.md). Imports no
tvm."""

from __future__ import annotations

from llmc.compiler.kernel_spec import BUFFERS, KernelSpec

OPERANDS = {
    "sample_mask": 5, "sample_edit": 3, "sample_scan": 5, "sample_sum": 5, "sample_best": 3, "sample_draw": 7,
    "sample_top": 9, "sample_rank": 5, "sample_feed": 2,
}  # fmt: skip
"""The stages in order, with their operand counts."""
SAMPLING_LEVEL = 1
"""The level of devices that know all stages."""
STAGES = tuple(OPERANDS)
"""A stage's number in its kernel's launch facts is its index here plus 1."""
PIECE = 4096
"""Elements of a row per group."""
SPAN = 512
"""Elements summed in eight chains, as in sampling/logit_rows.h."""
SORTED = 2048
"""Most logits that a group sorts."""
CANDIDATES = 1024
"""Most sorted logits that are examined."""
_LEAST_BLOCKS = 4 * CANDIDATES
_MOST_BLOCK = 64


def sampling_specs(vocab: int) -> list[KernelSpec]:
    """The sampling kernels for a vocabulary of `vocab` tokens."""
    return [KernelSpec.of("other", op, vocab=vocab, **{BUFFERS: count}) for op, count in OPERANDS.items()]


def block_of(vocab: int) -> int:
    """Elements per block, of which the maximum is kept; small, so that few blocks hold candidates."""
    block = _MOST_BLOCK
    while block > 1 and vocab // block < _LEAST_BLOCKS:
        block //= 2
    return block


def candidates_of(vocab: int) -> int:
    return min(vocab, CANDIDATES)
