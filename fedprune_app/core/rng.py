"""Randomness as an argument: one generator per (seed, role, partition, round), equal on every machine."""

from __future__ import annotations

import hashlib

import numpy as np
import torch


def derive_seed(seed: int, role: str, partition: int = 0, round: int = 0) -> int:
    """A 63-bit seed from a run's seed and what the randomness is for; distinct uses get unrelated streams."""
    text = f"{seed}/{role}/{partition}/{round}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1


def generator(seed: int, role: str, partition: int = 0, round: int = 0) -> torch.Generator:
    """A CPU ``torch.Generator`` for one use (``role``) by one client in one round."""
    return torch.Generator().manual_seed(derive_seed(seed, role, partition, round))


def numpy_generator(seed: int, role: str, partition: int = 0, round: int = 0) -> np.random.Generator:
    """The numpy counterpart of :func:`generator`, for index lists."""
    return np.random.Generator(np.random.PCG64(derive_seed(seed, role, partition, round)))
