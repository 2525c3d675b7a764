"""The code of kernels for a CPU of `targets.cpu.target`: nothing beyond its instruction sets."""

from __future__ import annotations

from llmc.compiler.targets.cpu.target import Target
from llmc.compiler.targets.elf import codegen

_TRIPLE = "x86_64-unknown-linux-gnu"


def llvm_text(kernel: codegen.Kernel, target: Target, form: str = "ll") -> str:
    """Optimised LLVM IR (`ll`) or assembly (`asm`) of one kernel, for people."""
    return codegen.llvm_text(kernel, _TRIPLE, target.mcpu, target.mattr, form)


def compile_object(kernel: codegen.Kernel, target: Target) -> bytes:
    """An ELF object in `target.instruction_sets` that defines the kernel's symbol and needs no library of TVM."""
    return codegen.compile_object(kernel, _TRIPLE, target.mcpu, target.mattr)
