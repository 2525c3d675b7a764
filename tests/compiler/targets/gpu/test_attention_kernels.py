"""Attention by the kernels of GPUs, on the host: against numpy in float64, whole and split, in any company."""

from __future__ import annotations

import ctypes
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.cpu.target import Target
from llmc.compiler.targets.gpu.attention_split import num_partitions, partial_floats, rows_together, segments_of
from llmc.compiler.targets.gpu.cuda import cuda_text
from llmc.compiler.targets.gpu.launch import launch_of
from llmc.compiler.targets.gpu.tensor_attention import tensor_attention

from support.cuda import host_library
from support.kernel_harness import Tolerance
from support.kv_pools import latent_row_pool, row_pool
from support.latent_attention import LatentCache
from support.paged_attention import (
    LENGTHS,
    NUMPY,
    Attends,
    Cache,
    attention_params,
    check_companies,
    merge_params,
    same_bits,
)

Array = NDArray[Any]
Chunks = list[tuple[int, int, int]]
SEGMENTS = num_partitions(max(LENGTHS)) + 1  # of the last one nobody has keys
_ALONE = cast(Target, type("Alone", (), {"row_tile": 1}))


class _Kernels:
    """The kernels of a case: of whole contexts, with one token a sequence and with runs; of split ones; the merge."""

    def __init__(self, op: str, params: dict[str, Any], merge: dict[str, Any]) -> None:
        def spec(name: str, given: dict[str, Any], segments: int, **more: bool) -> KernelSpec:
            return KernelSpec.of("attention", name, **given, segments=segments, **more)

        self.single, self.whole = spec(op, params, 0), spec(op, params, 0, runs=True)
        self.split = spec(op, params, SEGMENTS, runs=True)
        self.merge = spec("merge_attention", merge, SEGMENTS)
        self.library: ctypes.CDLL | None = None

    def texts(self) -> list[str]:
        return [cuda_text(spec) for spec in (self.single, self.whole, self.split, self.merge)]

    def call(self, spec: KernelSpec, buffers: list[Array], rows: int, stride: int, groups: int) -> None:
        scalars = np.array([rows, 1, rows, stride, 0, 0, 0, 0], np.int32)
        arguments: list[Any] = [ctypes.c_void_p(one.ctypes.data) for one in buffers]
        arguments += [ctypes.c_int32(0) for _ in buffers]
        arguments.append(ctypes.c_void_p(scalars.ctypes.data))
        pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(one) for one in arguments))
        getattr(self.library, f"run_{spec.symbol()}")(pointers, groups, launch_of(spec, tensor_cores=True).items)

    def attend(self, inputs: list[Array], ends: list[Array], sinks: list[Array], out: Array, floats: int, stride: int,
               groups: int, split: bool, runs: bool) -> Array:  # fmt: skip
        """inputs: of the first kernel. ends: what the merge knows of contexts. floats: of the partial results. runs:
        whether a sequence has several tokens."""
        rows = len(out)
        if not split:
            self.call(self.whole if runs else self.single, [*inputs, out], rows, stride, groups)
            return out
        partials = np.full(floats, np.nan, np.float32)
        self.call(self.split, [*inputs, partials, out], rows, stride, groups)
        self.call(self.merge, [*ends, partials, *sinks, out], rows, stride, groups)
        return out


