"""Sampling parameters, in Python and for the C ABI."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Mapping, Sequence

from llmc.runtime.binding import abi
from llmc.runtime.binding.handle import initial, int32


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters; defaults are those of llmc.h. seed: None lets the engine draw one."""

    n: int = 1
    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    ignore_eos: bool = False
    seed: int | None = None
    num_logprobs: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    best_of: int | None = None
    beam_width: int = 0
    length_penalty: float = 1.0
    early_stopping_code: int = 0


_PLAIN_SAMPLING: Sequence[str] = (
    "n",
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "min_p",
    "top_k",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "beam_width",
    "length_penalty",
)


class NativeSampling:
    """A llmc_sampling_params, valid while this object lives."""

    def __init__(self, params: SamplingParams) -> None:
        """Raises TypeError for stop ids that are not integers."""
        stop = int32("stop_token_ids", params.stop_token_ids)
        bias = (abi.LogitBias * len(params.logit_bias))(
            *(abi.LogitBias(token, value) for token, value in params.logit_bias.items())
        )
        native = initial("llmc_sampling_params_init", abi.SamplingParams)
        for name in _PLAIN_SAMPLING:
            setattr(native, name, getattr(params, name))
        native.ignore_eos = int(params.ignore_eos)
        native.best_of, native.early_stopping = params.best_of or 0, params.early_stopping_code
        native.has_seed = int(params.seed is not None)
        native.seed = params.seed or 0
        native.num_logprobs = -1 if params.num_logprobs is None else params.num_logprobs
        native.stop_token_ids, native.num_stop_token_ids = stop.ctypes.data_as(abi.I32P), stop.size
        native.logit_bias, native.num_logit_bias = bias, len(bias)
        self._kept = stop, bias
        self.pointer = ctypes.pointer(native)
