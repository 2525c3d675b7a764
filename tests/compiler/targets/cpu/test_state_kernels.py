"""The kernels of layers with a state against numpy in float64, and the bits of a sequence in every division into
steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.cpu.target import Target

from support.kernel_harness import run, targets_here
from support.marks import on_levels, rare
from support.paged_attention import random, same_bits

pytestmark = pytest.mark.native

Array = NDArray[Any]
Step = list[tuple[int, int, int]]
on_cpus = on_levels(targets_here("x86-64-v4", "x86-64-v3"))

BLOCK = 8
LENGTHS = [21, 1, 34, 9]
TOGETHER: Step = [(s, 0, length) for s, length in enumerate(LENGTHS)]
ALONE: list[Step] = [[chunk] for chunk in TOGETHER]
SINGLE: list[Step] = [[(s, t, t + 1) for s, length in enumerate(LENGTHS) if t < length] for t in range(max(LENGTHS))]
# Chunks that begin and end within blocks, at their last token, and at their ends.
CHUNKS: list[Step] = [
    [(2, 0, 7), (0, 0, 5)],
    [(0, 5, 6), (1, 0, 1), (2, 7, 25)],
    [(3, 0, 2), (2, 25, 26), (0, 6, 16)],
    [(2, 26, 34), (0, 16, 21), (3, 2, 9)],
]
TABLES = 2 + max(-(-length // BLOCK) for length in LENGTHS)  # wider than any sequence needs


class Layer:
    """Sequences of a layer with a state. rows: inputs of all tokens by name, each [sequence][token, width].

    state: elements of the state in a block. pool: the name of its buffer.
    """

    def __init__(self, spec: KernelSpec, rows: dict[str, list[Array]], width: int, state: int, pool: str) -> None:
        self.spec, self.rows, self.width, self.state, self.pool = spec, rows, width, state, pool
        needed = [-(-length // BLOCK) for length in LENGTHS]
        order = np.random.default_rng(3).permutation(np.arange(1, sum(needed) + 1)).astype(np.int32)
        self.tables = np.zeros((len(LENGTHS), TABLES), np.int32)  # block 0 is the dummy block
        for s, count in enumerate(needed):
            self.tables[s, :count] = order[sum(needed[:s]) : sum(needed[:s]) + count]
        self.blocks = sum(needed) + 2

    def pass_steps(self, target: Target, steps: list[Step], tasks: int, given: dict[str, Array]) -> tuple[Array, Array]:
        """Outputs of all tokens, one sequence behind the other, and the pool behind the last step."""
        pool = np.full((self.blocks, self.state), np.nan, np.float32)
        found = [np.full((length, self.width), np.nan, np.float32) for length in LENGTHS]
        for step in steps:
            before, touched = pool, set()
            ends = np.cumsum([0] + [end - start for _, start, end in step]).astype(np.int32)
            room = np.full((3, self.width), np.nan, np.float32)
            arrays = {
                "block_tables": self.tables[[s for s, _, _ in step]],
                "query_start": ends,
                "token_seq": np.repeat(np.arange(len(step), dtype=np.int32), np.diff(ends)),
                "positions": np.concatenate([np.arange(start, end, dtype=np.int32) for _, start, end in step]),
                self.pool: pool,
                "out": np.concatenate([np.full((ends[-1], self.width), np.nan, np.float32), room]),
                **given,
            }
            for name, of in self.rows.items():
                rows = [of[s][start:end] for s, start, end in step]
                arrays[name] = np.concatenate([*rows, np.full((3, rows[0].shape[1]), np.nan, np.float32)])
            scalars = {0: int(ends[-1]), 1: len(step), 3: TABLES, 4: self.blocks}
            made = run(self.spec, target, arrays, written=(self.pool, "out"), scalars=scalars, num_tasks=tasks)
            pool = made[self.pool]
            assert same_bits(made["out"][ends[-1] :], room)
            for i, (s, start, end) in enumerate(step):
                found[s][start:end] = made["out"][ends[i] : ends[i + 1]]
                touched |= {int(self.tables[s, t // BLOCK]) for t in range(start, end)}
            rest = [n for n in range(self.blocks) if n not in touched]
            assert same_bits(pool[rest], before[rest])
        return np.concatenate(found), pool

    def check(
        self, target: Target, outputs: list[Array], states: list[Array], tolerance: float, **given: Array
    ) -> None:
        """outputs: by sequence. states: behind each token."""
        out, pool = self.pass_steps(target, [TOGETHER], 3, given)
        np.testing.assert_allclose(out, np.concatenate(outputs), rtol=tolerance, atol=tolerance)
        for s, length in enumerate(LENGTHS):
            for n in range(-(-length // BLOCK)):
                behind = states[s][min(n * BLOCK + BLOCK, length) - 1].reshape(-1)
                np.testing.assert_allclose(pool[self.tables[s, n]], behind, rtol=tolerance, atol=tolerance)
        for steps, tasks in (([TOGETHER], 1), ([TOGETHER], 7), (ALONE, 2), (CHUNKS, 3), (SINGLE, 1), (SINGLE, 7)):
            again, left = self.pass_steps(target, steps, tasks, given)
            assert same_bits(again, out), (steps, tasks)
            assert same_bits(left, pool), (steps, tasks)


def options(bias: bool, activation: str) -> dict[str, Any]:
    """Parameters of a convolution, which lack what gated delta nets have."""
    return {**({"bias": True} if bias else {}), **({} if activation == "silu" else {"activation": activation})}


@on_cpus
@pytest.mark.parametrize(
    ("channels", "stride", "taps", "bias", "activation"),
    [
        (300, 310, 4, False, "silu"),
        (8, 8, 3, False, "silu"),
        (512, 530, 2, False, "silu"),
        (273, 280, 6, False, "silu"),
        (300, 310, 4, True, "silu"),
        (273, 273, 3, False, "none"),
        (40, 50, 3, True, "none"),
        rare(16, 17, 1, False, "silu"),
        rare(16, 17, 1, True, "none"),
    ],
)
def test_short_conv(target: Target, channels: int, stride: int, taps: int, bias: bool, activation: str) -> None:
    x = [random(length, stride, seed=s) * 2 for s, length in enumerate(LENGTHS)]
    weight = random(taps, channels, seed=9)
    offsets = random(1, channels, seed=10)[0] * bias
    outputs, states = [], []
    for of in x:
        of[:, channels:] = np.nan
        inputs = np.concatenate([np.zeros((taps - 1, channels)), of[:, :channels].astype(np.float64)])
        total = sum(inputs[tap : tap + len(of)] * weight[tap] for tap in range(taps)) + offsets
        outputs.append(total / (1 + np.exp(-total)) if activation == "silu" else total)
        states.append(np.stack([inputs[t + 1 : t + taps] for t in range(len(of))]))
    sizes = {"channels": channels, "stride": stride, "taps": taps, "block_size": BLOCK}
    spec = KernelSpec.of("other", "short_conv", **sizes, **options(bias, activation))
    given = {"weight": weight.reshape(-1), **({"bias": offsets} if bias else {})}
    layer = Layer(spec, {"x": x}, channels, (taps - 1) * channels, "v_pool")
    layer.check(target, outputs, states, 3e-6, **given)


@on_cpus
@pytest.mark.parametrize(
    ("heads", "key_heads", "key_dim", "value_dim", "tiled"),
    [
        (4, 2, 8, 8, True),
        (2, 1, 24, 40, False),
        (3, 3, 13, 37, False),
        (6, 2, 128, 128, False),
        (2, 2, 3, 16, False),
        rare(2, 1, 40, 65, False),
    ],
)
def test_delta_rule(target: Target, heads: int, key_heads: int, key_dim: int, value_dim: int, tiled: bool) -> None:
    size = key_heads * key_dim
    rng = np.random.default_rng(5)
    qkv = [random(length, 2 * size + heads * value_dim, seed=s) for s, length in enumerate(LENGTHS)]
    gates = [rng.uniform(0.05, 1.0, (length, 2 * heads)).astype(np.float32) for length in LENGTHS]
    gates[0][6, heads:], gates[2][3, :heads] = 0.0, 0.0
    qkv[2][4, : 2 * size] = 0.0
    outputs, states = [], []
    for rows, of_rows in zip(qkv, gates, strict=True):
        state, found, behind = np.zeros((heads, key_dim, value_dim)), [], []
        for row, gate in zip(rows.astype(np.float64), of_rows.astype(np.float64), strict=True):
            q, k = row[: 2 * size].reshape(2, key_heads, key_dim)
            q, k = (one / np.sqrt((one**2).sum(-1, keepdims=True) + 1e-6) for one in (q, k))
            of_heads = np.arange(heads) % key_heads if tiled else np.arange(heads) // (heads // key_heads)
            q, k = (one[of_heads] for one in (q * key_dim**-0.5, k))
            state = state * gate[heads:, None, None]
            told = np.einsum("hkv,hk->hv", state, k)
            change = (row[2 * size :].reshape(heads, value_dim) - told) * gate[:heads, None]
            state = state + k[:, :, None] * change[:, None]
            found.append(np.einsum("hkv,hk->hv", state, q).reshape(-1))
            behind.append(state)
        outputs.append(np.stack(found))
        states.append(np.stack(behind))
    sizes = {"heads": heads, "key_heads": key_heads, "key_dim": key_dim, "value_dim": value_dim, "tiled": tiled}
    spec = KernelSpec.of("attention", "delta_rule", **sizes, block_size=BLOCK)
    layer = Layer(spec, {"qkv": qkv, "gates": gates}, heads * value_dim, heads * key_dim * value_dim, "k_pool")
    layer.check(target, outputs, states, 3e-6)


@on_cpus
@pytest.mark.parametrize(
    ("heads", "head_dim", "groups", "state_size"),
    [(4, 16, 2, 16), (6, 24, 2, 40), (3, 37, 1, 13), (4, 64, 4, 128), (2, 3, 2, 3), rare(4, 65, 1, 256)],
)
def test_selective_state(target: Target, heads: int, head_dim: int, groups: int, state_size: int) -> None:
    size, of_groups = heads * head_dim, groups * state_size
    rng = np.random.default_rng(5)
    xbc = [random(length, size + 2 * of_groups, seed=s) for s, length in enumerate(LENGTHS)]
    steps = [rng.uniform(0.05, 1.0, (length, 2 * heads)).astype(np.float32) for length in LENGTHS]
    steps[0][6, heads:], steps[2][3, :heads] = 0.0, 0.0
    skip = random(1, heads, seed=9)[0]
    outputs, states = [], []
    for rows, of_rows in zip(xbc, steps, strict=True):
        state, found, behind = np.zeros((heads, head_dim, state_size)), [], []
        for row, gates in zip(rows.astype(np.float64), of_rows.astype(np.float64), strict=True):
            x = row[:size].reshape(heads, head_dim)
            b, c = row[size:].reshape(2, groups, state_size).repeat(heads // groups, axis=1)
            added = (x * gates[:heads, None])[:, :, None] * b[:, None]
            state = state * gates[heads:, None, None] + added
            found.append((np.einsum("hpn,hn->hp", state, c) + x * skip[:, None]).reshape(-1))
            behind.append(state)
        outputs.append(np.stack(found))
        states.append(np.stack(behind))
    sizes = {"heads": heads, "head_dim": head_dim, "groups": groups, "state_size": state_size}
    spec = KernelSpec.of("attention", "selective_state", **sizes, block_size=BLOCK)
    layer = Layer(spec, {"xbc": xbc, "steps": steps}, size, size * state_size, "k_pool")
    layer.check(target, outputs, states, 1e-5, skip=skip)
