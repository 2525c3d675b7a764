"""The CPU target: implements `targets.base.Target` with this folder's modules.

Imports neither torch nor tvm; kernels and tuning import them when called.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from llmc.adapter_slot import ITEM_BYTES, AdapterSlot
from llmc.compiler.config import CompileError
from llmc.compiler.dtypes import FLOATS
from llmc.compiler.graph.commands import GraphShape
from llmc.compiler.kernel_spec import KernelSpec, KernelSpecError, Param
from llmc.compiler.ops.registry import brought_template
from llmc.compiler.store.cache import GraphCache
from llmc.compiler.targets import base
from llmc.compiler.targets.base import Choice, Compare, OnStep, TargetError
from llmc.compiler.targets.cpu import layouts, target
from llmc.compiler.targets.cpu.kernels.linear.schedule import Schedule
from llmc.compiler.targets.cpu.kernels.sources import KIND, TEMPLATE_FILES, source_digest
from llmc.compiler.targets.cpu.kernels.tasks import max_tasks, weight_parts
from llmc.compiler.targets.elf.link import link_shared
from llmc.compiler.targets.elf.symbols import defined_symbols
from llmc.compiler.weight_request import WeightRequest, WeightTensor
from llmc.kv_dtypes import kv_block_bytes
from llmc.models.loader import Parameter
from llmc.quantize import WeightFormat
from llmc.quantize.formats.registry import format_sources
from llmc.tvm_import import import_tvm

_HERE = Path(__file__).parent
_ANY_K = 256  # columns of a weight that is only asked about: whole groups of every format


@dataclass(frozen=True)
class CpuTarget(base.Target):
    """An x86-64 CPU of `targets.cpu.target`."""

    cpu: target.Target
    kind: ClassVar[str] = "cpu"
    device: ClassVar[str] = "cpu"
    code_name: ClassVar[str] = "kernels.so"
    layout: ClassVar[str] = "tiles"
    runs_ranks: ClassVar[bool] = True
    keeps_states: ClassVar[bool] = True

    @property
    def name(self) -> str:
        return self.cpu.name

    @property
    def level(self) -> int:
        return self.cpu.isa_level

    def record(self) -> dict[str, Any]:
        return asdict(self.cpu)

    def code_key(self) -> str:
        return json.dumps({**asdict(self.cpu), "mattr": self.cpu.mattr}, sort_keys=True)

    def layout_key(self) -> str:
        return f"{self.cpu.lanes} {self.cpu.row_tile} {self.cpu.panel_columns}"

    def runs_here(self) -> bool:
        return target.runs_here(self.cpu)

    def has_kernel(self, name: str) -> bool:
        return name in TEMPLATE_FILES or brought_template(name, KIND) is not None

    def multiplies(self, act_dtype: str, format: WeightFormat | None) -> bool:
        import_tvm()
        from llmc.compiler.targets.cpu.kernels.linear.plan import operands
        from llmc.compiler.targets.cpu.kernels.linear.spec import linear_quant_spec, linear_spec, problem_of

        size = self.cpu.row_tile, act_dtype
        spec = linear_spec(1, _ANY_K, *size) if format is None else linear_quant_spec(1, _ANY_K, *size, format)
        try:
            operands(problem_of(spec, self.cpu))
        except KernelSpecError:
            return False
        return True

    def graph_shape(
        self, tokens: int, samples: int, longest_context: int, max_context: int, block_size: int
    ) -> GraphShape:
        return layouts.graph_shape(self.cpu, tokens, samples, longest_context, max_context, block_size)

    def row_params(self, layout: int) -> Mapping[str, Param]:
        return {"row_tile": layout}

    def int8_row_words(self, width: int, groups: int) -> int:
        from llmc.compiler.targets.cpu.quant_packing import quantized_row_words

        return quantized_row_words(width, groups)

    def attention_scratch_bytes(self, rows: int, num_heads: int, head_dim: int, segments: int) -> int:
        return layouts.attention_scratch_bytes(rows, num_heads, head_dim, segments)

    def row_unit(self, layout: int) -> int:
        return layout

    def kv_block_bytes(
        self, num_kv_heads: int, head_dim: int, block_size: int, dtype: str, key_scales: int = 1
    ) -> tuple[int, int]:
        return kv_block_bytes(dtype, num_kv_heads, block_size, head_dim, layouts.value_width(head_dim), key_scales)

    def adapter_slot(self, columns: int, rows: tuple[int, ...], rank: int, dtype: str) -> AdapterSlot:
        lanes = FLOATS[dtype].per_word
        return AdapterSlot(columns, rows, rank, layouts.ADAPTER_PANEL, lanes, ITEM_BYTES[dtype])

    def weight_params(self) -> Mapping[str, Param]:
        return {"panel_columns": self.cpu.panel_columns}

    def weight_tensors(self, request: WeightRequest) -> list[WeightTensor]:
        from llmc.compiler.targets.cpu.weights import weight_tensors

        return weight_tensors(request, self.cpu.panel_columns)

    def weight_pieces(self, request: WeightRequest, parameter: Parameter) -> Iterator[tuple[memoryview, ...]]:
        from llmc.compiler.targets.cpu.weights import weight_pieces

        return weight_pieces(request, parameter, self.cpu.panel_columns)

    def graph_sources(self) -> Sequence[Path]:
        names = ("layouts.py", "quant_packing.py", "kernels/attention_split.py")
        return [_HERE / name for name in names]

    def weight_sources(self, *, quantized: bool) -> Sequence[Path]:
        names = ("weights.py", "packing.py", *(("quant_packing.py",) if quantized else ()))
        return [_HERE / name for name in names]

    def template_digest(self, spec: KernelSpec) -> str:
        return source_digest(spec.op, of_format=format_sources(spec.as_dict().get("format")))

    def launch_facts(self, spec: KernelSpec) -> tuple[int, ...]:
        return max_tasks(spec, self.cpu.panel_columns), weight_parts(spec)

    def compile(self, spec: KernelSpec, variant: str | None) -> bytes:
        import_tvm()
        from llmc.compiler.targets.cpu.kernels.codegen import compile_object
        from llmc.compiler.targets.cpu.kernels.registry import build_kernel

        schedule = None if variant is None else Schedule.parse(variant)
        return compile_object(build_kernel(spec, self.cpu, schedule), self.cpu)

    def listings(self, spec: KernelSpec, variant: str | None) -> dict[str, str]:
        import_tvm()
        from llmc.compiler.targets.cpu.kernels.codegen import llvm_text
        from llmc.compiler.targets.cpu.kernels.registry import build_kernel

        function = build_kernel(spec, self.cpu, None if variant is None else Schedule.parse(variant))
        return {"tir.txt": f"{function.script()}\n", "asm": llvm_text(function, self.cpu, "asm")}

    def link(self, codes: Sequence[bytes], path: Path) -> None:
        link_shared(codes, path, "x86_64")

    def kernels_of_code(self, code: bytes) -> Collection[str]:
        return defined_symbols(code)

    def check_variant(self, text: str) -> str:
        return Schedule.parse(text).text()

    def check_tunes_here(self) -> None:
        if not self.runs_here():
            raise CompileError(
                f"this machine cannot run code for {self.name}, so nothing can be measured on it: leave out --tune, or "
                "compile on such a machine"
            )
        try:
            target.enable(self.cpu)
        except TargetError as error:
            raise CompileError(f"{error}, so nothing can be measured: leave out --tune") from None

    def tune(
        self,
        rows: Mapping[KernelSpec, int],
        cache: GraphCache,
        machine: Mapping[str, str],
        num_jobs: int,
        on_step: OnStep,
        compare: Compare | None = None,
    ) -> dict[KernelSpec, Choice]:
        from llmc.compiler.targets.cpu.tuning import tune

        self.check_tunes_here()
        return tune(rows, self, self.cpu, cache, machine, num_jobs, on_step, compare)


def names() -> tuple[str, ...]:
    """Names of all targets of this kind, as users write them."""
    return tuple(target.TARGETS)


def named(name: str) -> CpuTarget:
    """The target called `name`, one of `names()`."""
    return CpuTarget(target.TARGETS[name])


def native() -> CpuTarget:
    """The best target that this machine runs. Raises TargetError."""
    return CpuTarget(target.native_target())


def from_record(record: Mapping[str, Any]) -> CpuTarget:
    """The target with this `record`. Raises TargetError."""
    from llmc.compiler.targets.cpu.record import Record
    from llmc.manifest_schema import complaint

    if (why := complaint(Record, record)) is not None:
        raise TargetError(f"a CPU target is not recorded so: {why}; compile the model again")
    return CpuTarget(target.Target(**{**record, "instruction_sets": tuple(record["instruction_sets"])}))
