"""Diagonal Gaussians: divergence, and products (which are Gaussians again, up to scale)."""

from __future__ import annotations

import torch
from torch import Tensor


def kl_divergence(mean_p: Tensor, std_p: Tensor, mean_q: Tensor, std_q: Tensor) -> Tensor:
    """KL(p ‖ q) per row, summed over the last dimension; std are standard deviations, above 0."""
    ratio = (std_p / std_q).square()
    apart = ((mean_p - mean_q) / std_q).square()
    return 0.5 * (ratio + apart - 1 - ratio.log()).sum(-1)


def experts_by_class(mean: Tensor, std: Tensor, labels: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Products of the Gaussians (N, d) of each class, as (precision, precision times mean), both float64 (C, d).

    These two add up over factors; a class without factors has 0 for both.
    """
    precision = std.double().square().reciprocal()
    total = torch.zeros(num_classes, mean.shape[1], dtype=torch.float64, device=mean.device)
    return (
        total.index_add(0, labels, precision),
        total.index_add(0, labels, precision * mean.double()),
    )


def product_with_standard_normal(precision: Tensor, weighted: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of a product, as :func:`experts_by_class` gives it, with one more factor N(0, 1)."""
    precision = precision + 1
    return weighted / precision, precision.rsqrt()
