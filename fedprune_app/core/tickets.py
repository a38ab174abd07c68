"""Winning tickets: masks, the choice among several tickets, and nested sub-models by iterative pruning.

Source: Fed-LTP, section 4; Frankle and Carbin, "The Lottery Ticket Hypothesis", ICLR 2019.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from fedprune_app.core.masks import Masks, keep_count, relative_threshold_masks
from fedprune_app.core.named import TensorDict, Tensors, Values
from fedprune_app.core.scores import magnitude_mask, smallest

# A ticket with 0.01 less accuracy is drawn with 1/e of the probability.
TEMPERATURE = 0.01


@dataclass(frozen=True)
class Ticket:
    """A pruned network: the values to start from, the masks, and the trained weights from which they were chosen."""

    start: Tensors
    trained: Tensors
    masks: Tensors
    about: Values = field(default_factory=dict)  # plain values, for the record


def ticket_masks(weights: Tensors, density: float, rule: str = "quantile") -> Masks:
    """Return the masks of trained weights, per tensor, by one of two rules.

    * ``quantile`` keeps exactly ``keep_count(n, density)`` weights of largest magnitude, so that ``p = 1 - Pr``
      (equation 11).
    * ``relative-threshold`` keeps ``|w| > Pr max |w|`` (equation 9 as printed) with ``Pr = 1 - density``. The number of
      kept weights then depends on the weights.

    ``ValueError`` for NaN.
    """
    if rule == "quantile":
        return {name: magnitude_mask(weight, density) for name, weight in weights.items()}
    return relative_threshold_masks(weights, 1 - density)


def selection_probabilities(counts: Sequence[float], total: int, temperature: float = TEMPERATURE) -> list[float]:
    """Return each ticket's probability of being chosen, from its number of correct predictions of ``total``.

    They are the softmax of accuracies over ``temperature``. Equation 10 as printed is the softmax of the counts
    themselves, which nearly always chooses the best ticket. The largest exponent is 0, so nothing overflows.

    >>> [round(share, 2) for share in selection_probabilities([90, 80], total=100, temperature=0.1)]
    [0.73, 0.27]
    """
    best = max(counts)
    powers = np.exp([(count - best) / (total * temperature) for count in counts])  # exact differences, never positive
    return [float(power) for power in powers / powers.sum()]


def nested_levels(weights: Tensors, masks: Tensors, num_models: int, pruned_share: float) -> TensorDict:
    """Return how many of the nested sub-models ``M_1 ⊃ M_2 ⊃ ... ⊃ M_K`` keep each coordinate.

    The numbers are int16, and 0 outside ``masks``. ``M_i`` keeps ``keep_count(kept, (1 - pruned_share)^i)`` of a
    tensor's ``kept`` coordinates, those of largest magnitude. This is equation 15, so each sub-model loses a
    ``pruned_share`` of the survivors. Equation 12 with rule (9), read literally, removes nothing after its first pass,
    since all survivors exceed the threshold. :func:`at_level` returns the masks. ``ValueError`` for NaN.
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


def at_level(levels: Tensors, model: int) -> Masks:
    """Return the masks of sub-model number ``model``; numbers start at 1."""
    return {name: level >= model for name, level in levels.items()}
