"""From TIR to machine code: plain C symbols, without TVM's calling convention or runtime.

Architecture and CPU have LLVM's names. triple: the architecture. cpu: fixes the timings to schedule for and the
instruction sets. features: sets added ("+avx2") or removed ("-avx512fp16").
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import tvm
from tvm import s_tir, tirx
from tvm.tirx import compilation_pipeline

from llmc.compiler.targets.tir_steps import straight

PIPELINE = "llmc_plain_c"


class KernelBuildError(RuntimeError):
    """A kernel could not be compiled."""


def _plain_c_pipeline() -> tuple[Any, Any, Any]:
    """Steps that every kernel needs. Templates write flat buffers and 32-bit indices, and LLVM finds what is computed
    twice or never: TVM's steps for these take as long as LLVM's, and make longer code."""

    def lower(mod: tvm.IRModule, _ctx: Any) -> tvm.IRModule:
        for step in (
            s_tir.transform.CanonicalizeLoop(),
            s_tir.transform.LowerInitBlock(),
            s_tir.transform.PlanAndUpdateBufferAllocationLocation(),
            s_tir.transform.ConvertBlocksToOpaque(),
            s_tir.transform.LowerMatchBuffer(),
            s_tir.transform.LowerOpaqueBlock(),
            *straight(),
        ):
            mod = step(mod)
        return mod

    return tvm.transform.module_pass(lower, opt_level=0), tirx.transform.LowerIntrin, tirx.transform.LowerIntrin


compilation_pipeline.PIPELINE_MAP[PIPELINE] = _plain_c_pipeline


Kernel: TypeAlias = tirx.PrimFunc | tvm.IRModule
"""One function, or several of which one calls the others."""


def _built(kernel: Kernel, triple: str, cpu: str, features: Sequence[str]) -> list[Any]:
    """The modules that TVM builds from a kernel; one of them is LLVM's."""
    machine = {"kind": "llvm", "mcpu": cpu, "mattr": list(features), "mtriple": triple}
    module = kernel
    if not isinstance(kernel, tvm.IRModule):
        module = tvm.IRModule({str(kernel.attrs["global_symbol"]): kernel})
    built = tvm.tirx.build(module, target=tvm.target.Target(machine), pipeline=PIPELINE)
    return [built, *getattr(built, "imports", [])]


def llvm_text(kernel: Kernel, triple: str, cpu: str, features: Sequence[str] = (), form: str = "ll") -> str:
    """One kernel as optimised LLVM IR (`ll`) or assembly (`asm`), for reading."""
    for module in _built(kernel, triple, cpu, features):
        try:
            return str(module.inspect_source(form))
        except (tvm.error.InternalError, RuntimeError):
            continue
    raise KernelBuildError("the built module has no LLVM source to show")


def compile_object(kernel: Kernel, triple: str, cpu: str, features: Sequence[str] = ()) -> bytes:
    """An ELF object that defines the kernel's symbol and needs no TVM library."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.o"
        for module in _built(kernel, triple, cpu, features):
            if module.kind == "llvm":
                module.write_to_file(str(path), "o")
                return path.read_bytes()
    what = kernel.get_global_vars() if isinstance(kernel, tvm.IRModule) else kernel.attrs["global_symbol"]
    raise KernelBuildError(f"TVM built no LLVM module for {what}")
