"""GPTQ, AWQ and SmoothQuant against round to nearest, brute force and the definitions of their papers."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from llmc.quantize import QuantizeError
from llmc.quantize.formats.affine import Affine
from llmc.quantize.formats.base import WeightFormat
from llmc.quantize.formats.codes import E8M0, Codes
from llmc.quantize.formats.fp8 import Fp8
from llmc.quantize.formats.integers import Integers
from llmc.quantize.methods import awq, gptq
from llmc.quantize.methods.grid import rounded_scale
from llmc.quantize.methods.grids import ONE, find_grid, group_grams, round_to_nearest, settle
from llmc.quantize.methods.smoothquant import smooth_scales
from llmc.quantize.rtn import quantize

FORMATS: list[WeightFormat] = [
    Integers(4, 32), Integers(4, 32, True), Integers(4), Integers(8), Affine(4, 32, 32), Codes("e2m1", 32, E8M0), Fp8(),
]  # fmt: skip


def inputs(rng: np.random.Generator, tokens: int, k: int) -> np.ndarray:
    """Correlated, with channels of very different size."""
    mixed = rng.standard_normal((tokens, k)) @ rng.standard_normal((k, k)) / np.sqrt(k)
    found: np.ndarray = (mixed + 0.3 * rng.standard_normal((tokens, k))) * np.exp(rng.standard_normal(k))
    return found.astype(np.float32)


def output_error(change: np.ndarray, hessian: np.ndarray) -> float:
    """tr(C H Cᵀ) for a change C [N, K] of a weight: the squared change of the layer's outputs."""
    wide = change.astype(np.float64)
    return float(np.vdot(wide @ hessian.astype(np.float64), wide))


def case(seed: int, n: int = 40, k: int = 96) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A weight, inputs, and the sum of their outer products."""
    rng = np.random.default_rng(seed)
    x = inputs(rng, 400, k)
    return rng.standard_normal((n, k)).astype(np.float32), x, x.T @ x


@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("act_order", [True, False])
def test_gptq_moves_outputs_much_less_than_rounding_to_nearest(format: WeightFormat, act_order: bool) -> None:
    ratios = []
    for seed in range(6):
        weight, _, hessian = case(seed)
        found = gptq.quantize_rows(weight, gptq.factor(hessian, 0.01, act_order), format)
        nearest = output_error(quantize(weight, format).value() - weight, hessian)
        ratios.append(output_error(found.value() - weight, hessian) / nearest)
    assert max(ratios) < 0.9
    assert np.mean(ratios) < 0.7


@pytest.mark.parametrize("act_order", [True, False])
def test_gptq_is_what_solving_for_the_rest_gives_at_every_step(act_order: bool) -> None:
    """After each column the others are what minimises the error of the outputs: solved anew, without any factor."""
    weight, _, hessian = case(7, n=5, k=64)
    format = Integers(4, 32)
    factor = gptq.factor(hessian, 0.01, act_order)
    found = gptq.quantize_rows(weight, factor, format)
    damped = hessian.astype(np.float64)
    damped[np.diag_indices_from(damped)] += 0.01 * np.diagonal(damped).mean()
    grid = find_grid(weight, format, importance=factor.cost)
    same = 0
    for row, start in enumerate(weight.astype(np.float64)):
        now, done = start.copy(), np.zeros(64, bool)
        for j in factor.order:
            scale = float(grid.scale[row, j // 32])
            number = np.clip(np.rint(now[j] / scale) + 8, 0, 15)
            same += number == found.numbers[row, j]
            # As GPTQ went on, so that one number at the edge does not change all behind it.
            done[j], now[j] = True, (int(found.numbers[row, j]) - 8) * scale
            change = (now - start)[done]
            rest = ~done
            if rest.any():
                now[rest] = start[rest] - np.linalg.solve(
                    damped[np.ix_(rest, rest)], damped[np.ix_(rest, done)] @ change
                )
    assert same >= 5 * 64 - 1


def test_gptq_is_the_best_there_is_where_inputs_do_not_correlate() -> None:
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((6, 3)).astype(np.float32)
    hessian = np.diag([4.0, 1.0, 0.5])
    format = Integers(4)
    found = gptq.quantize_rows(weight, gptq.factor(hessian), format)
    for row, scale, value in zip(weight, found.scale[:, 0], found.value(), strict=True):
        grid = (np.arange(16) - 8) * scale
        errors = [output_error((np.array(q) - row)[None], hessian) for q in itertools.product(grid, repeat=3)]
        assert output_error((value - row)[None], hessian) == pytest.approx(min(errors), rel=1e-5)


def test_gptq_takes_rows_apart_and_inputs_that_never_come() -> None:
    weight, _, hessian = case(3)
    hessian[5] = hessian[:, 5] = 0
    format = Integers(4, 32)
    factor = gptq.factor(hessian)
    found = gptq.quantize_rows(weight, factor, format)
    assert np.isfinite(found.value()).all()
    nearest = quantize(weight, format)
    zeros = gptq.quantize_rows(weight, gptq.factor(np.zeros_like(hessian)), format, shrinks=ONE)
    assert np.array_equal(zeros.numbers, nearest.numbers)
    with pytest.raises(QuantizeError, match="infinite or not numbers"):
        gptq.factor(np.full((3, 3), np.nan))
    # More inputs than tokens: the moments have no inverse of their own.
    thin = np.random.default_rng(1).standard_normal((4, 96))
    assert np.isfinite(gptq.factor(thin.T @ thin, 0.0).upper).all()


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_awq_moves_outputs_less_than_rounding_to_nearest(format: WeightFormat) -> None:
    ratios = []
    for seed in range(6):
        weight, x, gram = case(seed)
        scales = awq.search_scales(weight, gram, np.abs(x).mean(0), format)
        scaled = awq.quantize_rows(weight * scales, (gram / np.outer(scales, scales)).astype(np.float32), format)
        nearest = output_error(quantize(weight, format).value() - weight, gram)
        ratios.append(output_error(scaled.value() / scales - weight, gram) / nearest)
        alone = awq.quantize_rows(weight, gram, format)
        assert output_error(alone.value() - weight, gram) <= 1.0001 * nearest
        found = round_to_nearest(weight, format, find_grid(weight, format, gram=group_grams(gram, format)))
        assert np.all(grid_costs(found.value() - weight, gram, format) <= 1.0001 * grid_costs(
            quantize(weight, format).value() - weight, gram, format))  # fmt: skip
    assert max(ratios) <= 1
    assert np.mean(ratios) < 0.9


def int8_inputs(x: np.ndarray) -> np.ndarray:
    step = np.abs(x).max(1, keepdims=True) / 127
    return np.asarray(np.rint(x / step) * step)


def test_awq_scales_know_that_inputs_are_rounded() -> None:
    """A few inputs are a hundred times the others: scales that shrink them help those that share their step."""
    format = Integers(4, 32)
    blind: list[float] = []
    aware: list[float] = []
    for seed in range(6):
        weight, x, _ = case(seed)
        x = x * np.where(np.arange(x.shape[1]) % 32 == 5, 100, 1).astype(np.float32)
        weight = (weight / np.where(np.arange(x.shape[1]) % 32 == 5, 30, 1)).astype(np.float32)
        gram = (x.T @ x / len(x)).astype(np.float32)
        mean, largest = np.abs(x).mean(0), np.abs(x).max(0)
        for errors, told in ((blind, None), (aware, largest)):
            scales = awq.search_scales(weight, gram, mean, format, largest=told)
            moments = (gram / np.outer(scales, scales)).astype(np.float32)
            scaled = awq.quantize_rows(weight * scales, moments, format)
            moved = int8_inputs(x / scales) @ scaled.value().T - x @ weight.T
            errors.append(float(np.square(moved).sum()))
    assert np.mean(aware) < np.mean(blind)


@pytest.mark.parametrize("format", [f for f in FORMATS if f.group_size == 32], ids=str)
def test_groups_are_settled_with_a_view_to_one_another(format: WeightFormat) -> None:
    """Never worse for the outputs than each group's best by itself. Scales that are powers of two have few choices."""
    ratios = []
    for seed in range(6):
        weight, _, gram = case(seed)
        alone = find_grid(weight, format, gram=group_grams(gram, format), ends=True)
        costs = [
            output_error(round_to_nearest(weight, format, grid).value() - weight, gram)
            for grid in (alone, settle(weight, format, alone, gram))
        ]
        ratios.append(costs[1] / costs[0])
    assert max(ratios) <= 1.0001
    assert np.mean(ratios) < (0.99 if isinstance(format, Codes) else 0.95)


