"""The shapes that Intel Gaudi's vLLM plugin warms up, by its own rules: the input of `llmc buckets import`.

The rules are those of vllm_gaudi/extension/bucketing/ (common, exponential, linear and padding_aware), described at
https://docs.vllm.ai/projects/gaudi/en/latest/features/bucketing_mechanism.html. tests/data/vllm_gaudi_shapes.json holds
output of its code. Not covered is what only its model runner knows: speculative decoding, chunk sizes of Mamba layers,
and the decode range of hybrid models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

from .bucket import BucketError
from .ladder import geometric

Shape = tuple[int, int, int]
"""(batch, query tokens, context blocks); the context is per sequence for prompts, of the batch for decode."""

STRATEGIES = {"exp": "exponential", "lin": "linear", "pad": "padding-aware"}
_LONG_CONTEXT = 8192
_MAX_SIZES = 1 << 16
_MAX_SHAPES = 1 << 20


@dataclass(frozen=True, slots=True)
class PluginServer:
    """The inputs of the plugin's lists. Lengths in tokens. num_blocks: KV blocks of the device.

    numbers: set by variables, as {"PROMPT_QUERY_MIN": 128}. slices: (threshold, size) of sliced attention. shapes:
    (prompt, decode) of a bucket file, instead of a strategy. totals: whether llmc counts contexts of a step together.
    """

    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int
    strategy: str
    contiguous: bool
    merged: bool
    numbers: Mapping[str, int]
    slices: tuple[int, int] | None = None
    shapes: tuple[list[Shape], list[Shape]] | None = None
    totals: bool = False

    @property
    def prompt_seqs(self) -> int:
        """Most prompts in a prefill step."""
        return self.max_num_seqs if self.merged else self.numbers.get("PROMPT_BS_MAX", 1)

    @property
    def blocks_per_seq(self) -> int:
        return -(-self.max_model_len // self.block_size)


@dataclass(frozen=True, slots=True)
class Axis:
    """Ascending sizes of an axis, and the (name, value) numbers that define them."""

    numbers: tuple[tuple[str, int], ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PluginShapes:
    """The plugin's sorted lists, and its axes by name (PROMPT_BS, PROMPT_QUERY, …); no axes for a bucket file."""

    prompt: tuple[Shape, ...]
    decode: tuple[Shape, ...]
    axes: Mapping[str, Axis]


def plugin_shapes(server: PluginServer) -> PluginShapes:
    """The plugin's shapes. Raises BucketError where the plugin fails, and for lists of more than a million shapes."""
    if server.shapes is not None:
        prompt = {shape for shape in server.shapes[0] if _prompt_holds(server, *shape)}
        decode = {_cut(server, shape) for shape in server.shapes[1] if _decode_holds(server, shape)}
        axes: dict[str, Axis] = {}
    else:
        axes = _axes(server)
        batches, queries, contexts = (axes[f"PROMPT_{name}"].sizes for name in ("BS", "QUERY", "CTX"))
        _check_count("prompt", len(batches) * len(queries) * len(contexts))
        prompt = set()
        for batch, context in product(batches, contexts):
            edge = context == contexts[-1] and server.max_model_len >= _LONG_CONTEXT
            for query in queries:
                if edge:
                    context = _edge(server, query, context)
                if _prompt_holds(server, batch, query, context):
                    prompt.add((batch, query, context))
        batches, blocks = axes["DECODE_BS"].sizes, axes["DECODE_BLOCK"].sizes
        _check_count("decode", len(batches) * len(blocks))
        shapes = ((batch, 1, context) for batch, context in product(batches, blocks))
        decode = {_cut(server, shape) for shape in shapes if _decode_holds(server, shape)}
    for phase, found in (("prompt", prompt), ("decode", decode)):
        if not found:
            raise BucketError(
                f"the plugin has no {phase} shape within these limits: raise them, or change the VLLM_ variables"
            )
    if server.slices is not None:
        threshold, size = server.slices
        prompt = {s for s in prompt if s[2] or s[1] < threshold or s[1] % size == 0}
    return PluginShapes(tuple(sorted(prompt)), tuple(sorted(decode)), axes)


def _edge(server: PluginServer, query: int, context: int) -> int:
    """The context blocks before a query of the longest sequence; `context` where that is not allowed."""
    longest = (server.max_model_len - query) // server.block_size
    limit = server.numbers.get("PROMPT_CTX_MAX")
    return longest if longest >= 0 and (limit is None or longest < limit) else context


