"""What linear layers of one decode step have in flight on a GPU, by layer and scheme. Needs nvcc, and no GPU.

Memory reaches its bandwidth with bandwidth × latency bytes in flight (Little's law). How many groups of a kernel a
processor holds follows from its registers and shared memory; how many bytes a group waits for, from its ring.

    python -m bench.gpu.in_flight --architecture sm_90a
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from llmc.compiler.kernel_spec import KernelSpec, Param
from llmc.compiler.ops.normed import normed_spec
from llmc.compiler.targets.gpu import cuda_prelude
from llmc.compiler.targets.gpu.cuda import cuda_text
from llmc.compiler.targets.gpu.linear_forms import few_forms, few_groups
from llmc.compiler.targets.gpu.normed import norms_inside
from llmc.compiler.targets.gpu.nvcc import build_cubin, build_ptx
from llmc.compiler.targets.gpu.tensor_cores import ITEMS, WARP, tensor_layer
from llmc.compiler.targets.gpu.wgmma import OFF
from llmc.models.sources.gguf.stored import LAYOUTS
from llmc.quantize.formats.base import WeightFormat
from llmc.quantize.formats.codes import E8M0, Codes
from llmc.quantize.formats.fp8 import Fp8
from llmc.quantize.formats.integers import Integers

LAYERS: Mapping[str, tuple[int, int, bool]] = {
    "qkv": (4096, 6144, False),
    "attention output": (4096, 4096, False),
    "gate and up": (4096, 2 * 14336, True),
    "down": (14336, 4096, False),
    "logits": (4096, 128256, False),
}
"""Of Llama 3 8B: K, weight rows, and whether they are gated."""
_BEHIND_NORMS = ("qkv", "gate and up")
_NORMED = ", normed"
"""Behind the name of a layer that norms its row of x."""
SCHEMES: Mapping[str, tuple[str, WeightFormat | None]] = {
    "bf16": ("bf16", None),
    "f16": ("f16", None),
    "w8a16": ("bf16", Integers(8)),
    "w4a16": ("bf16", Integers(4, 128)),
    "w4a16, groups of 64": ("bf16", Integers(4, 64)),
    "fp8": ("bf16", Fp8()),
    "mxfp4": ("bf16", Codes("e2m1", 32, E8M0)),
    "Q4_K": ("bf16", LAYOUTS["Q4_K"]),
    "Q5_K": ("bf16", LAYOUTS["Q5_K"]),
    "Q6_K": ("bf16", LAYOUTS["Q6_K"]),
    "Q3_K": ("bf16", LAYOUTS["Q3_K"]),
    "IQ4_XS": ("bf16", LAYOUTS["IQ4_XS"]),
    "nvfp4": ("bf16", Codes("e2m1", 16)),
    "w8a8": ("i8", Integers(8)),
    "int4 weights, int8 inputs": ("i8", Integers(4, 128)),
}
"""Type of x, and format of the weight; None: that of x."""


@dataclass(frozen=True)
class Gpu:
    """processors: streaming multiprocessors. shared_bytes: of each. needed_bytes: in flight on each, for the bandwidth.

    Sizes are those of the CUDA programming guide's table of compute capabilities. What is needed is bandwidth times a
    latency of 800 ns under load, divided by the processors: 2.0 TB/s of an A100, 4.8 of an H200, 8.0 of a B200.
    """

    processors: int
    shared_bytes: int
    needed_bytes: int

    def resident(self, registers: int, shared_bytes: int, items: int) -> int:
        """Groups that a processor holds. Each quarter of it gives warps registers in units of 256."""
        of_warp = -(-registers * WARP // _REGISTER_UNIT) * _REGISTER_UNIT
        warps = 4 * min(_REGISTERS // 4 // of_warp, _MOST_WARPS // 4)
        return min(warps // (items // WARP), self.shared_bytes // (shared_bytes + _RESERVED_BYTES))


_EPS = 1e-5
_REGISTERS, _REGISTER_UNIT, _MOST_WARPS = 1 << 16, 256, 64
_RESERVED_BYTES = 1 << 10  # of shared memory, for each group
GPUS: Mapping[str, Gpu] = {
    "sm_80": Gpu(108, 164 << 10, 15 << 10),
    "sm_90a": Gpu(132, 228 << 10, 29 << 10),
    "sm_100": Gpu(148, 228 << 10, 43 << 10),
}


@dataclass(frozen=True)
class Row:
    """A kernel of the table, for up to `most` rows of x. groups: of its launch. registers: of an item. resident: groups
    on a processor. in_flight: bytes of the weight on each processor. last_wave: what the last groups occupy of the GPU,
    from 0 to 1."""

    scheme: str
    layer: str
    most: int
    groups: int
    registers: int
    shared_bytes: int
    resident: int
    in_flight: float
    last_wave: float


def kernels() -> dict[tuple[str, str], KernelSpec]:
    """All kernels, by scheme and layer."""
    found = {}
    for scheme, (dtype, format) in SCHEMES.items():
        sums = format.sums if format is not None and dtype == "i8" else None
        of_int8 = {} if sums is None else {"group_size": sums.group_size, "sum_factor": sums.factor}
        for name, (k, _, _) in LAYERS.items():
            found[scheme, name] = spec = _spec_of(scheme, name)
            norm = KernelSpec.of("norm", "rms_norm", dim=k, act_dtype=dtype, eps=_EPS, rows=0, **of_int8)
            if name in _BEHIND_NORMS and norms_inside(norm, spec, OFF):
                found[scheme, name + _NORMED] = normed_spec(spec, _EPS)
    return found


def _spec_of(scheme: str, layer: str) -> KernelSpec:
    """The linear layer's kernel."""
    dtype, format = SCHEMES[scheme]
    k, n, gated = LAYERS[layer]
    given: dict[str, Param] = {"k": k, "n": n, "act_dtype": dtype, "gated": "f32" if gated else "", "rows": 0}
    given |= {"bias": False, "residual": False}
    if format is None:
        return KernelSpec.of("linear", "linear", **given, weight_dtype=dtype)
    return KernelSpec.of("linear", "linear_quant", **given, **format.kernel_params())


