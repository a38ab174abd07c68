"""FedP3's appendix as laws: unbiasedness, second moments, and Theorem 1 on quadratics whose optimum is known."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedprune_app.core.fedp3 import perm_k_owners
from tests.examples import full
from tests.laws.theorem1 import iterate, perm_k, perm_k_mean, rand_k, theorem1_bound, theorem1_step_size


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def every_owners(dimension, num_clients):
    """All outcomes of the permutation, each as likely as the others."""
    block = dimension // num_clients
    for order in permutations(range(dimension)):
        owners = torch.empty(dimension, dtype=torch.int64)
        for place, coordinate in enumerate(order):
            owners[coordinate] = place // block
        yield owners


@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 10**6))
def test_blocks_differ_by_at_most_one_and_cover_every_coordinate_once(dimension, num_clients, seed):
    owners = perm_k_owners(dimension, num_clients, generator(seed))
    sizes = torch.bincount(owners, minlength=num_clients)
    assert owners.shape == (dimension,)
    assert len(sizes) == num_clients
    assert int(sizes.max() - sizes.min()) <= 1
    ones = torch.ones(dimension)
    total = sum(perm_k(ones, owners, i, num_clients) for i in range(num_clients)) / num_clients
    assert torch.equal(total, ones)  # (1/n) Σ S_i = I


@pytest.mark.parametrize(("dimension", "num_clients"), [(6, 3), (7, 3), full(5, 5), full(3, 4)])
def test_every_coordinate_is_every_clients_equally_often(dimension, num_clients):
    rng, draws = generator(), 6000
    counts = torch.zeros(num_clients, dimension)
    for _ in range(draws):
        owners = perm_k_owners(dimension, num_clients, rng)
        counts[owners, torch.arange(dimension)] += 1
    share = 1 / num_clients
    assert (counts / draws - share).abs().max() < 5 * (share * (1 - share) / draws) ** 0.5


def test_the_mean_of_the_sketched_models_is_unbiased():
    """E (1/n) Σ S_i y_i is the mean of the y_i (Theorem 4)."""
    dimension, n, draws, rng = 11, 3, 6000, generator(5)
    vectors = torch.randn(n, dimension, generator=rng, dtype=torch.float64)
    total = sum(perm_k_mean(vectors, perm_k_owners(dimension, n, rng)) for _ in range(draws))
    spread = vectors.std(0, correction=0) / draws**0.5
    assert ((total / draws - vectors.mean(0)).abs() < 4.5 * spread).all()


def test_any_two_coordinates_are_one_clients_equally_often():
    """As of a random permutation: (s - 1)/(d - 1), wherever they lie."""
    rng, draws = generator(1), 6000
    together = torch.zeros(6, 6)
    for _ in range(draws):
        owners = perm_k_owners(6, 3, rng)
        together += owners.unsqueeze(0) == owners.unsqueeze(1)
    apart = together[~torch.eye(6, dtype=torch.bool)] / draws
    assert (apart - 1 / 5).abs().max() < 5 * (0.16 / draws) ** 0.5


def test_the_aggregation_sketch_is_unbiased_and_its_second_moment_is_n_times_the_norm():
    """Theorem 4, eq. (11), exactly: over all 720 permutations."""
    x = torch.randn(6, generator=generator(), dtype=torch.float64)
    for client in range(3):
        sketched = torch.stack([perm_k(x, owners, client, 3) for owners in every_owners(6, 3)])
        torch.testing.assert_close(sketched.mean(0), x)
        torch.testing.assert_close(sketched.square().sum(1).mean(), 3 * x.square().sum())


def test_the_mean_of_sketches_has_the_second_moment_and_variance_of_theorem_4():
    """Equations (12) and (13), with equality, over all permutations."""
    y = torch.randn(3, 6, generator=generator(1), dtype=torch.float64)
    means = torch.stack([perm_k_mean(y, owners) for owners in every_owners(6, 3)])
    torch.testing.assert_close(means.mean(0), y.mean(0))
    torch.testing.assert_close(means.square().sum(1).mean(), y.square().sum() / 3)
    variance = (means - y.mean(0)).square().sum(1).mean()
    torch.testing.assert_close(variance, y.square().sum() / 3 - y.mean(0).square().sum())


def test_the_mean_is_that_of_the_sketches_written_out():
    y, owners = torch.randn(4, 10, generator=generator(2)), perm_k_owners(10, 4, generator(3))
    written_out = sum(perm_k(y[i], owners, i, 4) for i in range(4)) / 4
    assert torch.equal(perm_k_mean(y, owners), written_out)
    same = y[:1].expand(4, -1)
    assert torch.equal(perm_k_mean(same, owners), y[0])  # clients that agree lose nothing


def test_random_pruning_is_biased_by_the_kept_share_and_never_longer():
    x, rng = torch.randn(10, generator=generator()), generator(1)
    pruned = torch.stack([rand_k(x, 3, rng) for _ in range(20_000)])
    assert ((pruned != 0).sum(1) == 3).all()
    assert all(torch.equal(row[row != 0], x[row != 0]) for row in pruned[:100])  # not scaled up
    torch.testing.assert_close(pruned.mean(0), 0.3 * x, rtol=0, atol=0.02 * float(x.abs().max()))
    assert (pruned.square().sum(1) <= x.square().sum()).all()
    assert torch.equal(rand_k(x, 10, rng), x)
    assert not rand_k(x, 0, rng).any()
    with pytest.raises(ValueError, match="count is 11, allowed: 0 to 10"):
        rand_k(x, 11, rng)


class Quadratics:
    """``f_i(w) = ½ wᵀ A_i w - b_iᵀ w`` of n clients, in closed form."""

    def __init__(self, num_clients=5, dimension=10, interpolation=False, seed=0):
        rng = generator(seed)
        roots = torch.randn(num_clients, dimension, dimension, generator=rng, dtype=torch.float64)
        self.a = roots @ roots.mT / dimension + 0.1 * torch.eye(dimension, dtype=torch.float64)
        self.b = torch.randn(num_clients, dimension, generator=rng, dtype=torch.float64) * (not interpolation)
        self.smoothness = torch.linalg.eigvalsh(self.a)[:, -1]

    def gradients(self, w):  # (n, d) → (n, d)
        return torch.einsum("nij,nj->ni", self.a, w) - self.b

    def gradient(self, w):
        return self.a.mean(0) @ w - self.b.mean(0)

    def gap(self, w):
        """f(w) less the mean of the clients' own minima."""
        value = torch.einsum("i,nij,j->n", w, self.a, w) / 2 - self.b @ w
        minima = -torch.einsum("ni,ni->n", self.b, torch.linalg.solve(self.a, self.b)) / 2
        return float((value - minima).mean())

    def smallest_squared_gradient(self, num_iterations, runs=16, step_size=None, count=None):
        """``min_k E |∇f(w^k)|²`` over so many iterations, the expectation over so many runs; where they end; w^0."""
        step_size = step_size or theorem1_step_size(self.smoothness, num_iterations)
        start = torch.ones(self.a.shape[1], dtype=torch.float64) * 2
        mean = torch.zeros(num_iterations, dtype=torch.float64)
        for seed in range(runs):
            w, rng = start, generator(1000 + seed)
            for k in range(num_iterations):
                mean[k] += self.gradient(w).square().sum() / runs
                w = iterate(w, self.gradients, step_size, rng, len(self.a), count)
        return float(mean.min()), w, start


