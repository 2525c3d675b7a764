"""Plain TIR to machine code of any CPU of an architecture: nothing beyond what all of them have."""

from __future__ import annotations

import tempfile
from pathlib import Path

import tvm
from tvm import tirx

from llmc.compiler.targets.cpu.kernels.pipeline import PIPELINE, KernelBuildError


def compile_object(func: tirx.PrimFunc, triple: str, cpu: str) -> bytes:
    """An ELF object that defines the kernel's symbol."""
    symbol = str(func.attrs["global_symbol"])
    machine = {"kind": "llvm", "mcpu": cpu, "mtriple": triple}
    built = tvm.tirx.build(tvm.IRModule({symbol: func}), target=tvm.target.Target(machine), pipeline=PIPELINE)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.o"
        for module in (built, *getattr(built, "imports", [])):
            if module.kind == "llvm":
                module.write_to_file(str(path), "o")
                return path.read_bytes()
    raise KernelBuildError(f"TVM built no LLVM module for {symbol}")
