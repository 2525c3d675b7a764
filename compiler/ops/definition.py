"""The definition of an op of the graph IR: its tensors, result and kernels. Imports neither torch nor tvm."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmc.compiler import dtypes
from llmc.compiler.graph.commands import GraphShape, Site, round_up
from llmc.compiler.kernel_spec import KernelSpec, Param
from llmc.compiler.targets.base import Target
from llmc.graphs_format import ALIGNMENT
from llmc.quantize import WeightFormat
from llmc.quantize.formats.registry import format_of

NUM_TOKENS, NUM_SAMPLES = 0, 2
"""Indices of kernel scalars that bound a kernel's rows."""

F32, I32, ANY_FLOAT = (dtypes.F32.long_name,), (dtypes.I32.long_name,), tuple(dtypes.FLOATS_BY_LONG_NAME)


class BufferSource:
    """Buffers that are not tensors of the traced graph."""

    K_POOL = "<k_pool>"
    V_POOL = "<v_pool>"
    KV_SCALES = "<kv_scales>"
    """Scales of a layer's keys and values, stated by the checkpoint."""
    SAMPLE_INDEX = "<sample_index>"
    """The token row of each sampled row."""
    ADAPTER_TILES = "<adapter_tiles>"
    ADAPTER_POOL = "<adapter_pool>"
    """The pool of adapter matrices of the weight that the op reads; see `of_pool` for one of several."""
    STATES = "<states>"
    """Hidden states passed to the graph, and left by it."""
    SCRATCH = "<scratch>"
    """Memory used only by the commands of one op."""

    @staticmethod
    def of_scratch(part: str) -> str:
        """The buffer name of one of `OpDef.scratch_parts`."""
        return f"{BufferSource.SCRATCH}.{part}"

    @staticmethod
    def of_pool(weight: str) -> str:
        """The buffer name of the pool of one of an op's weights."""
        return f"{BufferSource.ADAPTER_POOL}.{weight}"

    @staticmethod
    def of_weight(plane: str) -> str:
        """The buffer name of a plane of the weight that the op reads."""
        return f"weight.{plane}"


@dataclass(frozen=True)
class Argument:
    """A tensor argument of an op. packed: an activation in the layout that linear layers read."""

    rank: int
    dtypes: tuple[str, ...]
    packed: bool = False


@dataclass(frozen=True)
class Call:
    """An op call in a trace: the shape of each tensor (ints and symbols), and the values of the other arguments."""

    shapes: Mapping[str, Sequence[Any]]
    values: Mapping[str, Any]
    act: dtypes.Dtype
    """Dtype of activations that feed linear layers."""
    eager: bool = False
    """Whether torch computes it; then rows have no padding."""

    def packed_width(self, width: Any) -> int:
        """Elements in a row of a packed activation: whole words."""
        return int(width) if self.eager else round_up(int(width), self.act.per_word)


@dataclass(frozen=True)
class GraphParams:
    """What an op's kernels depend on besides the op.

    kv_scales: whether the checkpoint states scales of the KV cache. merged: tokens that make one sample; 0 for one
    sample per sequence.
    """

    target: Target
    shape: GraphShape
    max_model_len: int
    act_dtype: str
    kv_dtype: str
    block_size: int
    kv_scales: bool = False
    merged: int = 0

    def row_params(self, *, on_samples: bool = False) -> dict[str, Param]:
        """Kernel parameters that depend on the row layout."""
        return dict(self.target.row_params(self.shape.sample_layout if on_samples else self.shape.token_layout))

    def rows(self, site: Site) -> dict[str, Param]:
        """Parameters of a kernel of rows: the row layout, and the scalar that counts valid rows."""
        on_samples = bool(site.attributes["on_samples"])
        return {"rows": NUM_SAMPLES if on_samples else NUM_TOKENS, **self.row_params(on_samples=on_samples)}


@dataclass(frozen=True)
class KernelCall:
    """One kernel of an op.

    buffers: names of the op's tensors or of BufferSource, in operand order; the output, `out` or scratch, comes last.
    barrier: whether threads meet after it; not before a kernel that reads and overwrites nothing of it.
    """

    spec: KernelSpec
    buffers: tuple[str, ...]
    barrier: bool = True


