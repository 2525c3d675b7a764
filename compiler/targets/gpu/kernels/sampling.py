"""Sampling: logits to tokens, with the same operations in the same order as `runtime/native/sampling`: equal bits.

A job reads a row, or the row's modified copy. Jobs are sorted by kind: best token, draw from all, draw from the top
(`sampling_top.py`), logprobs. A group leaves to the host what it cannot do. Where the host uses float64, so do these
kernels, in the same chains.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.gpu.kernels.exponential import exp_negative
from llmc.compiler.targets.gpu.kernels.groups import Shared, calling, sync
from llmc.compiler.targets.gpu.kernels.sampling_jobs import (
    BAD,
    CHAINS,
    COUNT,
    FIRST,
    FOUND,
    HOST,
    JOB,
    MASK,
    MASK_WORDS,
    MAX,
    MIN_P,
    NONE,
    OF_DRAWS,
    OF_EDITS,
    OF_TOPS,
    OWN,
    PARTIAL,
    RESULT,
    ROW,
    SCALE,
    STATUS,
    Best,
    Job,
    Row,
    Sum,
    Sums,
    bits_of,
    float_word,
    in_order,
    is_finite,
    minus_infinity,
    pieces_of,
)
from llmc.compiler.targets.gpu.launch import ITEMS
from llmc.compiler.targets.gpu.sampling import PIECE, SPAN
from llmc.compiler.targets.reference.kernels.frame import NUM_TOKENS, Cell, Frame, let, when


def sample_mask(spec: KernelSpec) -> tirx.PrimFunc:
    """Copies rows to be edited, and removes tokens that their masks forbid."""
    vocab = int(spec.as_dict()["vocab"])
    buffers = {"jobs": "i32", "masks": "i32", "logits": "f32", "copies": "f32", "partials": "i32"}
    with Frame(spec.symbol(), buffers) as k:
        of, fold, item = Job(k, vocab), Sum(k), calling(k).item
        with pieces_of(k, of, T.int32(0)) as (job, piece):
            own, row = of.word(job, OWN), let(of.word(job, ROW) * vocab)
            mask, words = of.word(job, MASK), of.word(job, MASK_WORDS)
            first, bad = let(piece * PIECE), Cell(T.int32(0), "int32")
            count = let(T.min(vocab - first, PIECE) * T.Cast("int32", own > 0))
            with T.serial(let(T.truncdiv(count - item + (ITEMS - 1), ITEMS))) as turn:
                i = let(first + turn * ITEMS + item)
                x, allowed = let(k.raw("logits", row + i), "float32"), Cell(T.int32(1), "int32")
                bad.set(T.Select(is_finite(x), bad.get(), T.int32(1)))
                with when(mask >= 0):
                    word = let(T.truncdiv(i, 32))
                    allowed.set(T.int32(0))
                    with when(word < words):
                        shifted = T.shift_right(k.raw("masks", mask + word), T.truncmod(i, 32))
                        allowed.set(T.bitwise_and(shifted, T.int32(1)))
                k.put_raw("copies", T.Select(allowed.get() == 1, x, minus_infinity()), let((own - 1) * vocab + i))
            found = fold(item, bad.get())
            with when(T.And(item == 0, own > 0)):
                k.put_raw("partials", found, let((job * of.pieces + piece) * PARTIAL + BAD))
    return k.function()


def sample_edit(spec: KernelSpec) -> tirx.PrimFunc:
    """Applies bias, early-stop bans and penalties; one item makes all changes to a logit, in order."""
    vocab = int(spec.as_dict()["vocab"])
    with (
        Frame(spec.symbol(), {"edits": "i32", "changes": "i32", "copies": "f32"}) as k,
        k.share(k.scalar(OF_EDITS)) as edit,
    ):
        copy, token, begin, count = (let(k.raw("edits", edit * 4 + word)) for word in range(4))
        at = let(copy * vocab + token)
        x = Cell(k.raw("copies", at))
        with T.serial(count) as i:
            kind, by = let(k.raw("changes", (begin + i) * 2)), float_word(k, "changes", let((begin + i) * 2 + 1))
            now = let(x.get(), "float32")
            with when(kind == 0):
                x.set(now + by)
            with when(kind == 1):
                x.set(minus_infinity())
            with when(T.And(kind == 2, now > T.float32(0.0))):
                x.set(now / by)
            with when(T.And(kind == 2, T.Not(now > T.float32(0.0)))):
                x.set(now * by)
            with when(kind == 3):
                x.set(now - by)
        k.put_raw("copies", x.get(), at)
    return k.function()


def sample_scan(spec: KernelSpec) -> tirx.PrimFunc:
    """Per piece: the largest logit, and whether all are finite. Per block: the largest logit."""
    vocab = int(spec.as_dict()["vocab"])
    buffers = {"jobs": "i32", "logits": "f32", "copies": "f32", "partials": "i32", "maxima": "i32"}
    with Frame(spec.symbol(), buffers) as k:
        of, best, item = Job(k, vocab), Best(k), calling(k).item
        with pieces_of(k, of, T.int32(0)) as (job, piece):
            row, own, first = Row(k, vocab, job), of.word(job, OWN), let(piece * PIECE)
            value, place, bad = Cell(minus_infinity()), Cell(T.int32(NONE), "int32"), Cell(T.int32(0), "int32")
            count = let(T.min(vocab - first, PIECE))
            with T.serial(let(T.truncdiv(count - item + (ITEMS - 1), ITEMS))) as turn:
                i = let(first + turn * ITEMS + item)
                x = row[i]
                bad.set(T.Select(is_finite(x), bad.get(), T.int32(1)))
                with when(x > value.get()):
                    value.set(x)
                    place.set(i)
            largest, at, found = best(item, value.get(), place.get(), bad.get())
            to = let((job * of.pieces + piece) * PARTIAL)
            with when(item == 0):
                k.put_raw("partials", bits_of(largest), to + MAX)
                k.put_raw("partials", at, to + FIRST)
                with when(own == 0):
                    k.put_raw("partials", found, to + BAD)
            wanted = T.Cast("int32", T.And(job >= k.scalar(OF_TOPS), of.word(job, COUNT) > 0))
            blocks = let(T.truncdiv(count + (of.block - 1), of.block) * wanted)
            with T.serial(let(T.truncdiv(blocks - item + (ITEMS - 1), ITEMS))) as turn:
                block = let(turn * ITEMS + item)
                high, begin = Cell(T.int32(-(1 << 31)), "int32"), let(block * of.block)
                with T.serial(let(T.min(of.block, count - begin))) as i:
                    high.set(T.max(high.get(), in_order(row[let(first + begin + i)])))
                k.put_raw("maxima", high.get(), let(job * of.blocks + piece * (PIECE // of.block) + block))
    return k.function()


def sample_sum(spec: KernelSpec) -> tirx.PrimFunc:
    """Sums of exponentials per span, as in SumRow."""
    vocab = int(spec.as_dict()["vocab"])
    buffers = {"jobs": "i32", "logits": "f32", "copies": "f32", "partials": "i32", "sums": "f64"}
    with Frame(spec.symbol(), buffers) as k:
        of, best, item = Job(k, vocab), Best(k), calling(k).item
        chains = Shared(ITEMS, "float64")
        with pieces_of(k, of, k.scalar(OF_DRAWS)) as (job, piece):
            row, (largest, _, _) = Row(k, vocab, job), of.best(job, best)
            scale, least = (float_word(k, "jobs", job * JOB + word) for word in (SCALE, MIN_P))
            span = let(piece * (PIECE // SPAN) + T.truncdiv(item, CHAINS))
            first = let(span * SPAN + T.truncmod(item, CHAINS))
            total = Cell(T.float64(0.0), "float64")
            with T.serial(SPAN // CHAINS) as turn:
                i = let(first + turn * CHAINS)
                with when(i < vocab):
                    weight = exp_negative(let((row[i] - largest) * scale, "float32"))
                    with when(weight >= least):
                        total.set(total.get() + T.Cast("float64", weight))
            sync()
            chains[item] = total.get()
            sync()
            with when(T.And(T.truncmod(item, CHAINS) == 0, span < of.spans)):
                whole = Cell(T.float64(0.0), "float64")
                with T.serial(CHAINS) as chain:
                    whole.set(whole.get() + chains[item + chain])
                k.put_raw("sums", whole.get(), let(job * of.spans + span))
            sync()
    return k.function()


def sample_best(spec: KernelSpec) -> tirx.PrimFunc:
    """Picks the tokens of greedy jobs."""
    vocab = int(spec.as_dict()["vocab"])
    with Frame(spec.symbol(), {"jobs": "i32", "partials": "i32", "results": "i32"}) as k:
        of, best, item = Job(k, vocab), Best(k), calling(k).item
        with calling(k).share_groups(k.scalar(OF_DRAWS)) as job:
            largest, first, bad = of.best(job, best)
            with when(item == 0):
                fine = T.And(bad == 0, is_finite(largest))
                k.put_raw("results", T.Select(fine, T.int32(0), T.int32(HOST)), let(job * RESULT + STATUS))
                k.put_raw("results", first, let(job * RESULT + FOUND))
    return k.function()


def sample_draw(spec: KernelSpec) -> tirx.PrimFunc:
    """Draws tokens from whole rows."""
    vocab = int(spec.as_dict()["vocab"])
    buffers = {"jobs": "i32", "numbers": "f64", "logits": "f32", "copies": "f32", "partials": "i32", "sums": "f64",
               "results": "i32"}  # fmt: skip
    with Frame(spec.symbol(), buffers) as k:
        of, best, item = Job(k, vocab), Best(k), calling(k).item
        sums, weights = Sums(k, of), Shared(SPAN)
        chosen, start = Shared(1, "int32"), Shared(2, "float64")
        first, end = k.scalar(OF_DRAWS), k.scalar(OF_TOPS)
        with calling(k).share_groups(let(end - first)) as unit:
            job = let(first + unit)
            row, (largest, _, bad) = Row(k, vocab, job), of.best(job, best)
            scale = float_word(k, "jobs", job * JOB + SCALE)
            sums.load(job)
            with when(item == 0):
                target = let(k.raw("numbers", job * 2) * sums.total(), "float64")
                before, span = Cell(T.float64(0.0), "float64"), Cell(T.int32(0), "int32")
                going = Cell(T.int32(1), "int32")
                with T.While(going.get() == 1):
                    behind = let(before.get() + sums[span.get()], "float64")
                    with T.If(T.And(span.get() < of.spans - 1, behind <= target)):
                        with T.Then():
                            before.set(behind)
                            span.set(span.get() + 1)
                        with T.Else():
                            going.set(T.int32(0))
                chosen[0] = span.get()
                start[0], start[1] = before.get(), target
            sync()
            base = let(chosen[0] * SPAN)
            count = let(T.min(vocab - base, SPAN))
            with T.serial(let(T.truncdiv(count - item + (ITEMS - 1), ITEMS))) as turn:
                i = let(turn * ITEMS + item)
                weights[i] = exp_negative(let((row[let(base + i)] - largest) * scale, "float32"))
            sync()
            with when(item == 0):
                inside, i, token = Cell(start[0], "float64"), Cell(T.int32(0), "int32"), Cell(T.int32(-1), "int32")
                with T.While(T.And(token.get() < 0, i.get() < count)):
                    weight = let(weights[i.get()], "float32")
                    inside.set(inside.get() + T.Cast("float64", weight))
                    with when(T.And(weight > T.float32(0.0), inside.get() > start[1])):
                        token.set(base + i.get())
                    i.set(i.get() + 1)
                # Rounding may have moved the target past this span: the host continues.
                fine = T.And(T.And(bad == 0, is_finite(largest)), token.get() >= 0)
                k.put_raw("results", T.Select(fine, T.int32(0), T.int32(HOST)), let(job * RESULT + STATUS))
                k.put_raw("results", token.get(), let(job * RESULT + FOUND))
    return k.function()


def sample_feed(spec: KernelSpec) -> tirx.PrimFunc:
    """Gives drawn tokens to the step that runs next: among its input ids −1 − j stands for the token of job j."""
    vocab = int(spec.as_dict()["vocab"])
    with (
        Frame(spec.symbol(), {"results": "i32", "input_ids": "i32"}) as k,
        k.share(k.scalar(NUM_TOKENS)) as row,
    ):
        job = let(-1 - k.raw("input_ids", row))
        with when(job >= 0):
            token = let(k.raw("results", job * RESULT + FOUND))
            # What is left to the host may be no token; the step then runs in vain, but must not read astray.
            known = T.And(token >= 0, token < vocab)
            k.put_raw("input_ids", T.Select(known, token, T.int32(0)), row)
    return k.function()
