"""From what was released to an ε: dp-accounting events, their composition, and the noise that a target needs.

Neighbours differ by one example, added or removed. A release is one of two kinds: steps of DP-SGD on Poisson samples,
or a number with Laplace noise.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import dp_accounting
import numpy as np
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp.rdp_privacy_accountant import RdpAccountant, compute_epsilon

ACCOUNTANTS = ("rdp", "pld")
ORDERS = tuple([1 + x / 10 for x in range(1, 100)] + [float(x) for x in range(11, 64)] + [80, 96, 128, 256, 512, 1024])
"""The Rényi orders; the more of them, the tighter ε. Those above 64 are for small ones."""


@dataclass(frozen=True, order=True)
class Steps:
    """A step of DP-SGD: each example takes part with probability ``sample_rate``, their clipped gradients are summed,
    Gaussian noise of ``noise_multiplier`` times the clipping norm is added. Raises ``ValueError``."""

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
    """A number that one example changes by at most ``sensitivity``, plus Laplace noise of ``scale``, both in its units.
    Pure ε = sensitivity / scale. Raises ``ValueError``."""

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
Spent = Mapping[Release, int]
"""How often each was released. Order does not matter, so n at once are n times one."""


def epsilon(spent: Spent, delta: float, accountant: str = "rdp") -> float:
    """The ε for which everything in ``spent`` together is (ε, ``delta``)-DP; 0 for nothing, inf where noise lacked.

    ``rdp`` composes Rényi divergences and converts once (Balle et al. 2020), by the exact divergence of each kind;
    ``pld`` composes privacy loss distributions: tighter, and seconds slower. Raises ``ValueError``.
    """
    if not 0 < delta < 1:
        raise ValueError(f"delta is {delta}, allowed: above 0 and below 1")
    if accountant not in ACCOUNTANTS:
        raise ValueError(f"accountant is {accountant!r}, allowed: {', '.join(ACCOUNTANTS)}")
    counted = tuple(sorted(((r, n) for r, n in spent.items() if n > 0), key=repr))
    if not counted:
        return 0.0
    return _epsilon(counted, delta, accountant)


@lru_cache(maxsize=512)  # clients of equal volume ask the same
def _epsilon(counted: tuple[tuple[Release, int], ...], delta: float, accountant: str) -> float:
    if accountant == "pld":
        composed = PLDAccountant()
        for release, count in counted:
            composed.compose(release.event, count)
        return float(composed.get_epsilon(delta))
    rho = sum((count * divergence(release) for release, count in counted), np.zeros(len(ORDERS)))
    if not np.isfinite(rho).any():
        return math.inf
    return float(compute_epsilon(ORDERS, rho, delta)[0])


@lru_cache(maxsize=128)
def divergence(release: Release) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Rényi divergence at each of :data:`ORDERS`, infinite where it is not found."""
    accountant = RdpAccountant(ORDERS)
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it warns of orders near 1 that do not converge; they count as infinite
    try:
        accountant.compose(release.event)
    finally:
        logger.setLevel(level)
    return np.asarray(accountant.rdp, dtype=np.float64)


@lru_cache(maxsize=128)
def noise_for(
    target_epsilon: float,
    delta: float,
    sample_rate: float,
    steps: int,
    accountant: str = "rdp",
    besides: tuple[tuple[Release, int], ...] = (),
) -> float:
    """The least noise multiplier, of three decimals, for which so many steps are (target_epsilon, delta)-DP.

    ``besides`` is what else will be released, and how often. Raises ``ValueError`` when not even a multiplier of 1000
    is enough.
    """
    enough, too_little = 1000, 0  # whole thousandths, so every machine finds the same

    def spends(thousandths: int) -> float:
        return epsilon({Steps(thousandths / 1000, sample_rate): steps, **dict(besides)}, delta, accountant)

    while spends(enough) > target_epsilon:
        too_little, enough = enough, enough * 2
        if enough > 1_000_000:
            counts = f" beside {sum(count for _, count in besides)} noised counts" if besides else ""
            what = f"{steps} steps{counts} reach with no noise up to 1000"
            raise ValueError(f"target_epsilon is {target_epsilon}, which {what}")
    while enough - too_little > 1:
        middle = (enough + too_little) // 2
        too_little, enough = (too_little, middle) if spends(middle) <= target_epsilon else (middle, enough)
    return enough / 1000


def total(*parts: Spent) -> Counter[Release]:
    """What several together released."""
    everything: Counter[Release] = Counter()
    for part in parts:
        everything.update(part)
    return everything
