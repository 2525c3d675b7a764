"""The llmc ops of rows that graphs pass to one another or are given; `ops.py` has the others.

A graph has a buffer of states beside its inputs, float32 [T, D]. It may leave a state per row there for others, or read
what was placed there: hidden states, patches of images, or rows that take the place of tokens. T tokens, S samples, D
floats per state, V the vocabulary, W that of a head.
"""

# torch reads op schemas from the annotations, so they must be types, not strings.

import torch
from torch import Tensor

from llmc.models.ops import llmc_op
from llmc.models.reference import active_states


@llmc_op("gather_rows_leaving")
def gather_rows_leaving(x: Tensor, index: Tensor, states: Tensor) -> Tensor:
    """Rows of x [T, D] selected by index i32 [S]: [S, D]. Also copies all rows of states [T, D] to the states
    buffer."""
    active_states().rows = states.clone()
    return x[index.long()]


@gather_rows_leaving.register_fake
def _(x: Tensor, index: Tensor, states: Tensor) -> Tensor:
    return x.new_empty((index.shape[0], x.shape[1]))


@llmc_op("beside_states")
def beside_states(x: Tensor) -> Tensor:
    """Each row of x [T, D], followed by that row of the states buffer: [T, 2 D]."""
    return torch.cat((x, active_states().rows), dim=-1)


@beside_states.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], 2 * x.shape[1]))


@llmc_op("read_states")
def read_states(ids: Tensor, width: int) -> Tensor:
    """The rows of the states buffer: [T, width]. ids i32 [T] tells only their number."""
    return active_states().rows.clone()


@read_states.register_fake
def _(ids: Tensor, width: int) -> Tensor:
    return ids.new_empty((ids.shape[0], width), dtype=torch.float32)


@llmc_op("placed_rows")
def placed_rows(x: Tensor, ids: Tensor, width: int, first: int = 0, added: bool = False) -> Tensor:
    """x [T, D], with the row of the states buffer where ids i32 [T] is negative: [T, D].

    width: of the buffer's rows, of which numbers from `first` on are taken. added: to the row of x.
    """
    placed = active_states().rows[:, first : first + x.shape[1]]
    return torch.where(ids[:, None] < 0, x + placed if added else placed, x)


@placed_rows.register_fake
def _(x: Tensor, ids: Tensor, width: int, first: int = 0, added: bool = False) -> Tensor:
    return x.new_empty(x.shape)


@llmc_op("spread_logits")
def spread_logits(x: Tensor, places: Tensor) -> Tensor:
    """[S, V] of x [S, W]: column v is column places[v], or -1e30 where that is negative.

    places: float32 [V] of whole numbers below W and 2²⁴.
    """
    index = places.long()
    return torch.where(index < 0, -1e30, x[:, index.clamp(min=0)])


@spread_logits.register_fake
def _(x: Tensor, places: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], places.shape[0]))
