"""The randomness that protects comes from a seed, for runs that can be repeated, or from the operating system.

A seeded run simulates the mechanism: whoever knows the seed can subtract the noise. ``dp.secure-rng`` draws from the
operating system, and its results are not reproducible. docs/privacy.md says when to use which.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fedprune_app.core import rng


class Noise(Protocol):
    """A noise source is a stream of independent draws on the CPU."""

    def uniform(self, size: int) -> Tensor:
        """Draw float64 in [0, 1), with 53 bits."""

    def gaussian(self, size: int) -> Tensor:
        """Draw standard normal float32."""

    def laplace(self, scale: float) -> float:
        """Draw one number from the Laplace distribution of this scale."""


class Seeded(Noise):
    """A seeded source gives draws that a seed and a purpose determine."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def uniform(self, size: int) -> Tensor:
        return torch.rand(size, generator=self.generator, dtype=torch.float64)

    def gaussian(self, size: int) -> Tensor:
        return torch.randn(size, generator=self.generator)

    def laplace(self, scale: float) -> float:
        return _laplace(float(self.uniform(1)), scale)


class Secure(Noise):
    """A secure source draws from the operating system's cryptographic generator."""

    def uniform(self, size: int) -> Tensor:
        bits = np.frombuffer(os.urandom(8 * size), dtype=np.uint64) >> np.uint64(11)
        return torch.from_numpy(bits * 2.0**-53)

    def gaussian(self, size: int) -> Tensor:
        """Draw standard normal float32, each as half the sum of four normal numbers.

        The gaps between floating-point numbers then tell nothing that can be computed (Holohan and Braghin 2021).
        """
        pairs = 2 * size
        radius = torch.sqrt(-2 * torch.log1p(-self.uniform(pairs)))  # Box and Muller
        angle = 2 * math.pi * self.uniform(pairs)
        normals = torch.cat([radius * torch.cos(angle), radius * torch.sin(angle)]).view(4, size)
        return (normals.sum(0) / 2).float()

    def laplace(self, scale: float) -> float:
        return _laplace(float(self.uniform(1)), scale)


def _laplace(uniform: float, scale: float) -> float:
    """Return the inverse of the Laplace distribution function at ``uniform`` in [0, 1)."""
    centred = uniform + 2.0**-54 - 0.5  # never -0.5, whose logarithm is infinite
    return -scale * math.copysign(math.log1p(-2 * abs(centred)), centred)


def noise_source(
    secure: bool, seed: int, role: str, partition: int, round: int, inputs: Mapping[str, Tensor], settings: str
) -> Noise:
    """Return the randomness for one release.

    Seeded draws depend on everything that goes into the release but the data: on ``inputs`` (the tensors from which the
    release starts) and ``settings``. A round repeated after a resume then gives the same result, to the bit. A round
    repeated from *another* model gets other noise: two results under one noise would give their difference away.
    """
    if secure:
        return Secure()
    digest = hashlib.sha256(settings.encode())
    for name, tensor in sorted(inputs.items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return Seeded(rng.generator(seed, f"noise of {role} {digest.hexdigest()}", partition, round))


def noisy_count(count: int, scale: float, noise: Noise) -> int:
    """Return a count of examples plus Laplace noise, as a whole number.

    The result can be below 0, or above every possible count.
    Rounding costs no privacy, and the low bits of a floating-point sum stay here (Mironov 2012).
    """
    return round(count + noise.laplace(scale))
