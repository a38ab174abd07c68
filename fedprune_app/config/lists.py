"""Lists in one text: names, and numbers that are dealt to the clients in turn."""

import math

from fedprune_app.config.errors import ConfigError


def listed(text: str) -> tuple[str, ...]:
    """Return the names in ``text``, 'cat, dog'."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def share_in_turn(key: str, text: str, client: int, default: float) -> float:
    """Return the share of client number ``client`` from ``text``, '0.2 0.4'; ``default`` where ``text`` is empty.

    Raises :class:`ConfigError` naming ``key`` unless all shares are above 0 and at most 1.
    """
    texts = text.replace(",", " ").split()
    if not texts:
        return default
    try:
        values = [float(part) for part in texts]
    except ValueError:
        values = [math.nan]
    if not all(0 < value <= 1 for value in values):
        raise ConfigError(key, text, "numbers above 0 and at most 1")
    return values[client % len(values)]