def rows(gpu: Gpu, used: Mapping[tuple[str, str], tuple[int, int]]) -> Iterator[Row]:
    """used: registers and bytes of shared memory of each kernel, by scheme and layer."""
    specs = kernels()
    for (scheme, name), (registers, shared_bytes) in used.items():
        layer = tensor_layer(specs[scheme, name])
        assert layer is not None
        groups, resident = few_groups(layer), gpu.resident(registers, shared_bytes, ITEMS)
        at_once = min(groups, resident * gpu.processors)
        last = groups % (resident * gpu.processors) or resident * gpu.processors
        last_wave = 1.0 if groups == at_once else last / (resident * gpu.processors)
        for form in few_forms(layer):
            in_flight = at_once * form.in_flight_bytes / gpu.processors
            yield Row(scheme, name, form.most, groups, registers, shared_bytes, resident, in_flight, last_wave)


def built(architecture: str) -> dict[tuple[str, str], tuple[int, int]]:
    """Registers and shared memory of each kernel, by scheme and layer, as nvcc builds it."""
    specs = kernels()
    ptx = build_ptx("\n".join((cuda_prelude.FULL, *map(cuda_text, specs.values()))), "compute_80")
    said = build_cubin(ptx, architecture)[1]
    used = {
        name: (int(registers), int(shared))
        for name, registers, shared in re.findall(
            r"Compiling entry function '(\w+)'.*?Used (\d+) registers.*?(\d+) bytes smem", said, re.DOTALL
        )
    }
    return {key: used[spec.symbol()] for key, spec in specs.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--architecture", choices=sorted(GPUS), default="sm_90a")
    chosen = parser.parse_args().architecture
    gpu = GPUS[chosen]
    print(f"{chosen}: {gpu.processors} processors, each needs {gpu.needed_bytes >> 10} KB in flight")
    print(
        f"{'scheme':27}{'layer':21}{'rows':>6}{'groups':>8}"
        f"{'registers':>11}{'resident':>10}{'in flight':>11}{'last wave':>11}"
    )
    for row in rows(gpu, built(chosen)):
        print(
            f"{row.scheme:27}{row.layer:21}{row.most:6}{row.groups:8}{row.registers:11}{row.resident:10}"
            f"{row.in_flight / 1024:8.0f} KB{row.last_wave:10.0%}"
        )


if __name__ == "__main__":
    main()
