"""Diagonal Gaussians have a divergence and products, and the products are Gaussians again, up to scale."""

import torch
from torch import Tensor


def kl_divergence(mean_p: Tensor, std_p: Tensor, mean_q: Tensor, std_q: Tensor) -> Tensor:
    """Return KL(p ‖ q) per row, summed over the last dimension.

    ``std_p`` and ``std_q`` are standard deviations, above 0.
    """
    ratio = (std_p / std_q).square()
    distance = ((mean_p - mean_q) / std_q).square()
    return 0.5 * (ratio + distance - 1 - ratio.log()).sum(-1)


def experts_by_class(mean: Tensor, std: Tensor, labels: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Return the product of the Gaussians (N, d) of each class as (precision, precision times mean).

    Both are float64 (C, d). Both add up over the factors of a product. A class without factors has 0 for both.
    """
    precision = std.double().square().reciprocal()
    total = torch.zeros(num_classes, mean.shape[1], dtype=torch.float64, device=mean.device)
    return (
        total.index_add(0, labels, precision),
        total.index_add(0, labels, precision * mean.double()),
    )


def product_with_standard_normal(precision: Tensor, weighted: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of a product with one more factor N(0, 1).

    ``precision`` and ``weighted`` are a product as :func:`experts_by_class` gives it.
    """
    precision = precision + 1
    return weighted / precision, precision.rsqrt()
