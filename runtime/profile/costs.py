"""Minimum memory traffic and arithmetic of a command, from its operands and its kernel's parameters."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from llmc.cpu_levels import PRODUCT_LEVELS
from llmc.graphs_format import FAMILIES, OPERAND_KINDS
from llmc.graphs_records import Command, Graph, Tables, TargetRecord
from llmc.runtime.graph_view import is_written, writes_cache
from llmc.runtime.profile.steps import Step

Params = dict[str, Any]
_ON_SAMPLES = 2  # value of parameter `rows` for a kernel that works on sampled rows
_OF_STATES = frozenset({"taps", "key_dim", "state_size"})  # parameters that only kernels of layers with a state have


@dataclass(frozen=True)
class Cost:
    """memory_bytes: weights and KV cache, which exceed every cache. bytes: those plus activations. flops: of matrix
    products and attention; a multiply-add is two. written_bytes: the written part of `bytes`."""

    memory_bytes: int
    bytes: int
    flops: int
    written_bytes: int = 0

    @property
    def read_bytes(self) -> int:
        return self.bytes - self.written_bytes

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.memory_bytes + other.memory_bytes,
            self.bytes + other.bytes,
            self.flops + other.flops,
            self.written_bytes + other.written_bytes,
        )


NOTHING = Cost(0, 0, 0)


def kernel_params(manifest: dict[str, Any]) -> dict[str, Params]:
    """Template parameters by kernel symbol; empty where the manifest has none."""
    found: dict[str, Params] = {}
    for kernel in manifest.get("kernels") or []:
        try:
            found[kernel["symbol"]] = dict(json.loads(kernel["components"]["params"]))
        except (KeyError, TypeError, ValueError):
            continue
    return found


def _first_key(position: int, window: int, chunk: int) -> int:
    """The first key that a token sees."""
    return max(position - window + 1 if window else 0, position // chunk * chunk if chunk else 0, 0)


def visible_keys(step: Step, window: int, chunk: int = 0) -> int:
    """The number of (new token, visible key) pairs. window, chunk: 0 for none."""
    total = 0
    for start, count in step.sequences:
        for position in range(start, start + count) if window or chunk else ():
            total += position + 1 - _first_key(position, window, chunk)
        if not window and not chunk:
            total += count * start + count * (count + 1) // 2
    return total


def _keys_read(step: Step, window: int, chunk: int) -> int:
    """The number of keys that some new token sees."""
    return sum(start + count - _first_key(start, window, chunk) for start, count in step.sequences)


def _of_rotation(weights: int, rotary_dim: int, step: Step) -> int:
    """Bytes of weights that a rotation reads: rows of its table."""
    return min(weights, step.num_tokens * rotary_dim * 4)


def command_cost(tables: Tables, graph: Graph, command: Command, params: Params, step: Step) -> Cost:
    """The cost of `command` when `graph` replays `step`."""
    model, family = tables.model, FAMILIES[command.family]
    num_samples = len(step.sequences)
    rows = num_samples if params.get("rows") == _ON_SAMPLES else step.num_tokens
    weights = activations = written = token_bytes = block_bytes = 0
    operands = tables.operands_of(command)
    cache = writes_cache(operands)
    for position, operand in enumerate(operands):
        kind, moved = OPERAND_KINDS[operand.kind], 0
        if kind == "weight":
            weights += operand.bytes
        elif kind in ("k_pool", "v_pool"):
            block_bytes += operand.bytes
            token_bytes += operand.bytes // model.block_size
        elif kind == "arena" or kind == "states":
            moved = operand.bytes * min(step.num_tokens, graph.max_tokens) // graph.max_tokens
        elif kind == "output":
            moved = num_samples * model.vocab_size * 4
        activations += moved
        if is_written(command.family, kind, position, len(operands), cache=cache):
            written += moved
    kv = flops = 0
    if family == "linear":
        flops = 2 * rows * int(params.get("k", 0)) * int(params.get("n", 0))
        if experts := int(params.get("experts", 0)):
            # Which experts tokens share is unknown: assume a random choice.
            top_k = int(params.get("top_k", 1))
            flops *= top_k
            weights = round(weights * (1 - (1 - top_k / experts) ** rows))
    elif family == "embedding":
        # Only the rows of the tokens are read.
        weights = min(weights, weights * step.num_tokens // max(int(params.get("vocab", model.vocab_size)), 1))
    elif family == "rope":
        weights = _of_rotation(weights, int(params.get("rotary_dim", model.head_dim)), step)
        kv = step.num_tokens * token_bytes
        written += kv
    elif family == "attention" and "kv_dtype" in params:  # the other kernel merges this one's partial results
        window = int(params.get("window", model.sliding_window))
        chunk = int(params.get("chunk", 0))
        kv = _keys_read(step, window, chunk) * token_bytes
        # One that rotates also does what a kernel of family rope does.
        if "rotary_dim" in params:
            weights = _of_rotation(weights, int(params["rotary_dim"]), step)
        if cache:
            kv, written = kv + step.num_tokens * token_bytes, written + step.num_tokens * token_bytes
        # Values are part of the latent key.
        head_dim = int(params.get("head_dim", model.head_dim))
        both = head_dim + int(params.get("rank", head_dim))
        flops = 2 * int(params.get("num_heads", 0)) * both * visible_keys(step, window, chunk)
    elif block_bytes and not _OF_STATES.isdisjoint(params):
        # A state: it is read before the first token of a sequence, and written behind the last one. That a step also
        # keeps one is rare.
        writes = block_bytes * num_samples
        kv, written = writes + block_bytes * sum(start > 0 for start, _ in step.sequences), written + writes
        flops = step.num_tokens * _flops_of_token(params)
    return Cost(weights + kv, weights + kv + activations, flops, written)


def _flops_of_token(params: Params) -> int:
    """Of a kernel of layers with a state."""
    if taps := int(params.get("taps", 0)):
        return 2 * taps * int(params["channels"])
    if state_size := int(params.get("state_size", 0)):
        # Decay, the change, and what is read.
        return 5 * int(params["heads"]) * int(params["head_dim"]) * state_size
    # Decay, what a key finds, the change, and what a query finds.
    return 7 * int(params["heads"]) * int(params["key_dim"]) * int(params["value_dim"])


def arithmetic(family: str, params: Params, target: TargetRecord) -> str:
    """The limit on a kernel's products: f32, or that of the target's dot product for them."""
    level = target.level if target.kind == "cpu" else 0
    act = params.get("act_dtype") if family == "linear" else None
    if act == "i8" and level >= PRODUCT_LEVELS["int8"]:
        return "int8"
    # With float activations, 8- and 4-bit weights are converted to float32.
    return "bf16" if act == "bf16" and level >= PRODUCT_LEVELS["bf16"] and "bits" not in params else "f32"


def step_cost(tables: Tables, manifest: dict[str, Any], graph: Graph, step: Step) -> dict[str, Cost]:
    """The cost of a whole step, by kernel family."""
    params, total = kernel_params(manifest), dict.fromkeys(FAMILIES, NOTHING)
    for command in tables.commands_of(graph):
        symbol = tables.name_of(command)
        total[FAMILIES[command.family]] += command_cost(tables, graph, command, params.get(symbol, {}), step)
    return total
