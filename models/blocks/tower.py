"""A tower: a bidirectional encoder of an image's patches, whose rows a text model reads in place of tokens."""

from __future__ import annotations

from torch import Tensor

from llmc.models import states_ops
from llmc.models.blocks.decoder import Decoder
from llmc.models.blocks.layers import Linear
from llmc.models.blocks.norms import Rounded
from llmc.models.config import ModelConfig


class TowerEncoder(Decoder):
    """patches [D, numbers of a patch], then the layers, and a pooled head that joins patches.

    A step holds one image, so a patch's position is its row. With `Tower.rotation`, each row brings the angles of its
    own place, and the rows themselves are the rotary table.
    """

    def __init__(self, config: ModelConfig, act_dtype: str, max_len: int) -> None:
        super().__init__(config, act_dtype, max_len)
        assert config.tower is not None
        self.tower = config.tower
        if not self.tower.places:
            del self.embed
        self.rounded = Rounded(act_dtype)
        self.patches = Linear(config.hidden_size, self.tower.patch_width, self.tower.patch_bias, act_dtype)

    def entered(self, input_ids: Tensor, positions: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        rows, width = states_ops.read_states(input_ids, self.tower.states_width), self.tower.patch_width
        patches = rows[:, :width] if self.tower.rotation else rows
        embedded = self.embed(input_ids) if self.tower.places else None
        x = self.patches(self.rounded(patches), embedded)
        if self.embed_norm is not None:
            x = self.embed_norm(x)
        tables = (rows[:, width:],) if self.tower.rotation else (self.get_buffer("ropes.0.cos_sin"),)
        return x, tables