def _prompt_holds(server: PluginServer, batch: int, query: int, context: int) -> bool:
    if server.merged:
        seqs = server.prompt_seqs
        return context <= seqs * ((server.max_model_len - query // seqs) // server.block_size)
    most = -(-(server.max_model_len - 1) // server.block_size)
    return context <= most and query <= server.max_model_len and batch * query <= server.max_num_batched_tokens


def _decode_holds(server: PluginServer, shape: Shape) -> bool:
    return server.contiguous or shape[0] <= shape[2]


def _cut(server: PluginServer, shape: Shape) -> Shape:
    batch, query, context = shape
    return shape if server.contiguous else (batch, query, min(context, batch * server.blocks_per_seq))


def _axes(server: PluginServer) -> dict[str, Axis]:
    if server.prompt_seqs < 1:
        raise BucketError("VLLM_PROMPT_BS_BUCKET_MAX is 0: set 1 or more, or unset it")
    numbers = {"exp": _exponential_numbers, "lin": _linear_numbers, "pad": _padded_numbers}[server.strategy](server)
    if server.merged:
        # One packed step of all prompts: no batch, coarser lengths, and the total context.
        numbers["PROMPT_BS"] |= {"MIN": 1, "STEP": 1, "MAX": 1, **({"LIMIT": 1} if server.strategy == "exp" else {})}
        numbers["PROMPT_QUERY"] |= {"STEP": 4 * numbers["PROMPT_QUERY"]["STEP"], "MAX": server.max_num_batched_tokens}
    last = numbers["DECODE_BLOCK"]
    if server.strategy != "exp":
        if server.contiguous:
            last["MAX"] = min(last["MAX"], server.num_blocks)
        most = last["MAX"] if server.strategy == "lin" else server.num_blocks
        if last["MIN"] > most:
            last["MIN"] = max(1, most - last["STEP"])
    rule = {"exp": _exponential, "lin": _linear, "pad": _padded}[server.strategy]
    axes = {}
    for name, values in numbers.items():
        try:
            sizes = tuple(sorted(rule(values)))
        except BucketError as error:
            raise BucketError(f"VLLM_{name}_BUCKET_*: {error}") from error
        axes[name] = Axis(tuple(values.items()), sizes)
    blocks = axes["DECODE_BLOCK"]
    if server.contiguous and blocks.sizes and blocks.sizes[-1] < server.num_blocks:
        axes["DECODE_BLOCK"] = Axis(blocks.numbers, (*blocks.sizes, server.num_blocks))
    empty = next((name for name, axis in axes.items() if not axis.sizes), None)
    if empty is not None:
        raise BucketError(f"VLLM_{empty}_BUCKET_* leave no size between MIN and MAX: change STEP or MAX")
    return axes


def _log2(value: int) -> int:
    """log2, rounded up."""
    return (value - 1).bit_length()


def _exponential_numbers(server: PluginServer) -> dict[str, dict[str, int]]:
    """The axes' numbers; the exponential strategy uses its own, except VLLM_PROMPT_QUERY_BUCKET_MIN=1."""
    tokens, block, length = server.max_num_batched_tokens, server.block_size, server.max_model_len
    query = 1 if server.numbers.get("PROMPT_QUERY_MIN") == 1 else block
    context = max(1, (length - (tokens if length >= _LONG_CONTEXT else query)) // block)
    worst = server.blocks_per_seq * server.max_num_seqs
    blocks = min(worst, server.num_blocks if server.contiguous else 3 * server.num_blocks)
    limit = 2 if context == 1 else _log2(context) + 1
    step, factor = (4, server.prompt_seqs) if server.merged else (1, 1)
    return {
        "PROMPT_BS": _exp(1, 2, server.prompt_seqs, _log2(server.prompt_seqs) + 1),
        "PROMPT_QUERY": _exp(query, block, tokens, _log2(tokens)),
        "PROMPT_CTX": _exp(0, step, context * factor, limit),
        "DECODE_BS": _exp(1, 2, server.max_num_seqs, _log2(server.max_num_seqs) + 1),
        "DECODE_BLOCK": _exp(1, server.max_num_seqs, blocks, _log2(blocks) + 1),
    }


def _linear_numbers(server: PluginServer) -> dict[str, dict[str, int]]:
    block, length, seqs = server.block_size, server.max_model_len, server.max_num_seqs
    query = _set(server, "PROMPT_QUERY", MIN=block, STEP=block, MAX=server.max_num_batched_tokens)
    context = (length - query["MIN"]) // block
    step, factor = (4, server.prompt_seqs) if server.merged else (1, 1)
    worst = server.num_blocks if server.contiguous else max(length * seqs // block, block)
    return {
        "PROMPT_BS": _set(server, "PROMPT_BS", MIN=1, STEP=1, MAX=server.prompt_seqs),
        "PROMPT_QUERY": query,
        "PROMPT_CTX": _set(server, "PROMPT_CTX", MIN=0, STEP=step, MAX=context * factor),
        "DECODE_BS": _set(server, "DECODE_BS", MIN=1, STEP=32, MAX=seqs),
        "DECODE_BLOCK": _set(server, "DECODE_BLOCK", MIN=1, STEP=block, MAX=worst),
    }


def _padded_numbers(server: PluginServer) -> dict[str, dict[str, int]]:
    tokens, block, length, seqs = (
        server.max_num_batched_tokens, server.block_size, server.max_model_len, server.max_num_seqs
    )  # fmt: skip

    def axis(name: str, low: int, step: int, high: int, pad: int) -> dict[str, int]:
        return _set(server, name, MIN=low, STEP=step, MAX=high, PAD_MAX=pad, PAD_PERCENT=25)

    query = axis("PROMPT_QUERY", block, block, tokens, -(-tokens // 4))
    context = -(-(length - query["MIN"]) // block)
    step, factor = (4, server.prompt_seqs) if server.merged else (2, 1)
    worst = server.num_blocks if server.contiguous else max(-(-length * seqs // block), block)
    return {
        "PROMPT_BS": axis("PROMPT_BS", 1, 1, server.prompt_seqs, -(-server.prompt_seqs // 4)),
        "PROMPT_QUERY": query,
        "PROMPT_CTX": axis("PROMPT_CTX", 0, step, context * factor, -(-tokens // block)),
        "DECODE_BS": axis("DECODE_BS", 1, 2, seqs, -(-seqs // 4)),
        "DECODE_BLOCK": axis("DECODE_BLOCK", block, block, worst, -(-worst // 4)),
    }


def _exp(low: int, step: int, high: int, limit: int) -> dict[str, int]:
    return {"MIN": low, "STEP": step, "MAX": high, "LIMIT": limit}


def _set(server: PluginServer, axis: str, **defaults: int) -> dict[str, int]:
    """The defaults, updated by variables; for query lengths SEQ applies if QUERY is not set."""
    given = server.numbers
    older = {number: given.get(f"PROMPT_SEQ_{number}", value) for number, value in defaults.items()}
    defaults = older if axis == "PROMPT_QUERY" else defaults
    return {number: given.get(f"{axis}_{number}", value) for number, value in defaults.items()}


def _exponential(values: Mapping[str, int]) -> set[int]:
    low, step, high, limit = values["MIN"], values["STEP"], values["MAX"], values["LIMIT"]
    if limit < 1:
        raise BucketError(f"{high} tokens leave no size: raise --max-num-batched-tokens")
    if limit == 1:
        return {high}
    sizes = set(geometric(step if low <= 1 else low, step, high, limit))
    return sizes | {low} if low <= 1 else sizes


def _linear(values: Mapping[str, int]) -> set[int]:
    low, step, high = _checked(values)
    if low == high == 0:
        return {0}
    start = low or step
    sizes = {0} if low == 0 else set()
    ramp = start
    while ramp < step and ramp <= high:
        sizes.add(ramp)
        ramp *= 2
    return sizes | {size for size in range(step, high + 1, step) if size >= start}


def _padded(values: Mapping[str, int]) -> list[int]:
    low, step, high = _checked(values)
    cap, percent = values["PAD_MAX"] or high, values["PAD_PERCENT"]
    if percent > 50:
        raise BucketError(f"PAD_PERCENT is {percent}: set 0 to 50")
    sizes, size = [low], low
    while size <= high:
        last = sizes[-1]
        if size <= step:
            above = max(1, 2 * last)
            if above <= high:
                sizes.append(above)
        else:
            above = size + step
            padding = above - last - 1
            wasteful = 100 * padding > percent * above or padding > cap or size % cap == 0
            if wasteful and size != last:
                sizes.append(size)
        size = above
    return sizes if sizes[-1] == high else [*sizes, high]


def _checked(values: Mapping[str, int]) -> tuple[int, int, int]:
    low, step, high = values["MIN"], values["STEP"], values["MAX"]
    if step < 1:
        raise BucketError(f"STEP is {step}: set 1 or more")
    if low > high:
        raise BucketError(f"MIN {low} is above MAX {high}: lower MIN or raise MAX")
    if (high - low) // step > _MAX_SIZES:
        raise BucketError(f"about {(high - low) // step} sizes from MIN {low} to MAX {high}: use a larger STEP")
    return low, step, high


def _check_count(phase: str, count: int) -> None:
    if count > _MAX_SHAPES:
        raise BucketError(f"the plugin's {phase} axes make {count} shapes, at most {_MAX_SHAPES} are read: raise STEP")
