"""Layers with states of heads for tests: their inputs, numpy's results in float64, and sequences in every division
into steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.kernel_spec import KernelSpec, Param

from support.paged_attention import random, same_bits

Array = NDArray[Any]
Step = list[tuple[int, int, int]]
Call = Callable[[dict[str, Array], Mapping[int, int], int], dict[str, Array]]
"""Runs a kernel: operands by name, scalars by index, how many tasks or groups share it. Gives the pool and `out`."""

LENGTHS = [21, 1, 34, 9]
TOGETHER: Step = [(s, 0, length) for s, length in enumerate(LENGTHS)]
ALONE: list[Step] = [[chunk] for chunk in TOGETHER]
SINGLE: list[Step] = [[(s, t, t + 1) for s, length in enumerate(LENGTHS) if t < length] for t in range(max(LENGTHS))]
CHUNKS: list[Step] = [
    [(2, 0, 7), (0, 0, 5)],
    [(0, 5, 6), (1, 0, 1), (2, 7, 25)],
    [(3, 0, 2), (2, 25, 26), (0, 6, 16)],
    [(2, 26, 34), (0, 16, 21), (3, 2, 9)],
]
KEPT = ((16, 1, 25, 10), (1, 0, 30, 9), (21, 1, 34, 8))
"""Of each sequence, the number of tokens behind which its state is kept: within chunks, at their ends, in steps before
or behind others; 0, or more than it has: not at all."""
DUMMY = 0
SLOTS = np.random.default_rng(3).permutation(np.arange(1, 2 * len(LENGTHS) + 1)).astype(np.int32)
"""Of each sequence, then where each keeps another state. The last slot of a pool is nobody's."""


class Layer:
    """Sequences of a layer with a state. rows: inputs of all tokens by name, each [sequence][token, width].

    state: elements of the state in a slot. pool: the name of its buffer.
    """

    def __init__(self, rows: dict[str, list[Array]], width: int, state: int, pool: str) -> None:
        self.rows, self.width, self.state, self.pool = rows, width, state, pool

    def new_pool(self) -> Array:
        return np.full((len(SLOTS) + 2, self.state), np.nan, np.float32)

    def pass_steps(
        self,
        call: Call,
        steps: list[Step],
        tasks: int,
        given: dict[str, Array],
        kept: Sequence[int] = KEPT[0],
        pool: Array | None = None,
    ) -> tuple[Array, Array]:
        """Outputs of all tokens, one sequence behind the other, and the pool behind the last step. pool: before it."""
        pool = self.new_pool() if pool is None else pool
        found = [np.full((length, self.width), np.nan, np.float32) for length in LENGTHS]
        own, others = np.split(SLOTS, 2)
        records = np.stack([own, kept, np.where(kept, others, DUMMY)], axis=1).astype(np.int32)
        for step in steps:
            before = pool
            ends = np.cumsum([0] + [end - start for _, start, end in step]).astype(np.int32)
            room = np.full((3, self.width), np.nan, np.float32)
            arrays = {
                "state_slots": records[[s for s, _, _ in step]],
                "query_start": ends,
                "positions": np.concatenate([np.arange(start, end, dtype=np.int32) for _, start, end in step]),
                self.pool: pool,
                "out": np.concatenate([np.full((ends[-1], self.width), np.nan, np.float32), room]),
                **given,
            }
            for name, of in self.rows.items():
                rows = [of[s][start:end] for s, start, end in step]
                arrays[name] = np.concatenate([*rows, np.full((3, rows[0].shape[1]), np.nan, np.float32)])
            made = call(arrays, {0: int(ends[-1]), 1: len(step)}, tasks)
            pool = made[self.pool]
            assert same_bits(made["out"][ends[-1] :], room)
            for i, (s, start, end) in enumerate(step):
                found[s][start:end] = made["out"][ends[i] : ends[i + 1]]
            touched = {int(own[s]) for s, _, _ in step}
            touched |= {int(others[s]) for s, start, end in step if start < kept[s] <= end}
            rest = [n for n in range(len(pool)) if n not in touched]
            assert same_bits(pool[rest], before[rest])
        return np.concatenate(found), pool

    def check(
        self, call: Call, outputs: list[Array], states: list[Array], tolerance: float, given: dict[str, Array]
    ) -> tuple[Array, Array]:
        """Gives outputs and the pool, which have the same bits in every division into steps. outputs: by sequence.
        states: behind each token."""
        out, pool = self.pass_steps(call, [TOGETHER], 3, given)
        np.testing.assert_allclose(out, np.concatenate(outputs), rtol=tolerance, atol=tolerance)
        for s, length in enumerate(LENGTHS):
            behind = states[s][-1].reshape(-1)
            np.testing.assert_allclose(pool[SLOTS[s]], behind, rtol=tolerance, atol=tolerance)
            if 0 < KEPT[0][s] <= length:
                behind = states[s][KEPT[0][s] - 1].reshape(-1)
                np.testing.assert_allclose(pool[SLOTS[len(LENGTHS) + s]], behind, rtol=tolerance, atol=tolerance)
        for steps, tasks in (([TOGETHER], 1), ([TOGETHER], 7), (ALONE, 2), (CHUNKS, 3), (SINGLE, 1), (SINGLE, 7)):
            again, left = self.pass_steps(call, steps, tasks, given)
            assert same_bits(again, out), (steps, tasks)
            assert same_bits(left, pool), (steps, tasks)
        for kept in KEPT:
            self._check_kept(call, kept, out, given)
        return out, pool

    def _check_kept(self, call: Call, kept: Sequence[int], out: Array, given: dict[str, Array]) -> None:
        """Whether states are kept in every division into steps, and what follows them has the bits of `out`."""
        pools = [self.pass_steps(call, steps, 2, given, kept)[1] for steps in ([TOGETHER], CHUNKS, SINGLE)]
        assert same_bits(pools[0], pools[1])
        assert same_bits(pools[0], pools[2])
        pool, rest, expected = self.new_pool(), [], np.full_like(out, np.nan)
        for s, length in enumerate(LENGTHS):
            if 0 < kept[s] < length:
                pool[SLOTS[s]] = pools[0][SLOTS[len(LENGTHS) + s]]
                rest.append((s, kept[s], length))
                first = sum(LENGTHS[:s])
                expected[first + kept[s] : first + length] = out[first + kept[s] : first + length]
        if rest:
            again, _ = self.pass_steps(call, [rest], 2, given, [0] * len(LENGTHS), pool)
            assert same_bits(again, expected)


