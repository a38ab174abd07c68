"""GPTQ and its grids, against a slow reference with explicit inverses and against gguf-py's reading of the bytes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from hypothesis import given, settings
from hypothesis import strategies as st

from fedprune_app.core import hessians
from fedprune_app.core.gptq import gptq as quantized_together
from fedprune_app.core.grids import BLOCK, Grid, Quantized, grid_of
from tests.core.one_matrix import sparsegpt
from tests.core.test_sparsegpt import hessian_of, problem
from tests.examples import examples

BITS = (8, 5, 4, 3)
GRIDS = [grid_of(bits, keeps_zeros=keeps_zeros) for bits in BITS for keeps_zeros in (True, False)]


def gptq(weight, hessian, grid, mask=None):
    return quantized_together([weight], hessian, grid, None if mask is None else [mask])[0]


def name(grid):
    return f"{grid.gguf_type}-{grid.lowest}"


def half(number):
    return float(np.float16(number))


def nearest(grid, value, scale, minimum):
    level = round((value - minimum) / scale) if scale else 0
    return min(max(level, grid.lowest), grid.highest)


def fitted_by_hand(grid, values, importance):
    """The scale and minimum of one block, in float64, number by number."""
    start, spread = 0.0, max(values, key=abs) / grid.lowest if not grid.has_minimums else 0.0
    if not grid.has_minimums:
        counted = [value if weight > 0 else 0.0 for value, weight in zip(values, importance, strict=True)]
        spread = max(counted, key=abs) / grid.lowest
    else:
        start, spread = min(values), (max(values) - min(values)) / grid.highest
    best = (math.inf, 0.0, 0.0)
    for step in range(12):
        levels = [nearest(grid, value, spread * (0.5 + 0.05 * step), start) for value in values]
        total, centre, middle = sum(importance), 0.0, 0.0
        if grid.has_minimums:
            centre = sum(w * level for w, level in zip(importance, levels, strict=True)) / total
            middle = sum(w * value for w, value in zip(importance, values, strict=True)) / total
        size = sum(w * (level - centre) ** 2 for w, level in zip(importance, levels, strict=True))
        slope = sum(
            w * (level - centre) * (value - middle) for w, level, value in zip(importance, levels, values, strict=True)
        )
        scale = half(slope / size) if size else 0.0
        minimum = half(middle - scale * centre)
        error = sum(
            w * (value - minimum - scale * nearest(grid, value, scale, minimum)) ** 2
            for w, value in zip(importance, values, strict=True)
        )
        if error < best[0] * (1 - 1e-6):  # float32 calls errors equal that differ by rounding
            best = (error, scale, minimum)
    return best[1:]


def reference(weight, hessian, grid, mask=None, damping=0.01):
    """Algorithm 1 of the paper as optimal brain surgery: for each column the inverse of what is left of the Hessian."""
    num_rows, num_inputs = weight.shape
    hessian, weights = hessian.double().clone(), weight.double().clone()
    for j in range(num_inputs):
        if hessian[j, j] == 0:
            hessian[j, j] = 1
            weights[:, j] = 0
    hessian += damping * hessian.diagonal().mean() * torch.eye(num_inputs, dtype=torch.float64)
    inverses = [torch.linalg.inv(hessian[j:, j:]) for j in range(num_inputs)]
    levels = torch.zeros(weight.shape, dtype=torch.int8)
    for r in range(num_rows):
        for j in range(num_inputs):
            if j % BLOCK == 0:
                kept = [mask is None or bool(mask[r, i]) for i in range(j, j + BLOCK)]
                importance = [k / float(inverses[j + i][0, 0]) for i, k in enumerate(kept)]
                scale, minimum = fitted_by_hand(grid, weights[r, j : j + BLOCK].tolist(), importance)
            if kept[j % BLOCK]:
                levels[r, j] = nearest(grid, float(weights[r, j]), scale, minimum)
            error = weights[r, j] - scale * levels[r, j] - minimum
            weights[r, j:] -= error / inverses[j][0, 0] * inverses[j][:, 0]
    return levels


@pytest.mark.parametrize("grid", GRIDS, ids=name)
def test_levels_are_those_of_a_slow_gptq_with_explicit_inverses(grid):
    weight, inputs = problem(seed=1, rows=6, columns=192, tokens=600)
    hessian = hessian_of(inputs)
    assert torch.equal(gptq(weight, hessian, grid).levels, reference(weight, hessian, grid))


@pytest.mark.parametrize("bits", BITS)
def test_pruned_weights_stay_exactly_zero_and_the_others_make_up_for_rounding(bits):
    weight, inputs = problem(seed=2, rows=6, columns=96, tokens=300)
    hessian, grid = hessian_of(inputs), grid_of(bits, keeps_zeros=True)
    pruned, mask = sparsegpt(weight, hessian, 0.5)
    mask[0, :40], pruned[0, :40] = False, 0  # a whole block, too
    quantized = gptq(pruned, hessian, grid, mask)
    assert torch.equal(quantized.levels, reference(pruned, hessian, grid, mask))
    assert not quantized.weights()[~mask].any()
    with pytest.raises(ValueError, match="no exact 0"):
        gptq(pruned, hessian, grid_of(4, keeps_zeros=False), mask)


@pytest.mark.parametrize("grid", GRIDS, ids=name)
def test_llama_cpps_own_reader_makes_the_same_weights_of_the_bytes(grid):
    weight, inputs = problem(seed=3, rows=5, columns=64, tokens=300)
    quantized = gptq(weight, hessian_of(inputs), grid)
    read = quants.dequantize(quantized.packed().numpy(), GGMLQuantizationType[grid.gguf_type])
    assert np.array_equal(read, quantized.weights().numpy())
    every_level = torch.arange(grid.lowest, grid.highest + 1, dtype=torch.int8).repeat(32)
    rows = len(every_level) // BLOCK
    numbers = torch.randn(2, rows, 1, generator=torch.Generator().manual_seed(0)).half()
    minimums = numbers[1] * grid.has_minimums
    quantized = Quantized(grid, every_level.view(rows, BLOCK), numbers[0], minimums)
    read = quants.dequantize(quantized.packed().numpy(), GGMLQuantizationType[grid.gguf_type])
    assert np.array_equal(read, quantized.weights().numpy())


def test_gptq_moves_outputs_less_than_rounding_to_nearest_does():
    weight, inputs = problem(seed=4, rows=20, columns=64, tokens=600)
    tokens = inputs.reshape(-1, 64)
    for bits in (4, 3):
        grid = grid_of(bits, keeps_zeros=False)

        def error(quantized):
            return float(((quantized.weights() - weight) @ tokens.T).square().sum())

        assert error(gptq(weight, hessian_of(inputs), grid)) < 0.7 * error(gptq(weight, torch.eye(64), grid))


def test_four_clients_sums_give_every_level_that_one_place_with_all_text_has():
    """The inputs are small integers, so float32 sums them without rounding, as one client's and as four clients'."""
    draw = torch.Generator().manual_seed(5)
    texts = torch.randint(-9, 10, (4, 8, 16, 96), generator=draw).float()
    weight = torch.randn(24, 96, generator=draw)
    one_place, four_clients = hessians.HessianSum(96), hessians.HessianSum(96)
    pooled = texts.flatten(0, 2)
    one_place.add("x", hessians.encoded({"x": pooled.T @ pooled / 32}), 32)
    for client in (2, 0, 3, 1):
        tokens = texts[client].flatten(0, 1)
        four_clients.add("x", hessians.encoded({"x": tokens.T @ tokens / 8}), 8)
    for grid in GRIDS:
        expected, found = (gptq(weight, each.matrix(), grid) for each in (one_place, four_clients))
        assert torch.equal(expected.levels, found.levels)
        assert torch.equal(expected.packed(), found.packed())


def test_any_number_of_threads_gives_the_same_bytes():
    weight, inputs = problem(seed=6, rows=1100, columns=64, tokens=300)  # a block is shared out among threads
    hessian, grid = hessian_of(inputs), grid_of(4, keeps_zeros=False)
    before, packed = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            packed.append(gptq(weight, hessian, grid).packed())
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(each, packed[0]) for each in packed)


def test_matrices_with_the_same_inputs_are_quantized_as_each_alone():
    first, inputs = problem(seed=7, rows=9, columns=64, tokens=300)
    second = problem(seed=8, rows=5, columns=64)[0]
    hessian, grid = hessian_of(inputs), grid_of(4, keeps_zeros=False)
    for weight, quantized in zip((first, second), quantized_together([first, second], hessian, grid), strict=True):
        assert torch.equal(quantized.packed(), gptq(weight, hessian, grid).packed())


@pytest.mark.parametrize("grid", GRIDS, ids=name)
def test_blocks_of_equal_weights_and_inputs_that_were_never_seen_are_no_exception(grid: Grid):
    weight, inputs = problem(seed=9, rows=4, columns=96, tokens=300)
    weight[0], weight[1], inputs[..., 32:64] = 0, 0.5, 0
    weights = gptq(weight, hessian_of(inputs), grid).weights()
    assert weights.isfinite().all()
    assert not weights[0].any()
    assert not weights[:, 32:64].any()


@pytest.mark.parametrize("grid", GRIDS, ids=name)
def test_a_row_that_ends_within_a_block_is_filled_up(grid):
    weight, inputs = problem(seed=10, rows=4, columns=72, tokens=300)
    whole, hessian = torch.nn.functional.pad(weight, (0, 24)), torch.zeros(96, 96)
    hessian[:72, :72] = hessian_of(inputs)
    hessian.diagonal()[72:] = hessian.diagonal()[:72].mean()
    quantized = gptq(weight, hessian_of(inputs), grid)
    assert quantized.levels.shape == (4, 96)
    assert torch.equal(quantized.packed(), gptq(whole, hessian, grid).packed())


@settings(max_examples=examples(20), deadline=None)
@given(seed=st.integers(0, 10**6), rows=st.integers(1, 9), blocks=st.integers(1, 5), grid=st.sampled_from(GRIDS))
def test_levels_are_within_their_grid_and_nearer_than_a_plain_grid(seed, rows, blocks, grid):
    weight, _ = problem(seed, rows, blocks * BLOCK)
    quantized = gptq(weight, torch.eye(blocks * BLOCK), grid)
    assert int(quantized.levels.min()) >= grid.lowest
    assert int(quantized.levels.max()) <= grid.highest
    if grid.highest in (7, 15, 31, 127) and grid.highest - grid.lowest > 7:
        plain = quants.quantize(weight.numpy(), GGMLQuantizationType[grid.gguf_type])
        read = torch.from_numpy(quants.dequantize(plain, GGMLQuantizationType[grid.gguf_type]))
        assert float((quantized.weights() - weight).square().sum()) <= float((read - weight).square().sum()) * 1.001


@pytest.mark.parametrize(
    ("weight", "hessian", "says"),
    [
        (torch.full((2, 32), 1e9), torch.eye(32), "beyond float16"),
        (torch.full((2, 32), torch.nan), torch.eye(32), "not finite"),
        (torch.ones(2, 32), -torch.eye(32), "not positive definite"),
    ],
)
def test_what_cannot_be_quantized_is_named(weight, hessian, says):
    with pytest.raises(ValueError, match=says):
        gptq(weight, hessian, grid_of(4, keeps_zeros=False))
