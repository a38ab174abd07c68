"""Variational networks of FedCR: encode an image as a Gaussian and classify draws from it."""

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def kl_divergence(mean_p: Tensor, std_p: Tensor, mean_q: Tensor, std_q: Tensor) -> Tensor:
    """Return KL(p ‖ q) per row, summed over the last dimension.

    ``std_p`` and ``std_q`` are standard deviations, above 0.
    """
    ratio = (std_p / std_q).square()
    distance = ((mean_p - mean_q) / std_q).square()
    return 0.5 * (ratio + distance - 1 - ratio.log()).sum(-1)


def experts_by_class(mean: Tensor, std: Tensor, labels: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Return the product of the Gaussians (N, d) of each class as (precision, precision times mean).

    Both are float64 (C, d), and sums over the factors of a product. A class without factors has 0 for both.
    """
    precision = std.double().square().reciprocal()
    total = torch.zeros(num_classes, mean.shape[1], dtype=torch.float64, device=mean.device)
    return (
        total.index_add(0, labels, precision),
        total.index_add(0, labels, precision * mean.double()),
    )


def product_with_standard_normal(precision: Tensor, weighted: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of a product with one more factor N(0, 1).

    ``precision`` and ``weighted`` are the product as :func:`experts_by_class` returns it.
    """
    precision = precision + 1
    return weighted / precision, precision.rsqrt()


# --- the network ------------------------------------------------------------------------------------------------------


LATENT = 256


class Prior(nn.Module):
    """Per class, the Gaussian to which encoders are drawn: buffers ``mean`` and ``std``, (C, latent)."""

    mean: Tensor
    std: Tensor

    def __init__(self, num_classes: int, latent: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(num_classes, latent))
        self.register_buffer("std", torch.ones(num_classes, latent))

    def reset_parameters(self) -> None:
        """Set N(0, 1) for all classes."""
        self.mean.zero_()
        self.std.fill_(1.0)


class Variational(nn.Sequential):
    """An encoder (all layers but the last two), a linear head, and a prior.

    The prior has no part in the forward pass. Without ``noise`` the logits are those of the mean code. With ``noise``
    (S, latent) they are the logarithm of the mean prediction over S draws ``μ + σ ε`` (the same ε for all images).
    """

    prior: Prior

    def __init__(self, encoder: OrderedDict[str, nn.Module], num_classes: int, latent: int) -> None:
        number = sum(isinstance(layer, nn.Linear) for layer in encoder.values())
        head = nn.Linear(latent, num_classes)
        super().__init__(
            OrderedDict([*encoder.items(), (f"fc{number + 1}", head), ("prior", Prior(num_classes, latent))])
        )
        self.noise: Tensor | None = None

    def encode(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return μ and σ of images, both (N, latent)."""
        for layer in list(self)[:-2]:
            images = layer(images)
        mean, raw = images.chunk(2, dim=1)
        return mean, F.softplus(raw)

    def classify(self, codes: Tensor) -> Tensor:
        """Return the logits (..., C) of codes (..., latent)."""
        logits: Tensor = self[-2](codes)
        return logits

    def forward(self, images: Tensor) -> Tensor:
        mean, std = self.encode(images)
        if self.noise is None:
            return self.classify(mean)
        codes = mean + std * self.noise.to(mean.device).unsqueeze(1)  # (S, N, latent)
        return self.classify(codes).softmax(-1).mean(0).log()
