"""Structure of graphs.bin (runtime/FORMAT.md): records, codes and names, for compiler and runtime."""

from __future__ import annotations

import re
import struct
import zlib

MAGIC = b"LLMCGRPH"
VERSION_OF_PLACED_ROWS = 13
"""Version of an artifact that takes rows in place of tokens."""
VERSION_OF_STATE_LAYERS = 12
"""Version of an artifact with layers that hold a state."""
VERSION_OF_KV_LAYERS = 10
"""Version of an artifact whose layers have KV blocks of different sizes."""
VERSION_OF_STAGES = 9
"""Version of an artifact with several stages."""
VERSION_OF_TOTALS = 8
"""Version of an artifact with a graph for a total of contexts, or whose graphs output hidden states."""
VERSION_OF_RANKS = 7
"""Version of an artifact for several ranks."""
VERSION_OF_ADAPTERS = 6
"""Version of an artifact with pools of adapters."""
VERSION_WITHOUT_ADAPTERS = 5
VERSION_OF_STATES_IN_BLOCKS = 11
"""Version of older artifacts, which had a state in each KV block: no longer read."""
VERSIONS = (
    VERSION_WITHOUT_ADAPTERS,
    VERSION_OF_ADAPTERS,
    VERSION_OF_RANKS,
    VERSION_OF_TOTALS,
    VERSION_OF_STAGES,
    VERSION_OF_KV_LAYERS,
    VERSION_OF_STATE_LAYERS,
    VERSION_OF_PLACED_ROWS,
)
ALIGNMENT = 64
MAX_BUFFERS = 12
MAX_EOS = 8
MAX_RANK = 4
MAX_LAUNCH_FACTS = 7
MAX_CODE_FILES = 16
MAX_RANKS = 256
COLLECTIVE = 1 << 31
"""Added to the index of a collective in a command, in place of a kernel index."""

RECORDS = {
    "header": "u8 magic[8], u32 version, u32 header_bytes, u64 file_bytes, u32 num_sections, u32 crc32, "
    "u64 weights_bytes, u32 weights_header_crc32, u32 reserved[5]",
    "section": "u32 kind, u32 record_bytes, u64 offset, u64 count",
    "model": "i32 num_layers, i32 num_kv_heads, i32 head_dim, i32 block_size, i32 kv_dtype, i32 vocab_size, "
    "i32 max_model_len, i32 max_num_seqs, i32 act_dtype, i32 sliding_window, i32 num_eos, i32 eos[8], i32 bos, "
    "u64 key_block_bytes, u64 value_block_bytes, i32 vector_width, i32 whole_prompts, i32 adapter_slots, "
    "i32 adapter_rank, i32 num_ranks, i32 num_shared_weights, i32 states_width, i32 takes_states",
    "kernel": "u32 symbol_offset, u32 symbol_length, u32 num_buffers, u32 family, u32 code, u32 launch[7]",
    "weight": "u32 name_offset, u32 name_length, u32 dtype, u32 rank, u64 file_offset, u64 bytes, i64 shape[4], "
    "u32 crc32, u32 layout_offset, u32 layout_length, u32 reserved",
    "graph": "u32 phase, u32 batch, u32 seq, u32 max_tokens, u32 max_seqs, u32 max_samples, u32 max_blocks_per_seq, "
    "u32 row_unit, u32 first_command, u32 num_commands, u64 arena_bytes, u32 max_blocks, u32 reserved[3]",
    "command": "u32 kernel, u32 first_operand, u32 num_operands, u32 barrier, i32 layer, u32 family",
    "operand": "u32 kind, u32 index, u64 offset, u64 bytes",
    "target": "u32 kind_offset, u32 kind_length, u32 name_offset, u32 name_length, u32 layout_offset, "
    "u32 layout_length, u32 level, u32 reserved",
    "code": "u32 name_offset, u32 name_length, u32 crc32, u32 reserved, u64 bytes",
    "adapter": "u32 weight, u32 columns, u32 tile_rows, u32 tile_columns, u32 num_parts, u32 rows[8], u32 reserved, "
    "u64 slot_bytes",
    "collective": "u32 op, u32 rows, u32 width, u32 adds, u32 stage, u32 reserved[3]",
    "stage": "u32 first_layer, u32 num_layers",
    "kv_layer": "u64 key_block_bytes, u64 value_block_bytes",
    "state_layer": "u32 layer, u32 reserved",
}
"""The records of FORMAT.md, word for word."""

SECTIONS = {
    "strings": 1, "model": 2, "kernel": 3, "weight": 4, "graph": 5, "command": 6, "operand": 7, "target": 8, "code": 9,
    "adapter": 10, "collective": 11, "stage": 12, "kv_layer": 13, "state_layer": 14,
}  # fmt: skip
"""Kind of the section that contains each record."""
FIRST_VERSIONS = {
    "adapter": VERSION_OF_ADAPTERS,
    "collective": VERSION_OF_RANKS,
    "stage": VERSION_OF_STAGES,
    "kv_layer": VERSION_OF_KV_LAYERS,
    "state_layer": VERSION_OF_STATE_LAYERS,
}
"""First version with a section, if it is not the first version that is read."""

