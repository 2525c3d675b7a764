"""Sampling on a device: its stages, and the sizes that kernels and devices agree on (FORMAT.md). Imports no tvm."""

from __future__ import annotations

from llmc.compiler.kernel_spec import BUFFERS, KernelSpec

OPERANDS = {
    "sample_mask": 5, "sample_edit": 3, "sample_scan": 5, "sample_sum": 5, "sample_best": 3, "sample_draw": 7,
    "sample_top": 9, "sample_rank": 5,
}  # fmt: skip
"""Stages in order, and how many operands each has."""
STAGES = tuple(OPERANDS)
"""A stage's number, in its kernel's launch facts, is its place here and one."""
PIECE = 4096
"""Elements of a row that a group works on."""
SPAN = 512
"""Elements that are added up in eight chains, as sampling/logit_rows.h has it."""
SORTED = 2048
"""Logits that a group sorts at most."""
CANDIDATES = 1024
"""Of them, those that are looked at."""
_LEAST_BLOCKS = 4 * CANDIDATES
_MOST_BLOCK = 64


def sampling_specs(vocab: int) -> list[KernelSpec]:
    """The kernels that draw tokens of such a vocabulary."""
    return [KernelSpec.of("other", op, vocab=vocab, **{BUFFERS: count}) for op, count in OPERANDS.items()]


def block_of(vocab: int) -> int:
    """Elements of a block whose largest one is kept: many blocks, so that few of them hold a candidate."""
    block = _MOST_BLOCK
    while block > 1 and vocab // block < _LEAST_BLOCKS:
        block //= 2
    return block


def candidates_of(vocab: int) -> int:
    return min(vocab, CANDIDATES)
