"""The llmc op of Mamba-2's states; `delta_ops.py` has the convolution before it, and says where states lie."""

# torch reads op schemas from the annotations, so they must be types, not strings.

import torch
from torch import Tensor

from llmc.models.ops import llmc_op
from llmc.models.reference import active_cache, state_tokens


@llmc_op("selective_state")
def selective_state(
    xbc: Tensor,
    steps: Tensor,
    skip: Tensor,
    state_slots: Tensor,
    query_start: Tensor,
    positions: Tensor,
    layer: int,
    groups: int,
    state_size: int,
) -> Tensor:
    """Mamba-2's selective state space (https://arxiv.org/abs/2405.21060) over each sequence: float32 [T, H head_dim].

    xbc: float32 [T, H head_dim + 2 groups state_size], inputs of heads, then for each group the direction b of writes,
    then that of reads, c. steps: float32 [T, 2 H], of each head the step, then what its state keeps. skip: float32 [H].
    Equally many neighbouring heads use each group. A token x makes state = kept · state + step · x bᵀ. Its result is
    state · c + skip · x. A sequence begins with a state of zeros, float32 [H, head_dim, state_size], which lies in its
    slot.
    """
    heads, cache = skip.shape[0], active_cache()
    of_groups = groups * state_size
    x, b, c = xbc.split([xbc.shape[1] - 2 * of_groups, of_groups, of_groups], dim=-1)
    x = x.reshape(len(xbc), heads, -1)
    b, c = (one.reshape(len(xbc), groups, state_size).repeat_interleave(heads // groups, 1) for one in (b, c))
    step, kept = steps.chunk(2, dim=-1)
    out = torch.empty_like(x)
    for tokens in state_tokens(state_slots, query_start, positions):
        state = cache.state("heads", layer, tokens, (heads, x.shape[2], state_size))
        for row in tokens.rows:
            added = torch.einsum("hp,hn->hpn", x[row] * step[row, :, None], b[row])
            state = state * kept[row, :, None, None] + added
            out[row] = torch.einsum("hpn,hn->hp", state, c[row]) + x[row] * skip[:, None]
            cache.put_state("heads", layer, tokens, row, state)
    return out.reshape(len(xbc), -1)


@selective_state.register_fake
def _(
    xbc: Tensor,
    steps: Tensor,
    skip: Tensor,
    state_slots: Tensor,
    query_start: Tensor,
    positions: Tensor,
    layer: int,
    groups: int,
    state_size: int,
) -> Tensor:
    return xbc.new_empty((xbc.shape[0], xbc.shape[1] - 2 * groups * state_size), dtype=torch.float32)