Result = Callable[[Call], tuple[Sequence[Any], str]]
"""Shape and dtype (TVM's name) of an op's result."""
Kernels = Callable[[Site, GraphParams], list[KernelCall]]
Template = Callable[..., Any]
"""Builds the TIR of a kernel from its spec and, for targets whose own templates take more, the target."""


@dataclass(frozen=True)
class Eager:
    """torch's implementation of an op.

    schema: in torch's form, as "(Tensor x, float eps) -> Tensor". function: imports torch when called.
    """

    schema: str
    function: Callable[..., Any]


@dataclass(frozen=True)
class OpDef:
    """One op `llmc::name`.

    arguments: by name; optional ones may be omitted from a call.
    result: shape and dtype of a call's result.
    kernels: of a site in a graph, in order.
    packed_result: whether the result is a packed activation.
    quantized: the op that replaces it at a site with a quantized `weight`; None if its weight is never quantized.
    reads_int8: whether that op takes `x` as int8 in a scheme with int8 activations.
    writes_int8: whether its kernels can write a packed result as int8.
    scratch_bytes: memory that the kernels of one site pass to each other. scratch_parts: sizes of several such places,
    by name.
    traced: whether models call it; otherwise passes insert it.
    calls: names of the kernels that every call needs; None: one of the op's own name. quantized_calls: those of a call
    with quantized weights; (): it has none. runs_on: whether devices of a target can run it at all.

    A single-file op brings two more things. eager: torch's implementation; None if `models/ops.py` has it. templates:
    of its kernels, which share the op's name, by kind of target; a template in a target's folder takes precedence.
    """

    name: str
    arguments: Mapping[str, Argument]
    result: Result
    kernels: Kernels
    packed_result: bool = False
    quantized: str | None = None
    reads_int8: bool = False
    writes_int8: bool = False
    scratch_bytes: Callable[[Site, GraphParams], int] = field(default=lambda site, graph: 0)
    scratch_parts: Callable[[Site, GraphParams], Mapping[str, int]] = field(default=lambda site, graph: {})
    traced: bool = True
    calls: tuple[str, ...] | None = None
    quantized_calls: tuple[str, ...] = ()
    runs_on: Callable[[Target], bool] = field(default=lambda target: True)
    eager: Eager | None = None
    templates: Mapping[str, Template] = field(default_factory=dict)

    def scratch(self, site: Site, graph: GraphParams) -> tuple[dict[str, tuple[int, int]], int]:
        """({part: (offset, bytes)}, total bytes) of a site's scratch memory."""
        places, total = {}, self.scratch_bytes(site, graph)
        for name, nbytes in self.scratch_parts(site, graph).items():
            places[BufferSource.of_scratch(name)] = total, nbytes
            total += round_up(nbytes, ALIGNMENT)
        return places, total

    @property
    def kernel_names(self) -> tuple[str, ...]:
        """Names of the kernels that every call needs, with weights as floats if it has any."""
        return (self.name,) if self.calls is None else self.calls

    @property
    def packed_arguments(self) -> tuple[str, ...]:
        return tuple(name for name, argument in self.arguments.items() if argument.packed)


def weight_format(site: Site) -> WeightFormat:
    """The storage format of a quantized site's weight."""
    return format_of(site.attributes["format"])


def weight_buffers(site: Site) -> tuple[str, ...]:
    """The operands that form a quantized site's weight, in order."""
    planes = weight_format(site).planes(site.attributes["weight_shapes"]["weight"][1])
    return "weight", *(BufferSource.of_weight(plane.name) for plane in planes)


def int8_sums(site: Site) -> dict[str, int]:
    """Parameters of the sums in an int8 activation that a site makes."""
    return {name: site.attributes[f"int8_{name}"] for name in ("group_size", "sum_factor")}


def makes_int8(site: Site) -> bool:
    """Whether the result of a site is quantized to int8."""
    return "int8_group_size" in site.attributes


def written_activation(site: Site, graph: GraphParams) -> dict[str, Param]:
    """The dtype of a packed activation that a kernel writes; for int8, also its sums."""
    return {"act_dtype": "i8", **int8_sums(site)} if makes_int8(site) else {"act_dtype": graph.act_dtype}
