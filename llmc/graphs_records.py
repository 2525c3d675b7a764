"""The contents of graphs.bin as values: the records of FORMAT.md that compiler and runtime share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from llmc.adapter_slot import AdapterSlot
from llmc.graphs_format import COLLECTIVE, COLLECTIVES, GRAPH_INPUTS, OPERAND_KINDS, PASS_ON, PHASES, input_shape
from llmc.kv_dtypes import BY_CODE, KvDtype

_WEIGHT = OPERAND_KINDS.index("weight")


@dataclass(frozen=True)
class Header:
    """Version, size of graphs.bin in bytes and its CRC-32; size of weights.safetensors and CRC-32 of its header."""

    version: int
    file_bytes: int
    crc32: int
    weights_bytes: int
    weights_header_crc32: int


@dataclass(frozen=True)
class TargetRecord:
    """Target of the code. kind: of the device that loads it. level: least level of the device. layout: tag of the
    layout of activations and KV cache."""

    kind: str
    name: str
    level: int
    layout: str


@dataclass(frozen=True)
class CodeRecord:
    """A file of machine code beside graphs.bin, read only by the device: name, size in bytes, CRC-32."""

    name: str
    bytes: int
    crc32: int


@dataclass(frozen=True)
class ModelRecord:
    """Facts that the engine needs about the model.

    sliding_window 0: none. eos: at most 8 ids. bos -1: none. Dtypes are codes of DTYPES.

    key_block_bytes, value_block_bytes: of one KV block of one layer; the most of any where layers differ, as
    KvLayerRecord says then. vector_width: floats of a text's vector in place
    of logits; 0: logits. whole_prompts 1: a step must contain all tokens of a text. adapter_slots: LoRA adapters held
    at once, 0: none possible. adapter_rank: the largest rank of an adapter. num_ranks: ranks that share each layer,
    each with num_kv_heads KV heads; 0: a single one. num_shared_weights: leading weights shared by all ranks; after
    them each rank has the same number of weights, rank by rank. states_width: floats of the hidden state that graphs
    output per row, 0: none. takes_states: index in STATES_USES.
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
        """Floats per row of a graph's output."""
        return self.vector_width or self.vocab_size

    @property
    def kv(self) -> KvDtype:
        """Number format of the KV cache."""
        return BY_CODE[self.kv_dtype]

    def kv_widths(self) -> tuple[int, int]:
        """Stored elements per token of a head's keys and of its values, if layers do not differ; includes padding,
        excludes scales."""
        if not self.value_block_bytes:
            return self.head_dim, 0  # latent attention
        rows, kv = self.num_kv_heads * self.block_size, self.kv
        keys, values = self.key_block_bytes // rows, self.value_block_bytes // rows
        return (keys - kv.scale_bytes) // kv.item_bytes, (values - kv.scale_bytes) // kv.item_bytes


@dataclass(frozen=True)
class KernelRecord:
    """A symbol in a code file. code: index of the file. family: index into FAMILIES. launch: at most MAX_LAUNCH_FACTS
    numbers for the device, as the target defines them."""

    symbol: str
    num_buffers: int
    family: int
    code: int = 0
    launch: tuple[int, ...] = ()


@dataclass(frozen=True)
class WeightRecord:
    """A packed tensor: dtype code, packed shape (rank at most 4), byte range in weights.safetensors, CRC-32, and a
    layout tag that the target defines."""

    name: str
    dtype: int
    shape: tuple[int, ...]
    file_offset: int
    bytes: int
    crc32: int
    layout: str


@dataclass(frozen=True)
class CollectiveRecord:
    """A collective operation on rows of float32. op, rows: indices into COLLECTIVES and COLLECTIVE_ROWS.

    width: floats in a row of the result. adds: bits ADDS_BIAS and ADDS_RESIDUAL; added to a sum over ranks. stage: the
    one that passes its results on to the next.
    """

    op: int
    rows: int
    width: int
    adds: int = 0
    stage: int = 0

    @property
    def num_operands(self) -> int:
        """Number of operands: input, added operands, result; or what is passed on."""
        return 1 if self.passes_on else 2 + self.adds.bit_count()

    @property
    def passes_on(self) -> bool:
        """Whether it hands results of one stage to the next."""
        return self.op == PASS_ON


@dataclass(frozen=True)
class StageRecord:
    """Layers of the KV cache that a stage has; one stage after the other."""

    first_layer: int
    num_layers: int


@dataclass(frozen=True)
class KvLayerRecord:
    """Bytes of one KV block of a layer, or of one slot of its states. value_block_bytes 0: no V pool, as where values
    are part of the keys."""

    key_block_bytes: int
    value_block_bytes: int

    @property
    def block_bytes(self) -> int:
        """Bytes of keys and values together."""
        return self.key_block_bytes + self.value_block_bytes


def layers_differ(kv_layers: Sequence[KvLayerRecord]) -> bool:
    """Whether an artifact needs records of its layers."""
    return len(set(kv_layers)) > 1


def kv_block_bytes(
    model: ModelRecord,
    kv_layers: Sequence[KvLayerRecord],
    stages: Sequence[StageRecord] = (),
    state_layers: Sequence[int] = (),
) -> int:
    """Bytes of a KV block on one rank: keys and values of all layers that have them, or of those of the stage with the
    most.

    kv_layers: of all layers; empty if they do not differ. state_layers: those with a state, which have no KV blocks.
    """
    return _most_bytes(model, kv_layers, stages, set(range(model.num_layers)) - set(state_layers))


