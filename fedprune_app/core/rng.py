"""Randomness is an argument: one generator per (seed, role, partition, round), equal on every machine."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def derive_seed(seed: int, role: str, partition: int = 0, round: int = 0) -> int:
    """Return a 63-bit seed from a run's seed and the use of the randomness; distinct uses get unrelated streams.

    >>> derive_seed(0, "init")
    2559000112367765771
    >>> derive_seed(0, "init") == derive_seed(0, "init", partition=1)
    False
    """
    text = f"{seed}/{role}/{partition}/{round}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1


def generator(seed: int, role: str, partition: int = 0, round: int = 0) -> torch.Generator:
    """Return a CPU ``torch.Generator`` for one use (``role``) by one client in one round."""
    return torch.Generator().manual_seed(derive_seed(seed, role, partition, round))


def numpy_generator(seed: int, role: str, partition: int = 0, round: int = 0) -> np.random.Generator:
    """Return the numpy counterpart of :func:`generator`, for index lists."""
    return np.random.Generator(np.random.PCG64(derive_seed(seed, role, partition, round)))


@contextmanager
def global_draws_of(rng: torch.Generator) -> Iterator[None]:
    """Let a network that draws while it trains, as dropout does, draw by the seed of ``rng``.

    Such layers take torch's global generators. That of the CPU is afterwards as it was.
    """
    # torch.manual_seed formats the whole stack for a device that is not there, which takes as long as a small step
    cpu_generator, seed = torch.default_generator, rng.initial_seed()
    state = cpu_generator.get_state()
    cpu_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)
    try:
        yield
    finally:
        cpu_generator.set_state(state)
