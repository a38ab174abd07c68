"""Scores of one matrix' entries for pruning, by its weights and inputs: magnitude, Wanda, N:M. True = kept."""

import torch
from torch import Tensor

from fedprune_app.core.masks import keep_count, kth_smallest

# The score of already pruned entries, below all others.
PRUNED = -1.0

# An N:M pattern is the pair (n, m): of every m neighbours in a row, n are kept.
NOfM = tuple[int, int]


def smallest(scores: Tensor, count: int) -> Tensor:
    """Return a mask that is True at the ``count`` smallest scores.

    Ties go to the lowest flat index. ``ValueError`` for NaN.

    >>> smallest(torch.tensor([3.0, 1.0, 1.0, 2.0]), count=2).tolist()
    [False, True, True, False]
    """
    flat = scores.reshape(-1)
    if bool(flat.isnan().any()):
        raise ValueError("scores hold NaN, allowed: numbers")
    if count <= 0:
        return torch.zeros(scores.shape, dtype=torch.bool, device=scores.device)
    if count >= len(flat):
        return torch.ones(scores.shape, dtype=torch.bool, device=scores.device)
    threshold = kth_smallest(flat, count)
    selection = flat < threshold
    ties = (flat == threshold).nonzero().squeeze(1)
    selection[ties[: count - int(selection.count_nonzero())]] = True
    return selection.view(scores.shape)


def n_of_m_mask(scores: Tensor, n_of_m: NOfM) -> Tensor:
    """Return the mask of the n largest of every m neighbouring scores of a row (rows, columns).

    Among equal scores the later ones are kept. ``ValueError`` unless 0 < n <= m and m divides the number of columns.

    >>> n_of_m_mask(torch.tensor([[1.0, 4.0, 3.0, 2.0]]), (2, 4)).tolist()
    [[False, True, True, False]]
    """
    check_n_of_m(n_of_m, scores.shape[1])
    n, m = n_of_m
    groups = scores.reshape(scores.shape[0], -1, m)
    order = groups.sort(dim=2, stable=True).indices
    mask = torch.ones_like(groups, dtype=torch.bool)
    return mask.scatter_(2, order[:, :, : m - n], False).view(scores.shape)


def check_n_of_m(n_of_m: NOfM, num_columns: int) -> None:
    """Raise ``ValueError`` unless 0 < n <= m and m divides ``num_columns``, the length of a row."""
    n, m = n_of_m
    if not 0 < n <= m or num_columns % m:
        raise ValueError(f"n_of_m is {n}:{m}, allowed for rows of {num_columns}: m that divides it, and n from 1 to m")


def magnitude_mask(weight: Tensor, density: float | None = None, n_of_m: NOfM | None = None) -> Tensor:
    """Return the mask of the ``keep_count(n, density)`` weights of largest magnitude, or of n of every m neighbours.

    Among equal weights the one at the lowest flat index is pruned. ``ValueError`` unless exactly one of ``density`` and
    ``n_of_m`` is given.
    """
    scores = weight.detach().abs().float()
    if n_of_m is not None and density is None:
        return n_of_m_mask(scores, n_of_m)
    return ~smallest(scores, scores.numel() - keep_count(scores.numel(), one_target(density, n_of_m)))


def wanda_mask(weight: Tensor, input_norms: Tensor, density: float | None = None, n_of_m: NOfM | None = None) -> Tensor:
    """Return Wanda's mask, which prunes the smallest ``|w| · ‖x_j‖`` of every row; weights are not updated.

    ``weight`` is (out, in), ``input_norms`` (in,) up to a common factor. Each row keeps ``in - ⌊in · sparsity⌋``
    weights. Among equal weights the one at the lowest column is pruned. In a matrix pruned before, zeros stay pruned,
    and the rows share the remaining removals in proportion to their other weights, so masks only shrink. ``ValueError``
    unless exactly one of ``density`` and ``n_of_m`` is given.

    Source: Sun et al., "A Simple and Effective Pruning Approach for Large Language Models", ICLR 2024, section 3.
    """
    scores = weight.detach().abs().float() * input_norms.float()  # (out, in) * (in,)
    zeros = weight.detach() == 0
    scores = scores.masked_fill(zeros, PRUNED)  # pruned first, also where an input was never seen
    if n_of_m is not None and density is None:
        return n_of_m_mask(scores, n_of_m)
    num_inputs = scores.shape[1]
    num_removed = keep_count(num_inputs, 1 - one_target(density, n_of_m))
    if bool(scores.isnan().any()):
        raise ValueError("scores hold NaN, allowed: numbers")
    order = scores.sort(dim=1, stable=True).indices
    if not bool(zeros.any()):
        mask = torch.ones_like(scores, dtype=torch.bool)
        return mask.scatter_(1, order[:, :num_removed], False)
    alive_counts = (~zeros).sum(dim=1).cumsum(0)
    missing_counts = missing_until(alive_counts, (num_removed * len(scores) - zeros.sum()).clamp(min=0))
    removed_counts = zeros.sum(dim=1) + missing_counts.diff(prepend=missing_counts.new_zeros(1))
    places = torch.arange(num_inputs, device=scores.device)
    return torch.empty_like(zeros).scatter_(1, order, places >= removed_counts[:, None])


def missing_until(alive: Tensor, missing: int | Tensor) -> Tensor:
    """Return how many of the ``missing`` removals fall into the rows or columns up to each, in proportion to weights.

    ``alive`` is the cumulative number of non-zero weights. Shares are rounded up, so that no row or column keeps more
    than it has.
    """
    return -(-missing * alive // alive[-1].clamp(min=1))


def one_target(density: float | None, n_of_m: NOfM | None) -> float:
    """Return ``density`` if it alone is given; raise ``ValueError`` otherwise."""
    if density is None or n_of_m is not None:
        raise ValueError(f"density is {density} and n_of_m is {n_of_m}, allowed: exactly one of them")
    return density
