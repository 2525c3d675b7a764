"""Targets whose artifacts use layout `rows` throughout (FORMAT.md), and whose kernels have one schedule."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import ClassVar

from llmc.adapter_slot import ITEM_BYTES, AdapterSlot
from llmc.compiler import kernel_spec
from llmc.compiler.config import CompileError
from llmc.compiler.dtypes import FLOATS
from llmc.compiler.graph.commands import GraphShape, round_up
from llmc.compiler.kernel_spec import KernelSpec, KernelSpecError, Param
from llmc.compiler.ops.registry import brought_template
from llmc.compiler.store.cache import GraphCache
from llmc.compiler.targets import base
from llmc.compiler.targets.base import Choice, Compare, OnStep
from llmc.compiler.targets.reference.kernels.padding import VALUES, number_bytes
from llmc.compiler.weight_request import ROWS, WeightRequest, WeightTensor
from llmc.kv_dtypes import kv_block_bytes
from llmc.models.loader import Parameter
from llmc.quantize import WeightFormat
from llmc.quantize.formats.registry import format_sources
from llmc.tvm_import import import_tvm

_HERE = Path(__file__).parent
_KERNELS = _HERE / "kernels"
_WORDS_BESIDE_NUMBERS = 1  # of an int8 row: its scale
_WORDS_AT_ONCE = 4  # that an int8 row has a multiple of


class RowsTarget(base.Target):
    """Shared by such targets: everything but their identity and code."""

    layout: ClassVar[str] = ROWS
    template_kinds: ClassVar[tuple[str, ...]] = ("reference",)
    """Kinds of templates that it takes from ops, in order of preference."""

    def has_kernel(self, name: str) -> bool:
        import_tvm()
        from llmc.compiler.targets.reference.kernels.registry import KERNELS

        return name in KERNELS or any(brought_template(name, kind) is not None for kind in self.template_kinds)

    def multiplies(self, act_dtype: str, format: WeightFormat | None) -> bool:
        if format is None:
            return act_dtype in FLOATS
        import_tvm()
        from llmc.compiler.targets.reference.kernels.matrices import multiplies

        return multiplies(act_dtype, format)

    def layout_key(self) -> str:
        return ROWS

    def graph_shape(
        self, tokens: int, samples: int, longest_context: int, max_context: int, block_size: int
    ) -> GraphShape:
        return GraphShape(tokens, samples, 1, 1, 0)

    def row_params(self, layout: int) -> Mapping[str, Param]:
        return {}

    def int8_row_words(self, width: int, groups: int) -> int:
        return round_up(number_bytes(width, 8) // 4 + _WORDS_BESIDE_NUMBERS + groups, _WORDS_AT_ONCE)

    def attention_scratch_bytes(self, rows: int, num_heads: int, head_dim: int, segments: int) -> int:
        return 0

    def row_unit(self, layout: int) -> int:
        return 1

    def kv_block_bytes(
        self, num_kv_heads: int, head_dim: int, block_size: int, dtype: str, key_scales: int = 1
    ) -> tuple[int, int]:
        return kv_block_bytes(dtype, num_kv_heads, block_size, head_dim, round_up(head_dim, VALUES), key_scales)

    def adapter_slot(self, columns: int, rows: tuple[int, ...], rank: int, dtype: str) -> AdapterSlot:
        return AdapterSlot(columns, rows, rank, 1, 1, ITEM_BYTES[dtype])

    def weight_params(self) -> Mapping[str, Param]:
        return {}

    def weight_tensors(self, request: WeightRequest) -> list[WeightTensor]:
        from llmc.compiler.targets.reference.weights import weight_tensors

        return weight_tensors(request)

    def weight_pieces(self, request: WeightRequest, parameter: Parameter) -> Iterator[tuple[memoryview, ...]]:
        from llmc.compiler.targets.reference.weights import weight_pieces

        return weight_pieces(request, parameter)

    def graph_sources(self) -> Sequence[Path]:
        return [_HERE / "rows_target.py", _KERNELS / "padding.py"]

    def weight_sources(self, *, quantized: bool) -> Sequence[Path]:
        return [_HERE / "weights.py", _KERNELS / "padding.py"]

    def digest_of(self, code: Sequence[Path], brought: Sequence[Path], spec: KernelSpec) -> str:
        """Digest of the sources that a kernel's code depends on.

        code: sources that turn TIR into code, and the kind's own kernels. brought: file of the op's own template.
        """
        return _digest((*code, *brought, *format_sources(spec.as_dict().get("format"))))

    def check_no_variant(self, variant: str | None) -> None:
        """Raises KernelSpecError for any schedule but the only one."""
        if variant is not None:
            raise KernelSpecError(f"kernels of {self.name} have one schedule; {variant!r} is another")

    def check_variant(self, text: str) -> str:
        raise ValueError(f"{text!r} is not a schedule: kernels of {self.name} have none")

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
def _digest(beside: tuple[Path, ...]) -> str:
    """Digest of the plain kernels, which are few and share parts, and of `beside`."""
    digest = hashlib.sha256()
    for file in (Path(kernel_spec.__file__), *sorted(_KERNELS.glob("*.py")), *beside):
        data = file.read_bytes()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()
