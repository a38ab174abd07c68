"""The noise of a private run, computed from all releases that its clients plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedprune_app.config import Config

if TYPE_CHECKING:  # dp-accounting takes seconds to import, and most runs do not need it
    from fedprune_app.privacy.accounting import Release


def planned_rounds(config: Config) -> int:
    return config.dp.planned_rounds or config.num_server_rounds


def num_evaluations(config: Config) -> int:
    """Return how often all clients are evaluated in a run with all its rounds."""
    rounds, interval = config.num_server_rounds, config.evaluate_every
    return -(-rounds // interval) if interval else 1


def noise_multiplier(
    config: Config, sample_rate: float, steps: int, extra_releases: tuple[tuple[Release, int], ...] = ()
) -> float:
    """Return the noise multiplier of a run: the configured one, or the smallest for ``dp.target-epsilon``.

    ``steps`` and ``extra_releases`` are all planned releases of a client.
    """
    options = config.dp
    if not options.target_epsilon:
        return options.noise_multiplier
    from fedprune_app.privacy.accounting import noise_for

    return noise_for(options.target_epsilon, options.delta, sample_rate, steps, options.accountant, extra_releases)


def segment_noise(config: Config, num_releases: int) -> float:
    """Return the noise multiplier of clients with ``num_releases`` a round; 0 without ``dp.enabled``."""
    if not config.dp.enabled:
        return 0.0
    return noise_multiplier(config, 1.0, planned_rounds(config) * num_releases)
