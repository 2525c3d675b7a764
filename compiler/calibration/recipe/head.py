"""From the last layer's output to the divergence of next-token distributions from the float model's."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from llmc.compiler.calibration.running import Floats
from llmc.compiler.calibration.threads import Workers
from llmc.models.blocks.norms import RmsNorm
from llmc.models.config import ModelConfig
from llmc.models.eager import as_tensor
from llmc.models.loader import Parameter

_ROWS = 4096  # rows of the output projection per step
_TOKENS = 128  # tokens whose distributions each thread holds at once


class Head:
    """The last norm and the output projection, which stays in the checkpoint and is read piece by piece."""

    def __init__(self, model: ModelConfig, parameters: Mapping[str, Parameter], workers: Workers) -> None:
        self._norm = RmsNorm(model.hidden_size, model.norm_eps, "f32")
        self._norm.load_state_dict({"weight": as_tensor(parameters["norm.weight"].value())}, assign=True)
        self._weight = parameters["embed.weight" if model.tie_word_embeddings else "lm_head.weight"]
        self._multiplier, self._workers = model.logit_multiplier, workers

    def divergence(self, reference: Floats, stream: Floats) -> float:
        """Mean KL(reference ‖ stream) in nats over the tokens of two streams [windows, T, D]."""
        width = stream.shape[-1]
        ours, theirs = stream.reshape(-1, width), reference.reshape(-1, width)

        def work(first: int) -> float:
            some = slice(first, first + _TOKENS)
            p, q = self._log_probabilities(theirs[some]), self._log_probabilities(ours[some])
            return float((p.exp() * (p - q)).sum())

        total = sum(self._workers.map(work, range(0, len(ours), _TOKENS)))
        return max(0.0, total / len(ours))

    def _log_probabilities(self, rows: Floats) -> Tensor:
        """Log probabilities float64 [T, V]."""
        with torch.no_grad():
            x = self._norm(torch.from_numpy(np.ascontiguousarray(rows)))
            count, width = self._weight.shape
            logits = torch.empty((len(rows), count))
            piece = np.empty((min(_ROWS, count), width), np.float32)
            for first in range(0, count, _ROWS):
                some = piece[: min(_ROWS, count - first)]
                self._weight.read(first, some)
                torch.mm(x, torch.from_numpy(some).T, out=logits[:, first : first + len(some)])
            return torch.log_softmax(logits.double() * self._multiplier, -1)
