"""CUDA: the GPU kernels in CUDA C++. nvcc builds machine code for some architectures, and PTX for later ones."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.base import TargetError
from llmc.compiler.targets.gpu import cuda_prelude
from llmc.compiler.targets.gpu.backend import GpuTarget
from llmc.compiler.targets.gpu.cuda_images import CUBIN, PTX, Image, joined, pack
from llmc.compiler.targets.gpu.launch import launch_of
from llmc.compiler.targets.gpu.nvcc import build_cubin, build_ptx, nvcc_version
from llmc.compiler.targets.gpu.sampling import SAMPLING_LEVEL
from llmc.tvm_import import import_tvm

KIND = "cuda"
ARCHITECTURES = (
    "sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_100a", "sm_103", "sm_103a", "sm_120",
    "sm_120a",
)  # fmt: skip
"""Supported architectures. A suffix `a` means code for that one GPU only."""
_HEAD = 'extern "C" __global__ void __launch_bounds__({items}, 1)'
_COMPILE = "tvm_callback_cuda_compile"


def capability_of(architecture: str) -> tuple[int, bool]:
    """(10 × major + minor of an architecture such as sm_90a, whether its code runs on that one only)."""
    match = re.fullmatch(r"sm_(\d+)(a?)", architecture)
    assert match is not None
    return int(match[1]), bool(match[2])


def cuda_text(spec: KernelSpec) -> str:
    """A kernel in CUDA C++, without the prelude. Raises KernelSpecError."""
    import_tvm()
    from llmc.compiler.targets.gpu.codegen import Language, kernel_text
    from llmc.compiler.targets.gpu.kernels.registry import build_kernel

    with _uncompiled():
        language = Language({"kind": "cuda", "arch": ARCHITECTURES[0]}, _HEAD)
        return kernel_text(build_kernel(spec, tensor_cores=True), language, launch_of(spec, tensor_cores=True).items)


@contextmanager
def _uncompiled() -> Iterator[None]:
    """Stops TVM from compiling the text that it writes, by pretending that this was done."""
    import tvm_ffi

    ours = tvm_ffi.get_global_func(_COMPILE, allow_missing=True)

    def nothing(_code: Any) -> bytes:
        return b""

    tvm_ffi.register_global_func(_COMPILE, nothing, override=True)
    try:
        yield
    finally:
        if ours is not None:
            tvm_ffi.register_global_func(_COMPILE, ours, override=True)


@dataclass(frozen=True)
class CudaTarget(GpuTarget):
    """NVIDIA GPUs of these architectures, and later ones by PTX."""

    architectures: tuple[str, ...]

    kind: ClassVar[str] = KIND
    device: ClassVar[str] = KIND
    code_name: ClassVar[str] = "kernels.cuda"
    tensor_cores: ClassVar[bool] = True

    @property
    def name(self) -> str:
        return f"{KIND}:{','.join(self.architectures)}"

    @property
    def level(self) -> int:
        return SAMPLING_LEVEL

    def code_key(self) -> str:
        """Raises CompileError without nvcc, on whose version code depends."""
        return json.dumps({**self.record(), "nvcc": nvcc_version()}, sort_keys=True)

    def runs_here(self) -> bool:
        from llmc.compiler.targets.gpu.devices import cuda_capabilities

        least = min(capability_of(name)[0] for name in self.architectures)
        return any(capability >= least for capability in cuda_capabilities())

    def compile(self, spec: KernelSpec, variant: str | None) -> bytes:
        self.check_no_variant(variant)
        least = min(capability_of(name)[0] for name in self.architectures)
        ptx = build_ptx("\n".join((cuda_prelude.FULL, cuda_text(spec))), f"compute_{least}")
        images = [Image(0, CUBIN, *capability_of(name), build_cubin(ptx, name)[0]) for name in self.architectures]
        # A driver reads PTX up to a terminating 0.
        return pack([*images, Image(0, PTX, least, False, ptx.rstrip(b"\0") + b"\0")], 1)

    def listings(self, spec: KernelSpec, variant: str | None) -> dict[str, str]:
        return {**super().listings(spec, variant), "cu": cuda_text(spec)}

    def link(self, codes: Sequence[bytes], path: Path) -> None:
        path.write_bytes(joined(codes))


def names() -> tuple[str, ...]:
    """Single-architecture targets, as users write them."""
    return tuple(f"{KIND}:{name}" for name in ARCHITECTURES)


def named(name: str) -> CudaTarget:
    """The target called `name`: one of `names()`, or several joined, as in cuda:sm_80,sm_90. Raises TargetError."""
    chosen = name.removeprefix(f"{KIND}:").split(",")
    for one in chosen:
        if one not in ARCHITECTURES:
            raise TargetError(
                f"target {name!r}: there is no CUDA architecture {one!r}; known are {', '.join(ARCHITECTURES)}, and "
                "several of them with commas"
            )
    return CudaTarget(tuple(name for name in ARCHITECTURES if name in chosen))


def from_record(record: Mapping[str, Any]) -> CudaTarget:
    """The target with this `record`."""
    return named(str(record["name"]))
