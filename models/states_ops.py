"""The llmc ops by which graphs hand hidden states to one another, as `ops.py` has the others.

A graph has a buffer of states beside its inputs, float32 [T, D]: what it leaves there of each row, somebody else takes,
and puts there what this graph is given. T tokens, S samples, D floats of a state.
"""

# torch reads the ops' schemas from the annotations, so they must be types and not strings.

import torch
from torch import Tensor

from llmc.models.ops import llmc_op
from llmc.models.reference import active_states


@llmc_op("gather_rows_leaving")
def gather_rows_leaving(x: Tensor, index: Tensor, states: Tensor) -> Tensor:
    """Rows of x [T, D] named by index i32 [S]: [S, D]. Leaves all rows of states [T, D] in the buffer of states."""
    active_states().rows = states.clone()
    return x[index.long()]


@gather_rows_leaving.register_fake
def _(x: Tensor, index: Tensor, states: Tensor) -> Tensor:
    return x.new_empty((index.shape[0], x.shape[1]))


@llmc_op("beside_states")
def beside_states(x: Tensor) -> Tensor:
    """x [T, D], and behind each row the one that the buffer of states holds: [T, 2 D]."""
    return torch.cat((x, active_states().rows), dim=-1)


@beside_states.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], 2 * x.shape[1]))
