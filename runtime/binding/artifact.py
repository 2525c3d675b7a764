"""An opened artifact, through the C ABI."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from ctypes import byref, c_uint32, c_void_p
from pathlib import Path
from typing import Any

from llmc.buckets.bucket import Bucket
from llmc.graphs_format import PHASES
from llmc.runtime.binding import abi
from llmc.runtime.binding.handle import Handle, call, initial, plain, sized, whole

POOL_FACTS = (
    *("block_size", "max_model_len", "max_num_seqs"),
    *("kv_block_bytes", "max_kv_blocks", "state_bytes", "max_states"),
)
"""Facts of an artifact from which the sizes of an engine's pools follow."""


@dataclasses.dataclass(frozen=True)
class PoolSizes:
    """KV blocks and slots of states of an engine, without the dummies; bytes of both pools with them."""

    num_blocks: int
    num_states: int
    num_bytes: int


def pool_sizes(facts: Mapping[str, int], **options: int) -> PoolSizes:
    """The pools of an engine of an artifact with these POOL_FACTS and these options: num_blocks, num_states, kv_bytes,
    max_num_seqs. Raises LlmcError for options that it would refuse."""
    info, native = sized(abi.ArtifactInfo), initial("llmc_engine_options_init", abi.EngineOptions)
    for name in POOL_FACTS:
        setattr(info, name, facts[name])
    kinds: dict[str, Any] = {field[0]: field[1] for field in abi.EngineOptions._fields_}
    for name, value in options.items():
        setattr(native, name, whole(name, value, kinds[name]))
    blocks, states = c_uint32(), c_uint32()
    call("llmc_artifact_info_get_pool_sizes", byref(info), byref(native), byref(blocks), byref(states))
    used = (blocks.value + 1) * facts["kv_block_bytes"]
    if facts["state_bytes"]:
        used += (states.value + 1) * facts["state_bytes"]
    return PoolSizes(blocks.value, states.value, used)


@dataclasses.dataclass(frozen=True)
class ArtifactInfo:
    """llmc_artifact_info of llmc.h: counts, sizes of the model, bytes, and the target.

    num_kv_heads, head_dim: of some layer of the KV cache, if its layers differ. vector_width: floats of the vector
    returned per prompt; 0 if the model generates text. whole_prompts: 1 if a step must hold all tokens of a prompt.
    num_adapter_linears: layers that adapters can change. adapter_slots: most adapters loaded at once. adapter_rank:
    their largest rank. adapter_bytes: size of one slot. num_ranks: processes that run it together; each reads
    rank_weight_bytes. state_bytes: states of a sequence; 0 if no layer has one. states_width, states_use: floats of a
    row of hidden states, and what graphs do with them (LLMC_STATES_ of llmc.h).
    """

    num_graphs: int
    num_kernels: int
    num_commands: int
    num_weights: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    target_level: int
    weight_bytes: int
    code_bytes: int
    max_arena_bytes: int
    kv_block_bytes: int
    target_kind: str
    target_name: str
    vector_width: int = 0
    whole_prompts: int = 0
    num_adapter_linears: int = 0
    adapter_slots: int = 0
    adapter_rank: int = 0
    adapter_bytes: int = 0
    num_ranks: int = 1
    rank_weight_bytes: int = 0
    max_kv_blocks: int = 2**31 - 1
    state_bytes: int = 0
    max_states: int = 0
    states_width: int = 0
    states_use: int = 0

    @property
    def pool_facts(self) -> dict[str, int]:
        """The POOL_FACTS."""
        return {name: getattr(self, name) for name in POOL_FACTS}

    def pool_sizes(self, **options: int) -> PoolSizes:
        """As the function of this name."""
        return pool_sizes(self.pool_facts, **options)


@dataclasses.dataclass(frozen=True)
class AdapterLinear:
    """llmc_adapter_linear of llmc.h: a layer that adapters can change, by its weight. rows: of each part."""

    name: str
    columns: int
    rows: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class GraphInfo:
    """llmc_graph_info of llmc.h: a bucket, its graph's capacity, and bytes of its arena. max_blocks: for a
    total-context bucket, KV blocks of all sequences together; else 0."""

    phase: str
    batch: int
    seq: int
    max_tokens: int
    max_seqs: int
    max_samples: int
    max_blocks_per_seq: int
    num_commands: int
    arena_bytes: int
    max_blocks: int = 0

    @property
    def bucket(self) -> Bucket:
        """The bucket that the graph was compiled for."""
        return Bucket(self.phase, self.batch, self.seq, self.max_blocks > 0)


def _text(value: Any) -> Any:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


class Artifact(Handle):
    """An opened artifact directory. Engines and replayers made from it remain valid after close()."""

    _destroy = "llmc_artifact_close"

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self.path = Path(path)
        pointer = c_void_p()
        call("llmc_artifact_open", os.fsencode(path), byref(pointer))
        self._pointer = pointer

    @property
    def info(self) -> ArtifactInfo:
        info = sized(abi.ArtifactInfo)
        call("llmc_artifact_get_info", self.pointer, byref(info))
        return ArtifactInfo(**{name: _text(value) for name, value in plain(info).items()})

    def pool_sizes(self, **options: int) -> PoolSizes:
        """As `ArtifactInfo.pool_sizes`."""
        return self.info.pool_sizes(**options)

    def verify(self) -> None:
        """Checks all weights against their checksums. Raises LlmcError naming a damaged one.

        Reads weights.safetensors once; other threads and engines continue meanwhile.
        """
        call("llmc_artifact_verify", self.pointer)

    def graphs(self) -> list[GraphInfo]:
        """The graphs of the ladder, by index."""
        return [self._graph(index) for index in range(self.info.num_graphs)]

    def adapter_linears(self) -> list[AdapterLinear]:
        """The layers that adapters can change, by index."""
        return [self._adapter_linear(index) for index in range(self.info.num_adapter_linears)]

    def _adapter_linear(self, index: int) -> AdapterLinear:
        info = sized(abi.AdapterLinear)
        call("llmc_artifact_get_adapter_linear", self.pointer, index, byref(info))
        return AdapterLinear(_text(info.name), info.columns, tuple(info.rows[: info.num_parts]))

    def _graph(self, index: int) -> GraphInfo:
        info = sized(abi.GraphInfo)
        call("llmc_artifact_get_graph", self.pointer, index, byref(info))
        fields = plain(info)
        return GraphInfo(**(fields | {"phase": PHASES[fields["phase"]]}))
