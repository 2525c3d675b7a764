"""Contents of an artifact directory besides weights and code: the tables of graphs.bin, and copied files."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from llmc.adapter_slot import AdapterSlot
from llmc.buckets import Bucket
from llmc.compiler.adapters import pooled_weight
from llmc.compiler.config import CompileError
from llmc.compiler.dtypes import DTYPES
from llmc.compiler.graph.commands import CommandList, GraphShape, Operand, round_up
from llmc.compiler.graph.demands import collectives_of
from llmc.compiler.kernel_spec import BUFFERS, KernelSpec
from llmc.compiler.ops.adapters import spec_slot
from llmc.compiler.ops.collective import record_of
from llmc.compiler.ops.state_bytes import state_slot_bytes
from llmc.compiler.store.graphs_writer import CommandRecord, FileSums, GraphRecord, write_graphs
from llmc.compiler.store.output import COPIED_FILES
from llmc.compiler.store.weights import WeightLayout
from llmc.compiler.targets.base import Target
from llmc.graphs_format import COLLECTIVE, FAMILIES, GRAPH_INPUTS, OPERAND_KINDS, PHASES, RANK_0
from llmc.graphs_records import (
    AdapterRecord,
    KernelRecord,
    KvLayerRecord,
    ModelRecord,
    OperandRecord,
    StageRecord,
    TargetRecord,
    WeightRecord,
)
from llmc.models.sources.base import ModelFiles

_TOKENIZER = "tokenizer.json"
# Files that some tokenizers consist of.
_NOT_CONVERTED = ("vocab.json", "vocab.txt", "spiece.model", "tekken.json")
_OPERAND_KINDS = {name: code for code, name in enumerate(OPERAND_KINDS)}


def kv_block_bytes(spec: KernelSpec, pool: str, target: Target) -> int:
    """Bytes of a block of one layer's pool, or of a slot of states, as the kernel `spec` addresses it.

    pool: "k_pool" or "v_pool".
    """
    params = spec.as_dict()
    if nbytes := state_slot_bytes(spec):
        return nbytes
    keys, values = target.kv_block_bytes(
        int(params["num_kv_heads"]),
        int(params["head_dim"]),
        int(params["block_size"]),
        str(params["kv_dtype"]),
        int(params.get("key_scales", 1)),
    )
    return keys if pool == "k_pool" else values


def _input_bytes(graph: GraphRecord) -> dict[str, int]:
    """Bytes of each int32 input of a graph."""
    return {name: 4 * math.prod(graph.input_shape(i)) for i, name in enumerate(GRAPH_INPUTS)}


def _adapter_slots(graphs: Iterable[CommandList], target: Target) -> dict[str, AdapterSlot]:
    """Slot layouts of adapter pools by name, in the order of `pooled_weights`."""
    found: dict[str, AdapterSlot] = {}
    for graph in graphs:
        for command in graph.commands:
            for operand in command.operands:
                if operand.kind == "adapters" and operand.name not in found:
                    found[operand.name] = spec_slot(command.spec, target)
    return found


class _Commands:
    """The records of a command list; between its graphs only the sizes of inputs differ."""

    def __init__(
        self,
        of: CommandList,
        kernel_index: Mapping[KernelSpec, int],
        layout: WeightLayout,
        pools: Sequence[str],
        target: Target,
    ) -> None:
        weight_index = {w.name.removeprefix(RANK_0): i for i, w in enumerate(layout.weights)}
        pool_index = {name: i for i, name in enumerate(pools)}

        def operand(o: Operand, spec: KernelSpec) -> OperandRecord:
            kind = _OPERAND_KINDS[o.kind]
            if o.kind == "weight":
                index = weight_index[o.name]
                return OperandRecord(kind, index, 0, layout.weights[index].nbytes)
            if o.kind == "input":
                return OperandRecord(kind, GRAPH_INPUTS.index(o.name), 0, 0)
            if o.kind == "adapters":
                return OperandRecord(kind, pool_index[o.name], 0, o.nbytes)
            if o.kind in ("k_pool", "v_pool"):
                return OperandRecord(kind, o.layer, 0, kv_block_bytes(spec, o.kind, target))
            return OperandRecord(kind, 0, o.offset, o.nbytes)

        fields = {c.spec: (kernel_index[c.spec], FAMILIES.index(c.spec.family)) for c in of.commands}
        self._commands = [
            CommandRecord(kernel, tuple(operand(o, c.spec) for o in c.operands), c.barrier, c.layer, family)
            for c in of.commands
            for kernel, family in (fields[c.spec],)
        ]
        self._with_inputs = [
            i for i, c in enumerate(self._commands) if any(o.kind == _OPERAND_KINDS["input"] for o in c.operands)
        ]

    def records(self, input_bytes: Mapping[str, int]) -> tuple[CommandRecord, ...]:
        """The commands in a graph with inputs of these sizes."""
        kind = _OPERAND_KINDS["input"]
        inputs = [OperandRecord(kind, i, 0, input_bytes[name]) for i, name in enumerate(GRAPH_INPUTS)]
        commands = list(self._commands)
        for i in self._with_inputs:
            operands = tuple(inputs[o.index] if o.kind == kind else o for o in commands[i].operands)
            commands[i] = commands[i]._replace(operands=operands)
        return tuple(commands)


def graphs_bin(
    model: ModelRecord,
    kernels: Sequence[KernelSpec],
    layout: WeightLayout,
    weight_crcs: Mapping[str, int],
    graphs: Mapping[Bucket, tuple[GraphShape, CommandList]],
    target: Target,
    files: FileSums,
    stages: Sequence[StageRecord] = (),
    kv_layers: Sequence[KvLayerRecord] = (),
    state_layers: Sequence[int] = (),
) -> bytes:
    """The tables of FORMAT.md. weight_crcs: CRC-32 of every weight in `layout`, by name."""
    kernel_index = {spec: i for i, spec in enumerate(kernels)}
    # A kernel that no command calls states its own operand count.
    num_buffers = {s: int(s.as_dict()[BUFFERS]) for s in kernels if BUFFERS in s.as_dict()}
    lists = [commands for _, commands in graphs.values()]
    collectives = collectives_of(lists)
    kernel_index |= {spec: COLLECTIVE + i for i, spec in enumerate(collectives)}
    num_buffers |= {c.spec: len(c.operands) for _, commands in graphs.values() for c in commands.commands}
    slots = _adapter_slots((commands for _, commands in graphs.values()), target)
    weight_index = {w.name: i for i, w in enumerate(layout.weights)}
    builders: dict[int, _Commands] = {}

    def graph(bucket: Bucket, shape: GraphShape, of: CommandList) -> GraphRecord:
        tokens = bucket.seq if bucket.phase == "decode" and not bucket.total else model.max_model_len
        blocks = bucket.seq // model.block_size if bucket.total else 0
        per_seq = round_up(tokens, model.block_size) // model.block_size
        record = GraphRecord(
            PHASES.index(bucket.phase),
            bucket.batch,
            bucket.seq,
            shape.tokens,
            bucket.batch,
            shape.samples,
            min(per_seq, blocks) if blocks else per_seq,
            target.row_unit(shape.token_layout),
            of.arena_bytes,
            (),
            max_blocks=blocks,
        )
        # Buckets of equal shape share one list.
        if id(of) not in builders:
            builders[id(of)] = _Commands(of, kernel_index, layout, list(slots), target)
        return replace(record, commands=builders[id(of)].records(_input_bytes(record)))

    return write_graphs(
        TargetRecord(target.device, target.name, target.level, target.layout),
        model,
        [
            KernelRecord(s.symbol(), num_buffers[s], FAMILIES.index(s.family), launch=target.launch_facts(s))
            for s in kernels
        ],
        [
            WeightRecord(w.name, DTYPES[w.dtype].code, w.shape, w.file_offset, w.nbytes, weight_crcs[w.name], w.layout)
            for w in layout.weights
        ],
        [graph(bucket, shape, of) for bucket, (shape, of) in graphs.items()],
        files,
        [AdapterRecord(weight_index[pooled_weight(name)], slot) for name, slot in slots.items()],
        [record_of(spec) for spec in collectives],
        stages,
        kv_layers,
        state_layers,
    )


def copied_files(files: ModelFiles, tokenizer: str) -> list[str]:
    """Names of the tokenizer and generation files to copy into an artifact. tokenizer: as in CompileConfig.

    Raises CompileError if a required one is missing or unreadable, ModelError if one is not a regular file.
    """
    if tokenizer != "none" and not files.has(_TOKENIZER):
        for name in filter(files.has, _NOT_CONVERTED):
            raise CompileError(
                f"{files.place(_TOKENIZER)} is missing, and llmc makes none of {name}: save one with transformers "
                "(AutoTokenizer.from_pretrained, then save_pretrained), or compile with --no-tokenizer an artifact "
                "that takes token ids alone"
            )
    if tokenizer == "none":
        return [name for name in COPIED_FILES if name == "generation_config.json" and files.has(name)]
    names = [name for name in COPIED_FILES if files.has(name)]
    if tokenizer == "required" or _TOKENIZER in names:
        _check_tokenizer(files, names)
    return names


def _check_tokenizer(files: ModelFiles, names: Sequence[str]) -> None:
    meant = "correct it, or compile with --no-tokenizer an artifact that takes token ids alone"
    place = files.place(_TOKENIZER)
    if _TOKENIZER not in names:
        raise CompileError(f"{place} is missing: {meant.replace('correct', 'add')}")
    from tokenizers import Tokenizer

    content = _content(files, _TOKENIZER)
    try:
        Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises bare Exception
        raise CompileError(f"{place} is not a tokenizer ({' '.join(str(error).split())[:200]}): {meant}") from None
    for name in names:
        if name.endswith(".json") and name != _TOKENIZER:
            try:
                sound = isinstance(json.loads(_content(files, name)), dict)
            except (OSError, ValueError, RecursionError):
                sound = False
            if not sound:
                raise CompileError(f"{files.place(name)} is not a JSON object: {meant}")


def _content(files: ModelFiles, name: str) -> bytes:
    with files.open(name) as file:
        return file.read()


def copy_files(files: ModelFiles, output: Path, names: Sequence[str]) -> list[str]:
    """Copies files of the model into an artifact; returns their names."""
    for name in names:
        with files.open(name) as source, (output / name).open("wb") as copy:
            shutil.copyfileobj(source, copy)
    return list(names)
