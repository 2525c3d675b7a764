"""What an op of the graph IR is: its tensors, result and kernels. Imports neither torch nor tvm."""

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
"""Indices into the kernel scalars: what bounds a kernel's rows."""

F32, I32, ANY_FLOAT = (dtypes.F32.long_name,), (dtypes.I32.long_name,), tuple(dtypes.FLOATS_BY_LONG_NAME)


class BufferSource:
    """Buffers that are no tensor of the traced graph."""

    K_POOL = "<k_pool>"
    V_POOL = "<v_pool>"
    KV_SCALES = "<kv_scales>"
    """The scales that the checkpoint states of a layer's keys and values."""
    ADAPTER_TILES = "<adapter_tiles>"
    ADAPTER_POOL = "<adapter_pool>"
    """The matrices of adapters of the weight that the op reads."""
    STATES = "<states>"
    """The hidden states that are handed to the graph, and that it leaves."""
    SCRATCH = "<scratch>"
    """Memory that only the commands of one op use."""

    @staticmethod
    def of_scratch(part: str) -> str:
        """One of `OpDef.scratch_parts`."""
        return f"{BufferSource.SCRATCH}.{part}"

    @staticmethod
    def of_weight(plane: str) -> str:
        """What is stored beside the numbers of the weight that the op reads."""
        return f"weight.{plane}"


@dataclass(frozen=True)
class Argument:
    """A tensor that an op is called with. packed: an activation in the layout that linear layers read."""

    rank: int
    dtypes: tuple[str, ...]
    packed: bool = False


@dataclass(frozen=True)
class Call:
    """An op as it is called in a trace: the shape of each tensor (ints and symbols) and the values of the others."""

    shapes: Mapping[str, Sequence[Any]]
    values: Mapping[str, Any]
    act: dtypes.Dtype
    """Of activations that feed linear layers."""
    eager: bool = False
    """It is torch that computes it, where no row has padding."""

    def packed_width(self, width: Any) -> int:
        """Elements of a row of a packed activation: whole words."""
        return int(width) if self.eager else round_up(int(width), self.act.per_word)


@dataclass(frozen=True)
class GraphParams:
    """What the kernels of an op depend on beside the op.

    kv_scales: the checkpoint states the scales of the KV cache.
    """

    target: Target
    shape: GraphShape
    max_model_len: int
    act_dtype: str
    kv_dtype: str
    block_size: int
    kv_scales: bool = False

    def row_params(self, *, on_samples: bool = False) -> dict[str, Param]:
        """Parameters of a kernel that depend on how rows lie."""
        return dict(self.target.row_params(self.shape.sample_layout if on_samples else self.shape.token_layout))

    def rows(self, site: Site) -> dict[str, Param]:
        """Parameters of a kernel of rows: how they lie, and the scalar that counts the valid ones."""
        on_samples = bool(site.attributes["on_samples"])
        return {"rows": NUM_SAMPLES if on_samples else NUM_TOKENS, **self.row_params(on_samples=on_samples)}


@dataclass(frozen=True)
class KernelCall:
    """One kernel of an op.

    buffers: names of the op's tensors or of BufferSource, in operand order; the output, `out` or scratch, comes last.
    """

    spec: KernelSpec
    buffers: tuple[str, ...]


Result = Callable[[Call], tuple[Sequence[Any], str]]
"""Shape and dtype (TVM's name) of what an op makes."""
Kernels = Callable[[Site, GraphParams], list[KernelCall]]
Template = Callable[..., Any]
"""Makes the TIR of a kernel, called with its spec and, by targets whose own templates take more, with that."""


@dataclass(frozen=True)
class Eager:
    """What torch computes for an op. schema: torch's, as "(Tensor x, float eps) -> Tensor", by the names of the
    arguments; function imports torch when it is called."""

    schema: str
    function: Callable[..., Any]


@dataclass(frozen=True)
class OpDef:
    """One op `llmc::name`.

    arguments: by name; optional ones may be left out of a call. result: of a call. kernels: those that compute a site
    in a graph, in order. packed_result: it makes a packed activation. quantized: the op that a site becomes whose
    `weight` is quantized, None: its weight never is. reads_int8: that op takes `x` as int8 where the scheme has int8
    activations. writes_int8: its kernels can make a packed result as int8. scratch_bytes: of memory that the kernels of
    one site pass to each other; scratch_parts: of each of several such places, by name. traced: models call it; others
    are made by passes.

    An op that is one file brings two things more. eager: what torch computes, None: `models/ops.py` has it. templates:
    by kind of target, of its kernels, which are called as the op is; a template in a target's folder goes before.
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
    eager: Eager | None = None
    templates: Mapping[str, Template] = field(default_factory=dict)

    def scratch(self, site: Site, graph: GraphParams) -> tuple[dict[str, tuple[int, int]], int]:
        """Where each part of a site's scratch memory lies in it, (offset, bytes), and the bytes of all."""
        places, total = {}, self.scratch_bytes(site, graph)
        for name, nbytes in self.scratch_parts(site, graph).items():
            places[BufferSource.of_scratch(name)] = total, nbytes
            total += round_up(nbytes, ALIGNMENT)
        return places, total

    @property
    def packed_arguments(self) -> tuple[str, ...]:
        return tuple(name for name, argument in self.arguments.items() if argument.packed)


def weight_format(site: Site) -> WeightFormat:
    """How the weight of a quantized site is stored."""
    return format_of(site.attributes["format"])


def weight_buffers(site: Site) -> tuple[str, ...]:
    """The operands that the weight of a quantized site is, in order."""
    planes = weight_format(site).planes(site.attributes["weight_shapes"]["weight"][1])
    return "weight", *(BufferSource.of_weight(plane.name) for plane in planes)


def int8_sums(site: Site) -> dict[str, int]:
    """How the int8 activation that a site makes is summed."""
    return {name: site.attributes[f"int8_{name}"] for name in ("group_size", "sum_factor")}


def makes_int8(site: Site) -> bool:
    """Whether the result of a site is quantized to int8."""
    return "int8_group_size" in site.attributes


def written_activation(site: Site, graph: GraphParams) -> dict[str, Param]:
    """The dtype of a packed activation that a kernel writes; of int8, also the groups it is summed in."""
    return {"act_dtype": "i8", **int8_sums(site)} if makes_int8(site) else {"act_dtype": graph.act_dtype}
