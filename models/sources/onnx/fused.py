"""Expands onnxruntime's fused operators into ONNX's own operators."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from llmc.models.brief import brief_name
from llmc.models.convert import Array
from llmc.models.sources.onnx.blocks import BIAS, values_name
from llmc.models.sources.onnx.blocks import OPERATOR as BLOCKS
from llmc.models.sources.onnx.file import OnnxFile

MICROSOFT = "com.microsoft"
_ATTENTION = (MICROSOFT, "GroupQueryAttention")
_OF_ENCODERS = (MICROSOFT, "Attention")
_REFUSED_INPUTS = {4: "a cache", 5: "a bias of scores", 6: "a cache"}
"""Of onnxruntime's Attention, by position."""


class NotWrittenOut(Exception):
    """An unsupported setting of an operator; the message states it, as in `has the attribute …`."""


@dataclass(frozen=True)
class Call:
    """One node. shapes: of its inputs, by position. known: values of known inputs."""

    node: onnx.NodeProto
    shapes: Sequence[tuple[int, ...] | None]
    known: Sequence[Array | None]

    def attribute(self, name: str, default: Any) -> Any:
        found = next((a for a in self.node.attribute if a.name == name), None)
        return default if found is None else onnx.helper.get_attribute_value(found)

    def has(self, place: int) -> bool:
        return place < len(self.node.input) and bool(self.node.input[place])

    def values(self, place: int) -> Array:
        """Raises NotWrittenOut for an input that is present but not known."""
        found = self.known[place] if self.has(place) else None
        if found is None:
            raise NotWrittenOut(f"reads values that are not known in its input {place}")
        return found


class Written:
    """The nodes that replace one, in order, and the constants that they read."""

    def __init__(self, call: Call) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, Array] = {}
        self._name = f"{call.node.name or call.node.output[0]}/written"

    def add(self, op: str, *inputs: str, to: str | None = None, **attributes: Any) -> str:
        output = to or f"{self._name}/{len(self.nodes)}"
        self.nodes.append(onnx.helper.make_node(op, list(inputs), [output], name=output, **attributes))
        return output

    def constant(self, value: Any, dtype: Any = np.float32) -> str:
        name = f"{self._name}/constant_{len(self.constants)}"
        self.constants[name] = np.asarray(value, dtype)
        return name

    def shape(self, *sizes: int) -> str:
        return self.constant(sizes, np.int64)

    def part(self, x: str, begin: int, end: int, axis: int = -1) -> str:
        bounds = [self.constant([value], np.int64) for value in (begin, end, axis)]
        return self.add("Slice", x, *bounds)


