"""What the compiler needs to know of hardware: an abstract target, which each kind of hardware implements once.

A target owns its identity, the layouts of weights, activations and KV cache, kernel templates, code generation, linking
and tuning. No other module of the compiler knows what a target is made of, but for templates that an op brings.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from llmc.adapter_slot import AdapterSlot
from llmc.compiler.graph.commands import GraphShape
from llmc.compiler.kernel_spec import KernelSpec, Param
from llmc.compiler.store.cache import GraphCache
from llmc.compiler.weight_request import WeightRequest, WeightTensor
from llmc.models.loader import Parameter

OnStep = Callable[[int, int], None]
"""Called with (done, total)."""


class TargetError(ValueError):
    """A target name that llmc does not know, or that this machine cannot be."""


@dataclass(frozen=True)
class Choice:
    """What a measured search found for a kernel: a variant, None for the default one, and how many times as fast as the
    default it was."""

    variant: str | None
    gain: float = 1.0


class Compare(Protocol):
    """How many times as fast as the first one each code of a kernel is, at so many rows."""

    def __call__(self, spec: KernelSpec, codes: Sequence[bytes], rows: int) -> list[float]: ...


class Target(ABC):
    """One piece of hardware at one level, to compile for. Immutable; equal targets have equal records."""

    kind: ClassVar[str]
    """As in `targets.registry.KINDS`."""
    device: ClassVar[str]
    """Kind of the devices that load its code, as they register."""
    code_name: ClassVar[str]
    """Of the file of machine code in an artifact."""
    layout: ClassVar[str]
    """Tag of how activations and KV cache lie (FORMAT.md)."""
    runs_ranks: ClassVar[bool] = False
    """Whether its devices run as one of several ranks."""
    keeps_states: ClassVar[bool] = False
    """Whether its devices have a buffer of hidden states, which heads that guess read."""

    # Identity

    @property
    @abstractmethod
    def name(self) -> str:
        """As users write it; unique among all kinds."""

    @property
    @abstractmethod
    def level(self) -> int:
        """What an artifact demands of a device of this kind: its level or a higher one (FORMAT.md)."""

    @abstractmethod
    def record(self) -> dict[str, Any]:
        """All that identifies it, as JSON: the manifest's `target`. The kind's `from_record` reads it."""

    @abstractmethod
    def code_key(self) -> str:
        """What the code of all its kernels depends on, for keys of the cache."""

    @abstractmethod
    def layout_key(self) -> str:
        """What graphs depend on of it, and so of its layouts, for keys of the cache."""

    @abstractmethod
    def runs_here(self) -> bool:
        """Whether this machine runs its code."""

    # Rows of activations, and the KV cache

    @abstractmethod
    def graph_shape(
        self, tokens: int, samples: int, longest_context: int, max_context: int, block_size: int
    ) -> GraphShape:
        """How a graph holds at most `tokens` and `samples` rows. longest_context: tokens of a sequence of the graph;
        max_context: of any graph of the model."""

    @abstractmethod
    def row_params(self, layout: int) -> Mapping[str, Param]:
        """Parameters of kernels whose rows are held in `layout`, as `graph_shape` chose it."""

    @abstractmethod
    def int8_row_words(self, width: int, groups: int) -> int:
        """Words of 4 bytes of a row of `width` numbers quantized to int8, with its scale and a sum for each group."""

    @abstractmethod
    def attention_scratch_bytes(self, rows: int, num_heads: int, head_dim: int, segments: int) -> int:
        """Bytes of partial results of attention that cuts contexts into segments."""

    @abstractmethod
    def row_unit(self, layout: int) -> int:
        """Rows held in `layout` are a multiple of this many, and computed so."""

    @abstractmethod
    def kv_block_bytes(self, num_kv_heads: int, head_dim: int, block_size: int, dtype: str) -> tuple[int, int]:
        """Bytes of the keys, and of the values, of one KV block of one layer."""

    @abstractmethod
    def adapter_slot(self, columns: int, rows: tuple[int, ...], rank: int, dtype: str) -> AdapterSlot:
        """How adapters of a layer lie in its pool. columns: its inputs; rows: outputs of each of its parts; rank: the
        largest of an adapter; dtype: of its numbers."""

    # Weights

    @abstractmethod
    def weight_params(self) -> Mapping[str, Param]:
        """Parameters of kernels that read a matrix in the target's layout otherwise than a linear layer does."""

    @abstractmethod
    def weight_tensors(self, request: WeightRequest) -> list[WeightTensor]:
        """The tensors that a packed weight is stored in: the first has the weight's name, others their part's after
        it."""

    @abstractmethod
    def weight_pieces(self, request: WeightRequest, parameter: Parameter) -> Iterator[tuple[memoryview, ...]]:
        """The bytes of a packed weight's tensors in order, some MiB at a time; pieces are valid until the next ones are
        asked for. Raises QuantizeError."""

    # Sources, for keys of the cache

    @abstractmethod
    def graph_sources(self) -> Sequence[Path]:
        """Sources of this kind of target that decide command lists."""

    @abstractmethod
    def weight_sources(self, *, quantized: bool) -> Sequence[Path]:
        """Sources of this kind of target that decide how weights are packed."""

    @abstractmethod
    def template_digest(self, spec: KernelSpec) -> str:
        """Digest of the sources that decide a kernel's code. Raises KernelSpecError."""

    # Code

    def sampling_kernels(self, vocab: int) -> Sequence[KernelSpec]:
        """Kernels beside those of graphs, by which a device draws tokens of so many; none: the host draws them."""
        return ()

    @abstractmethod
    def launch_facts(self, spec: KernelSpec) -> tuple[int, ...]:
        """What the device is told of a kernel: at most `graphs_format.MAX_LAUNCH_FACTS` numbers (FORMAT.md)."""

    @abstractmethod
    def compile(self, spec: KernelSpec, variant: str | None) -> bytes:
        """The code of one kernel, in this process. variant: of its schedule, None: the default. Same input, same bytes.
        Raises KernelSpecError."""

    def listings(self, spec: KernelSpec, variant: str | None) -> dict[str, str]:
        """What people may see of a kernel's code: texts by the ending of a file."""
        return {}

    @abstractmethod
    def link(self, codes: Sequence[bytes], path: Path) -> None:
        """Writes the code section of an artifact with these kernels, in order. Same codes, same bytes. Raises
        LinkError."""

    def kernels_of_code(self, code: bytes) -> Collection[str] | None:
        """The symbols that a code section defines; None where these are the device's to find, when it loads them."""
        return None

    # Tuning

    @abstractmethod
    def check_variant(self, text: str) -> str:
        """The variant of a schedule in its canonical form. Raises ValueError."""

    @abstractmethod
    def check_tunes_here(self) -> None:
        """Raises CompileError where nothing can be measured on this machine."""

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
        """Measured choices for those kernels that have one. rows: the most that each is called with. machine: what the
        speed of this machine depends on, by name. compare: for tests; None measures. Raises CompileError."""


class LinkError(RuntimeError):
    """Kernels that could not be linked."""
