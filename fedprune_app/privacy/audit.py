"""Auditing: a lower bound on ε from one run, by guessing which canaries were in a client's data.

Steinke, Nasr, Jagielski, "Privacy Auditing with One (1) Training Run", NeurIPS 2023 (arXiv 2305.08846). Each of m
canaries is in or out by its own coin. The attacker sees the releases alone and guesses some of the coins. (ε, δ)-DP
limits how many guesses can be right, for every attack. A weak attack gives a small bound, never a wrong one.
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
    """Return the largest probability under (ε, δ)-DP of so many correct guesses, or more.

    Theorem 3.1 of the paper, for r ``guesses`` of m ``canaries``, a number fixed in advance, and v ``correct``: ``f(v)
    + 2 m δ max_{1 <= i <= m} (f(v - i) - f(v)) / i`` with ``f(v) = P[Binomial(r, e^ε / (1 + e^ε)) >= v]``.

    >>> round(p_value(canaries=100, guesses=10, correct=9, epsilon=0.0, delta=0.0), 4)  # (1 + 10) / 2^10
    0.0107
    """
    accuracy = 1 / (1 + math.exp(-epsilon))
    tail = binom.sf(np.arange(-1, guesses), guesses, accuracy)  # f(v) for v = 0 to r
    if correct == 0:
        return 1.0
    i = np.arange(1, correct + 1)  # for larger i, f(v - i) is 1 and the quotient falls
    slope = ((tail[correct - i] - tail[correct]) / i).max()
    return float(min(1.0, tail[correct] + 2 * canaries * delta * slope))


def lower_bound(canaries: int, guesses: int, correct: int, delta: float, confidence: float = 0.95) -> float:
    """Return the largest ε that ``correct`` guesses rule out.

    With ``confidence``, above 0 and below 1, the true ε is at least the bound. The bound is 0 if nothing is ruled out,
    and never inf.
    """

    def is_refuted(epsilon: float) -> bool:
        return p_value(canaries, guesses, correct, epsilon, delta) < 1 - confidence

    low, high = 0.0, 1.0
    if not is_refuted(low):
        return 0.0
    while is_refuted(high):
        low, high = high, 2 * high
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if is_refuted(middle) else (low, middle)
    return low


def guesses_of(scores: Tensor, number: int) -> Tensor:
    """Return the guesses (m,): +1 (in) for large scores, -1 (out) for small ones, 0 for no guess.

    Half of the ``number`` guesses, which is even, are for the largest ``scores`` (m,) and half for the smallest.

    >>> guesses_of(torch.tensor([0.4, 0.9, 0.1, 0.2]), number=2).tolist()
    [0, 1, -1, 0]
    """
    order = torch.argsort(scores, stable=True)
    guesses = torch.zeros(len(scores), dtype=torch.int64)
    guesses[order[-(number // 2) :]] = 1
    guesses[order[: number // 2]] = -1
    return guesses


@dataclass(frozen=True)
class Finding:
    """The result of an audit: the ledger's ``claim`` of ε at ``delta``, and the number of correct guesses."""

    canaries: int
    guesses: int
    correct: int
    delta: float
    confidence: float
    claim: float

    @cached_property
    def bound(self) -> float:
        """Return the lower bound on ε at ``confidence``."""
        return lower_bound(self.canaries, self.guesses, self.correct, self.delta, self.confidence)

    @property
    def holds(self) -> bool:
        """Return whether no observation contradicts the claim."""
        return self.bound <= self.claim

    @property
    def verdict(self) -> str:
        summary = f"{self.correct} of {self.guesses} guesses were right"
        if self.holds:
            return f"{summary}; ε is at least {self.bound:.3g}, which does not contradict the ledger's {self.claim:.3g}"
        return (
            f"the ledger claims ε = {self.claim:.3g} at δ = {self.delta:g}, but {summary}: "
            f"ε is at least {self.bound:.3g} (confidence {self.confidence:.1%})"
        )

    def to_dict(self) -> dict[str, float | int | bool | None]:
        """Return the finding for JSON, which has no infinity: an infinite claim is None."""
        claim = self.claim if math.isfinite(self.claim) else None
        return {**asdict(self), "claim": claim, "bound": self.bound, "holds": self.holds}

    @classmethod
    def of(cls, scores: Tensor, coins: Tensor, number: int, delta: float, confidence: float, claim: float) -> Finding:
        """Return the finding for ``number`` guesses of the coins (m,), True for in, by an attack's scores (m,)."""
        guesses = guesses_of(scores, number)
        correct = int(((guesses == 1) & coins).sum() + ((guesses == -1) & ~coins).sum())
        return cls(len(coins), number, correct, delta, confidence, claim)