class _Paged(Cache):
    kernels: _Kernels

    def attend(
        self, target: Target, params: dict[str, Any], chunks: Chunks, tile: int, tasks: int, segments: int = 0
    ) -> Array:
        rows, width = sum(end - start for _, start, end in chunks), self.heads * self.dim
        positions = np.concatenate([np.arange(a, e, dtype=np.int32) for _, a, e in chunks])
        token_seq = np.concatenate([np.full(e - a, i, np.int32) for i, (_, a, e) in enumerate(chunks)])
        ends = [self.contexts(chunks)] if "both_ways" in params else []
        keys = row_pool(self.k_pool.swapaxes(-1, -2), self.dim, self.kv)
        inputs = [
            np.concatenate([self.queries[s][a:e] for s, a, e in chunks]),
            np.stack([self.tables[s] for s, _, _ in chunks]),
            token_seq, positions, *ends, keys, row_pool(self.v_pool, self.dim, self.kv),
            *([self.slopes] if "bias" in params else []), *([self.sinks] if "sinks" in params else []),
        ]  # fmt: skip
        out = np.full((rows, width), np.nan, NUMPY[params["act_dtype"]])
        floats = rows * self.heads * SEGMENTS * partial_floats(self.dim)
        of_merge = [positions, *([token_seq, *ends] if ends else [])]
        sinks = [self.sinks] if "sinks" in params else []
        runs = rows > len(chunks)
        return self.kernels.attend(inputs, of_merge, sinks, out, floats, self.stride, tasks, segments > 0, runs)


class _Latent(LatentCache):
    kernels: _Kernels

    def attend(
        self, target: Target, params: dict[str, Any], chunks: Chunks, tile: int, tasks: int, segments: int = 0
    ) -> Array:
        rows = sum(end - start for _, start, end in chunks)
        positions = np.concatenate([np.arange(a, e, dtype=np.int32) for _, a, e in chunks])
        inputs = [
            np.concatenate([self.queries[s][a:e] for s, a, e in chunks]),
            np.concatenate([self.queries_rotated[s][a:e] for s, a, e in chunks]),
            np.stack([self.tables[s] for s, _, _ in chunks]),
            np.concatenate([np.full(e - a, i, np.int32) for i, (_, a, e) in enumerate(chunks)]),
            positions,
            latent_row_pool(self.pool, self.rank, self.kv),
        ]
        out = np.full((rows, self.heads * self.rank), np.nan, np.float32)
        floats = rows * self.heads * SEGMENTS * partial_floats(self.rank)
        runs = rows > len(chunks)
        return self.kernels.attend(inputs, [positions], [], out, floats, self.stride, tasks, segments > 0, runs)


_PAGED: dict[str, dict[str, Any]] = {
    "f32": attention_params(6, 2, 24, "f32", "f32", 16, 0),
    "bf16, a window, sinks": attention_params(8, 2, 80, "bf16", "bf16", 16, 150, sinks=True),
    "f16, chunks, a cap, a bias": attention_params(
        11, 1, 32, "f16", "f16", 48, 0, chunk=200, score_cap=20.0, bias="distance"
    ),
    "int8, chunks, a cap, a bias": attention_params(
        4, 4, 32, "f32", "int8", 48, 0, chunk=200, score_cap=20.0, bias="distance"
    ),
    "both ways": attention_params(5, 1, 16, "f16", "fp8_e4m3", 32, 40, both_ways=True),
}
_LATENT = {
    "latent": ("f16", 5, 64, 16),
    "latent, no tensor cores": ("bf16", 4, 72, 8),
    "latent, scales": ("int8", 4, 72, 8),
}
"""dtype of the KV cache, heads, and elements of the two parts of a key."""
_WIDE = {"heads": attention_params(5, 1, 512, "bf16", "bf16", 16, 0)}, {"latent": ("bf16", 18, 448, 16)}
"""Rows of a unit are of several tokens, and of more heads than one product has."""
_TOLERANCES: dict[str, Tolerance] = {
    "f32": {"rtol": 2e-5, "atol": 3e-6},
    "bf16": {"rtol": 2.0**-8, "atol": 1e-5},
    "f16": {"rtol": 2.0**-10, "atol": 1e-5},
}
# On tensor cores, queries and weights are rounded, too, and cancel.
_OF_TENSOR_CORES: dict[str, Tolerance] = {
    "bf16": {"rtol": 2.0**-6, "atol": 2.0**-6},
    "f16": {"rtol": 2.0**-9, "atol": 2.0**-9},
}


def _tolerance(spec: KernelSpec) -> Tolerance:
    p = spec.as_dict()
    if tensor_attention(spec) is not None:
        return _OF_TENSOR_CORES[str(p["kv_dtype"])]
    return _TOLERANCES[str(p.get("act_dtype", "f32"))]