PHASES = ("prefill", "decode", "mixed")
FAMILIES = ("embedding", "norm", "linear", "rope", "attention", "activation", "gather", "other")
DTYPES = ("f32", "bf16", "f16", "i8", "u8", "i32", "fp8_e4m3", "fp8_e5m2")
DTYPE_BYTES = (4, 2, 2, 1, 1, 4, 1, 1)
COLLECTIVES = ("all_reduce", "all_gather", "pass_on")
PASS_ON = COLLECTIVES.index("pass_on")
COLLECTIVE_ROWS = ("tokens", "samples")
RANK_0 = "rank0."
"""Prefix of the names of rank 0's weights, if there are several ranks."""
ADDS_BIAS, ADDS_RESIDUAL = 1, 2
"""Bits for what is added to a sum over ranks."""
STATES_USES = ("left", "taken", "placed", "placed_on_axes")
"""What graphs do with rows of hidden states, by `takes_states` of the model."""
OPERAND_KINDS = ("arena", "weight", "input", "k_pool", "v_pool", "output", "adapters", "states")
INPUTS = (
    "input_ids",
    "positions",
    "slot_mapping",
    "block_tables",
    "context_lens",
    "query_start",
    "sample_index",
    "token_seq",
)
"""Inputs of a traced model, int32, in index order."""
SAMPLE_INDEX = "sample_index"
"""Input with the token row of each sampled row, in ascending order."""
ADAPTER_TILES = "adapter_tiles"
"""Input that only commands of adapters read: the number of tiles of rows, then a record for each."""
STATE_SLOTS = "state_slots"
"""Input of a model with layers that hold a state; a traced one has it behind `INPUTS`."""
ROPE_POSITIONS = "rope_positions"
"""Input of a model whose rotary positions have axes; a traced one has it behind all others."""
GRAPH_INPUTS = (*INPUTS, ADAPTER_TILES, STATE_SLOTS, ROPE_POSITIONS)
"""Inputs of a graph in index order."""
TILE_ROWS = 8
TILE_RECORD = 2 + TILE_ROWS
"""int32 values of a tile: the slot of its adapter, its number of rows, then the rows; the last row fills the record."""
MAX_ADAPTER_PARTS = 8
STATE_FIELDS = 3
"""int32 values of a sequence in state_slots: the slot of its states; a number of tokens, behind which they are also
written to another slot, or 0; that slot."""

PLACED_ROW = -1
"""In input_ids, in place of a token: its row of hidden states."""
ROPE_AXES = 3
"""int32 values of a token in rope_positions: time, height, width."""

_CODES = {"u8": "s", "u32": "I", "i32": "i", "u64": "Q", "i64": "q"}
_BYTES = {"u8": 1, "u32": 4, "i32": 4, "u64": 8, "i64": 8}
_CRC_OFFSET = 28
_OF_RANK = re.compile(r"^rank\d+\.")


def name_in_model(name: str) -> str:
    """Name of a weight without its rank prefix."""
    return _OF_RANK.sub("", name)


def layout(record: str) -> struct.Struct:
    """Struct of a record. Reserved fields are zero bytes that consume no value."""
    codes = []
    for kind, name, count in re.findall(r"(\w+) (\w+)(?:\[(\d+)\])?", RECORDS[record]):
        number = int(count or 1)
        codes.append(f"{number * _BYTES[kind]}x" if name == "reserved" else f"{number}{_CODES[kind]}")
    return struct.Struct("<" + "".join(codes))


def tables_crc32(data: bytes | bytearray | memoryview) -> int:
    """CRC-32 in the header: over every byte of graphs.bin except the four bytes that hold it."""
    view = memoryview(data)
    return zlib.crc32(view[_CRC_OFFSET + 4 :], zlib.crc32(view[:_CRC_OFFSET]))


def input_shape(
    name: str, max_tokens: int, max_seqs: int, max_samples: int, max_blocks_per_seq: int, max_blocks: int = 0
) -> tuple[int, ...]:
    """Shape of an input of a graph with these limits. max_blocks: KV blocks of all sequences together, 0: no such
    limit."""
    shapes = {
        "block_tables": (max_blocks,) if max_blocks else (max_seqs, max_blocks_per_seq),
        "context_lens": (max_seqs,),
        "query_start": (max_seqs + 1,),
        "sample_index": (max_samples,),
        ADAPTER_TILES: (1 + TILE_RECORD * max_tokens,),
        STATE_SLOTS: (max_seqs, STATE_FIELDS),
        ROPE_POSITIONS: (max_tokens, ROPE_AXES),
    }
    return shapes.get(name, (max_tokens,))
