"""Compiles kernels for a CPU of `targets.cpu.target`, limited to its instruction sets."""

from __future__ import annotations

from llmc.compiler.targets.cpu.target import Target
from llmc.compiler.targets.elf import codegen

_TRIPLE = "x86_64-unknown-linux-gnu"


def llvm_text(kernel: codegen.Kernel, target: Target, form: str = "ll") -> str:
    """One kernel as optimised LLVM IR (`ll`) or assembly (`asm`), for reading."""
    return codegen.llvm_text(kernel, _TRIPLE, target.mcpu, target.mattr, form)


def compile_object(kernel: codegen.Kernel, target: Target) -> bytes:
    """An ELF object that defines the kernel's symbol, uses only `target.instruction_sets`, and needs no TVM library."""
    return codegen.compile_object(kernel, _TRIPLE, target.mcpu, target.mattr)
