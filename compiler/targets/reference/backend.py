"""The reference target: the plainest implementation of `targets.base.Target` that the runtime can replay.

Imports neither torch nor tvm; kernels import them when compiled.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.ops.registry import brought_sources
from llmc.compiler.targets.elf import CODE_SOURCES
from llmc.compiler.targets.elf.link import link_shared
from llmc.compiler.targets.elf.symbols import defined_symbols
from llmc.compiler.targets.reference.rows_target import RowsTarget
from llmc.tvm_import import import_tvm

KIND = "reference"
# Per machine: LLVM's triple, and a CPU whose instructions every CPU of that architecture has.
_MACHINES = {
    "x86_64": ("x86_64-unknown-linux-gnu", "x86-64"),
    "aarch64": ("aarch64-unknown-linux-gnu", "generic"),
}
_NAMES = {"reference": "x86_64", "reference-aarch64": "aarch64"}


@dataclass(frozen=True)
class ReferenceTarget(RowsTarget):
    """machine: an architecture, by uname's name."""

    machine: str
    kind: ClassVar[str] = KIND
    device: ClassVar[str] = "cpu"
    code_name: ClassVar[str] = "kernels.so"
    runs_ranks: ClassVar[bool] = True
    keeps_states: ClassVar[bool] = True

    @property
    def name(self) -> str:
        return next(name for name, machine in _NAMES.items() if machine == self.machine)

    @property
    def level(self) -> int:
        return 0

    def record(self) -> dict[str, Any]:
        return {"kind": KIND, "name": self.name, "machine": self.machine}

    def code_key(self) -> str:
        return json.dumps({**self.record(), "code": _MACHINES[self.machine]}, sort_keys=True)

    def runs_here(self) -> bool:
        return platform.machine() == self.machine

    def template_digest(self, spec: KernelSpec) -> str:
        return self.digest_of(CODE_SOURCES, brought_sources(spec.op, KIND), spec)

    def launch_facts(self, spec: KernelSpec) -> tuple[int, ...]:
        return ()

    def compile(self, spec: KernelSpec, variant: str | None) -> bytes:
        self.check_no_variant(variant)
        import_tvm()
        from llmc.compiler.targets.elf.codegen import compile_object

        return compile_object(self.kernel(spec), *_MACHINES[self.machine])

    def kernel(self, spec: KernelSpec) -> Any:
        """The TIR of a kernel. Raises KernelSpecError."""
        from llmc.compiler.targets.reference.kernels.registry import build_kernel

        return build_kernel(spec)

    def listings(self, spec: KernelSpec, variant: str | None) -> dict[str, str]:
        import_tvm()
        return {"tir.txt": f"{self.kernel(spec).script()}\n"}

    def link(self, codes: Sequence[bytes], path: Path) -> None:
        link_shared(codes, path, self.machine)

    def kernels_of_code(self, code: bytes) -> Collection[str]:
        return defined_symbols(code)


def names() -> tuple[str, ...]:
    """Names of all targets of this kind, as users write them."""
    return tuple(_NAMES)


def named(name: str) -> ReferenceTarget:
    """The target called `name`, one of `names()`."""
    return ReferenceTarget(_NAMES[name])


def from_record(record: Mapping[str, Any]) -> ReferenceTarget:
    """The target with this `record`."""
    return named(str(record["name"]))
