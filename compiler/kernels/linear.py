"""linear: y = x · wᵀ (+ bias) (+ residual). One chain of fma (or bf16 dot) per output element, k ascending.

Tiles of `row_tile` rows × one panel of columns stay in registers. K is walked in blocks: partial sums are stored in y
and picked up again, which keeps the chain, so a block of the panel stays in cache for all row tiles.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernels import builder as b
from llmc.compiler.kernels import vector_ir
from llmc.compiler.kernels.spec import KernelSpec
from llmc.compiler.targets.cpu import Target

_ROW_CHUNK = 256  # rows that share one pass over the panels
_K_BLOCK = 1024  # words of K in one pass
_PANEL_GROUP = 4  # panels whose partial sums stay in cache while K is walked
# bf16 rows widened on the stack: rows × words × 8 bytes = 256 KiB, a share of L2 and of a thread's stack.
_WIDE_ROWS, _WIDE_BLOCK, _WIDE_GROUP = 128, 256, 8


def buffers(spec: KernelSpec) -> tuple[str, ...]:
    p = spec.as_dict()
    return ("x", "w", *(["bias"] if p["bias"] else []), *(["residual"] if p["residual"] else []), "y")


def build(spec: KernelSpec, target: Target) -> tirx.PrimFunc:
    p = spec.as_dict()
    kdim, n, tile, act = int(p["k"]), int(p["n"]), int(p["row_tile"]), str(p["act_dtype"])
    if p["weight_dtype"] != act:
        raise b.KernelSpecError(f"linear: weight_dtype {p['weight_dtype']!r} must equal act_dtype {act!r}")
    lanes = b.lanes_of(act)
    words = b.ceil_div(kdim, lanes)
    columns = target.panel_columns
    panels, vectors = b.ceil_div(n, columns), columns // b.WIDTH
    dot = lanes == 2 and target.bf16_dot
    expand = lanes == 2 and not dot and tile > 1  # bf16 rows become float32 once for all panels
    block = words if tile == 1 else min(words, _WIDE_BLOCK if expand else _K_BLOCK)
    blocks = b.ceil_div(words, block)
    panel_group = _WIDE_GROUP if expand else _PANEL_GROUP
    chunk_tiles = max(1, (_WIDE_ROWS if expand else _ROW_CHUNK) // tile)

    specs = [(name, b.word_dtype(act) if name in ("x", "w") else "float32") for name in buffers(spec)]
    kernel = b.Kernel(spec.symbol(), specs, vector_ir.helpers(target.mcpu, bf16_dot=dot))
    with kernel as k:
        x, w, y = k["x"], k["w"], k["y"]
        rows = k.scalar(int(p["rows"]))
        tiles = T.truncdiv(rows + (tile - 1), tile)
        wide: b.Expr = T.alloc_buffer((chunk_tiles * block * 2 * tile,), "float32", scope="local") if expand else None

        def tile_body(
            t: b.Expr, t_local: b.Expr, panel: b.Expr, kb: b.Expr, length: b.Expr, ahead: b.Expr | None
        ) -> None:
            acc = b.Vectors(tile * vectors)
            span = [panel * columns + v * b.WIDTH for v in range(vectors)]
            whole = n % columns == 0
            count = [b.WIDTH if whole else n - s for s in span]

            def each_row(body: Callable[[int], None]) -> None:
                for r in range(tile):
                    if tile == 1:
                        body(r)
                    else:
                        with b.when(t * tile + r < rows):
                            body(r)

            for i in range(tile * vectors):
                acc[i] = b.splat(0.0)
            if blocks > 1:

                def reload(r: int) -> None:
                    for v in range(vectors):
                        acc[r * vectors + v] = b.load_vector(y, (t * tile + r) * n + span[v], count[v])

                with b.when(kb > 0):
                    each_row(reload)
            with T.serial(length) as q:
                word = q + kb * block
                if ahead is not None:  # the tiles of a chunk together fetch the panel block that comes next
                    line = T.truncdiv((t_local * length + q) * columns, chunk_tiles)
                    b.do("prefetch", b.at(w, ahead * columns + line))
                wv = [w[T.ramp((panel * words + word) * columns + v * b.WIDTH, 1, b.WIDTH)] for v in range(vectors)]
                xi = [(t * words + word) * tile + r for r in range(tile)]
                if lanes == 1 or dot:
                    helper = "dot_bf16" if dot else "fma"
                    for r in range(tile):
                        for v in range(vectors):
                            i = r * vectors + v
                            value = b.splat(x[xi[r]])
                            args = (acc[i], value, wv[v]) if dot else (value, wv[v], acc[i])
                            acc[i] = b.call(helper, *args)
                else:
                    for half, part in enumerate(("bf16_low", "bf16_high")):
                        parts = b.Vectors(vectors)
                        for v in range(vectors):
                            parts[v] = b.call(part, wv[v])
                        for r in range(tile):
                            if expand:
                                value = b.splat(wide[((t_local * 2 + half) * block + q) * tile + r])
                            else:
                                value = b.call(part, b.splat(x[xi[r]]))
                            for v in range(vectors):
                                i = r * vectors + v
                                acc[i] = b.call("fma", value, parts[v], acc[i])

            def add_rest(r: int) -> None:
                for v in range(vectors):
                    i, at = r * vectors + v, (t * tile + r) * n + span[v]
                    if p["bias"]:
                        acc[i] = b.call("add", acc[i], b.load_vector(k["bias"], span[v], count[v]))
                    if p["residual"]:
                        acc[i] = b.call("add", acc[i], b.load_vector(k["residual"], at, count[v]))

            def keep(r: int) -> None:
                for v in range(vectors):
                    b.store_vector(y, acc[r * vectors + v], (t * tile + r) * n + span[v], count[v])

            if p["bias"] or p["residual"]:
                if blocks == 1:
                    each_row(add_rest)
                else:
                    with b.when(kb == blocks - 1):
                        each_row(add_rest)
            each_row(keep)

        def widen(t: b.Expr, start: b.Expr, length: b.Expr) -> None:
            """Row tile t of the chunk, words [start, start + length): first all low halves, then all high ones."""
            low, high = t * 2 * block * tile, (t * 2 + 1) * block * tile
            vectors_here = b.let(T.truncdiv(length * tile, b.WIDTH))
            with T.serial(vectors_here) as i:
                words_read = x[T.ramp(start + i * b.WIDTH, 1, b.WIDTH)]
                b.store(wide, b.call("bf16_low", words_read), T.ramp(low + i * b.WIDTH, 1, b.WIDTH))
                b.store(wide, b.call("bf16_high", words_read), T.ramp(high + i * b.WIDTH, 1, b.WIDTH))
            with T.serial(vectors_here * b.WIDTH, length * tile) as i:
                value = x[start + i]
                b.store(wide, T.reinterpret("float32", T.shift_left(value, 16)), low + i)
                b.store(wide, T.reinterpret("float32", T.bitwise_and(value, T.int32(-65536))), high + i)

        if tile == 1:
            with k.share(panels) as panel, T.serial(rows) as t:
                tile_body(t, 0, panel, 0, words, None)
        else:
            chunks = T.truncdiv(tiles + (chunk_tiles - 1), chunk_tiles)
            units = chunks * panels
            unit0, unit1 = k.share_bounds(units)
            chunk0, chunk1 = b.let(T.truncdiv(unit0, panels)), b.let(T.truncdiv(unit1 + (panels - 1), panels))
            with T.serial(chunk0, chunk1) as chunk:
                panel0 = b.let(T.max(unit0 - chunk * panels, 0))
                panel1 = b.let(T.min(unit1 - chunk * panels, panels))
                tile0 = b.let(chunk * chunk_tiles)
                here = b.let(T.min(tiles - tile0, chunk_tiles))
                with T.serial(T.truncdiv(panel1 - panel0 + (panel_group - 1), panel_group)) as group:
                    first = b.let(panel0 + group * panel_group)
                    end = b.let(T.min(first + panel_group, panel1))
                    with T.serial(blocks) as kb:
                        length = b.let(T.min(words - kb * block, block))
                        if expand:
                            with T.serial(here) as t:
                                widen(t, b.let(((tile0 + t) * words + kb * block) * tile), length)
                        with T.serial(first, end) as panel:
                            last = T.Cast("int32", panel + 1 == end)
                            ahead = b.let((panel + 1 - last * (end - first)) * words + (kb + last) * block)
                            with T.serial(here) as t:
                                tile_body(tile0 + t, t, panel, kb, length, ahead)
    return kernel.function()
