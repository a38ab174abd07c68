"""ALPS against the best of all masks, and against SparseGPT with least squares."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedprune_app.core.alps import alps
from fedprune_app.core.masks import keep_count
from tests.core.one_matrix import sparsegpt
from tests.core.test_sparsegpt import hessian_of, problem
from tests.examples import examples


def damped(hessian):
    matrix = hessian.double().clone()
    matrix.diagonal().add_(0.01 * matrix.diagonal().mean())
    return matrix


def error(weight, dense, hessian):
    moved = weight.double() - dense.double()
    return float(((moved @ damped(hessian)) * moved).sum())


def best_on(mask, dense, hessian):
    """The least squares solution on a mask, row by row, in float64."""
    matrix, weight = damped(hessian), torch.zeros(dense.shape, dtype=torch.float64)
    for row, kept in enumerate(mask):
        weight[row, kept] = torch.linalg.solve(matrix[kept][:, kept], matrix[kept] @ dense[row].double())
    return weight


def best_of_all(dense, hessian, num_kept):
    """The smallest error of a row (1, in) with so many weights, by trying each mask."""
    found = []
    for places in combinations(range(dense.shape[1]), num_kept):
        mask = torch.zeros(dense.shape, dtype=torch.bool)
        mask[0, list(places)] = True
        found.append(error(best_on(mask, dense, hessian), dense, hessian))
    return min(found)


@pytest.mark.parametrize("num_kept", [2, 4, 6])
def test_a_row_of_eight_is_nearly_as_good_as_the_best_of_all_masks(num_kept):
    found, best = [], []
    for seed in range(20):
        dense, inputs = problem(seed, rows=1, columns=8)
        hessian = hessian_of(inputs)
        ((weight, mask),) = alps([dense], hessian, num_kept / 8)
        assert int(mask.sum()) == num_kept
        found.append(error(weight, dense, hessian))
        best.append(best_of_all(dense, hessian, num_kept))
    assert all(mine >= least * (1 - 1e-4) for mine, least in zip(found, best, strict=True))
    assert sum(mine <= least * (1 + 1e-4) for mine, least in zip(found, best, strict=True)) >= 12
    assert sum(found) <= 1.1 * sum(best)


@pytest.mark.parametrize("how", [{"density": 0.2}, {"density": 0.5}, {"density": 0.8}, {"n_of_m": (2, 4)}], ids=str)
def test_no_matrix_is_worse_than_by_sparsegpt_and_least_squares(how):
    for seed, (rows, columns) in enumerate([(12, 24), (16, 64), (40, 16), (32, 128)] * 2):
        dense, inputs = problem(seed, rows, columns, tokens=240)
        hessian = hessian_of(inputs)
        ((weight, _),) = alps([dense], hessian, **how)
        mask = sparsegpt(dense, hessian, **how, block_size=16)[1]
        assert error(weight, dense, hessian) < 0.95 * error(best_on(mask, dense, hessian), dense, hessian)


@settings(max_examples=examples(20))
@given(
    seed=st.integers(0, 2**16),
    rows=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    columns=st.integers(1, 20),
    density=st.floats(0, 1),
)
def test_each_matrix_has_its_exact_density_and_zeros_beside_its_mask(seed, rows, columns, density):
    dense, inputs = problem(seed, sum(rows), columns)
    matrices = torch.split(dense, rows)
    for matrix, (weight, mask) in zip(matrices, alps(matrices, hessian_of(inputs), density), strict=True):
        assert int(mask.sum()) == keep_count(matrix.numel(), density)
        assert not weight[~mask].any()


def test_a_pattern_holds_in_every_row():
    dense, inputs = problem(0)
    ((weight, mask),) = alps([dense], hessian_of(inputs), n_of_m=(2, 4))
    assert bool((mask.view(-1, 4).sum(dim=1) == 2).all())
    assert torch.equal(weight != 0, mask)


def test_the_weights_are_the_best_on_their_mask():
    dense, inputs = problem(1)
    ((weight, mask),) = alps([dense], hessian_of(inputs), density=0.4)
    expected = best_on(mask, dense, hessian_of(inputs)).float()
    torch.testing.assert_close(weight, expected, atol=2e-3, rtol=2e-3)


def test_density_1_changes_nothing_and_density_0_leaves_nothing():
    dense, inputs = problem(2)
    ((weight, mask),) = alps([dense], hessian_of(inputs), density=1.0)
    assert mask.all()
    torch.testing.assert_close(weight, dense, atol=1e-4, rtol=1e-3)
    ((weight, mask),) = alps([dense], hessian_of(inputs), density=0.0)
    assert not mask.any()
    assert not weight.any()


def test_the_same_call_gives_the_same_bits_and_leaves_its_arguments():
    dense, inputs = problem(3)
    hessian = hessian_of(inputs)
    before = dense.clone(), hessian.clone()
    (first,), (second,) = alps([dense], hessian, 0.3), alps([dense], hessian, 0.3)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    assert torch.equal(dense, before[0])
    assert torch.equal(hessian, before[1])


def test_the_scale_of_the_hessian_does_not_matter():
    dense, inputs = problem(4)
    ((weight, mask),) = alps([dense], hessian_of(inputs), 0.4)
    ((scaled, same),) = alps([dense], 2.0**20 * hessian_of(inputs), 0.4)
    assert torch.equal(mask, same)
    torch.testing.assert_close(weight, scaled)


def test_inputs_that_were_never_seen_lose_their_weights_first():
    dense, inputs = problem(5)
    inputs = inputs.clone()
    inputs[:, :, [3, 17]] = 0
    ((weight, mask),) = alps([dense], hessian_of(inputs), 0.4)
    assert not mask[:, [3, 17]].any()
    assert weight.isfinite().all()
    ((weight, mask),) = alps([dense], torch.zeros_like(hessian_of(inputs)), 0.7)  # nobody saw any
    assert weight.isfinite().all()
    assert int(mask.sum()) == keep_count(mask.numel(), 0.7)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_weights_come_back_as_such(dtype):
    dense, inputs = problem(6)
    ((weight, _),) = alps([dense.to(dtype)], hessian_of(inputs), 0.5)
    assert weight.dtype == dtype


def test_what_cannot_be_is_refused():
    dense, inputs = problem(7)
    with pytest.raises(ValueError, match="exactly one"):
        alps([dense], hessian_of(inputs), 0.5, n_of_m=(2, 4))
    with pytest.raises(ValueError, match="NaN"):
        alps([dense * 1e38], hessian_of(inputs) * 1e4, 0.5)
