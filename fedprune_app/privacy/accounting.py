"""Accounting: the ε of releases, by dp-accounting events and their composition, and the noise for a target ε.

Neighbouring data sets differ in one example, which is blank in one of them. A release is one of two kinds: steps of
DP-SGD on Poisson samples, or a number with Laplace noise.
"""

import logging
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import dp_accounting
import numpy as np
from dp_accounting.pld import privacy_loss_distribution
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from dp_accounting.rdp.rdp_privacy_accountant import RdpAccountant, compute_epsilon

ACCOUNTANTS = ("pld", "rdp")
# More Rényi orders give a tighter ε. Orders above 64 are for small ε.
ORDERS = tuple([1 + x / 10 for x in range(1, 100)] + [float(x) for x in range(11, 64)] + [80, 96, 128, 256, 512, 1024])


@dataclass(frozen=True, order=True)
class Steps:
    """Steps of DP-SGD: the sum of clipped gradients of a Poisson sample, with Gaussian noise.

    * Each example is sampled with probability ``sample_rate``.
    * The standard deviation of the noise is ``noise_multiplier`` times the clipping norm.

    Raises ``ValueError`` for a number out of range.
    """

    noise_multiplier: float
    sample_rate: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.noise_multiplier) and self.noise_multiplier >= 0):
            raise ValueError(f"noise_multiplier is {self.noise_multiplier}, allowed: a finite number >= 0")
        if not 0 <= self.sample_rate <= 1:
            raise ValueError(f"sample_rate is {self.sample_rate}, allowed: 0 to 1")

    @property
    def event(self) -> dp_accounting.DpEvent:
        if self.sample_rate == 0:
            return dp_accounting.NoOpDpEvent()
        if self.noise_multiplier == 0:
            return dp_accounting.NonPrivateDpEvent()
        gaussian = dp_accounting.GaussianDpEvent(self.noise_multiplier)
        return gaussian if self.sample_rate == 1 else dp_accounting.PoissonSampledDpEvent(self.sample_rate, gaussian)


@dataclass(frozen=True, order=True)
class Laplace:
    """A number that one example changes by at most ``sensitivity``, with Laplace noise of ``scale``.

    ``scale`` and ``sensitivity`` are in the number's units. The release costs the pure ε = sensitivity / scale. Raises
    ``ValueError`` for a number out of range.
    """

    scale: float
    sensitivity: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.scale) and self.scale >= 0):
            raise ValueError(f"scale is {self.scale}, allowed: a finite number >= 0")
        if not (math.isfinite(self.sensitivity) and self.sensitivity > 0):
            raise ValueError(f"sensitivity is {self.sensitivity}, allowed: a finite number > 0")

    @property
    def event(self) -> dp_accounting.DpEvent:
        if self.scale == 0:
            return dp_accounting.NonPrivateDpEvent()
        return dp_accounting.LaplaceDpEvent(self.scale / self.sensitivity)


Release = Steps | Laplace
_LONGEST = 1000.0  # above this ε, which protects nothing, privacy loss distributions take too long
_COARSEST = 2.0**-7
_PER_DEVIATION = 0.1
# The number of times that each release was made. Order does not matter, so n releases at once are n times one.
Spent = Mapping[Release, int]


def epsilon(spent: Spent, delta: float, accountant: str = "pld") -> float:
    """Return the ε for which all releases ``spent`` together are (ε, ``delta``)-DP: 0 for none, inf without noise.

    * ``pld`` composes privacy loss distributions. Its ε is never above that of ``rdp``, which is valid as well.
    * ``rdp`` composes Rényi divergences and converts once (Balle et al. 2020), by the exact divergence of each kind.
      This takes no time, but overestimates ε by a tenth to a third in usual trainings.

    Raises ``ValueError`` for ``delta`` outside (0, 1).

    >>> one_epoch = {Steps(noise_multiplier=1.0, sample_rate=0.01): 100}
    >>> two_epochs = {Steps(noise_multiplier=1.0, sample_rate=0.01): 200}
    >>> round(epsilon(one_epoch, delta=1e-5), 2), round(epsilon(two_epochs, delta=1e-5), 2)
    (0.72, 0.91)
    >>> round(epsilon(one_epoch, delta=1e-5, accountant="rdp"), 2)
    1.21
    >>> epsilon({Laplace(scale=0.0, sensitivity=1.0): 1}, delta=1e-5)
    inf
    """
    if not 0 < delta < 1:
        raise ValueError(f"delta is {delta}, allowed: above 0 and below 1")
    counts = tuple(sorted(((r, n) for r, n in spent.items() if n > 0), key=repr))
    if not counts:
        return 0.0
    return (_by_losses if accountant == "pld" else _by_divergences)(counts, delta)


def affords(spent: Spent, delta: float, limit: float, accountant: str = "pld") -> bool:
    """Return whether :func:`epsilon` is at most ``limit``: first by Rényi divergences, fast and never below it."""
    return epsilon(spent, delta, "rdp") <= limit or epsilon(spent, delta, accountant) <= limit


Counts = tuple[tuple[Release, int], ...]


@lru_cache(maxsize=512)  # clients of equal volume have equal charges
def _by_divergences(counts: Counts, delta: float) -> float:
    rho = sum((count * divergence(release) for release, count in counts), np.zeros(len(ORDERS)))
    if not np.isfinite(rho).any():
        return math.inf
    return float(compute_epsilon(ORDERS, rho, delta)[0])


