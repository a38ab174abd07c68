"""FedP3's theory as functions: sketches, the iteration of Algorithm 4, and what Theorem 1 says of it.

Yi, Gazagnadou, Richtárik, Lyu, "FedP3", ICLR 2024, Definitions 1 and 2, Algorithm 4, Theorem 1. Models are vectors
(d,), those of n clients together (n, d).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from fedprune_app.core.fedp3 import perm_k_owners


def perm_k(vector: Tensor, owners: Tensor, client: int, num_clients: int) -> Tensor:
    """Return ``S_i x``: n times the client's own coordinates, and 0 elsewhere; unbiased, ``E |S_i x|² = n |x|²``."""
    return torch.where(owners == client, num_clients * vector, 0)


def perm_k_mean(vectors: Tensor, owners: Tensor) -> Tensor:
    """Return ``(1/n) Σ_i S_i y_i`` for vectors (n, d): every coordinate comes from exactly one client, its owner."""
    return vectors.gather(0, owners.unsqueeze(0)).squeeze(0)


def rand_k(vector: Tensor, count: int, rng: torch.Generator) -> Tensor:
    """Return ``P x``: ``count`` coordinates, drawn uniformly, keep their values, and the others are 0.

    The sketch is biased, ``E P x = (count/d) x``. Kept values are not scaled up, so that a pruned model is part of the
    model. Source: Definition 1, with the uniform sampling of appendix C.4.
    """
    if not 0 <= count <= vector.numel():
        raise ValueError(f"count is {count}, allowed: 0 to {vector.numel()}")
    pruned = torch.zeros_like(vector)
    kept = torch.randperm(vector.numel(), generator=rng)[:count]
    pruned[kept] = vector[kept]
    return pruned


def iterate(
    model: Tensor,
    gradients: Callable[[Tensor], Tensor],
    step_size: float,
    rng: torch.Generator,
    num_clients: int,
    count: int | None = None,
) -> Tensor:
    """Return the model after one iteration of Algorithm 4.

    1. Prune each client's model to ``count`` coordinates (None: do not prune).
    2. Take a step of ``step_size``.
    3. Take each coordinate from its owner (the mean of the scaled own coordinates).

    ``gradients`` takes the clients' models (n, d) to their gradients (n, d).
    """
    dimension = model.numel()
    kept = torch.ones(num_clients, dimension, dtype=model.dtype)
    if count is not None:
        kept = torch.stack([rand_k(row, count, rng) for row in kept])
    pruned = kept * model  # P_i w
    updated = pruned - step_size * kept * gradients(pruned)  # u_i, line 6
    return perm_k_mean(updated, perm_k_owners(dimension, num_clients, rng))


def theorem1_step_size(smoothness: Tensor, num_iterations: int) -> float:
    """Return the largest step size of Theorem 1 for clients of smoothness L_i (n,): min{1/L_max, 1/√(L̄ L_max K)}."""
    largest, mean = float(smoothness.max()), float(smoothness.mean())
    return min(1 / largest, 1 / math.sqrt(mean * largest * num_iterations))


def theorem1_bound(gap: float, smoothness: Tensor, step_size: float, num_iterations: int) -> float:
    """Return the bound on ``min_k E |∇f(w^k)|²`` after K iterations without pruning, equation (3).

    ``gap`` is ``f(w^0) - (1/n) Σ_i inf f_i``. The text has ``inf f`` there. But Lemma 1 bounds each client's gradient,
    and so needs each client's own infimum. The two agree where one point minimises all.
    """
    growth = 1 + float(smoothness.mean()) * float(smoothness.max()) * step_size**2
    return 2 * growth**num_iterations / (step_size * num_iterations) * gap