Caches = dict[str, tuple[Any, dict[str, Any]]]


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Caches:
    return _caches(tmp_path_factory, _PAGED, _LATENT)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Caches:
    return _caches(tmp_path_factory, *_WIDE)


def _caches(
    tmp_path_factory: pytest.TempPathFactory,
    of_heads: dict[str, dict[str, Any]],
    latents: dict[str, tuple[str, int, int, int]],
) -> Caches:
    made: Caches = {}
    for name, params in of_heads.items():
        sizes = (params[key] for key in ("num_heads", "num_kv_heads", "head_dim", "block_size", "kv_dtype"))
        paged = _Paged(LENGTHS, *sizes)
        paged.kernels = _Kernels("paged_attention", params, merge_params(params))
        made[name] = paged, params
    for name, (kv, heads, rank, rotated) in latents.items():
        of_merge = {"num_heads": heads, "head_dim": rank, "window": 0, "act_dtype": "f32", "block_size": 16}
        latent = _Latent(LENGTHS, heads, rank, rotated, 16, kv)
        latent.kernels = _Kernels("latent_attention", latent.params(), of_merge)
        made[name] = latent, latent.params()
    texts = list(dict.fromkeys(text for cache, _ in made.values() for text in cache.kernels.texts()))
    library = ctypes.CDLL(str(host_library(texts, tmp_path_factory.mktemp("attention"))))
    for cache, _ in made.values():
        cache.kernels.library = library
    return made


@pytest.mark.slow
@pytest.mark.parametrize("name", [*_PAGED, *_LATENT])
def test_tokens_have_one_result_whole_and_split(name: str, caches: Caches) -> None:
    cache, params = caches[name]
    if "both_ways" not in params:
        check_companies(cast(Attends, cache), _ALONE, params, _tolerance(cache.kernels.single))
    # Tokens on both sides of the ends of partitions.
    _check_chunks(cache, params, [(0, 126, 130), (1, 30, 33), (0, 382, 386), (2, 0, 1), (0, 528, 530)], (1, 7, 400))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for cases in _WIDE for name in cases])
def test_wide_values_have_one_result_in_any_tiles(name: str, wide: Caches) -> None:
    cache, params = wide[name]
    chunks = [(0, 126, 130), (1, 32, 33), (0, 256, 258)]
    whole = _check_chunks(cache, params, chunks, (7,))
    behind = 0
    for sequence, first, end in chunks:
        behind += end - first
        last = cache.attend(_ALONE, params, [(sequence, end - 1, end)], 1, 2)
        assert same_bits(last, whole[behind - 1 : behind])


def _check_chunks(cache: Any, params: dict[str, Any], chunks: Chunks, groups: tuple[int, ...]) -> Array:
    whole: Array = cache.attend(_ALONE, params, chunks, 1, 3)
    for number in groups:
        assert same_bits(cache.attend(_ALONE, params, chunks, 1, number, SEGMENTS), whole)
    tokens = [(s, t) for s, a, e in chunks for t in range(a, e)]
    want = np.stack([cache.expected(s, t, params) for s, t in tokens])
    np.testing.assert_allclose(whole.astype(np.float64), want, **_tolerance(cache.kernels.single))
    return whole