@lru_cache(maxsize=512)
def _by_losses(counts: Counts, delta: float) -> float:
    bound = _by_divergences(counts, delta)
    return bound if bound > _LONGEST else min(bound, float(_losses(counts).get_epsilon_for_delta(delta)))


@lru_cache(maxsize=4)  # for the second delta
def _losses(counts: Counts) -> PrivacyLossDistribution:
    grid = _interval(counts)
    losses = privacy_loss_distribution.identity(grid)
    for release, count in counts:
        if not isinstance(release, Steps) or release.sample_rate:
            losses = losses.compose(_release_losses(release, grid).self_compose(count))
    return losses


@lru_cache(maxsize=64)  # a client's releases are the same in every round
def _release_losses(release: Release, grid: float) -> PrivacyLossDistribution:
    """Return the distribution of one release's privacy loss, if finite, on a grid of this width."""
    if isinstance(release, Laplace):
        return privacy_loss_distribution.from_laplace_mechanism(
            release.scale / release.sensitivity, value_discretization_interval=grid
        )
    return privacy_loss_distribution.from_gaussian_mechanism(
        release.noise_multiplier, value_discretization_interval=grid, sampling_prob=release.sample_rate
    )


def _interval(counts: Counts) -> float:
    """Return the width of the grid to which privacy losses are rounded up, a power of 2.

    A step's loss has the variance 2 D, with its divergence D of order 1. A grid of a tenth of the releases' mean
    deviation makes ε too large by a few hundredths of a percent, at most by two tenths. The library's fixed 1e-4 takes
    ten times as long if losses are large, and is too wide if they are small.
    """
    variance = sum(count * 2 * _per_order(divergence(release)) for release, count in counts)
    deviation = math.sqrt(variance / sum(count for _, count in counts))
    return min(_COARSEST, 2.0 ** math.floor(math.log2(_PER_DEVIATION * deviation))) if deviation else _COARSEST


def _per_order(divergences: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
    """Return ``D_α / α`` for the lowest order with a result: the divergence of order 1, or slightly more."""
    lowest = int(np.isfinite(divergences).argmax())
    return float(divergences[lowest]) / ORDERS[lowest]


@lru_cache(maxsize=128)
def divergence(release: Release) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return the Rényi divergence at each of :data:`ORDERS`, infinite where the library finds none."""
    accountant = RdpAccountant(ORDERS)
    logging.getLogger("absl").setLevel(logging.ERROR)  # it warns of orders near 1 that do not converge
    accountant.compose(release.event)
    return np.asarray(accountant.rdp, dtype=np.float64)


@lru_cache(maxsize=128)
def noise_for(
    target_epsilon: float,
    delta: float,
    sample_rate: float,
    steps: int,
    accountant: str = "pld",
    extra_releases: tuple[tuple[Release, int], ...] = (),
) -> float:
    """Return the smallest noise multiplier, to three decimals, with which ``steps`` are (target_epsilon, delta)-DP.

    ``extra_releases`` are further ones, with the number of each. Raises ``ValueError`` if not even a multiplier of 1000
    is enough.
    """
    high, low = 1000, 0  # whole thousandths, so that the result is the same on every machine

    def is_enough(thousandths: int) -> bool:
        spent = {Steps(thousandths / 1000, sample_rate): steps, **dict(extra_releases)}
        return affords(spent, delta, target_epsilon, accountant)

    while not is_enough(high):
        low, high = high, high * 2
        if high > 1_000_000:
            counts = f" beside {sum(count for _, count in extra_releases)} noised counts" if extra_releases else ""
            problem = f"{steps} steps{counts} reach with no noise up to 1000"
            raise ValueError(f"dp.target-epsilon is {target_epsilon:g}, which {problem}; allowed: a larger one")
    while high - low > 1:
        middle = (high + low) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high / 1000


def total(*parts: Spent) -> Counter[Release]:
    """Return all releases of ``parts`` together.

    >>> release = Laplace(scale=2.0, sensitivity=1.0)
    >>> total({release: 2}, {release: 3})[release]
    5
    """
    return sum((Counter(part) for part in parts), Counter[Release]())


def paper_epsilon(
    rounds: int, noise_multiplier: float, sample_rate: float, delta: float, validation_scale: float = 0.0
) -> float:
    """Return equation 20 after ``rounds`` rounds (t + 1 there), minimised over the orders; inf without noise.

    ``validation_scale`` is λ_val, for a score noised in every round; 0 for no such score. Raises ``ValueError`` for
    negative ``rounds``, and for ``delta`` outside (0, 1).
    """
    if rounds < 0 or not 0 < delta < 1:
        raise ValueError(f"rounds is {rounds} and delta {delta}, allowed: at least 0, and between 0 and 1")
    if rounds == 0:
        return 0.0
    alpha = np.asarray(ORDERS)
    rho = rounds * divergence(Steps(noise_multiplier, sample_rate**2))  # μ₁ is mixed already, and mixed again
    if validation_scale:
        rho = rho + rounds * alpha * (alpha - 1) / (2 * validation_scale**2)
    values = rho + (math.log(1 / delta) - np.log(alpha)) / (alpha - 1) + np.log1p(-1 / alpha)
    return max(0.0, float(values.min()))