def state_bytes(
    model: ModelRecord,
    kv_layers: Sequence[KvLayerRecord],
    stages: Sequence[StageRecord],
    state_layers: Sequence[int],
) -> int:
    """Bytes of a sequence's states on one rank, as `kv_block_bytes` has those of a KV block."""
    return _most_bytes(model, kv_layers, stages, set(state_layers))


def _most_bytes(
    model: ModelRecord, kv_layers: Sequence[KvLayerRecord], stages: Sequence[StageRecord], counted: set[int]
) -> int:
    same = KvLayerRecord(model.key_block_bytes, model.value_block_bytes)
    parts = [range(s.first_layer, s.first_layer + s.num_layers) for s in stages] or [range(model.num_layers)]
    return max(
        sum((kv_layers[layer] if kv_layers else same).block_bytes for layer in part if layer in counted)
        for part in parts
    )


@dataclass(frozen=True)
class AdapterRecord:
    """Adapter pool of a linear layer. weight: index of the layer's weight."""

    weight: int
    slot: AdapterSlot


class OperandRecord(NamedTuple):
    """A buffer of a command. kind: index into OPERAND_KINDS. offset: in the arena.

    bytes: bytes that the kernel may touch, never 0; for a pool those of one block or slot.
    """

    kind: int
    index: int  # type: ignore[assignment]  # it hides a method of tuples
    offset: int
    bytes: int


@dataclass(frozen=True)
class Command:
    """One call on operands[first_operand : first_operand + num_operands]. layer: of the KV cache; -1 for none.

    kernel: index of a kernel; from COLLECTIVE on, COLLECTIVE plus the index of a collective.
    """

    kernel: int
    first_operand: int
    num_operands: int
    barrier: bool
    layer: int
    family: int

    @property
    def collective(self) -> int | None:
        """Index of the collective; None for a kernel call."""
        return self.kernel - COLLECTIVE if self.kernel >= COLLECTIVE else None


@dataclass(frozen=True)
class GraphSizes:
    """One bucket, and the limits of its graph.

    phase: index into PHASES. row_unit: token rows are stored and computed in multiples of it. max_blocks: KV blocks of
    all sequences together in a bucket for a total of contexts, else 0.
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
        """Name of the bucket, as in `decode:4x512` or `decode:4x2048total`."""
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
    """Everything in graphs.bin. state_layers: layers of the KV cache that hold a state, ascending."""

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
    stages: tuple[StageRecord, ...] = ()
    kv_layers: tuple[KvLayerRecord, ...] = ()
    state_layers: tuple[int, ...] = ()

    @property
    def num_rank_weights(self) -> int:
        """Number of weights that each rank has of its own; with a single rank all weights."""
        return (len(self.weights) - self.model.num_shared_weights) // max(1, self.model.num_ranks)

    def weights_of(self, rank: int) -> tuple[WeightRecord, ...]:
        """Weights that operands name on the r-th rank of a stage, by index."""
        shared, own = self.model.num_shared_weights, self.num_rank_weights
        first = shared + rank * own
        return self.weights[:shared] + self.weights[first : first + own]

    @property
    def num_stages(self) -> int:
        """Stages among which the layers are divided."""
        return max(1, len(self.stages))

    @property
    def num_ranks(self) -> int:
        """Processes that run each step together, of all stages."""
        return max(1, self.model.num_ranks) * self.num_stages

    @property
    def kv_block_bytes(self) -> int:
        """Bytes of a KV block on one rank: keys and values of all layers that have them, or of those of a stage; the
        most of any stage."""
        return kv_block_bytes(self.model, self.kv_layers, self.stages, self.state_layers)

    @property
    def state_bytes(self) -> int:
        """Bytes of a sequence's states on one rank; the most of any stage. 0: no layer has a state."""
        return state_bytes(self.model, self.kv_layers, self.stages, self.state_layers)

    def kv_layer(self, layer: int) -> KvLayerRecord:
        """Bytes of one KV block of a layer, or of one slot of its states."""
        if not self.kv_layers:
            return KvLayerRecord(self.model.key_block_bytes, self.model.value_block_bytes)
        return self.kv_layers[layer]

    def stages_of(self, graph: Graph) -> tuple[tuple[int, ...], ...]:
        """Stages that run each command of `graph`: one, or two for what one passes on to the other."""
        at = 0
        found: list[tuple[int, ...]] = []
        for command in self.commands_of(graph):
            record = None if command.collective is None else self.collectives[command.collective]
            if record is None or not record.passes_on:
                found.append((at,))
                continue
            at = (record.stage + 1) % self.num_stages
            found.append((record.stage, at))
        return tuple(found)

    def weights_read(self, stage: int) -> tuple[int, ...]:
        """Indices into `weights_of` of the weights that commands of a stage read, ascending."""
        read: set[int] = set()
        for graph in self.graphs:
            for command, stages in zip(self.commands_of(graph), self.stages_of(graph), strict=True):
                if stage in stages:
                    read |= {o.index for o in self.operands_of(command) if o.kind == _WEIGHT}
        return tuple(sorted(read))

    def name_of(self, command: Command) -> str:
        """Symbol of the kernel. For a collective: its operation, `_` and its index."""
        if command.collective is None:
            return self.kernels[command.kernel].symbol
        return f"{COLLECTIVES[self.collectives[command.collective].op]}_{command.collective}"

    def commands_of(self, graph: Graph) -> tuple[Command, ...]:
        """The command list of `graph`, in the order of execution."""
        return self.commands[graph.first_command : graph.first_command + graph.num_commands]

    def operands_of(self, command: Command) -> tuple[OperandRecord, ...]:
        """The buffers of `command`, in the order of the kernel's arguments."""
        return self.operands[command.first_operand : command.first_operand + command.num_operands]
