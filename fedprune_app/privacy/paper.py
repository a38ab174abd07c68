"""The privacy figure of Fed-LTP as its paper prints it. NOT a guarantee: it is here to compare with published numbers.

Equations 20 and 21 mix the two Gaussians twice (so the sampling rate acts squared), compose rounds where steps were
run, and take a divergence for validation that is not Laplace's. What holds is :mod:`fedprune_app.privacy.accounting`.
"""

from __future__ import annotations

import math

import numpy as np

from fedprune_app.privacy.accounting import ORDERS, Steps, divergence


def paper_epsilon(
    rounds: int, noise_multiplier: float, sample_rate: float, delta: float, validation_scale: float = 0.0
) -> float:
    """Equation 20 after ``rounds`` rounds (t + 1 there), least over the orders; inf without noise.

    ``validation_scale`` is λ_val, of a score noised in every round; 0 for none. Raises ``ValueError``.
    """
    if rounds < 0 or not 0 < delta < 1:
        raise ValueError(f"rounds is {rounds} and delta {delta}, allowed: at least 0, and between 0 and 1")
    if rounds == 0:
        return 0.0
    training = divergence(Steps(noise_multiplier, sample_rate**2))  # μ₁ is the mixture already, and mixed again
    alpha = np.asarray(ORDERS)
    rho = rounds * training
    if validation_scale:
        rho = rho + rounds * alpha * (alpha - 1) / (2 * validation_scale**2)
    values = rho + (math.log(1 / delta) - np.log(alpha)) / (alpha - 1) + np.log1p(-1 / alpha)
    return max(0.0, float(values.min()))
