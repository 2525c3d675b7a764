"""The base of GPU targets: one kernel source, on row-major rows. Each kind adds its language and its devices.

Imports neither torch nor tvm; kernels import them when compiled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from llmc.compiler.graph.commands import GraphShape, round_up
from llmc.compiler.kernel_spec import KernelSpec, Param
from llmc.compiler.ops.registry import brought_sources
from llmc.compiler.targets.gpu.attention_split import one_group, partial_floats, segments_of
from llmc.compiler.targets.gpu.normed import MOST_NORMED_ROWS, norms_inside
from llmc.compiler.targets.gpu.sampling import sampling_specs
from llmc.compiler.targets.gpu.wgmma import ALL, OFF
from llmc.compiler.targets.reference.rows_target import RowsTarget
from llmc.tvm_import import import_tvm

_HERE = Path(__file__).parent
_HEADS = ("num_heads", "num_kv_heads", "head_dim")
_BESIDE = (_HERE.parent / "tir_steps.py", _HERE.parent / "coefficients.py")


class GpuTarget(RowsTarget):
    """A GPU of some kind. Immutable; equal targets have equal records."""

    template_kinds: ClassVar[tuple[str, ...]] = ("gpu", "reference")
    runs_ranks: ClassVar[bool] = True
    adds_parts: ClassVar[bool] = True
    keeps_states: ClassVar[bool] = True
    tensor_cores: ClassVar[bool] = False
    """Whether linear layers use tensor cores where they can."""

    @property
    def wgmma(self) -> str:
        """For which rows of x linear layers use Hopper's `wgmma` (`wgmma.py`)."""
        return OFF

    def has_kernel(self, name: str) -> bool:
        import_tvm()
        from llmc.compiler.targets.gpu.kernels.registry import KERNELS

        return name in KERNELS or super().has_kernel(name)

    def record(self) -> dict[str, Any]:
        return {"kind": self.kind, "name": self.name}

    def code_key(self) -> str:
        return json.dumps(self.record(), sort_keys=True)

    def graph_sources(self) -> Sequence[Path]:
        own = ("backend", "attention_split", "normed", "linear_forms", "tensor_cores", "wgmma")
        return [*super().graph_sources(), *(_HERE / f"{name}.py" for name in own)]

    def layout_key(self) -> str:
        # Where layers use tensor cores, they may norm.
        ways = ("normed",) if self.tensor_cores and self.wgmma != ALL else ()
        return " ".join((super().layout_key(), *ways))

    def graph_shape(
        self, tokens: int, samples: int, longest_context: int, max_context: int, block_size: int
    ) -> GraphShape:
        reach = min(round_up(longest_context, block_size), max_context)  # a sequence may fill its last block
        return GraphShape(tokens, samples, 1, 1, segments_of(tokens, reach, max_context))

    def attention_params(self, shape: GraphShape) -> Mapping[str, Param]:
        # With as many rows as sequences, hardly two are of one, unless they hold guesses.
        return {"runs": True} if shape.tokens > shape.samples else {}

    def joins_norm(self, norm: KernelSpec, linear: KernelSpec, shape: GraphShape) -> bool:
        few = self.tensor_cores and shape.tokens <= MOST_NORMED_ROWS
        return few and norms_inside(norm, linear, self.wgmma)

    def rotates_in_attention(self, shape: GraphShape, spec: KernelSpec) -> bool:
        # A decode graph of several rows also carries guesses: tokens of a sequence that read each other's keys.
        p = spec.as_dict()
        shared = not p.get("reads_cache") and not one_group(*(int(p[name]) for name in _HEADS))
        return shape.tokens == 1 and not shared and "both_ways" not in p

    def attention_scratch_bytes(self, rows: int, num_heads: int, head_dim: int, segments: int) -> int:
        return 4 * rows * num_heads * segments * partial_floats(head_dim)

    def template_digest(self, spec: KernelSpec) -> str:
        brought = next((found for kind in self.template_kinds if (found := brought_sources(spec.op, kind))), ())
        own = (*_HERE.glob("*.py"), *sorted((_HERE / "kernels").glob("*.py")), *_BESIDE)
        return self.digest_of(own, brought, spec)

    def launch_facts(self, spec: KernelSpec) -> tuple[int, ...]:
        from llmc.compiler.targets.gpu.launch import launch_of, reads_whole_weights

        facts = launch_of(spec, tensor_cores=self.tensor_cores).facts()
        return (*facts, 0, 1) if reads_whole_weights(spec) else facts

    def sampling_kernels(self, vocab: int) -> Sequence[KernelSpec]:
        return sampling_specs(vocab)

    def kernel(self, spec: KernelSpec) -> Any:
        """The TIR of a kernel. Raises KernelSpecError."""
        import_tvm()
        from llmc.compiler.targets.gpu.kernels.registry import build_kernel

        return build_kernel(spec, tensor_cores=self.tensor_cores, wgmma=self.wgmma)

    def listings(self, spec: KernelSpec, variant: str | None) -> dict[str, str]:
        return {"tir.txt": f"{self.kernel(spec).script()}\n"}