@pytest.mark.parametrize("format", [Integers(4, 32, True), Affine(4, 32, 32)], ids=str)
def test_either_end_of_an_asymmetric_range_moves_by_itself(format: WeightFormat) -> None:
    weight, _, gram = case(3)
    grams = group_grams(gram, format)
    together, apart = (find_grid(weight, format, gram=grams, ends=ends) for ends in (False, True))
    costs = [grid_costs(round_to_nearest(weight, format, grid).value() - weight, gram, format)
             for grid in (together, apart)]  # fmt: skip
    assert (costs[1] <= 1.0001 * costs[0]).all()
    assert costs[1].sum() < 0.98 * costs[0].sum()


def grid_costs(change: np.ndarray, gram: np.ndarray, format: WeightFormat) -> np.ndarray:
    """Of every group by itself, which is what the search of its range looks at."""
    groups = change.reshape(len(change), format.groups(change.shape[1]), -1)
    costs: np.ndarray = np.einsum("rgw,gwv,rgv->rg", groups, group_grams(gram, format), groups)
    return costs


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_a_grid_that_is_not_searched_is_that_of_rounding_to_nearest(format: WeightFormat) -> None:
    weight, _, _ = case(1)
    weight[3] = 0
    found, expected = round_to_nearest(weight, format, find_grid(weight, format, shrinks=ONE)), quantize(weight, format)
    assert np.array_equal(found.numbers, expected.numbers)
    assert np.array_equal(found.value(), expected.value())


def test_scales_are_rounded_before_numbers_are() -> None:
    weight, _, _ = case(2)
    for dtype in ("f16", "bf16"):
        grid = find_grid(weight, Integers(4, 32), dtype=dtype)
        assert np.array_equal(rounded_scale(grid.scale, dtype), grid.scale)
        change = round_to_nearest(weight, Integers(4, 32), grid).value() - weight
        assert np.sqrt(np.square(change).mean()) < 0.15
    with pytest.raises(QuantizeError, match="not whole groups of 64"):
        find_grid(weight, Integers(4, 64))


def test_smoothing_evens_inputs_and_weights_out() -> None:
    weight, x, _ = case(4)
    weight[:, 7] = 0
    inputs, weights = np.abs(x).max(0), np.abs(weight).max(0)
    scales = smooth_scales(inputs, weights)
    assert scales[7] == 1
    rest = np.arange(96) != 7
    np.testing.assert_allclose((inputs / scales)[rest], (weights * scales)[rest], rtol=1e-4)
    np.testing.assert_allclose((x / scales) @ (weight * scales).T, x @ weight.T, rtol=1e-3, atol=1e-3)
