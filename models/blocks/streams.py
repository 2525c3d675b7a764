"""Gemma 3n: a token has several hidden vectors, its streams; a layer computes on the first and corrects the others.

Streams are concatenated: [T, S D]. T tokens, S streams, D hidden size, P elements of a layer's token input.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmc.models import ops
from llmc.models.blocks.attention import Attention, StepInputs
from llmc.models.blocks.decoder import Decoder
from llmc.models.blocks.layers import Block, Linear, RepeatedBlock, empty
from llmc.models.blocks.mlp import Mlp
from llmc.models.blocks.norms import norm, result_norm
from llmc.models.blocks.token_inputs import InputsOfLayers, TokenInput, parts
from llmc.models.config import ModelConfig, Streams

_HALF = 2.0**-0.5
_LEAST = 1e-5  # added to a mean square before dividing


class CutMlp(Mlp):
    """A feed-forward block whose gate is cut off below its mean plus a number of standard deviations."""

    fuses = False

    def __init__(self, config: ModelConfig, layer: int, act_dtype: str, cutoff: float) -> None:
        super().__init__(config, layer, act_dtype)
        self.cutoff = cutoff

    def _activated(self, x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        beyond = x - mean
        deviation = torch.sqrt((beyond * beyond).mean(-1, keepdim=True))
        return super()._activated(F.relu(x - (mean + deviation * self.cutoff)))


class Updates(Block):
    """AltUp: predicts a layer's effect on all streams, and corrects the prediction by the first stream's result.

    Both are weighted sums of streams with per-token factors: tanh of S numbers from norm and router [S, D], times
    predict [S S, S] or correct [S, S], float32.
    """

    def __init__(self, config: ModelConfig, streams: Streams, act_dtype: str) -> None:
        super().__init__()
        self.count, self.hidden_size, self.act_dtype = streams.count, config.hidden_size, act_dtype
        self.norm = norm(config, act_dtype)
        self.router = Linear(streams.count, config.hidden_size, False, act_dtype)
        self.predict = empty(streams.count**2, streams.count)
        self.correct = empty(streams.count, streams.count)

    def _factors(self, x: Tensor, matrix: Tensor) -> Tensor:
        """float32 [T, D], [N, S] → float32 [T, N]."""
        kinds = torch.tanh(self.router(self.norm(x)) * (1.0 / self.hidden_size))
        return (kinds[:, None, :] * matrix).sum(-1)

    def predicted(self, streams: Sequence[Tensor]) -> list[Tensor]:
        """float32 [T, D] each."""
        factors = self._factors(streams[0], self.predict)
        found = []
        for i, stream in enumerate(streams):
            for j, other in enumerate(streams):
                at = i * self.count + j
                stream = stream + other * factors[:, at : at + 1]
            found.append(stream)
        return found

    def corrected(self, predicted: Sequence[Tensor], made: Tensor) -> list[Tensor]:
        """made: the new first stream, float32 [T, D]."""
        factors = self._factors(made, self.correct) + 1.0
        change = made - predicted[0]
        return [stream + change * factors[:, i : i + 1] for i, stream in enumerate(predicted)]


class LowRank(Block):
    """Laurel: a low-rank path beside attention: down [R, D], up [D, R] and a norm."""

    def __init__(self, config: ModelConfig, rank: int, act_dtype: str) -> None:
        super().__init__()
        self.act_dtype = act_dtype
        self.down = Linear(rank, config.hidden_size, False, act_dtype)
        self.up = Linear(config.hidden_size, rank, False, act_dtype)
        self.norm = result_norm(config, act_dtype)

    def forward(self, x: Tensor) -> Tensor:
        """act [T, D] → float32 [T, D]: x plus the path's output."""
        return x.float() + self.norm(self.up(self.down(x).to(ops.torch_act_dtype(self.act_dtype))))


class StreamLayer(RepeatedBlock):
    """Both blocks with norms before and after, inside the updates of the streams."""

    def __init__(self, config: ModelConfig, streams: Streams, layer: int, act_dtype: str) -> None:
        super().__init__()
        self.count = streams.count
        self.updates = Updates(config, streams, act_dtype)
        self.attention_norm = norm(config, act_dtype)
        self.low_rank = LowRank(config, streams.rank, act_dtype)
        self.attention = Attention(config, layer, act_dtype)
        self.attention_post_norm = result_norm(config, act_dtype)
        self.mlp_norm = norm(config, act_dtype)
        cutoff = streams.cutoffs[layer]
        self.mlp = Mlp(config, layer, act_dtype) if cutoff is None else CutMlp(config, layer, act_dtype, cutoff)
        self.mlp_post_norm = result_norm(config, act_dtype)
        self.input = TokenInput(config, streams.input_size, act_dtype, scaled=streams.scaled)

    def forward(self, x: Tensor, step: StepInputs, given: Tensor) -> Tensor:
        """float32 [T, S D], given float32 [T, P] → float32 [T, S D]."""
        predicted = self.updates.predicted(parts(x, self.count))
        normed = self.attention_norm(predicted[0])
        attended = predicted[0] + self.attention_post_norm(self.attention(normed, None, step))
        made = (attended + self.low_rank(normed)) * _HALF
        made = made + self.mlp_post_norm(self.mlp(self.mlp_norm(made), None))
        first, *others = self.updates.corrected(predicted, made)
        added = self.input(first, given)
        return torch.cat((first, *(other + added for other in others)), dim=-1)


class StreamDecoder(Decoder):
    """spread: matrices [D, D] that make the other streams from the embedding. merge: matrices that map them back."""

    def __init__(self, config: ModelConfig, streams: Streams, act_dtype: str, max_len: int) -> None:
        self.streams = streams
        super().__init__(config, act_dtype, max_len)
        self.act_dtype = act_dtype
        size = config.hidden_size
        self.inputs = InputsOfLayers(config, streams.input_size, streams.input_vocab, act_dtype)
        self.spread, self.merge = (
            nn.ModuleList(Linear(size, size, False, act_dtype) for _ in range(streams.count - 1)) for _ in range(2)
        )

    def layer(self, number: int, act_dtype: str) -> RepeatedBlock:
        return StreamLayer(self.config, self.streams, number, act_dtype)

    def through_layers(self, x: Tensor, input_ids: Tensor, step: StepInputs) -> tuple[Tensor, list[Tensor]]:
        inputs = parts(self.inputs(x, input_ids), len(self.layers))
        x = torch.cat((x, *(self._turned(matrix, x, x) for matrix in self.spread)), dim=-1)
        for layer, given in zip(self.layers, inputs, strict=True):
            x = layer(x, step, given)
        return x, []

    def logits(self, x: Tensor) -> Tensor:
        """float32 [S, S D] → float32 [S, V], from the mean of all streams."""
        first, *others = parts(x, self.streams.count)
        mean = first
        for matrix, other in zip(self.merge, others, strict=True):
            mean = mean + self._turned(matrix, other, first)
        return super().logits(mean * (1.0 / self.streams.count))

    def _turned(self, matrix: nn.Module, x: Tensor, like: Tensor) -> Tensor:
        """matrix · x, scaled to the length of `like`: all float32 [T, D]."""
        made: Tensor = matrix(x.to(ops.torch_act_dtype(self.act_dtype)))
        length = torch.sqrt((like * like).mean(-1, keepdim=True))
        return made * (length / torch.sqrt((made * made).mean(-1, keepdim=True).clamp(min=_LEAST)))