def test_what_is_no_number_spoils_those_that_see_it(caches: Caches) -> None:
    """Keys and values, on tensor cores: also among rows of one product."""
    cache, params = caches["bf16, a window, sinks"]
    chunks: Chunks = [(0, 300, 304), (1, 30, 33), (0, 460, 464)]
    clean = cache.attend(_ALONE, params, chunks, 1, 2)
    at, within = cache.tables[0, 301 // 16], 301 % 16
    sees = np.array([False] + [True] * 3 + [False] * 7)
    for pool, bad in ((cache.k_pool.swapaxes(-1, -2), np.nan), (cache.v_pool[..., : cache.dim], np.inf)):
        saved = pool[at].copy()
        pool[at, :, within] = bad
        for segments in (0, SEGMENTS):
            got = cache.attend(_ALONE, params, chunks, 1, 5, segments)
            assert same_bits(got[~sees], clean[~sees])
            assert not np.isfinite(got[sees].astype(np.float32)).any()
        pool[at] = saved


@pytest.mark.parametrize(
    ("tokens", "longest", "most", "segments"),
    [
        (1, 256, 4096, 0),
        (1, 257, 4096, 4),
        (1, 513, 4096, 8),
        (1, 640, 700, 6),  # never more than the model's longest context has
        (64, 16384, 16384, 128),
        (64, 4096, 32768, 32),
        (64, 16385, 32768, 0),
        (65, 4096, 4096, 0),
    ],
)
def test_which_graphs_split(tokens: int, longest: int, most: int, segments: int) -> None:
    assert segments_of(tokens, longest, most) == segments


@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "rows"),
    [(32, 8, 128, 4), (64, 8, 128, 8), (6, 2, 64, 3), (71, 1, 64, 1), (28, 4, 128, 7), (16, 1, 512, 2), (8, 1, 256, 4)],
)
def test_heads_that_share_their_keys(heads: int, kv_heads: int, width: int, rows: int) -> None:
    assert rows_together(heads, kv_heads, width) == rows
    params = attention_params(heads, kv_heads, width, "f32", "f32", 16, 0)
    spec = KernelSpec.of("attention", "paged_attention", **params, segments=16)
    assert launch_of(spec).groups == heads // rows * 16


@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "rows", "tokens", "groups"),
    [
        (32, 8, 128, 4, 12, 8),
        (64, 8, 128, 8, 6, 8),
        (71, 1, 64, 8, 8, 9),  # the last group of a token has 7 heads
        (32, 32, 96, 1, 48, 32),
        (8, 1, 256, 8, 3, 1),
        (8, 1, 512, 8, 2, 1),
        (40, 2, 512, 10, 1, 4),  # as many heads as there are rows
    ],
)
def test_tiles_of_tensor_cores(heads: int, kv_heads: int, width: int, rows: int, tokens: int, groups: int) -> None:
    params = attention_params(heads, kv_heads, width, "bf16", "bf16", 16, 0)
    spec = KernelSpec.of("attention", "paged_attention", **params, segments=0, runs=True)
    found = tensor_attention(spec)
    assert found is not None
    assert (found.heads, found.tokens, found.units) == (rows, tokens, groups)
    alone = tensor_attention(KernelSpec.of("attention", "paged_attention", **params, segments=4))
    assert alone is not None
    assert alone.tokens == 1
    assert launch_of(spec, tensor_cores=True).items == 128


def test_attention_that_tensor_cores_do_not_take() -> None:
    plain: dict[str, Any] = attention_params(4, 2, 64, "bf16", "bf16", 16, 0)
    latent = {"num_heads": 4, "num_kv_heads": 1, "head_dim": 80, "rank": 64, "kv_dtype": "bf16", "block_size": 16}
    for op, params, more in (
        ("paged_attention", plain, {"act_dtype": "f32"}),
        ("paged_attention", plain, {"kv_dtype": "f32"}),
        ("paged_attention", plain, {"kv_dtype": "int8"}),
        ("paged_attention", plain, {"head_dim": 24}),
        ("paged_attention", plain, {"head_dim": 528}),
        ("paged_attention", plain, {"block_size": 24}),
        ("latent_attention", latent, {"rank": 48, "head_dim": 64}),
        ("latent_attention", latent, {"rank": 1024, "head_dim": 1088}),
        ("latent_attention", latent, {"head_dim": 72}),
    ):
        assert tensor_attention(KernelSpec.of("attention", op, **params, segments=0)) is not None
        spec = KernelSpec.of("attention", op, **{**params, **more}, segments=0)
        assert tensor_attention(spec) is None
        assert launch_of(spec, tensor_cores=True) == launch_of(spec)
