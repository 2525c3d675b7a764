"""A tower: a bidirectional encoder of an image's patches, whose rows a text model reads in place of tokens."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from llmc.models import states_ops
from llmc.models.blocks.attention import StepInputs
from llmc.models.blocks.decoder import BlocksLayer, Decoder
from llmc.models.blocks.layers import Linear, RepeatedBlock
from llmc.models.blocks.norms import Rounded
from llmc.models.blocks.pooled import PooledHead
from llmc.models.config import ModelConfig
from llmc.models.tower import WEIGHTS


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
        assert config.pooled is not None
        merging = replace(config, pooled=replace(config.pooled, norm_merged=True))
        self.stacked = nn.ModuleList(PooledHead(merging, act_dtype) for _ in self.tower.stacked)

    def entered(self, input_ids: Tensor, positions: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        rows, width = states_ops.read_states(input_ids, self.tower.states_width), self.tower.patch_width
        patches = rows[:, :width] if width < self.tower.states_width else rows
        x = self.patches(self.rounded(patches), self._placed(input_ids, rows))
        if self.embed_norm is not None:
            x = self.embed_norm(x)
        tables = (
            (rows[:, self.tower.rotation_begin :],) if self.tower.rotation else (self.get_buffer("ropes.0.cos_sin"),)
        )
        return x, tables

    def layer(self, number: int, act_dtype: str) -> RepeatedBlock:
        made = super().layer(number, act_dtype)
        assert isinstance(made, BlocksLayer)
        assert self.config.tower is not None
        made.input_is_shared = number - 1 in self.config.tower.stacked
        return made

    def through_layers(self, x: Tensor, input_ids: Tensor, step: StepInputs) -> tuple[Tensor, list[Tensor]]:
        found = []
        for number, layer in enumerate(self.layers):
            x = layer(x, step)
            if number in self.tower.stacked:
                found.append(x)
        return x, found

    def vectors(self, x: Tensor, of_layers: list[Tensor], step: StepInputs, sample_index: Tensor) -> Tensor:
        made = [super().vectors(x, of_layers, step, sample_index)]
        for merged, rows in zip(self.stacked, of_layers, strict=True):
            made.append(merged(rows, step.query_start, step.token_seq, sample_index))
        return torch.cat(made, dim=-1) if of_layers else made[0]

    def _placed(self, input_ids: Tensor, rows: Tensor) -> Tensor | None:
        """What the table of places adds to patches: float32 [T, D]."""
        side, first = self.tower.places_side, self.tower.patch_width
        if not side:
            return self.embed(input_ids) if self.tower.places else None
        corners = [self.embed(input_ids + step) for step in (0, 1, side, side + 1)]
        weights = [rows[:, first + number : first + number + 1] for number in range(WEIGHTS)]
        a, b, c, d = (corner * weight for corner, weight in zip(corners, weights, strict=True))
        return a + b + c + d
