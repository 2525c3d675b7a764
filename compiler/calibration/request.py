"""The request and the report of `llmc quantize -o`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from llmc.compiler.config import CompileError
from llmc.quantize.recipe import QuantConfig
from llmc.quantize.scheme import get_scheme

METHODS = ("rtn", "gptq", "awq", "smoothquant")
DEFAULT_METHODS = {
    "w4a16": "gptq", "w4a8": "gptq", "w8a16": "rtn", "w8a8": "smoothquant", "fp8": "rtn", "mxfp4": "gptq",
}  # fmt: skip
"""The supported schemes, with the default method of each."""
Progress = Callable[[str, int, int], None]


def methods_of(scheme: str) -> tuple[str, ...]:
    """The methods that can round weights to a scheme. Raises QuantizeError."""
    if scheme not in DEFAULT_METHODS:
        return ("rtn",)
    return METHODS if get_scheme(scheme).act_bits == 8 else ("rtn", "gptq", "awq")


@dataclass(frozen=True)
class CalibrationConfig:
    """A quantization request. Raises CompileError.

    quant: scheme, groups, and layers to skip.
    method: one of METHODS.
    text: source of calibration inputs; None only for rtn.
    layout: see `quantize/export/registry.py`.
    samples, sample_tokens: number of windows of the text, and tokens in each.
    damping: for GPTQ, as a fraction of the mean diagonal.
    jobs: threads; 0 for one per CPU.
    """

    model: Path
    output: Path
    quant: QuantConfig
    method: str
    text: str | None = None
    layout: str = "compressed-tensors"
    samples: int = 128
    sample_tokens: int = 512
    damping: float = 0.01
    jobs: int = 0
    target_kl: float | None = None

    def __post_init__(self) -> None:
        scheme = self.quant.scheme
        if self.target_kl is not None:
            self._check_target(self.target_kl)
        if self.method not in METHODS:
            raise CompileError(f"--method {self.method!r} is unknown: use {', '.join(METHODS)}")
        if self.method == "smoothquant" and self.act_bits == 16:
            raise CompileError(
                f"--method smoothquant is for rounded activations, which {scheme} has not; use gptq or awq"
            )
        if self.method != "rtn" and self.text is None:
            raise CompileError(f"--method {self.method} needs --calibration FILE: text like that the model will read")

    def _check_target(self, target: float) -> None:
        if not 0 < target < math.inf:
            raise CompileError(f"--target-kl {target} is not a divergence; give a number above 0, like 0.01")
        if self.method not in ("rtn", "gptq") or self.layout != "compressed-tensors":
            raise CompileError(
                "--target-kl goes with --method rtn or gptq and --format compressed-tensors; leave the others out"
            )
        if self.text is None:
            raise CompileError("--target-kl needs --calibration FILE: text that divergences are measured on")

    @property
    def act_bits(self) -> int:
        return self.quant.layers.act_bits


@dataclass(frozen=True)
class Estimate:
    """Rough cost of a request: seconds on this machine, and bytes of memory, work files and output."""

    seconds: float
    memory_bytes: int
    work_bytes: int
    output_bytes: int
    tokens: int


@dataclass(frozen=True)
class TradeOff:
    """Size of a recipe's quantized matrices, and its predicted divergence in nats."""

    nbytes: int
    bits_per_weight: float
    predicted_kl: float


@dataclass(frozen=True)
class RecipeReport:
    """The recipe that was written.

    kl: divergence of the written model, measured on `measured_tokens` held-out tokens.
    tries: predicted and measured divergence of each recipe tried; the last is the written one.
    layers: format of each layer, by prefix.
    curve: the best trade-off at each size, smallest first.
    """

    target_kl: float
    kl: float
    chosen: TradeOff
    tries: tuple[tuple[float, float], ...]
    measured_tokens: int
    layers: Mapping[str, str]
    curve: tuple[TradeOff, ...]


@dataclass(frozen=True)
class CalibrationReport:
    """output_bytes: of the weights. resumed: layers finished by an earlier call. notes: sentences. recipe: only for a
    request with a target."""

    output: Path
    method: str
    scheme: str
    layers: int
    resumed: int
    tokens: int
    seconds: float
    output_bytes: int
    notes: tuple[str, ...]
    recipe: RecipeReport | None = None
