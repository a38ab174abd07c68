"""An empirical lower bound on ε from one run, and the attack that earns it: which canaries were in a client's data?

Steinke, Nasr, Jagielski, "Privacy Auditing with One (1) Training Run", NeurIPS 2023 (arXiv 2305.08846). Each of m
canaries is in or out by a coin of its own. Whoever sees the releases alone guesses some of the coins. (ε, δ)-DP limits
how many guesses can be right, whatever the attack is: an attack that is weak gives a small bound, never a wrong one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property

import numpy as np
import torch
from scipy.stats import binom
from torch import Tensor

GRID = 10.0 ** np.arange(-3, 8.01, 0.25)  # of λ, in units of the mean squared norm of a canary's gradient


# --- the bound --------------------------------------------------------------------------------------------------------


def p_value(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """The most that the probability of so many correct guesses, or more, can be where (ε, δ)-DP holds.

    Theorem 3.1 of the paper, for r ``guesses`` of m ``canaries``, a number that was fixed before, and v ``correct``:
    ``f(v) + 2 m δ max_{1 <= i <= m} (f(v - i) - f(v)) / i`` with ``f(v) = P[Binomial(r, e^ε / (1 + e^ε)) >= v]``.
    Raises ``ValueError`` unless 0 <= v <= r <= m, ε >= 0 and 0 <= δ <= 1.
    """
    if not 0 <= correct <= guesses <= canaries:
        raise ValueError(
            f"{correct} correct of {guesses} guesses on {canaries} canaries, allowed: each at most the next"
        )
    if not (epsilon >= 0 and 0 <= delta <= 1):
        raise ValueError(f"epsilon is {epsilon} and delta is {delta}, allowed: at least 0, and 0 to 1")
    tail = _tails(guesses, epsilon)
    if correct == 0:
        return 1.0
    i = np.arange(1, correct + 1)  # beyond, f is 1 and the quotient falls
    slope = ((tail[correct - i] - tail[correct]) / i).max()
    return float(min(1.0, tail[correct] + 2 * canaries * delta * slope))


def _tails(guesses: int, epsilon: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """``f(v)`` for v = 0 to r."""
    accuracy = 1 / (1 + math.exp(-epsilon))
    tails: np.ndarray[tuple[int], np.dtype[np.float64]] = binom.sf(np.arange(-1, guesses), guesses, accuracy)
    return tails


def lower_bound(canaries: int, guesses: int, correct: int, delta: float, confidence: float = 0.95) -> float:
    """The largest ε that so many correct guesses rule out: with this confidence the true one is not below it.

    0 where nothing is ruled out; never inf. Raises ``ValueError`` as :func:`p_value`, and for a confidence not
    between 0 and 1.
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence is {confidence}, allowed: above 0 and below 1")

    def refuted(epsilon: float) -> bool:
        return p_value(canaries, guesses, correct, epsilon, delta) < 1 - confidence

    low, high = 0.0, 1.0
    if not refuted(low):
        return 0.0
    while refuted(high):
        low, high = high, 2 * high
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


