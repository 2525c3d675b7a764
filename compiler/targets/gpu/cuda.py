"""CUDA: the GPU kernels in CUDA C++. nvcc builds machine code for some architectures, and PTX for later ones."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.base import TargetError
from llmc.compiler.targets.gpu import cuda_prelude, wgmma
from llmc.compiler.targets.gpu.backend import GpuTarget
from llmc.compiler.targets.gpu.cuda_images import joined, pack
from llmc.compiler.targets.gpu.cuda_wgmma import WGMMA
from llmc.compiler.targets.gpu.dependent import dependent_text
from llmc.compiler.targets.gpu.launch import launch_of
from llmc.compiler.targets.gpu.nvcc import build_cubin, build_ptx, nvcc_version
from llmc.compiler.targets.gpu.sampling import SAMPLING_LEVEL
from llmc.compiler.targets.gpu.tensor_cores import refusal, tensor_layer
from llmc.cuda_code import CUBIN, PTX, Image
from llmc.tvm_import import import_tvm

KIND = "cuda"
ARCHITECTURES = (
    "sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_100a", "sm_103", "sm_103a", "sm_120",
    "sm_120a",
)  # fmt: skip
"""Supported architectures. A suffix `a` means code for that one GPU only."""
DEPENDENT = "dependent"
OPTIONS = (DEPENDENT, *wgmma.WAYS)
"""Options of a target, as in cuda:sm_90a+dependent: kernels begin while those before them end, or layers use wgmma."""
_LEAST_DEPENDENT = 90
_HEAD = 'extern "C" __global__ void __launch_bounds__({items}, 1)'
_COMPILE = "tvm_callback_cuda_compile"


def capability_of(architecture: str) -> tuple[int, bool]:
    """(10 × major + minor of an architecture such as sm_90a, whether its code runs on that one only)."""
    match = re.fullmatch(r"sm_(\d+)(a?)", architecture)
    assert match is not None
    return int(match[1]), bool(match[2])


def cuda_text(spec: KernelSpec, way: str = wgmma.OFF, *, dependent: bool = False) -> str:
    """A kernel in CUDA C++, without the prelude.

    way: for which rows it uses wgmma. dependent: it may begin while the one before it ends. Raises KernelSpecError.
    """
    import_tvm()
    from llmc.compiler.targets.gpu.codegen import Language, kernel_text
    from llmc.compiler.targets.gpu.kernels.registry import build_kernel

    with _uncompiled():
        language = Language({"kind": "cuda", "arch": ARCHITECTURES[0]}, _HEAD)
        items = launch_of(spec, tensor_cores=True).items
        text = kernel_text(build_kernel(spec, tensor_cores=True, wgmma=way), language, items)
    return dependent_text(text) if dependent else text


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
class _Code:
    """What the text of a kernel depends on. dependent: it waits for earlier ones. way: for which rows it uses wgmma."""

    dependent: bool
    way: str

    @property
    def exact(self) -> bool:
        """Whether its PTX is for one architecture alone."""
        return self.way != wgmma.OFF

    def ptx(self, spec: KernelSpec, least: str) -> bytes:
        """least: the least architecture with this code."""
        prelude = cuda_prelude.FULL_DEPENDENT if self.dependent else cuda_prelude.FULL
        text = "\n".join(
            (prelude, *([WGMMA] if self.exact else []), cuda_text(spec, self.way, dependent=self.dependent))
        )
        return build_ptx(text, f"compute_{capability_of(least)[0]}{'a' if self.exact else ''}")


def _kernels(count: int) -> str:
    return f"{count} {'kernels' if count > 1 else 'kernel'} of linear layers"


@dataclass(frozen=True)
class CudaTarget(GpuTarget):
    """NVIDIA GPUs of these architectures, and later ones by PTX. With wgmma, that of an architecture without it: none
    if they all have it."""

    architectures: tuple[str, ...]
    options: tuple[str, ...] = ()

    kind: ClassVar[str] = KIND
    device: ClassVar[str] = KIND
    code_name: ClassVar[str] = "kernels.cuda"
    tensor_cores: ClassVar[bool] = True

    @property
    def name(self) -> str:
        return "+".join((f"{KIND}:{','.join(self.architectures)}", *self.options))

    @property
    def level(self) -> int:
        return SAMPLING_LEVEL

    @property
    def wgmma(self) -> str:
        return next((option for option in self.options if option in wgmma.WAYS), wgmma.OFF)

    def code_key(self) -> str:
        """Raises CompileError without nvcc, on whose version code depends."""
        return json.dumps({**self.record(), "nvcc": nvcc_version()}, sort_keys=True)

    def runs_here(self) -> bool:
        from llmc.compiler.targets.gpu.devices import cuda_capabilities

        images = [Image(0, CUBIN, *capability_of(name), b"") for name in self.architectures]
        # Of layers by wgmma, there is no PTX.
        plain = [name for name in self.architectures if self.wgmma == wgmma.OFF or name != wgmma.ARCHITECTURE]
        images += [Image(0, PTX, capability_of(name)[0], False, b"") for name in plain[:1]]
        return any(image.runs_on(capability) for capability in cuda_capabilities() for image in images)

    def compile(self, spec: KernelSpec, variant: str | None) -> bytes:
        self.check_no_variant(variant)
        images: list[Image] = []
        built: dict[_Code, tuple[int, bytes]] = {}
        for name in self.architectures:
            code = self._code_of(spec, name)
            if code not in built:
                built[code] = capability_of(name)[0], code.ptx(spec, name)
            images.append(Image(0, CUBIN, *capability_of(name), build_cubin(built[code][1], name)[0]))
        # For later GPUs: that of the least architecture whose code is not for it alone.
        for capability, ptx in [found for code, found in built.items() if not code.exact][:1]:
            # A driver reads PTX up to a terminating 0.
            images.append(Image(0, PTX, capability, False, ptx.rstrip(b"\0") + b"\0"))
        return pack(images, 1, awaits=DEPENDENT in self.options)

    def _code_of(self, spec: KernelSpec, architecture: str) -> _Code:
        early = DEPENDENT in self.options and capability_of(architecture)[0] >= _LEAST_DEPENDENT
        layer = tensor_layer(spec) if architecture == wgmma.ARCHITECTURE else None
        wide = layer is not None and not layer.normed and wgmma.takes(layer)
        return _Code(early, self.wgmma if wide else wgmma.OFF)

    def listings(self, spec: KernelSpec, variant: str | None) -> dict[str, str]:
        return {
            **super().listings(spec, variant),
            "cu": cuda_text(spec, self.wgmma, dependent=DEPENDENT in self.options),
        }

    def notes(self, specs: Sequence[KernelSpec]) -> tuple[str, ...]:
        reasons = Counter(why for spec in specs if (why := refusal(spec)) is not None)
        left = f", nor by {self.wgmma}" if self.wgmma != wgmma.OFF else ""
        found = [f"{_kernels(count)} not on tensor cores{left}: {why}" for why, count in sorted(reasons.items())]
        layers = [layer for spec in specs if (layer := tensor_layer(spec)) is not None]
        others = sum(not wgmma.takes(layer) for layer in layers) if left else 0
        if others:
            found.append(f"{_kernels(others)} by mma.sync alone, and not by {self.wgmma}: {wgmma.NOT_TAKEN}")
        return tuple(found)

    def link(self, codes: Sequence[bytes], path: Path) -> None:
        path.write_bytes(joined(codes))


def names() -> tuple[str, ...]:
    """Single-architecture targets, as users write them."""
    return tuple(f"{KIND}:{name}" for name in ARCHITECTURES)


def named(name: str) -> CudaTarget:
    """The target called `name`: one of `names()`, or several joined, as in cuda:sm_80,sm_90, with options behind them,
    as in cuda:sm_90a+dependent. Raises TargetError."""
    architectures, *options = name.removeprefix(f"{KIND}:").split("+")
    chosen = architectures.split(",")
    for one in chosen:
        if one not in ARCHITECTURES:
            raise TargetError(
                f"target {name!r}: there is no CUDA architecture {one!r}; known are {', '.join(ARCHITECTURES)}, and "
                "several of them with commas"
            )
    for one in options:
        if one not in OPTIONS:
            raise TargetError(f"target {name!r}: there is no option {one!r} of CUDA; known are {', '.join(OPTIONS)}")
    if DEPENDENT in options and all(capability_of(one)[0] < _LEAST_DEPENDENT for one in chosen):
        raise TargetError(
            f"target {name!r}: only GPUs from sm_90 on begin dependent kernels early; name such an architecture, or "
            f"leave +{DEPENDENT} out"
        )
    ways = [one for one in wgmma.WAYS if one in options]
    if len(ways) > 1:
        raise TargetError(f"target {name!r}: {' and '.join(ways)} exclude each other; leave one out")
    if ways and wgmma.ARCHITECTURE not in chosen:
        only = wgmma.ARCHITECTURE
        raise TargetError(f"target {name!r}: {ways[0]} is for {only} alone; name {only}, or leave +{ways[0]} out")
    return CudaTarget(
        tuple(name for name in ARCHITECTURES if name in chosen), tuple(name for name in OPTIONS if name in options)
    )


def from_record(record: Mapping[str, Any]) -> CudaTarget:
    """The target with this `record`."""
    return named(str(record["name"]))
