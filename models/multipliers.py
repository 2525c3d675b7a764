"""The multipliers of Falcon-H1 (https://arxiv.org/abs/2507.22448), and where a model has them without a kernel more.

Rows between layers are the reference's divided by `residual`, which norms undo but for their eps. So what a block adds
may be larger by one factor for all blocks. The norm ahead of a block takes another factor, which the block's own
multipliers leave over. What remains is in small float32 vectors: weights of norms and convolutions, and biases.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from llmc.models.mamba import Mamba2
from llmc.models.weight_map import Target
from llmc.quantize import layer_kind


@dataclass(frozen=True)
class Multipliers:
    """Factors in each layer, as config.json states them; all are positive.

    attention_in, mixer_in: of a block's input. attention_out, mixer_out: of its result. keys: of keys. gate: of the
    feed-forward block's gate before the activation. down: of its result. mixer_parts: of the parts of what a mixer's
    first linear layer makes: gate, inputs, directions of writes, of reads, and steps. logits: of logits.
    """

    attention_in: float
    attention_out: float
    keys: float
    mixer_in: float
    mixer_out: float
    mixer_parts: tuple[float, ...]
    gate: float
    down: float
    logits: float

    @property
    def residual(self) -> float:
        """The reference's rows between layers, over ours. The feed-forward block adds to ours what it makes of inputs
        times `gate`: gate and up both have that factor, and up does not bring it to the result."""
        return self.down / self.gate

    @property
    def normed(self) -> float:
        """Our input of attention and mixer, over the reference's normed rows. It makes our values so large that
        attention's result can be added as it is."""
        return self.attention_in * self.attention_out / self.residual

    @property
    def scores(self) -> float:
        """The reference's scores, over the products of our queries and keys."""
        return self.keys * (self.attention_in / self.normed) ** 2

    @property
    def cached(self) -> tuple[float, float]:
        """Our keys and values, over the reference's."""
        size = self.normed / self.attention_in
        return size / self.keys, size

    @property
    def parts(self) -> tuple[float, ...]:
        """`mixer_parts` of what our linear layer makes."""
        return tuple(part * self.mixer_in / self.normed for part in self.mixer_parts)

    @property
    def mixed(self) -> float:
        """What our mixer adds, over the reference's results before `mixer_out`."""
        return self.mixer_out / self.residual

    @property
    def are_moderate(self) -> bool:
        """Whether float32 and f16 hold what they make of a model's numbers."""
        made = (self.residual, self.normed, self.scores, *self.cached, *self.parts, self.mixed, self.gate, self.logits)
        return all(1e-3 <= factor <= 1e3 for factor in made)

    def in_weights(self, targets: tuple[Target, ...], net: Mamba2) -> Iterator[Target]:
        """The parameters of a model, those that take a factor with it. net: of all layers."""
        by_kind = {
            "norm": self.logits,
            "attention_norm": self.normed,
            "attention.qkv.bias": self.normed / self.attention_in,
            "attention.out.bias": self.attention_out / self.residual,
            "attention.mamba.inputs.bias": self.normed / self.mixer_in,
            "attention.mamba.out.bias": self.mixed,
            "mlp_norm": self.gate,
            "mlp.gate_up.bias": self.gate,
            "mlp.down.bias": self.down / self.residual,
        }
        of_group = net.groups * net.state_size
        channels = np.repeat(np.array(self.parts[1:-1], np.float32), (net.size, of_group, of_group))
        for target in targets:
            kind = layer_kind(target.name)
            if kind == "attention.mamba.convolution":
                yield replace(target, times=np.tile(channels, net.taps))
            elif kind in by_kind:
                yield replace(target, times=np.full(target.shape, by_kind[kind], np.float32))
            else:
                yield target
