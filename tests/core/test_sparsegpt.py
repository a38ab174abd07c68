"""SparseGPT against a slow reference that inverts, for every column, the Hessian of the columns that are left."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedprune_app.core.graphs import WARM_UP_STEPS
from fedprune_app.core.masks import keep_count
from fedprune_app.core.scores import magnitude_mask, wanda_mask
from fedprune_app.core.sparsegpt import Hessian, InputNorms
from tests.core.one_matrix import sparsegpt
from tests.examples import examples
from tests.recording import Recording


def problem(seed: int, rows: int = 12, columns: int = 24, tokens: int = 60):
    """A weight matrix, and inputs that are correlated and of unequal size, as a network's are."""
    draw = torch.Generator().manual_seed(seed)
    mixing = torch.randn(columns, columns, generator=draw) / math.sqrt(columns)
    inputs = torch.randn(tokens, columns, generator=draw) @ mixing
    inputs = inputs * torch.rand(columns, generator=draw).add(0.2)
    return torch.randn(rows, columns, generator=draw), inputs.view(3, tokens // 3, columns)


def hessian_of(inputs):
    accumulator = Hessian(inputs.shape[-1])
    for sequence in inputs:
        accumulator.add(sequence[None])
    return accumulator.matrix


def reference(weight, inputs, *, block_size, damping=0.01, density=None, n_of_m=None):
    """Algorithm 1 and equations (3) and (5) of the paper, in float64, by explicit inverses; no Cholesky factor.

    When column j is reached, the columns before it are settled, so every row's remaining problem has the Hessian
    H[j:, j:]: removing w_j costs w_j² / [H[j:, j:]⁻¹]_00, and the others move by -w_j / [..]_00 times its column 0.
    """
    num_rows, num_columns = weight.shape
    flat = inputs.reshape(-1, num_columns).double()
    hessian = 2 / len(inputs) * flat.T @ flat
    weights = weight.double().clone()
    for j in range(num_columns):
        if hessian[j, j] == 0:
            hessian[j, j] = 1
            weights[:, j] = 0
    hessian = hessian + damping * hessian.diagonal().mean() * torch.eye(num_columns, dtype=torch.float64)
    inverses = [torch.linalg.inv(hessian[j:, j:]) for j in range(num_columns)]
    removed: set[tuple[int, int]] = set()
    margins = []

    def settle(candidates, count):
        """The cheapest ``count`` of (row, column); equal ones by place."""
        cost = {(r, j): float(weights[r, j] ** 2 / inverses[j][0, 0]) for r, j in candidates}
        ordered = sorted(candidates, key=lambda place: (cost[place], place))
        if 0 < count < len(ordered):
            margins.append(cost[ordered[count]] / max(cost[ordered[count - 1]], 1e-30))
        removed.update(ordered[:count])

    for start in range(0, num_columns, block_size):
        stop = min(start + block_size, num_columns)
        if density is not None:
            kept_before, kept_after = (math.floor(density * num_rows * c + 1e-6) for c in (start, stop))
            size = num_rows * (stop - start)
            settle([(r, j) for r in range(num_rows) for j in range(start, stop)], size - (kept_after - kept_before))
        for j in range(start, stop):
            if n_of_m is not None and j % n_of_m[1] == 0:
                for r in range(num_rows):
                    settle([(r, i) for i in range(j, j + n_of_m[1])], n_of_m[1] - n_of_m[0])
            for r in range(num_rows):
                if (r, j) in removed:
                    step = weights[r, j] / inverses[j][0, 0]
                    weights[r, j:] = weights[r, j:] - step * inverses[j][:, 0]
                    weights[r, j] = 0
    mask = torch.ones(weight.shape, dtype=torch.bool)
    for place in removed:
        mask[place] = False
    assert not margins or min(margins) > 1 + 1e-5, "a decision too close for float32: take another seed"
    return weights.float(), mask


@pytest.mark.parametrize("block_size", [8, 24, 128, 7])
@pytest.mark.parametrize("density", [0.5, 0.3, 0.8])
def test_sparsegpt_is_the_papers_algorithm(density, block_size):
    weight, inputs = problem(seed=1)
    pruned, mask = sparsegpt(weight, hessian_of(inputs), density, block_size=block_size)
    expected, expected_mask = reference(weight, inputs, block_size=block_size, density=density)
    assert torch.equal(mask, expected_mask)
    torch.testing.assert_close(pruned, expected, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("target", [{"density": 0.5}, {"n_of_m": (2, 4)}], ids=str)
def test_blocks_that_repeat_a_recorded_one_end_with_the_same_bits(target):
    weight, inputs = problem(seed=7, rows=16, columns=60)
    recorder = Recording()
    found = sparsegpt(weight, hessian_of(inputs), **target, block_size=8, recorder=recorder)
    for tensor, expected in zip(found, sparsegpt(weight, hessian_of(inputs), **target, block_size=8), strict=True):
        assert torch.equal(tensor, expected)
    # 7 blocks of 8 columns, and one of 4
    assert (recorder.steps, recorder.recorded, recorder.repeated) == (WARM_UP_STEPS + 1, 1, 4)


@pytest.mark.parametrize("n_of_m", [(2, 4), (1, 4), (4, 8)])
def test_sparsegpt_with_a_pattern_is_the_papers_algorithm(n_of_m):
    weight, inputs = problem(seed=2)
    pruned, mask = sparsegpt(weight, hessian_of(inputs), n_of_m=n_of_m, block_size=8)
    expected, expected_mask = reference(weight, inputs, block_size=8, n_of_m=n_of_m)
    assert torch.equal(mask, expected_mask)
    torch.testing.assert_close(pruned, expected, atol=1e-4, rtol=1e-3)
    n, m = n_of_m
    assert (mask.view(12, -1, m).sum(2) == n).all()


def test_inputs_that_were_never_seen_lose_their_column_first():
    weight, inputs = problem(seed=3)
    inputs[..., [2, 9]] = 0
    pruned, mask = sparsegpt(weight, hessian_of(inputs), 0.5, block_size=24)
    expected, expected_mask = reference(weight, inputs, block_size=24, density=0.5)
    assert torch.equal(mask, expected_mask)
    assert not mask[:, [2, 9]].any()
    torch.testing.assert_close(pruned, expected, atol=1e-4, rtol=1e-3)


@settings(max_examples=examples(40), deadline=None)
@given(
    seed=st.integers(0, 10**6),
    rows=st.integers(1, 9),
    columns=st.integers(1, 20),
    density=st.floats(0, 1),
    block_size=st.integers(1, 25),
)
def test_the_density_is_exact_and_what_is_pruned_is_zero(seed, rows, columns, density, block_size):
    weight, inputs = problem(seed, rows, columns)
    pruned, mask = sparsegpt(weight, hessian_of(inputs), density, block_size=block_size)
    assert int(mask.sum()) == keep_count(weight.numel(), density)
    assert not pruned[~mask].any()


@settings(max_examples=examples(40), deadline=None)
@given(
    seed=st.integers(0, 10**6),
    rows=st.integers(1, 9),
    columns=st.integers(1, 20),
    before=st.floats(0, 1),
    density=st.floats(0, 1),
    block_size=st.integers(1, 25),
)
def test_what_was_pruned_before_stays_pruned_and_counts(seed, rows, columns, before, density, block_size):
    """A merged model has blocks and rows of unequal density, and is pruned again in the next round."""
    weight, inputs = problem(seed, rows, columns)
    weight *= torch.rand(weight.shape, generator=torch.Generator().manual_seed(seed)) < before
    alive = weight != 0
    wanted = min(int(alive.sum()), keep_count(weight.numel(), density))
    pruned, mask = sparsegpt(weight, hessian_of(inputs), density, block_size=block_size)
    assert int(mask.sum()) == wanted
    assert not (mask & ~alive).any()
    assert not pruned[~mask].any()
    mask = wanda_mask(weight, inputs.reshape(-1, columns).norm(dim=0), density)
    assert not (mask & ~alive).any()
    # of a dense matrix each row is rounded by itself
    assert int(mask.sum()) == min(int(alive.sum()), rows * (columns - keep_count(columns, 1 - density)))


def test_a_pattern_that_holds_already_stays():
    weight, inputs = problem(seed=21)
    hessian, norms = hessian_of(inputs), inputs.reshape(-1, 24).norm(dim=0)
    pruned, mask = sparsegpt(weight, hessian, n_of_m=(2, 4), block_size=8)
    assert torch.equal(sparsegpt(pruned, hessian, n_of_m=(2, 4), block_size=8)[1], mask)
    assert torch.equal(wanda_mask(pruned, norms, n_of_m=(2, 4)), mask)


def test_what_is_left_makes_up_for_what_is_removed():
    weight, inputs = problem(seed=4, rows=20, columns=32, tokens=300)
    tokens = inputs.reshape(-1, 32)
    pruned, mask = sparsegpt(weight, hessian_of(inputs), 0.5, block_size=16)

    def error(other):
        return float(((other - weight) @ tokens.T).square().sum())

    by_magnitude = torch.where(magnitude_mask(weight, 0.5), weight, 0)
    assert error(pruned) < 0.85 * error(torch.where(mask, weight, 0))
    assert error(pruned) < 0.85 * error(by_magnitude)


def test_density_1_changes_nothing_and_density_0_leaves_nothing():
    weight, inputs = problem(seed=5)
    pruned, mask = sparsegpt(weight, hessian_of(inputs), 1.0)
    assert torch.equal(pruned, weight)
    assert mask.all()
    pruned, mask = sparsegpt(weight, hessian_of(inputs), 0.0)
    assert not mask.any()
    assert not pruned.any()


def test_the_scale_of_the_hessian_does_not_matter():
    weight, inputs = problem(seed=6)
    hessian = hessian_of(inputs)
    for scale in (0.25, 4.0):  # powers of two: float32 rounds alike
        pruned, mask = sparsegpt(weight, hessian * scale, 0.5, block_size=8)
        expected, expected_mask = sparsegpt(weight, hessian, 0.5, block_size=8)
        assert torch.equal(mask, expected_mask)
        torch.testing.assert_close(pruned, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_weights_come_back_as_such(dtype):
    weight, inputs = problem(seed=8)
    pruned, mask = sparsegpt(weight.to(dtype), hessian_of(inputs), 0.5, block_size=8)
    expected, expected_mask = sparsegpt(weight.to(dtype).float(), hessian_of(inputs), 0.5, block_size=8)
    assert pruned.dtype == dtype
    assert torch.equal(mask, expected_mask)
    assert torch.equal(pruned, expected.to(dtype))


def test_the_arguments_are_left_as_they_were():
    weight, inputs = problem(seed=9)
    hessian = hessian_of(inputs)
    before = weight.clone(), hessian.clone()
    sparsegpt(weight, hessian, 0.5)
    assert torch.equal(weight, before[0])
    assert torch.equal(hessian, before[1])


def test_a_hessian_that_is_not_positive_definite_is_an_error_not_another_method():
    weight, inputs = problem(seed=10, tokens=6)  # fewer tokens than inputs
    with pytest.raises(ValueError, match="not positive definite"):
        sparsegpt(weight, hessian_of(inputs) - torch.eye(24), 0.5)
    sparsegpt(weight, hessian_of(inputs), 0.5)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({}, "exactly one of them"),
        ({"density": 0.5, "n_of_m": (2, 4)}, "exactly one of them"),
        ({"density": 1.5}, "density is 1.5"),
        ({"n_of_m": (0, 4)}, "n_of_m is 0:4"),
        ({"n_of_m": (2, 5)}, "n_of_m is 2:5"),
        ({"n_of_m": (2, 4), "block_size": 6}, "n_of_m is 2:4, allowed for rows of 2"),
    ],
)
def test_wrong_arguments_are_named(arguments, says):
    weight, inputs = problem(seed=11)
    with pytest.raises(ValueError, match=says):
        sparsegpt(weight, hessian_of(inputs), **arguments)


def test_values_that_cannot_be_are_refused():
    weight, inputs = problem(seed=12)
    with pytest.raises(ValueError, match="NaN or infinite"):
        sparsegpt(weight, hessian_of(inputs) * float("nan"), 0.5)


def test_the_hessian_is_twice_the_mean_over_sequences_however_they_arrive():
    _, inputs = problem(seed=13)
    flat = inputs.reshape(-1, 24).double()
    expected = (2 / 3 * flat.T @ flat).float()
    at_once = Hessian(24)
    at_once.add(inputs)
    torch.testing.assert_close(hessian_of(inputs), expected)
    torch.testing.assert_close(at_once.matrix, expected)
    norms = InputNorms(24)
    for sequence in inputs:
        norms.add(sequence[None])
    torch.testing.assert_close(norms.input_norms(), (flat.square().sum(0) / 3).sqrt().float())
    torch.testing.assert_close(at_once.input_norms(), norms.input_norms())


def test_wanda_removes_per_row_what_weighs_least():
    weight, inputs = problem(seed=14)
    norms = inputs.reshape(-1, 24).norm(dim=0)
    mask = wanda_mask(weight, norms, 0.7)
    for row in range(12):
        scores = [abs(float(weight[row, j])) * float(norms[j]) for j in range(24)]
        removed = sorted(range(24), key=lambda j: (scores[j], j))[: int(24 * 0.3)]
        assert [j for j in range(24) if not mask[row, j]] == sorted(removed)
    assert (wanda_mask(weight, norms, n_of_m=(2, 4)).view(12, 6, 4).sum(2) == 2).all()


def test_magnitude_keeps_exactly_the_largest_and_breaks_ties_by_place():
    weight = torch.tensor([[1.0, -3.0, 1.0], [1.0, 0.5, 2.0]])
    assert magnitude_mask(weight, 0.5).tolist() == [[False, True, False], [True, False, True]]
    assert magnitude_mask(torch.tensor([[1.0, 4.0, -3.0, 2.0]]), n_of_m=(2, 4)).tolist() == [[False, True, True, False]]
