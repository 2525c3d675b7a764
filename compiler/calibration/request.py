"""What `llmc quantize -o` is asked to do, and what it tells."""

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
"""The schemes that are written, and what is used of each where nothing is asked for."""
Progress = Callable[[str, int, int], None]


def methods_of(scheme: str) -> tuple[str, ...]:
    """The methods that round weights to a scheme. Raises QuantizeError."""
    if scheme not in DEFAULT_METHODS:
        return ("rtn",)
    return METHODS if get_scheme(scheme).act_bits == 8 else ("rtn", "gptq", "awq")


@dataclass(frozen=True)
class CalibrationConfig:
    """quant: scheme, groups, and which layers are left. method: one of METHODS. text: what inputs are taken from, None
    for rtn alone. layout: of the files, see `quantize/export/registry.py`. samples, sample_tokens: windows of the text,
    and their length. damping: of GPTQ, a share of the mean diagonal. jobs: threads, 0: one a CPU. Raises CompileError.
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
            raise CompileError(f"--target-kl {target} is no divergence; give a number above 0, like 0.01")
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
    """What a request takes, roughly: seconds on this machine, bytes of memory, of work files and of the output."""

    seconds: float
    memory_bytes: int
    work_bytes: int
    output_bytes: int
    tokens: int


@dataclass(frozen=True)
class TradeOff:
    """What a recipe's quantized matrices take, and the divergence in nats that is predicted of it."""

    nbytes: int
    bits_per_weight: float
    predicted_kl: float


@dataclass(frozen=True)
class RecipeReport:
    """kl: of the model that was written, measured on `measured_tokens` that nothing was calibrated on. tries: what was
    predicted and measured of each recipe, the last one being that of the model. layers: the format of each, by prefix.
    curve: the best there is at every size, smallest first."""

    target_kl: float
    kl: float
    chosen: TradeOff
    tries: tuple[tuple[float, float], ...]
    measured_tokens: int
    layers: Mapping[str, str]
    curve: tuple[TradeOff, ...]


@dataclass(frozen=True)
class CalibrationReport:
    """output_bytes: of the weights. resumed: layers that an earlier call had finished. notes: sentences. recipe: of a
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
