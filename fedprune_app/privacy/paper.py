"""This module computes Fed-LTP's privacy figure as its paper prints it. The figure is NOT a guarantee.

The figure is here for comparison with published numbers. Equations 20 and 21 differ from an account that holds in
three ways:

* They mix the two Gaussians twice, so the sampling rate acts squared.
* They compose rounds where steps were run.
* They take a divergence for validation that is not Laplace's.

The account that holds is :mod:`fedprune_app.privacy.accounting`.
"""

import math

import numpy as np

from fedprune_app.privacy.accounting import ORDERS, Steps, divergence


def paper_epsilon(
    rounds: int, noise_multiplier: float, sample_rate: float, delta: float, validation_scale: float = 0.0
) -> float:
    """Return equation 20 after ``rounds`` rounds (t + 1 there), least over the orders; inf without noise.

    ``validation_scale`` is λ_val, of a score noised in every round; 0 for no such score. Raises ``ValueError`` for
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
