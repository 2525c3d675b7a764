"""Stores to the KV cache. The words of a key are strided; the elements of a value are at one position of consecutive
words.

A word holds one or more elements, rounded by llmc_round_`dtype`.
"""

from __future__ import annotations

from collections.abc import Iterable

from llmc.compiler.targets.cpu.kernels.ir.text import F32, block, constant, define
from llmc.kv_dtypes import KV_DTYPES


def _elements(dtype: str) -> tuple[list[str], str]:
    """IR lines that compute %h, the bits of 16 elements, from %v; and the type of one element."""
    kind = f"i{8 * KV_DTYPES[dtype].item_bytes}"
    if dtype == "f32":
        return [f"%h = bitcast {F32} %v to <16 x i32>"], kind
    return [f"%h = call <16 x {kind}> @llmc_round_{dtype}({F32} %v)"], kind


def scatter_name(dtype: str, stride: int, count: int, first: int = 0) -> str:
    """Name of the helper that stores `count` elements of a row, words `stride` words apart.

    first: position of the first element in its word.
    """
    return f"scatter_{dtype}_{stride}_{count}_{first}"


def _scatter(dtype: str, stride: int, count: int, first: int) -> str:
    """Stores whole words where all elements of a word are present."""
    lines, kind = _elements(dtype)
    size, lanes = KV_DTYPES[dtype].item_bytes, KV_DTYPES[dtype].per_word
    lines.append(f"%w = bitcast <16 x {kind}> %h to <{16 // lanes} x i32>")
    lane = 0
    while lane < count:
        word, place = divmod(lane + first, lanes)
        whole = first == 0 and lane % lanes == 0 and lane + lanes <= count
        source, index = (f"<{16 // lanes} x i32> %w", lane // lanes) if whole else (f"<16 x {kind}> %h", lane)
        lines.append(f"%e{lane} = extractelement {source}, i32 {index}")
        lines.append(f"%a{lane} = getelementptr i8, ptr %p, i64 {word * stride * 4 + place * size}")
        lines.append(f"store {'i32' if whole else kind} %e{lane}, ptr %a{lane}, align {4 if whole else size}")
        lane += lanes if whole else 1
    return define("i32", scatter_name(dtype, stride, count, first), f"{F32} %v, ptr %p", block([*lines, "ret i32 0"]))


def spread_name(dtype: str, count: int) -> str:
    """Name of the helper that stores `count` elements at one position of consecutive words: (values, first word,
    position)."""
    return f"spread_{dtype}_{count}"


def _spread(dtype: str, count: int) -> str:
    """Leaves the other positions untouched: another thread may be writing them."""
    lines, kind = _elements(dtype)
    lanes, size = KV_DTYPES[dtype].per_word, KV_DTYPES[dtype].item_bytes
    total = 16 * lanes
    vector, mask_type = f"<{total} x {kind}>", f"<{total} x i1>"
    order = constant(lane // lanes if lane % lanes == 0 else "undef" for lane in range(total))
    mask = constant(("true" if lane % lanes == 0 and lane // lanes < count else "false" for lane in range(total)), "i1")
    lines += [
        f"%w = shufflevector <16 x {kind}> %h, <16 x {kind}> undef, <{total} x i32> {order}",
        f"%a = getelementptr {kind}, ptr %p, i32 %place",
        f"call void @llvm.masked.store.v{total}{kind}.p0({vector} %w, ptr %a, i32 {size}, {mask_type} {mask})",
        "ret i32 0",
    ]
    return define("i32", spread_name(dtype, count), f"{F32} %v, ptr %p, i32 %place", block(lines))


def stores(dtype: str, scatters: Iterable[tuple[int, int, int]], spreads: Iterable[int]) -> str:
    """The IR text of the helpers named by `scatter_name` and `spread_name` with these arguments after the dtype."""
    parts = [*(_scatter(dtype, *s) for s in sorted(set(scatters))), *(_spread(dtype, s) for s in sorted(set(spreads)))]
    return "".join(parts)