def guesses_of(scores: Tensor, number: int) -> Tensor:
    """+1 (in) for the half of ``number`` with the largest scores (m,), -1 (out) for that with the smallest, else 0.

    Raises ``ValueError`` unless ``number`` is even, from 2 to m.
    """
    if number % 2 or not 2 <= number <= len(scores):
        raise ValueError(f"guesses is {number}, allowed: an even number from 2 to {len(scores)}")
    order = torch.argsort(scores, stable=True)
    guesses = torch.zeros(len(scores), dtype=torch.int64)
    guesses[order[-(number // 2) :]] = 1
    guesses[order[: number // 2]] = -1
    return guesses


@dataclass(frozen=True)
class Finding:
    """What an audit found: the ledger's ``claim`` at ``delta``, and how many guesses of the coins were right."""

    canaries: int
    guesses: int
    correct: int
    delta: float
    confidence: float
    claim: float

    @cached_property
    def bound(self) -> float:
        """ε is at least this, with ``confidence``."""
        return lower_bound(self.canaries, self.guesses, self.correct, self.delta, self.confidence)

    @property
    def holds(self) -> bool:
        """Whether the claim survived: nothing that was seen contradicts it."""
        return self.bound <= self.claim

    @property
    def verdict(self) -> str:
        """One line."""
        seen = f"{self.correct} of {self.guesses} guesses were right"
        if self.holds:
            return f"{seen}; ε is at least {self.bound:.3g}, which does not contradict the ledger's {self.claim:.3g}"
        return (
            f"the ledger claims ε = {self.claim:.3g} at δ = {self.delta:g}, but {seen}: "
            f"ε is at least {self.bound:.3g} (confidence {self.confidence:.1%})"
        )

    def to_dict(self) -> dict[str, float | int | bool | None]:
        """For JSON, which has no infinite number: a claim that is infinite is None."""
        claim = self.claim if math.isfinite(self.claim) else None
        return {**asdict(self), "claim": claim, "bound": self.bound, "holds": self.holds}

    @classmethod
    def of(cls, scores: Tensor, coins: Tensor, number: int, delta: float, confidence: float, claim: float) -> Finding:
        """Guess ``number`` of the coins (m,), True for in, by the scores (m,) that an attack gave them."""
        guessed = guesses_of(scores, number)
        correct = int(((guessed == 1) & coins).sum() + ((guessed == -1) & ~coins).sum())
        return cls(len(coins), number, correct, delta, confidence, claim)


JSON_KEYS = frozenset({*(each.name for each in fields(Finding)), "bound", "holds"})
"""The keys of :meth:`Finding.to_dict`."""


# --- the attack -------------------------------------------------------------------------------------------------------


class Evidence:
    """What several releases say together about the parts that ``rows`` examples have in them.

    A release is taken to be ``u = a (g_0 + Σ_i x_i g_i) + n``: an update u of the weights, the direction g_i in which
    example i pulls, how much more or less than the mean it does so, x_i of unit variance (a canary by its coin, others
    by how often they were sampled), what all have in common g_0, an unknown scale a, and noise n that is equal in all
    directions. Then the best guess of x is a ridge regression. Its strength λ (noise over signal) is what makes the
    release most likely, so neither the noise nor the learning rate need be known.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.scores = torch.zeros(rows, dtype=torch.float64)
        """The sum over releases of the posterior means of x (rows,): the larger, the likelier a canary was in."""

    def add(self, update: Tensor, directions: Tensor, others: Sequence[Tensor] = ()) -> None:
        """``update`` u (d,), ``directions`` (rows, d); what lies along ``others`` (d,), and along the mean direction,
        says nothing of single coins and is taken out. A release without any signal adds nothing."""
        basis = _orthonormal([directions.mean(0), *others])
        u, g = _outside(update, basis), _outside(directions, basis)
        gram, projections = (g @ g.T).double(), (g @ u).double()
        unit = float(gram.diagonal().mean())
        if not unit > 0 or not float(u.norm()) > 0:
            return
        noise, scale = _most_likely(
            gram / unit, projections / math.sqrt(unit), float(u.double().square().sum()), len(u)
        )
        # each release by itself: where the model is wrong and not the noise large, errors differ between releases
        system = gram / unit + noise * torch.eye(self.rows, dtype=torch.float64)
        self.scores += torch.linalg.solve(system, projections / math.sqrt(unit)) / scale


def _orthonormal(vectors: Sequence[Tensor]) -> Tensor:
    """(k, d) -> (<= k, d), an orthonormal basis of what they span."""
    stacked = torch.stack(list(vectors))
    _, values, basis = torch.linalg.svd(stacked, full_matrices=False)
    spanning: Tensor = basis[values > 1e-6 * values.max()] if float(values.max()) > 0 else basis[:0]
    return spanning


def _outside(vectors: Tensor, basis: Tensor) -> Tensor:
    """The part of each vector (..., d) that is orthogonal to an orthonormal basis (k, d)."""
    outside: Tensor = vectors - (vectors @ basis.T) @ basis
    return outside


def _most_likely(gram: Tensor, projections: Tensor, squared_norm: float, dimensions: int) -> tuple[float, float]:
    """(λ, τ) that maximise the likelihood of u ~ N(0, τ² (Gᵀ G + λ I)), given G Gᵀ (m, m), G u (m,), ‖u‖², d."""
    values, vectors = torch.linalg.eigh(gram)
    kept = values > 1e-10 * values.max()
    spectrum = values[kept].numpy()
    squares = ((vectors.T @ projections)[kept].square() / values[kept]).numpy()  # of u along each singular direction
    rest, rest_dimensions = max(squared_norm - float(squares.sum()), 0.0), dimensions - len(spectrum)
    best = (-math.inf, 1.0, 1.0)
    for noise in GRID:
        variance = spectrum + noise
        total = float((squares / variance).sum()) + rest / noise
        likelihood = -dimensions * math.log(total) - np.log(variance).sum() - rest_dimensions * math.log(noise)
        best = max(best, (float(likelihood), float(noise), math.sqrt(total / dimensions)))
    return best[1], best[2]
