"""What graphs.bin says, as values: the records of FORMAT.md that compiler and runtime share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from llmc.adapter_slot import AdapterSlot
from llmc.graphs_format import COLLECTIVE, COLLECTIVES, GRAPH_INPUTS, PHASES, input_shape
from llmc.kv_dtypes import BY_CODE, KvDtype


@dataclass(frozen=True)
class Header:
    """version, size of graphs.bin in bytes, its CRC-32; of weights.safetensors the size and the CRC-32 of its
    header."""

    version: int
    file_bytes: int
    crc32: int
    weights_bytes: int
    weights_header_crc32: int


@dataclass(frozen=True)
class TargetRecord:
    """What the code is for. kind: of the device that loads it; level: that the device must have, or a higher one;
    layout: the tag of how activations and KV cache lie."""

    kind: str
    name: str
    level: int
    layout: str


@dataclass(frozen=True)
class CodeRecord:
    """A file of machine code beside graphs.bin, for the device alone: name, size in bytes, CRC-32."""

    name: str
    bytes: int
    crc32: int


@dataclass(frozen=True)
class ModelRecord:
    """What the engine must know of the model. sliding_window 0: none; eos: at most 8 ids; bos -1: none; dtypes are
    codes of DTYPES.

    key_block_bytes, value_block_bytes: of one KV block of one layer. vector_width: floats of the vector that a text
    gives in place of logits, 0: it gives logits. whole_prompts 1: a step must hold all tokens of a text. adapter_slots:
    of LoRA adapters that are held at once, 0: none can be; adapter_rank: the largest of theirs. num_ranks: that run a
    step together, each with num_kv_heads of the KV heads; 0: one alone. num_shared_weights: the first so many weights
    are all ranks', those behind them are as many for each rank, one rank after the other. states_width: floats of the
    hidden state that graphs leave of each row, 0: none; takes_states 1: they are given one of each row, too.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    kv_dtype: int
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    act_dtype: int
    sliding_window: int
    eos: tuple[int, ...]
    bos: int
    key_block_bytes: int
    value_block_bytes: int
    vector_width: int = 0
    whole_prompts: int = 0
    adapter_slots: int = 0
    adapter_rank: int = 0
    num_ranks: int = 0
    num_shared_weights: int = 0
    states_width: int = 0
    takes_states: int = 0

    @property
    def output_width(self) -> int:
        """Floats of a row that a graph gives."""
        return self.vector_width or self.vocab_size

    @property
    def kv(self) -> KvDtype:
        """Numbers of the KV cache."""
        return BY_CODE[self.kv_dtype]

    @property
    def kv_block_bytes(self) -> int:
        """Of a KV block, keys and values of all layers."""
        return self.num_layers * (self.key_block_bytes + self.value_block_bytes)

    def kv_widths(self) -> tuple[int, int]:
        """Elements that a token takes of a head's keys and values, padding included, scales not."""
        rows, kv = self.num_kv_heads * self.block_size, self.kv
        keys, values = self.key_block_bytes // rows, self.value_block_bytes // rows
        return (keys - kv.scale_bytes) // kv.item_bytes, (values - kv.scale_bytes) // kv.item_bytes


@dataclass(frozen=True)
class KernelRecord:
    """A symbol of a code file, `code` by index; family is an index into FAMILIES; launch: at most MAX_LAUNCH_FACTS
    numbers for the device, as the target defines them."""

    symbol: str
    num_buffers: int
    family: int
    code: int = 0
    launch: tuple[int, ...] = ()


@dataclass(frozen=True)
class WeightRecord:
    """A packed tensor: dtype code, packed shape (rank at most 4), byte range in weights.safetensors, its CRC-32, and
    the tag of its layout, which the target defines."""

    name: str
    dtype: int
    shape: tuple[int, ...]
    file_offset: int
    bytes: int
    crc32: int
    layout: str


@dataclass(frozen=True)
class CollectiveRecord:
    """What the ranks do together, in rows of float32: op and rows are indices into COLLECTIVES and COLLECTIVE_ROWS.

    width: of a row of the result. adds: bits of ADDS_BIAS and ADDS_RESIDUAL, of a sum over ranks.
    """

    op: int
    rows: int
    width: int
    adds: int = 0

    @property
    def num_operands(self) -> int:
        """What is given, what is added, and the result."""
        return 2 + self.adds.bit_count()