@pytest.mark.parametrize("interpolation", [True, False])
def test_the_sketched_gradient_obeys_lemma_2(interpolation):
    """``E |g|² <= 2 L_max (f(w) - mean inf f_i)``; for clients that disagree ``inf f`` in its place would be wrong."""
    problem = Quadratics(interpolation=interpolation)
    for seed in range(20):
        w = torch.randn(10, generator=generator(seed), dtype=torch.float64)
        second_moment = float(problem.gradients(w.expand(5, -1)).square().sum()) / 5  # Theorem 4
        assert second_moment <= 2 * float(problem.smoothness.max()) * problem.gap(w)


@pytest.mark.parametrize("interpolation", [True, False])
@pytest.mark.parametrize("num_iterations", [10, 100, full(1000)])
def test_theorem_1_holds_on_quadratics(interpolation, num_iterations):
    problem = Quadratics(interpolation=interpolation)
    smallest, _, start = problem.smallest_squared_gradient(num_iterations, runs=4)
    step_size = theorem1_step_size(problem.smoothness, num_iterations)
    bound = theorem1_bound(problem.gap(start), problem.smoothness, step_size, num_iterations)
    assert smallest <= bound
    assert bound <= 6 * problem.gap(start) / (step_size * num_iterations)  # as the text goes on: (1 + 1/K)^K < 3


@pytest.mark.full
def test_the_bound_falls_with_the_root_of_the_iterations_and_so_does_the_gradient():
    """The optimum, A⁻¹ b, is known: the iterates come as near to it as the rate says, and no step size does better."""
    problem = Quadratics()
    measured = {}
    for num_iterations in (100, 10_000):
        step_size = theorem1_step_size(problem.smoothness, num_iterations)
        gap = problem.gap(torch.ones(10, dtype=torch.float64) * 2)
        bound = theorem1_bound(gap, problem.smoothness, step_size, num_iterations)
        smallest, last, _ = problem.smallest_squared_gradient(num_iterations, runs=2)
        optimum = torch.linalg.solve(problem.a.mean(0), problem.b.mean(0))
        measured[num_iterations] = bound, smallest, float((last - optimum).norm())
    assert measured[100][0] / measured[10_000][0] == pytest.approx(10, rel=0.02)  # √(10000 / 100)
    assert measured[10_000][1] < measured[100][1] / 10
    assert measured[10_000][2] < 0.3


def test_clients_that_share_an_optimum_reach_it_and_pruned_ones_too():
    problem = Quadratics(interpolation=True)
    for count in (None, 7):
        _, last, start = problem.smallest_squared_gradient(400, runs=1, step_size=0.2, count=count)
        assert float(last.norm()) < 1e-6 * float(start.norm())


@pytest.mark.full
def test_pruning_keeps_clients_that_disagree_from_the_optimum():
    """The sketch of Definition 1 is biased: what Theorem 3 leaves out (b_i = 0 there) is not a detail."""
    problem = Quadratics()
    optimum = torch.linalg.solve(problem.a.mean(0), problem.b.mean(0))
    _, dense, _ = problem.smallest_squared_gradient(3000, runs=1, step_size=0.01)
    _, pruned, _ = problem.smallest_squared_gradient(3000, runs=1, step_size=0.01, count=7)
    assert float((dense - optimum).norm()) < 0.35 * float(optimum.norm())
    assert float((pruned - optimum).norm()) > 0.6 * float(optimum.norm())