def _heads(out: Written, x: str, shape: tuple[int, ...], heads: int) -> tuple[str, int]:
    """Splits rows [batch, tokens, heads · elements] into ([batch, heads, tokens, elements], elements per head)."""
    batch, tokens, width = shape
    if width % heads:
        raise NotWrittenOut(f"has rows of {width} elements for {heads} heads")
    split = out.add("Reshape", x, out.shape(batch, tokens, heads, width // heads))
    return out.add("Transpose", split, perm=[0, 2, 1, 3]), width // heads


def _joined(out: Written, x: str, batch: int, tokens: int, width: int, to: str) -> str:
    """The inverse of `_heads`."""
    turned = out.add("Transpose", x, perm=[0, 2, 1, 3])
    return out.add("Reshape", turned, out.shape(batch, tokens, width), to=to)


def _rotated(out: Written, x: str, shape: tuple[int, ...], cos: Array, sin: Array, *, pairs: bool) -> str:
    """Rotates x [batch, heads, tokens, elements] by cos, sin [batch or 1, tokens, rotated / 2]. pairs: interleaved
    rotation, not half-split."""
    half, dim = cos.shape[-1], shape[-1]
    cosines, sines = (out.constant(table[:, None]) for table in (cos, sin))
    if pairs:
        split = out.add("Reshape", out.part(x, 0, 2 * half), out.shape(*shape[:-1], half, 2))
        which = [out.constant(i, np.int64) for i in (0, 1)]
        first, second = (out.add("Gather", split, index, axis=-1) for index in which)
    else:
        first, second = out.part(x, 0, half), out.part(x, half, 2 * half)
    made = (
        out.add("Sub", out.add("Mul", first, cosines), out.add("Mul", second, sines)),
        out.add("Add", out.add("Mul", second, cosines), out.add("Mul", first, sines)),
    )
    if pairs:
        last = out.constant([-1], np.int64)
        stacked = out.add("Concat", *(out.add("Unsqueeze", one, last) for one in made), axis=-1)
        turned = out.add("Reshape", stacked, out.shape(*shape[:-1], 2 * half))
    else:
        turned = out.add("Concat", *made, axis=-1)
    return turned if 2 * half == dim else out.add("Concat", turned, out.part(x, 2 * half, dim), axis=-1)


def _rotary(call: Call) -> Written:
    """RotaryEmbedding: input, position_ids, cos_cache, sin_cache."""
    out, shape = Written(call), call.shapes[0]
    assert shape is not None
    positions, cos, sin = call.values(1), call.values(2), call.values(3)
    if call.attribute("is_packed_batching", 0) or call.attribute("scale", 1.0) != 1.0:
        raise NotWrittenOut("has the attribute is_packed_batching or scale")
    dim = call.attribute("rotary_embedding_dim", 0) or 2 * cos.shape[-1]
    heads = call.attribute("num_heads", 0)
    if len(shape) == 3:
        heads = heads or shape[-1] // dim
        x, width = _heads(out, call.node.input[0], (shape[0], shape[1], shape[2]), heads)
        batch, tokens = shape[:2]
    else:
        x, (batch, heads, tokens, width) = call.node.input[0], shape
    if positions.size == 1 and (batch, tokens) != (1, 1):
        positions = positions.reshape(1, 1) + np.arange(tokens)
    tables = (table[positions.reshape(-1, tokens)][..., : dim // 2] for table in (cos, sin))
    turned = _rotated(out, x, (batch, heads, tokens, width), *tables, pairs=bool(call.attribute("interleaved", 0)))
    if len(shape) == 3:
        _joined(out, turned, batch, tokens, heads * width, call.node.output[0])
    else:
        out.add("Identity", turned, to=call.node.output[0])
    return out


def _rotary_of_onnx(call: Call) -> Written:
    """ONNX's own RotaryEmbedding: input, cos_cache, sin_cache and, where these have a row for each position,
    position_ids."""
    out, shape = Written(call), call.shapes[0]
    assert shape is not None
    cos, sin = call.values(1), call.values(2)
    if call.has(3):
        cos, sin = cos[call.values(3)], sin[call.values(3)]
    if len(shape) == 3:
        heads = call.attribute("num_heads", 0)
        if heads < 1:
            raise NotWrittenOut("has no number of heads")
        batch, tokens, whole = shape
        x, width = _heads(out, call.node.input[0], (batch, tokens, whole), heads)
    else:
        x, (batch, heads, tokens, width) = call.node.input[0], shape
    dim = call.attribute("rotary_embedding_dim", 0) or width
    tables = (table[..., : dim // 2].astype(np.float32) for table in (cos, sin))
    turned = _rotated(out, x, (batch, heads, tokens, width), *tables, pairs=bool(call.attribute("interleaved", 0)))
    if len(shape) == 3:
        _joined(out, turned, batch, tokens, heads * width, call.node.output[0])
    else:
        out.add("Identity", turned, to=call.node.output[0])
    return out


def _product(call: Call) -> Written:
    """FusedMatMul: a product of matrices, each transposed or not, times alpha."""
    out, inputs = Written(call), list(call.node.input[:2])
    if call.attribute("transBatchA", 0) or call.attribute("transBatchB", 0):
        raise NotWrittenOut("has the attribute transBatchA or transBatchB")
    for place, name in enumerate(("transA", "transB")):
        shape = call.shapes[place]
        if call.attribute(name, 0) and shape is not None:
            axes = list(range(len(shape)))
            inputs[place] = out.add("Transpose", inputs[place], perm=[*axes[:-2], axes[-1], axes[-2]])
    alpha = call.attribute("alpha", 1.0)
    product = out.add("MatMul", *inputs, to=call.node.output[0] if alpha == 1.0 else None)
    if alpha != 1.0:
        out.add("Mul", product, out.constant(alpha), to=call.node.output[0])
    return out


def _grouped_query(call: Call) -> Written:
    """GroupQueryAttention: query, key, value, past_key, past_value, seqlens_k, total_sequence_length, cos_cache,
    sin_cache.

    Texts must have no padding, with the cache holding all earlier tokens.
    """
    out = Written(call)
    heads, kv_heads = call.attribute("num_heads", 0), call.attribute("kv_num_heads", 0)
    for place in range(9, len(call.node.input)):
        if call.has(place):
            raise NotWrittenOut(f"has an input {brief_name(call.node.input[place])} in place {place}")
    if call.attribute("local_window_size", -1) not in (-1, 0) or call.attribute("smooth_softmax", 0) > 0:
        raise NotWrittenOut("has the attribute local_window_size or smooth_softmax")
    query, past = call.shapes[0], call.shapes[3]
    if query is None or past is None or not call.has(4):
        raise NotWrittenOut("has no cache")
    batch, tokens, width = query
    q_name, dim, before = call.node.input[0], past[-1], past[2]
    if call.has(1):
        k_name, v_name = call.node.input[1], call.node.input[2]
    else:
        ends = np.cumsum([heads * dim, kv_heads * dim, kv_heads * dim])
        whole = q_name
        q_name, k_name, v_name = (out.part(whole, int(b), int(e)) for b, e in zip((0, *ends[:-1]), ends, strict=True))
        width = int(ends[0])
    q, _ = _heads(out, q_name, (batch, tokens, width), heads)
    k, _ = _heads(out, k_name, (batch, tokens, kv_heads * dim), kv_heads)
    v, _ = _heads(out, v_name, (batch, tokens, kv_heads * dim), kv_heads)
    if call.attribute("do_rotary", 0):
        tables = [call.values(place)[None, before : before + tokens] for place in (7, 8)]
        pairs = bool(call.attribute("rotary_interleaved", 0))
        q = _rotated(out, q, (batch, heads, tokens, dim), tables[0], tables[1], pairs=pairs)
        k = _rotated(out, k, (batch, kv_heads, tokens, dim), tables[0], tables[1], pairs=pairs)
    kept = [
        out.add("Concat", call.node.input[place], new, to=_output(call, place - 2), axis=2)
        for place, new in ((3, k), (4, v))
    ]
    k, v = (_repeated(out, x, (batch, kv_heads, before + tokens, dim), heads) for x in kept)
    scale = call.attribute("scale", 0.0) or dim**-0.5
    scores = out.add("Mul", out.add("MatMul", q, out.add("Transpose", k, perm=[0, 1, 3, 2])), out.constant(scale))
    cap = call.attribute("softcap", 0.0)
    if cap:
        bounded = out.add("Tanh", out.add("Div", scores, out.constant(cap)))
        scores = out.add("Mul", bounded, out.constant(cap))
    scores = out.add("Add", scores, _causal(out, call, before, tokens))
    attended = out.add("MatMul", out.add("Softmax", scores, axis=-1), v)
    _joined(out, attended, batch, tokens, heads * dim, call.node.output[0])
    return out


def _encoder_attention(call: Call) -> Written:
    """Attention: input, weights [elements, q + k + v], bias, mask_index. Its masks are as in `_padding`."""
    out, shape, weight = Written(call), call.shapes[0], call.shapes[1]
    for place, what in _REFUSED_INPUTS.items():
        if call.has(place):
            raise NotWrittenOut(f"has {what} (its input {brief_name(call.node.input[place])})")
    for name in ("unidirectional", "do_rotary"):
        if call.attribute(name, 0):
            raise NotWrittenOut(f"has the attribute {name}")
    if shape is None or weight is None or len(shape) != 3:
        raise NotWrittenOut("has no rows of tokens or no weights")
    batch, tokens, _ = shape
    heads, width = call.attribute("num_heads", 0), weight[1] // 3
    if any(size != width for size in call.attribute("qkv_hidden_sizes", ())):
        raise NotWrittenOut("has values of another size than keys")
    whole = out.add("MatMul", call.node.input[0], call.node.input[1])
    if call.has(2):
        whole = out.add("Add", whole, call.node.input[2])
    parts = (out.part(whole, i * width, (i + 1) * width) for i in range(3))
    q, k, v = (_heads(out, part, (batch, tokens, width), heads)[0] for part in parts)
    scores = out.add("MatMul", q, out.add("Transpose", k, perm=[0, 1, 3, 2]))
    scale = call.attribute("scale", 0.0) or (width // heads) ** -0.5
    scores = out.add("Mul", scores, out.constant(scale))
    if call.has(3):
        scores = out.add("Add", scores, _padding(out, call.values(3), batch, tokens))
    attended = out.add("MatMul", out.add("Softmax", scores, axis=-1), v)
    _joined(out, attended, batch, tokens, width, call.node.output[0])
    return out


def _padding(out: Written, mask: Array, batch: int, tokens: int) -> str:
    """mask: [batch] lengths of texts; or [batch, tokens] or [batch, tokens, tokens], 0 for keys that are not seen."""
    if mask.shape == (batch,):
        seen = np.arange(tokens) < mask[:, None, None]
    elif mask.shape in ((batch, tokens), (batch, tokens, tokens)):
        seen = mask.reshape(batch, -1, tokens) != 0
    else:
        raise NotWrittenOut(f"has a mask of shape {list(mask.shape)}")
    return out.constant(np.where(seen, 0.0, -np.inf)[:, None])


def _output(call: Call, place: int) -> str | None:
    return call.node.output[place] if place < len(call.node.output) and call.node.output[place] else None


def _repeated(out: Written, x: str, shape: tuple[int, ...], heads: int) -> str:
    batch, kv_heads, keys, dim = shape
    if heads % kv_heads:
        raise NotWrittenOut(f"has {heads} heads for {kv_heads} of keys")
    apart = out.add("Unsqueeze", x, out.constant([2], np.int64))
    wide = out.add("Expand", apart, out.shape(batch, kv_heads, heads // kv_heads, keys, dim))
    return out.add("Reshape", wide, out.shape(batch, heads, keys, dim))


def _causal(out: Written, call: Call, before: int, tokens: int) -> str:
    """The mask of onnxruntime's kernel, under a name shared by two imports of a graph."""
    hidden = np.arange(before + tokens) > before + np.arange(tokens)[:, None]
    name = f"{call.node.name or call.node.output[0]}/written/causal"
    out.constants[name] = np.where(hidden, -np.inf, 0.0).astype(np.float32)[None, None]
    return name


def _block_product(call: Call) -> Written:
    out, node = Written(call), call.node
    turned = out.add("Transpose", values_name(node), perm=[1, 0])
    product = out.add("MatMul", node.input[0], turned, to=None if call.has(BIAS) else node.output[0])
    if call.has(BIAS):
        out.add("Add", product, node.input[BIAS], to=node.output[0])
    return out


FUSED: Mapping[tuple[str, str], Callable[[Call], Written]] = {
    (MICROSOFT, "RotaryEmbedding"): _rotary,
    ("", "RotaryEmbedding"): _rotary_of_onnx,
    (MICROSOFT, "FusedMatMul"): _product,
    _ATTENTION: _grouped_query,
    _OF_ENCODERS: _encoder_attention,
    BLOCKS: _block_product,
}
"""By (domain, operator). They raise NotWrittenOut."""


def has_fused_attention(file: OnnxFile) -> bool:
    """Whether an operator makes its own mask from lengths of texts, which start at their beginning."""
    return any((node.domain, node.op_type) == _ATTENTION for node in file.model.graph.node)
