from __future__ import annotations

import torch
from torch.distributions import Normal, kl

from fedprune_app.models.variational import experts_by_class, kl_divergence, product_with_standard_normal


def gaussians(count, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(count, 4, generator=rng), torch.rand(count, 4, generator=rng) + 0.2


def test_the_divergence_is_that_of_torch_and_zero_between_equals():
    (mean_p, std_p), (mean_q, std_q) = gaussians(5), gaussians(5, 1)
    expected = kl.kl_divergence(Normal(mean_p, std_p), Normal(mean_q, std_q)).sum(-1)
    torch.testing.assert_close(kl_divergence(mean_p, std_p, mean_q, std_q), expected)
    assert kl_divergence(mean_p, std_p, mean_p, std_p).abs().max() < 1e-6
    assert not torch.allclose(expected, kl_divergence(mean_q, std_q, mean_p, std_p))


def test_a_product_of_gaussians_is_their_densities_multiplied():
    mean, std = gaussians(3)
    precision, weighted = experts_by_class(mean, std, torch.tensor([1, 1, 1]), 2)
    joint_mean, joint_std = product_with_standard_normal(precision, weighted)
    x = torch.linspace(-2, 2, 9, dtype=torch.float64).view(-1, 1)
    factors = [Normal(m.double(), s.double()).log_prob(x) for m, s in zip(mean, std, strict=True)]
    multiplied = sum(factors) + Normal(0.0, 1.0).log_prob(x)
    joint = Normal(joint_mean[1], joint_std[1]).log_prob(x)
    torch.testing.assert_close(multiplied - multiplied[:1], joint - joint[:1])  # up to scale


def test_a_class_without_examples_stays_standard_normal_and_parts_add_up():
    mean, std = gaussians(6)
    labels = torch.tensor([0, 2, 2, 0, 2, 2])
    whole = experts_by_class(mean, std, labels, 3)
    parts = [experts_by_class(mean[s], std[s], labels[s], 3) for s in (slice(0, 2), slice(2, 6))]
    for total, first, second in zip(whole, *parts, strict=True):
        torch.testing.assert_close(total, first + second)
    joint_mean, joint_std = product_with_standard_normal(*whole)
    assert joint_mean[1].eq(0).all()
    assert joint_std[1].eq(1).all()
    assert joint_std[2].max() < 1
