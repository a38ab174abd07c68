"""An audit finds a lower bound on ε from one run, step by step, by guesses which canaries are in which noised sum.

Nasr et al., "Tight Auditing of Differentially Private Machine Learning", USENIX Security 2023; with many canaries in
one run, as in Steinke, Nasr, Jagielski, "Privacy Auditing with One (1) Training Run", NeurIPS 2023. Each canary has a
direction of its own, along which it adds the clipping norm to a sum or nothing. A guess by the likelihood ratio says
"in" above half of that norm. How often that is right bounds the noise from above, and how often canaries are drawn
bounds the sampling rate from below, by exact intervals (Clopper and Pearson 1934; of unequal chances Hoeffding 1956).
An accountant composes the steps.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from functools import cached_property

from scipy.stats import beta, norm
from torch import Tensor

from fedprune_app.privacy.accounting import Steps, epsilon


@dataclass
class Tally:
    """Counts of what was seen of noised sums along the canaries' directions, over all ``steps``.

    * ``present`` and ``absent``: how many times a canary was in a sum, and was not.
    * ``found`` and ``cleared``: how many of these were guessed so.
    * ``draws`` of ``chances``: how many times a canary was drawn for a step, of all times it could have been. There are
      no chances where every step takes all.
    """

    steps: int = 0
    present: int = 0
    found: int = 0
    absent: int = 0
    cleared: int = 0
    draws: int = 0
    chances: int = 0

    def add(self, released: Tensor, is_in: Tensor, is_drawn: Tensor) -> None:
        """Count one step. ``released`` (m,) is its noised sum along each direction, in units of the clipping norm."""
        guesses = released > 0.5
        self.steps += 1
        self.present += int(is_in.sum())
        self.found += int((guesses & is_in).sum())
        self.absent += int((~is_in).sum())
        self.cleared += int((~guesses & ~is_in).sum())
        self.draws += int(is_drawn.sum())
        self.chances += len(is_drawn)

    def step(self, confidence: float) -> Steps | None:
        """Return the step of most noise and least sampling that is not ruled out; None where any noise is possible.

        >>> tally = Tally(100, present=400, found=400, absent=600, cleared=600, draws=400, chances=1000)
        >>> [round(number, 3) for number in (tally.step(0.95).noise_multiplier, tally.step(0.95).sample_rate)]
        [0.209, 0.367]
        """
        if self.chances:
            doubt = (1 - confidence) / 3
            shares = at_least(self.found, self.present, doubt), at_least(self.cleared, self.absent, doubt)
            rate = at_least(self.draws, self.chances, doubt)
        else:  # about as many are in as out, so that the mean of both shares says more than each by itself
            number = min(self.present, self.absent)
            right = int(number * (self.found / max(self.present, 1) + self.cleared / max(self.absent, 1)))
            shares = (at_least(right, 2 * number, 1 - confidence),) * 2
            rate = 1.0
        deviations = float(norm.ppf(shares).sum())  # from "out" to "in"
        return Steps(1 / deviations, rate) if deviations > 0 else None


def at_least(count: int, of: int, doubt: float) -> float:
    """Return the lower bound of Clopper and Pearson on a probability: it is too large with probability ``doubt``.

    >>> round(at_least(10, of=10, doubt=0.05), 3)
    0.741
    """
    return float(beta.ppf(doubt, count, of - count + 1)) if count else 0.0


@dataclass(frozen=True)
class Finding:
    """An audit's result: the ledger's ``claim`` at ``delta`` for all noised sums, and what was seen."""

    canaries: int
    claim: float
    delta: float
    confidence: float
    tally: Tally

    @cached_property
    def bound(self) -> float:
        """Return the lower bound on ε, with ``confidence``, for steps of DP-SGD with Gaussian noise."""
        step = self.tally.step(self.confidence)
        return 0.0 if step is None else epsilon({step: self.tally.steps}, self.delta)

    @property
    def holds(self) -> bool:
        """Return whether the claim survived: no observation contradicts it."""
        return self.bound <= self.claim

    @property
    def verdict(self) -> str:
        if self.holds:
            return f"ε is at least {self.bound:.3g}, which does not contradict the ledger's {self.claim:.3g}"
        return (
            f"the ledger claims ε = {self.claim:.3g} at δ = {self.delta:g}, but it is at least {self.bound:.3g} "
            f"(confidence {self.confidence:.1%})"
        )

    def to_dict(self) -> dict[str, float | int | bool | None]:
        """Return the finding for JSON, which has no infinite number: a claim that is infinite is None."""
        values = {**asdict(self), **asdict(self.tally), "bound": self.bound, "holds": self.holds}
        del values["tally"]
        return {**values, "claim": self.claim if math.isfinite(self.claim) else None}


JSON_KEYS = frozenset({each.name for kind in (Finding, Tally) for each in fields(kind)} | {"bound", "holds"}) - {
    "tally"
}
