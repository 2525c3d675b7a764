"""The reference target: what `targets.base.Target` asks for, in the plainest way that the runtime can replay.

Imports neither torch nor tvm: kernels do, when they are compiled.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from llmc.compiler import kernel_spec
from llmc.compiler.config import CompileError
from llmc.compiler.graph.commands import GraphShape, round_up
from llmc.compiler.kernel_spec import KernelSpec, KernelSpecError, Param
from llmc.compiler.ops.registry import brought_sources
from llmc.compiler.store.cache import GraphCache
from llmc.compiler.targets import base
from llmc.compiler.targets.base import Choice, Compare, OnStep
from llmc.compiler.targets.elf import CODE_SOURCES
from llmc.compiler.targets.elf.link import link_shared
from llmc.compiler.targets.reference.kernels.padding import VALUES, number_bytes
from llmc.compiler.weight_request import ROWS, WeightRequest, WeightTensor
from llmc.kv_dtypes import kv_block_bytes
from llmc.models.loader import Parameter
from llmc.quantize.formats.registry import format_sources
from llmc.tvm_import import import_tvm

KIND = "reference"
_HERE = Path(__file__).parent
_WORDS_BESIDE_NUMBERS = 1  # of an int8 row: its scale
# LLVM's triple and the CPU whose instructions every one of its architecture has, by machine.
_MACHINES = {
    "x86_64": ("x86_64-unknown-linux-gnu", "x86-64"),
    "aarch64": ("aarch64-unknown-linux-gnu", "generic"),
}
_NAMES = {"reference": "x86_64", "reference-aarch64": "aarch64"}


@dataclass(frozen=True)
class ReferenceTarget(base.Target):
    """machine: an architecture, as uname has it."""

    machine: str
    kind: ClassVar[str] = KIND
    device: ClassVar[str] = "cpu"
    code_name: ClassVar[str] = "kernels.so"
    layout: ClassVar[str] = ROWS

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

    def layout_key(self) -> str:
        return KIND

    def runs_here(self) -> bool:
        return platform.machine() == self.machine

    def graph_shape(
        self, tokens: int, samples: int, longest_context: int, max_context: int, block_size: int
    ) -> GraphShape:
        return GraphShape(tokens, samples, 1, 1, 0)

    def row_params(self, layout: int) -> Mapping[str, Param]:
        return {}

    def int8_row_words(self, width: int, groups: int) -> int:
        return number_bytes(width, 8) // 4 + _WORDS_BESIDE_NUMBERS + groups

    def attention_scratch_bytes(self, rows: int, num_heads: int, head_dim: int, segments: int) -> int:
        return 0

    def row_unit(self, layout: int) -> int:
        return 1

    def kv_block_bytes(self, num_kv_heads: int, head_dim: int, block_size: int, dtype: str) -> tuple[int, int]:
        return kv_block_bytes(dtype, num_kv_heads, block_size, head_dim, round_up(head_dim, VALUES))

    def weight_params(self) -> Mapping[str, Param]:
        return {}

    def weight_tensors(self, request: WeightRequest) -> list[WeightTensor]:
        from llmc.compiler.targets.reference.weights import weight_tensors

        return weight_tensors(request)

    def weight_pieces(self, request: WeightRequest, parameter: Parameter) -> Iterator[tuple[memoryview, ...]]:
        from llmc.compiler.targets.reference.weights import weight_pieces

        return weight_pieces(request, parameter)

    def graph_sources(self) -> Sequence[Path]:
        return [_HERE / "backend.py", _HERE / "kernels" / "padding.py"]

    def weight_sources(self, *, quantized: bool) -> Sequence[Path]:
        return [_HERE / "weights.py", _HERE / "kernels" / "padding.py"]

    def template_digest(self, spec: KernelSpec) -> str:
        of_format = format_sources(spec.as_dict().get("format"))
        return _sources_digest((*brought_sources(spec.op, KIND), *of_format))

    def launch_facts(self, spec: KernelSpec) -> tuple[int, ...]:
        return ()

    def compile(self, spec: KernelSpec, variant: str | None) -> bytes:
        if variant is not None:
            raise KernelSpecError(f"kernels of {self.name} have one schedule; {variant!r} is another")
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

    def check_variant(self, text: str) -> str:
        raise ValueError(f"{text!r} is no schedule: kernels of {self.name} have none")

    def check_tunes_here(self) -> None:
        raise CompileError(f"kernels of {self.name} have one schedule, so nothing can be measured: leave out --tune")

    def tune(
        self,
        rows: Mapping[KernelSpec, int],
        cache: GraphCache,
        machine: Mapping[str, str],
        num_jobs: int,
        on_step: OnStep,
        compare: Compare | None = None,
    ) -> dict[KernelSpec, Choice]:
        self.check_tunes_here()
        return {}


@cache
def _sources_digest(brought: tuple[Path, ...]) -> str:
    """Of all that decides a kernel's code: the kernels are few and share their parts. brought: by op and format."""
    digest = hashlib.sha256()
    kernels = sorted((_HERE / "kernels").glob("*.py"))
    for file in (Path(kernel_spec.__file__), *CODE_SOURCES, *kernels, *brought):
        data = file.read_bytes()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def names() -> tuple[str, ...]:
    """Targets of this kind, as users write them."""
    return tuple(_NAMES)


def named(name: str) -> ReferenceTarget:
    """The target called `name`, one of `names()`."""
    return ReferenceTarget(_NAMES[name])


def from_record(record: Mapping[str, Any]) -> ReferenceTarget:
    """The target whose `record()` it is."""
    return named(str(record["name"]))
