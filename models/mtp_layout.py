"""Names of a checkpoint's layer for multi-token prediction, which guesses the token after the next."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from llmc.models.config import ModelConfig
from llmc.models.weight_map import Source, Target, WeightMap


@dataclass(frozen=True)
class MtpLayout:
    """Full names in a checkpoint, without `.weight`; {} is the number of the model's layers.

    The layer reads a token's embedding and the model's state of the token before, each normed, side by side.

    layer: prefix of its attention and feed-forward block, which are those of a layer of the model.
    join: the linear layer before it. token_norm, state_norm: norms of what that reads. norm: behind the layer.
    state_first: the state comes before the embedding.
    """

    layer: str
    join: str
    token_norm: str
    state_norm: str
    norm: str
    state_first: bool = False

    def of_model(self, num_layers: int) -> MtpLayout:
        """The names with the number of the model's layers filled in."""
        names = ("layer", "join", "token_norm", "state_norm", "norm")
        return replace(self, **{name: getattr(self, name).format(num_layers) for name in names})

    def weight_map(self, head: ModelConfig, of_model: WeightMap) -> WeightMap:
        """The map of `blocks.mtp.MtpHead`.

        head: its configuration. of_model: what the model's family says of a model with this one layer.
        """
        targets = tuple(self._targets(head, of_model))
        return WeightMap(targets, frozenset(), head=of_model.head)

    def _targets(self, head: ModelConfig, of_model: WeightMap) -> Iterator[Target]:
        size = head.hidden_size
        for target in of_model.targets:
            if target.name.startswith("layers."):
                yield replace(target, sources=tuple(map(self._of_layer, target.sources)))
            elif target.name == "norm.weight":
                for name, source in (
                    ("norm", self.norm),
                    ("states_norm", self.norm),
                    ("token_norm", self.token_norm),
                    ("state_norm", self.state_norm),
                ):
                    yield replace(target, name=f"{name}.weight", sources=(Source(f"{source}.weight", (size,)),))
            else:
                yield target
        sources = (Source(f"{self.join}.weight", (size, 2 * size)),)
        yield Target("fc.weight", sources, "act", of_rows=_halves_swapped if self.state_first else None)

    def _of_layer(self, source: Source) -> Source:
        """The tensor of this layer in place of that of layer 0."""
        _, _, own = source.name.partition(".0.")
        return replace(source, name=f"{self.layer}.{own}")


def _halves_swapped(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.roll(rows, rows.shape[1] // 2, axis=1)


QWEN_MTP = MtpLayout(
    layer="mtp.layers.0",
    join="mtp.fc",
    token_norm="mtp.pre_fc_norm_embedding",
    state_norm="mtp.pre_fc_norm_hidden",
    norm="mtp.norm",
)
DEEPSEEK_MTP = MtpLayout(
    layer="model.layers.{}",
    join="model.layers.{}.eh_proj",
    token_norm="model.layers.{}.enorm",
    state_norm="model.layers.{}.hnorm",
    norm="model.layers.{}.shared_head.norm",
)
MIMO_MTP = MtpLayout(
    layer="model.mtp_layers.0",
    join="model.mtp_layers.0.input_proj",
    token_norm="model.mtp_layers.0.token_layernorm",
    state_norm="model.mtp_layers.0.hidden_layernorm",
    norm="model.mtp_layers.0.final_layernorm",
    state_first=True,
)
