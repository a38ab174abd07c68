"""Noise that a test knows beforehand, for references that draw the same numbers themselves."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedprune_app.privacy.noise import Noise


class KnownNoise(Noise):
    """The draws are those of a generator of torch's, in float64."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def uniform(self, size: int) -> Tensor:
        return torch.rand(size, generator=self.generator, dtype=torch.float64)

    def gaussian(self, size: int, device: torch.device | str = "cpu") -> Tensor:
        return torch.randn(size, generator=self.generator, dtype=torch.float64)

    def laplace(self, scale: float) -> float:
        centred = float(self.uniform(1)) - 0.5
        return -scale * math.copysign(math.log(1 - 2 * abs(centred)), centred)

    def seed(self) -> int:
        return self.generator.initial_seed()
