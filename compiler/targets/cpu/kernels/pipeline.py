"""From TIR to machine code: plain C symbols without TVM's calling convention or its runtime."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import tvm
from tvm import s_tir, tirx
from tvm.tirx import compilation_pipeline

from llmc.compiler.targets.cpu.target import Target

PIPELINE = "llmc_plain_c"


class KernelBuildError(RuntimeError):
    """A kernel that could not be compiled."""


def _plain_c_pipeline() -> tuple[Any, Any, Any]:
    def lower(mod: tvm.IRModule, _ctx: Any) -> tvm.IRModule:
        for step in (
            s_tir.transform.CanonicalizeLoop(),
            s_tir.transform.LowerInitBlock(),
            s_tir.transform.PlanAndUpdateBufferAllocationLocation(),
            s_tir.transform.ConvertBlocksToOpaque(),
            s_tir.transform.LowerMatchBuffer(),
            s_tir.transform.StmtSimplify(),
            s_tir.transform.LowerOpaqueBlock(),
            tirx.transform.FlattenBuffer(),
            tirx.transform.NarrowDataType(32),
            tirx.transform.VectorizeLoop(True),
            tirx.transform.StorageRewrite(),
            tirx.transform.UnrollLoop(),
            tirx.transform.StmtSimplify(),
            tirx.transform.RemoveNoOp(),
            tirx.transform.CommonSubexprElim(),
        ):
            mod = step(mod)
        return mod

    return tvm.transform.module_pass(lower, opt_level=0), tirx.transform.LowerIntrin, tirx.transform.LowerIntrin


compilation_pipeline.PIPELINE_MAP[PIPELINE] = _plain_c_pipeline


def _build(func: tirx.PrimFunc, target: Target) -> Any:
    symbol = str(func.attrs["global_symbol"])
    machine = {
        "kind": "llvm",
        "mcpu": target.mcpu,
        "mattr": list(target.mattr),
        "mtriple": "x86_64-unknown-linux-gnu",
    }
    return tvm.tirx.build(tvm.IRModule({symbol: func}), target=tvm.target.Target(machine), pipeline=PIPELINE)


def llvm_text(func: tirx.PrimFunc, target: Target, form: str = "ll") -> str:
    """Optimised LLVM IR (`ll`) or assembly (`asm`) of one kernel, for people."""
    built = _build(func, target)
    inner = [built, *getattr(built, "imports", [])]
    for module in inner:
        try:
            return str(module.inspect_source(form))
        except (tvm.error.InternalError, RuntimeError):
            continue
    raise KernelBuildError("the built module has no LLVM source to show")


def compile_object(func: tirx.PrimFunc, target: Target) -> bytes:
    """An ELF object in `target.instruction_sets` that defines the kernel's symbol and needs no library of TVM."""
    built = _build(func, target)
    inner = [built, *getattr(built, "imports", [])]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.o"
        for module in inner:
            if module.kind == "llvm":
                module.write_to_file(str(path), "o")
                return path.read_bytes()
    raise KernelBuildError(f"TVM built no LLVM module for {func.attrs['global_symbol']}")
