"""Variational networks encode an image as a Gaussian and classify draws from it (FedCR's)."""

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LATENT = 256
_SHIFT = 5.0  # σ = softplus(output - 5): an untrained encoder has a small σ


class Prior(nn.Module):
    """A prior is, per class, the Gaussian to which encoders are drawn: buffers ``mean`` and ``std``, (C, latent)."""

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
    """A variational network has an encoder (all layers but the last two), a linear head, and a prior.

    The prior takes no part in the forward pass. Without ``noise`` the logits are those of the mean code. With ``noise``
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
        return mean, F.softplus(raw - _SHIFT)

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
