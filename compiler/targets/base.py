"""The compiler's interface to hardware: an abstract target, implemented once per kind of hardware.

A target owns its identity, the layouts of weights, activations and KV cache, kernel templates, code generation, linking
and tuning. Outside of it, only templates that an op brings are specific to a target.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from llmc.adapter_slot import AdapterSlot
from llmc.compiler.dtypes import FLOATS
from llmc.compiler.graph.commands import GraphShape
from llmc.compiler.kernel_spec import KernelSpec, Param
from llmc.compiler.store.cache import GraphCache
from llmc.compiler.weight_request import WeightRequest, WeightTensor
from llmc.models.loader import Parameter
from llmc.quantize import Scheme, WeightFormat

OnStep = Callable[[int, int], None]
"""Called with (done, total)."""


class TargetError(ValueError):
    """A target name that llmc does not know, or a target that this machine cannot run."""


@dataclass(frozen=True)
class Choice:
    """The result of a measured search for a kernel: a variant (None: the default) and its speed-up over the default."""

    variant: str | None
    gain: float = 1.0


class Compare(Protocol):
    """Measures variants of a kernel's code for a row count; returns the speed-up of each over the first."""

    def __call__(self, spec: KernelSpec, codes: Sequence[bytes], rows: int) -> list[float]: ...


class OpKernels(Protocol):
    """What `Target.has` reads of an op's definition (`ops.definition.OpDef`)."""

    @property
    def kernel_names(self) -> tuple[str, ...]: ...
    @property
    def quantized_calls(self) -> tuple[str, ...]: ...
    @property
    def runs_on(self) -> Callable[[Target], bool]: ...