@dataclass(frozen=True)
class Case:
    """A kernel of states of heads, its layer, and what it should give: outputs and states as `Layer.check` has them."""

    spec: KernelSpec
    layer: Layer
    outputs: list[Array]
    states: list[Array]
    given: dict[str, Array]

    def check(self, call: Call, tolerance: float) -> tuple[Array, Array]:
        return self.layer.check(call, self.outputs, self.states, tolerance, self.given)


def short_conv_case(channels: int, stride: int, taps: int, bias: bool, activation: str) -> Case:
    x = [random(length, stride, seed=s) * 2 for s, length in enumerate(LENGTHS)]
    weight, offsets = random(taps, channels, seed=9), random(1, channels, seed=10)[0] * bias
    outputs, states = [], []
    for of in x:
        of[:, channels:] = np.nan
        inputs = np.concatenate([np.zeros((taps - 1, channels)), of[:, :channels].astype(np.float64)])
        total = sum(inputs[tap : tap + len(of)] * weight[tap] for tap in range(taps)) + offsets
        outputs.append(total / (1 + np.exp(-total)) if activation == "silu" else total)
        states.append(np.stack([inputs[t + 1 : t + taps] for t in range(len(of))]))
    # Parameters lack what gated delta nets have.
    more: dict[str, Param] = {
        **({"bias": True} if bias else {}),
        **({} if activation == "silu" else {"activation": activation}),
    }
    spec = KernelSpec.of("other", "short_conv", channels=channels, stride=stride, taps=taps, **more)
    given = {"weight": weight.reshape(-1), **({"bias": offsets} if bias else {})}
    return Case(spec, Layer({"x": x}, channels, (taps - 1) * channels, "v_pool"), outputs, states, given)


def delta_rule_case(heads: int, key_heads: int, key_dim: int, value_dim: int, tiled: bool) -> Case:
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
    spec = KernelSpec.of("attention", "delta_rule", **sizes)
    layer = Layer({"qkv": qkv, "gates": gates}, heads * value_dim, heads * key_dim * value_dim, "k_pool")
    return Case(spec, layer, outputs, states, {})


def selective_state_case(heads: int, head_dim: int, groups: int, state_size: int) -> Case:
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
    spec = KernelSpec.of("attention", "selective_state", **sizes)
    layer = Layer({"xbc": xbc, "steps": steps}, size, size * state_size, "k_pool")
    return Case(spec, layer, outputs, states, {"skip": skip})
