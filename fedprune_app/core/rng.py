"""Seeds and generators: one stream per (seed, role, partition, round), equal on every machine."""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def derive_seed(seed: int, role: str, partition: int = 0, round: int = 0) -> int:
    """Return a 63-bit seed for one use of a run's seed; distinct uses have unrelated streams.

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


def global_states() -> list[object]:
    """Return the states of the global generators of torch, NumPy and Python, which change with every draw."""
    on_gpu = [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    of_numpy = np.random.get_state(legacy=False)["state"]
    states = [state.numpy().tobytes() for state in (torch.get_rng_state(), *on_gpu)]
    return [*states, of_numpy["key"].tobytes(), of_numpy["pos"], random.getstate()]


@contextmanager
def global_draws_of(seed: int) -> Iterator[None]:
    """Seed the global generators within the context, for code that draws from them: dropout, a user's network or data.

    These are the generators of torch, NumPy and Python. Those of the CPU are restored afterwards.
    """
    # torch.manual_seed formats the whole stack for a missing device, which takes as long as a small step
    cpu_generator = torch.default_generator
    state, numpy_state, python_state = cpu_generator.get_state(), np.random.get_state(), random.getstate()
    cpu_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)
    try:
        yield
    finally:
        cpu_generator.set_state(state)
        np.random.set_state(numpy_state)
        random.setstate(python_state)