class Target(ABC):
    """One piece of hardware, at one level, to compile for. Immutable; equal targets have equal records."""

    kind: ClassVar[str]
    """Exact name, as in `targets.registry.KINDS`."""
    device: ClassVar[str]
    """The device kind that loads its code, as devices register it."""
    code_name: ClassVar[str]
    """Name of the machine code file in an artifact."""
    layout: ClassVar[str]
    """Tag of the layout of activations and KV cache (FORMAT.md)."""
    runs_ranks: ClassVar[bool] = False
    """Whether its devices can run as one of several ranks."""
    adds_parts: ClassVar[bool] = False
    """Whether its kernel `rank_sum` adds the parts of ranks; else the runtime does."""
    keeps_states: ClassVar[bool] = False
    """Whether its devices keep a buffer of hidden states, read by speculative heads."""

    # Identity

    @property
    @abstractmethod
    def name(self) -> str:
        """As users write it; unique among all kinds."""

    @property
    @abstractmethod
    def level(self) -> int:
        """The least device level that an artifact requires, within this kind (FORMAT.md)."""

    @abstractmethod
    def record(self) -> dict[str, Any]:
        """Everything that identifies it, as JSON: `target` in the manifest. The kind's `from_record` reads it."""

    @abstractmethod
    def code_key(self) -> str:
        """Everything that the code of all its kernels depends on, for cache keys."""

    @abstractmethod
    def layout_key(self) -> str:
        """Everything about it that graphs depend on, layouts included, for cache keys."""

    @abstractmethod
    def runs_here(self) -> bool:
        """Whether this machine runs its code."""

    # What it has

    def has(self, op: OpKernels, dtype: str, scheme: Scheme | None = None) -> bool:
        """Whether it computes an op for activations of `dtype`, by weights of `scheme`; None: by floats of that dtype.

        The answer is made from what it registers. Imports tvm if the op multiplies a weight.
        """
        names = op.quantized_calls if scheme is not None else op.kernel_names
        if (scheme is not None and not names) or dtype not in FLOATS or not op.runs_on(self):
            return False
        if not all(map(self.has_kernel, names)):
            return False
        if scheme is not None:
            return self.multiplies("i8" if scheme.act_bits == 8 else dtype, scheme.weight)
        return not op.quantized_calls or self.multiplies(dtype, None)

    @abstractmethod
    def has_kernel(self, name: str) -> bool:
        """Whether it has a template of kernels called `name` (`KernelSpec.op`): its own, or one that an op brings."""

    @abstractmethod
    def multiplies(self, act_dtype: str, format: WeightFormat | None) -> bool:
        """Whether linear layers have a kernel for activations of `act_dtype`, or "i8", by weights in `format`; None: by
        floats of that dtype. Imports tvm."""

    # Rows of activations, and the KV cache

    @abstractmethod
    def graph_shape(
        self, tokens: int, samples: int, longest_context: int, max_context: int, block_size: int
    ) -> GraphShape:
        """The shape of a graph of at most `tokens` and `samples` rows.

        longest_context: most tokens of a sequence in this graph; max_context: in any graph of the model.
        """

    @abstractmethod
    def row_params(self, layout: int) -> Mapping[str, Param]:
        """Parameters of kernels whose rows are in `layout`, as `graph_shape` chose it."""

    @abstractmethod
    def int8_row_words(self, width: int, groups: int) -> int:
        """4-byte words in an int8 row of `width` numbers, with its scale and one sum per group."""

    def attention_params(self, shape: GraphShape) -> Mapping[str, Param]:
        """Further parameters of attention kernels in a graph of this shape, which only this target knows."""
        return {}

    def joins_norm(self, norm: KernelSpec, linear: KernelSpec, shape: GraphShape) -> bool:
        """Whether one kernel computes a `rms_norm` and the linear layer that alone reads it, in a graph of this shape
        (`ops/normed.py`). The bits must be those of both kernels."""
        return False

    def rotates_in_attention(self, shape: GraphShape, spec: KernelSpec) -> bool:
        """Whether one kernel, `spec` of rotated_attention, takes the place of rope_kv_write and paged_attention in
        graphs of this shape. It must have their bits."""
        return False

    @abstractmethod
    def attention_scratch_bytes(self, rows: int, num_heads: int, head_dim: int, segments: int) -> int:
        """Bytes of partial results for attention that splits contexts into segments."""

    @abstractmethod
    def row_unit(self, layout: int) -> int:
        """Rows in `layout` are allocated and computed in multiples of this."""

    @abstractmethod
    def kv_block_bytes(
        self, num_kv_heads: int, head_dim: int, block_size: int, dtype: str, key_scales: int = 1
    ) -> tuple[int, int]:
        """Bytes of (keys, values) of one KV block of one layer. key_scales: per token and head, if the dtype has
        scales."""

    @abstractmethod
    def adapter_slot(self, columns: int, rows: tuple[int, ...], rank: int, dtype: str) -> AdapterSlot:
        """The layout of a layer's adapters in their pool.

        columns: inputs of the layer. rows: outputs of each of its parts. rank: the largest of any adapter. dtype: of
        the adapters' numbers.
        """

    # Weights

    @abstractmethod
    def weight_params(self) -> Mapping[str, Param]:
        """Parameters of kernels that read a linear layer's packed matrix in some other way, such as an embedding."""

    @abstractmethod
    def weight_tensors(self, request: WeightRequest) -> list[WeightTensor]:
        """The tensors that store a packed weight: the first has the weight's name, the others append their part's
        name."""

    @abstractmethod
    def weight_pieces(self, request: WeightRequest, parameter: Parameter) -> Iterator[tuple[memoryview, ...]]:
        """Yields the bytes of a packed weight's tensors in order, a few MiB at a time.

        A piece is valid until the next is requested. Raises QuantizeError.
        """

    # Sources, for keys of the cache

    @abstractmethod
    def graph_sources(self) -> Sequence[Path]:
        """Source files of this kind of target that command lists depend on."""

    @abstractmethod
    def weight_sources(self, *, quantized: bool) -> Sequence[Path]:
        """Source files of this kind of target that the packing of weights depends on."""

    @abstractmethod
    def template_digest(self, spec: KernelSpec) -> str:
        """Digest of the sources that a kernel's code depends on. Raises KernelSpecError."""

    # Code

    def sampling_kernels(self, vocab: int) -> Sequence[KernelSpec]:
        """Kernels outside the graphs by which a device samples from `vocab` logits; empty if the host samples."""
        return ()

    @abstractmethod
    def launch_facts(self, spec: KernelSpec) -> tuple[int, ...]:
        """What a device must know to launch a kernel: at most `graphs_format.MAX_LAUNCH_FACTS` integers (FORMAT.md)."""

    @abstractmethod
    def compile(self, spec: KernelSpec, variant: str | None) -> bytes:
        """Compiles one kernel in this process; deterministic. variant: of its schedule; None for the default. Raises
        KernelSpecError."""

    def listings(self, spec: KernelSpec, variant: str | None) -> dict[str, str]:
        """A kernel's code in readable forms: file suffix → text."""
        return {}

    @abstractmethod
    def link(self, codes: Sequence[bytes], path: Path) -> None:
        """Writes an artifact's code section with these kernels, in order; deterministic. Raises LinkError."""

    def notes(self, specs: Sequence[KernelSpec]) -> tuple[str, ...]:
        """Sentences on kernels of an artifact that are not what the target's name lets one expect."""
        return ()

    def kernels_of_code(self, code: bytes) -> Collection[str] | None:
        """The symbols that a code section defines; None where these are the device's to find, when it loads them."""
        return None

    # Tuning

    @abstractmethod
    def check_variant(self, text: str) -> str:
        """A schedule variant in canonical form. Raises ValueError."""

    @abstractmethod
    def check_tunes_here(self) -> None:
        """Raises CompileError if this machine cannot measure kernels of the target."""

    @abstractmethod
    def tune(
        self,
        rows: Mapping[KernelSpec, int],
        cache: GraphCache,
        machine: Mapping[str, str],
        num_jobs: int,
        on_step: OnStep,
        compare: Compare | None = None,
    ) -> dict[KernelSpec, Choice]:
        """Measures schedules; returns a choice for each kernel that has several.

        rows: the most rows that each kernel is called with.
        machine: properties that this machine's speed depends on, by name.
        compare: for tests; None measures.
        Raises CompileError.
        """


class LinkError(RuntimeError):
    """Kernels could not be linked."""