@dataclass(frozen=True)
class AdapterRecord:
    """The pool of a linear layer, for what loaded adapters add to it. weight: the layer's, by index."""

    weight: int
    slot: AdapterSlot


class OperandRecord(NamedTuple):
    """A buffer of a command: kind is an index into OPERAND_KINDS; offset in the arena.

    bytes: what the kernel may touch, never 0; of a pool, one block, or one slot.
    """

    kind: int
    index: int  # type: ignore[assignment]  # it hides a method of tuples
    offset: int
    bytes: int


@dataclass(frozen=True)
class Command:
    """One kernel call on operands[first_operand : first_operand + num_operands]; layer -1: none.

    kernel: from COLLECTIVE on, less that, the index of a collective.
    """

    kernel: int
    first_operand: int
    num_operands: int
    barrier: bool
    layer: int
    family: int

    @property
    def collective(self) -> int | None:
        """The index of the collective, None of a kernel call."""
        return self.kernel - COLLECTIVE if self.kernel >= COLLECTIVE else None


@dataclass(frozen=True)
class GraphSizes:
    """One bucket, and the most that its graph holds.

    phase: an index into PHASES; row_unit: rows of tokens are held, and computed, in multiples of it. max_blocks: KV
    blocks of all sequences together, of a bucket for a total of contexts; else 0.
    """

    phase: int
    batch: int
    seq: int
    max_tokens: int
    max_seqs: int
    max_samples: int
    max_blocks_per_seq: int
    row_unit: int
    max_blocks: int = field(default=0, kw_only=True)

    @property
    def name(self) -> str:
        """The bucket's, as in `decode:4x512` or `decode:4x2048total`."""
        return f"{PHASES[self.phase]}:{self.batch}x{self.seq}{'total' if self.max_blocks else ''}"

    def input_shape(self, index: int) -> tuple[int, ...]:
        """Shape of the int32 input GRAPH_INPUTS[index]."""
        limits = (self.max_tokens, self.max_seqs, self.max_samples, self.max_blocks_per_seq, self.max_blocks)
        return input_shape(GRAPH_INPUTS[index], *limits)


@dataclass(frozen=True)
class Graph(GraphSizes):
    """A graph of the tables; its commands are commands[first_command : first_command + num_commands]."""

    first_command: int
    num_commands: int
    arena_bytes: int


@dataclass(frozen=True)
class Tables:
    """Everything in graphs.bin."""

    header: Header
    target: TargetRecord
    code: tuple[CodeRecord, ...]
    model: ModelRecord
    kernels: tuple[KernelRecord, ...]
    weights: tuple[WeightRecord, ...]
    graphs: tuple[Graph, ...]
    commands: tuple[Command, ...]
    operands: tuple[OperandRecord, ...]
    adapters: tuple[AdapterRecord, ...] = ()
    collectives: tuple[CollectiveRecord, ...] = ()

    @property
    def num_rank_weights(self) -> int:
        """Weights that each rank has of its own; all weights where there is one rank."""
        return (len(self.weights) - self.model.num_shared_weights) // max(1, self.model.num_ranks)

    def weights_of(self, rank: int) -> tuple[WeightRecord, ...]:
        """The weights that operands of a rank name, by index."""
        shared, own = self.model.num_shared_weights, self.num_rank_weights
        first = shared + rank * own
        return self.weights[:shared] + self.weights[first : first + own]

    def name_of(self, command: Command) -> str:
        """The symbol of its kernel; of a collective what the ranks do, `_` and its number."""
        if command.collective is None:
            return self.kernels[command.kernel].symbol
        return f"{COLLECTIVES[self.collectives[command.collective].op]}_{command.collective}"

    def commands_of(self, graph: Graph) -> tuple[Command, ...]:
        """The command list of `graph`, in the order of execution."""
        return self.commands[graph.first_command : graph.first_command + graph.num_commands]

    def operands_of(self, command: Command) -> tuple[OperandRecord, ...]:
        """The buffers of `command`, in the order of the kernel's arguments."""
        return self.operands[command.first_operand : command.first_operand + command.num_operands]
