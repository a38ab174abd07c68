"""Groups of inputs that are cut, against brute force over all choices and least squares by hand."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch

from fedprune_app.core.cutting import cut_inputs


def problem(num_inputs=8, num_outputs=5, seed=0):
    """A weight, the Hessian of correlated inputs, and the Hessian as it is damped."""
    draw = torch.Generator().manual_seed(seed)
    weight = torch.randn(num_outputs, num_inputs, generator=draw, dtype=torch.float64)
    inputs = torch.randn(200, num_inputs, generator=draw, dtype=torch.float64)
    inputs = inputs @ torch.randn(num_inputs, num_inputs, generator=draw, dtype=torch.float64)
    hessian = 2 / len(inputs) * inputs.T @ inputs
    return weight, hessian, hessian + 0.01 * hessian.diag().mean() * torch.eye(num_inputs)


def best_on(weight, damped, kept):
    """The least-squares weights on these inputs, and their error."""
    best = torch.zeros_like(weight)
    best[:, kept] = weight @ damped[:, kept] @ torch.linalg.inv(damped[kept][:, kept])
    return best, error(weight - best, damped)


def error(difference, damped):
    return float((difference @ damped * difference).sum())


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("seed", range(3))
def test_one_group_is_the_one_whose_loss_is_least(size, seed):
    weight, hessian, damped = problem(seed=seed)
    groups = torch.arange(8).view(-1, size)
    found, kept = cut_inputs(weight, hessian, size, len(groups) - 1)
    choices = [torch.cat([groups[g] for g in rest]) for rest in combinations(range(len(groups)), len(groups) - 1)]
    best, least = min((best_on(weight, damped, choice) for choice in choices), key=lambda pair: pair[1])
    torch.testing.assert_close(found, best)
    assert error(weight - found, damped) == pytest.approx(least)
    assert int(kept.sum()) == 8 - size


@pytest.mark.parametrize("seed", range(5))
def test_each_step_takes_the_group_without_which_the_best_weights_lose_least(seed):
    weight, hessian, damped = problem(seed=seed)
    left = list(range(8))
    while len(left) > 3:
        rests = [[k for k in left if k != gone] for gone in left]
        left = min(rests, key=lambda rest: best_on(weight, damped, torch.tensor(rest))[1])
        found, kept = cut_inputs(weight, hessian, 1, len(left))
        assert kept.nonzero().flatten().tolist() == left
        torch.testing.assert_close(found, best_on(weight, damped, torch.tensor(left))[0])


def test_all_groups_kept_change_nothing():
    weight, hessian, _ = problem()
    found, kept = cut_inputs(weight.float(), hessian, 2, 4)
    assert torch.equal(found, weight.float())
    assert bool(kept.all())


def test_inputs_that_never_differ_from_0_go_first():
    weight, hessian, _ = problem()
    hessian[[2, 5]], hessian[:, [2, 5]] = 0, 0
    _, kept = cut_inputs(weight, hessian, 1, 6)
    assert (~kept).nonzero().flatten().tolist() == [2, 5]


def test_many_at_a_time_end_with_the_number_asked_for_and_the_same_bits_twice():
    weight, hessian, _ = problem(300, 20)
    (first, kept), (again, _) = (cut_inputs(weight, hessian, 1, 101) for _ in range(2))
    assert int(kept.sum()) == 101
    assert torch.equal(first, again)
    assert not first[:, ~kept].any()