JSON_KEYS = frozenset({*(each.name for each in fields(Finding)), "bound", "holds"})  # of Finding.to_dict


# --- the attack -------------------------------------------------------------------------------------------------------


class Evidence:
    """Scores for which of ``rows`` examples were in the data, summed over several releases.

    The model of a release is ``u = a (g_0 + Σ_i x_i g_i) + n``:

    * ``u`` is an update of the weights;
    * ``g_i`` is the direction in which example i pulls;
    * ``x_i``, of unit variance, is how much more or less than the mean example i pulls (a canary by its coin, others by
      how often they were sampled);
    * ``g_0`` is common to all examples;
    * ``a`` is an unknown scale;
    * ``n`` is noise that is equal in all directions.

    Then the best guess of x is a ridge regression. Its strength λ (noise over signal) maximises the likelihood of the
    release. So neither the noise nor the learning rate need be known.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        # the sum over releases of the posterior means of x (rows,): the larger, the likelier a canary was in
        self.scores = torch.zeros(rows, dtype=torch.float64)

    def add(self, update: Tensor, directions: Tensor, other_directions: Sequence[Tensor] = ()) -> None:
        """Add the evidence of one release: ``update`` u (d,) and the examples' ``directions`` (rows, d).

        Components along ``other_directions`` (d,) and along the mean direction carry no information on single coins and
        are removed. A release without any signal adds nothing.
        """
        basis = _orthonormal([directions.mean(0), *other_directions])
        u, g = _orthogonal_part(update, basis), _orthogonal_part(directions, basis)
        gram, projections = (g @ g.T).double(), (g @ u).double()
        unit = float(gram.diagonal().mean())
        if not unit > 0 or not float(u.norm()) > 0:
            return
        noise, scale = _fit_noise(gram / unit, projections / math.sqrt(unit), float(u.double().square().sum()), len(u))
        # Each release is solved separately: if the model is wrong and noise is small, errors differ between releases.
        system = gram / unit + noise * torch.eye(self.rows, dtype=torch.float64)
        self.scores += torch.linalg.solve(system, projections / math.sqrt(unit)) / scale


def _orthonormal(vectors: Sequence[Tensor]) -> Tensor:
    """Return an orthonormal basis (<= k, d) of the space that k vectors (d,) span."""
    matrix = torch.stack(list(vectors))
    _, values, basis = torch.linalg.svd(matrix, full_matrices=False)
    result: Tensor = basis[values > 1e-6 * values.max()] if float(values.max()) > 0 else basis[:0]
    return result


def _orthogonal_part(vectors: Tensor, basis: Tensor) -> Tensor:
    """Return the part of each vector (..., d) that is orthogonal to an orthonormal basis (k, d)."""
    return torch.sub(vectors, (vectors @ basis.T) @ basis)


def _fit_noise(gram: Tensor, projections: Tensor, squared_norm: float, dimensions: int) -> tuple[float, float]:
    """Return the (λ, τ) that maximise the likelihood of u ~ N(0, τ² (Gᵀ G + λ I)).

    ``gram`` is G Gᵀ (m, m), ``projections`` G u (m,), ``squared_norm`` ‖u‖² and ``dimensions`` d.
    """
    values, vectors = torch.linalg.eigh(gram)
    is_kept = values > 1e-10 * values.max()
    spectrum = values[is_kept].numpy()
    squares = (
        (vectors.T @ projections)[is_kept].square() / values[is_kept]
    ).numpy()  # of u along each singular direction
    rest, rest_dimensions = max(squared_norm - float(squares.sum()), 0.0), dimensions - len(spectrum)
    best = (-math.inf, 1.0, 1.0)
    for noise in GRID:
        variance = spectrum + noise
        total = float((squares / variance).sum()) + rest / noise
        likelihood = -dimensions * math.log(total) - np.log(variance).sum() - rest_dimensions * math.log(noise)
        best = max(best, (float(likelihood), float(noise), math.sqrt(total / dimensions)))
    return best[1], best[2]
