"""Schedules: how a quantity falls over the rounds of a run."""

import math


def cosine_fraction(initial: float, round: int, num_rounds: int) -> float:
    """Return the cosine annealing ``initial / 2 * (1 + cos(π round / num_rounds))``.

    Rounds count from 0. Round 0 returns ``initial``; the last one, ``num_rounds - 1``, a value still above 0.
    ``ValueError`` unless ``initial`` is in [0, 1], ``num_rounds`` at least 1 and ``round`` in [0, num_rounds).

    Source: Dis-PFL, Algorithm 2 (prune rate α_t), after Liu et al. 2021.

    >>> [round(cosine_fraction(0.5, number, num_rounds=4), 3) for number in range(4)]
    [0.5, 0.427, 0.25, 0.073]
    """
    if not (0.0 <= initial <= 1.0 and 0 <= round < num_rounds):
        raise ValueError(
            f"initial fraction is {initial} and round is {round} of {num_rounds}, allowed: 0 to 1, and a round below"
        )
    return initial / 2 * (1 + math.cos(math.pi * round / num_rounds))
