"""Scores say which entries of one matrix to prune, by the matrix and its inputs: magnitude, Wanda, N:M. True = kept."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedprune_app.core.masks import Masks, keep_count, kth_smallest, relative_threshold_masks

# The score of what was pruned before is below all others.
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

    Of equal scores the later ones are kept. ``ValueError`` unless 0 < n <= m and m divides the number of columns.

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

    ``weight`` is one tensor. Of equal weights the one at the lowest flat index goes. ``ValueError`` unless exactly one
    of ``density`` and ``n_of_m`` is given.
    """
    scores = weight.detach().abs().float()
    if n_of_m is not None and density is None:
        return n_of_m_mask(scores, n_of_m)
    return ~smallest(scores, scores.numel() - keep_count(scores.numel(), one_target(density, n_of_m)))


def wanda_mask(weight: Tensor, input_norms: Tensor, density: float | None = None, n_of_m: NOfM | None = None) -> Tensor:
    """Return Wanda's mask, which removes the smallest ``|w| · ‖x_j‖`` of every row; weights are not updated.

    ``weight`` is (out, in), ``input_norms`` (in,) up to a common factor. Each row keeps ``in - ⌊in · sparsity⌋``
    weights. Of equal weights the one at the lowest column goes. Of a matrix that was pruned before, each row loses its
    zeros, and of what is still missing its share by its other weights: so masks only shrink. ``ValueError`` unless
    exactly one of ``density`` and ``n_of_m`` is given.

    Source: Sun et al., "A Simple and Effective Pruning Approach for Large Language Models", ICLR 2024, section 3.
    """
    scores = weight.detach().abs().float() * input_norms.float()  # (out, in) * (in,)
    zeros = weight.detach() == 0
    scores = scores.masked_fill(zeros, PRUNED)  # first, also where an input was never seen
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
    """Return how many of the ``missing`` weights go in the rows or columns up to each, in proportion to the weights.

    ``alive`` are the numbers of weights that are not 0 up to each. Shares are rounded up, so that no row or column
    keeps more than it has.
    """
    return -(-missing * alive // alive[-1].clamp(min=1))


def one_target(density: float | None, n_of_m: NOfM | None) -> float:
    """Return ``density`` if it is given and ``n_of_m`` is not; raise ``ValueError`` otherwise."""
    if density is None or n_of_m is not None:
        raise ValueError(f"density is {density} and n_of_m is {n_of_m}, allowed: exactly one of them")
    return density


# A ticket that is right of one percent fewer images is drawn with 1/e of the probability.
TEMPERATURE = 0.01


@dataclass(frozen=True)
class Ticket:
    """A ticket is a pruned network: the values to start from, the masks, and the trained weights that gave these."""

    start: Mapping[str, Tensor]
    trained: Mapping[str, Tensor]
    masks: Mapping[str, Tensor]
    about: Mapping[str, Any] = field(default_factory=dict)  # plain values, for the record


def ticket_masks(weights: Mapping[str, Tensor], density: float, rule: str = "quantile") -> Masks:
    """Return the masks of trained weights, tensor by tensor, by one of two rules.

    * ``quantile`` keeps exactly ``keep_count(n, density)`` weights of largest magnitude, so that ``p = 1 - Pr``
      (equation 11).
    * ``relative-threshold`` keeps ``|w| > Pr max |w|`` (equation 9 as printed) with ``Pr = 1 - density``. The number of
      kept weights then depends on the weights.

    ``ValueError`` for NaN.
    """
    if rule == "quantile":
        return {name: magnitude_mask(weight, density) for name, weight in weights.items()}
    return relative_threshold_masks(weights, 1 - density)


def selection_probabilities(counts: Sequence[int], total: int, temperature: float = TEMPERATURE) -> list[float]:
    """Return the probability with which each ticket is taken, given its number of correct predictions of ``total``.

    They are the softmax of accuracies over ``temperature``. Equation 10 as printed is the softmax of the counts
    themselves: it all but always takes the best ticket. The largest exponent is 0, so nothing overflows.

    >>> [round(share, 2) for share in selection_probabilities([90, 80], total=100, temperature=0.1)]
    [0.73, 0.27]
    """
    best = max(counts)
    powers = np.exp([(count - best) / (total * temperature) for count in counts])  # exact differences, never positive
    return [float(power) for power in powers / powers.sum()]


def nested_levels(
    weights: Mapping[str, Tensor], masks: Mapping[str, Tensor], num_models: int, pruned_share: float
) -> dict[str, Tensor]:
    """Return how many of the nested sub-models ``M_1 ⊃ M_2 ⊃ ... ⊃ M_K`` keep each coordinate.

    The numbers are int16, and 0 outside ``masks``. ``M_i`` keeps ``keep_count(kept, (1 - pruned_share)^i)`` of a
    tensor's ``kept`` coordinates, those of largest magnitude. This is equation 15, so each sub-model loses a
    ``pruned_share`` of the survivors. Equation 12 with rule (9), read literally, removes nothing after its first pass,
    since all survivors exceed the threshold. :func:`at_level` gives the masks. ``ValueError`` for NaN.
    """
    levels = {}
    for name, mask in masks.items():
        scores = torch.where(mask, weights[name].detach().abs().float(), -1.0)
        num_kept = int(mask.count_nonzero())
        levels[name] = torch.zeros(mask.shape, dtype=torch.int16)
        for i in range(1, num_models + 1):
            count = keep_count(num_kept, (1 - pruned_share) ** i)
            levels[name] += ~smallest(scores, scores.numel() - count)
    return levels


def at_level(levels: Mapping[str, Tensor], model: int) -> Masks:
    """Return the masks of sub-model number ``model``; numbers start at 1."""
    return {name: level >= model for name, level in levels.items()}
