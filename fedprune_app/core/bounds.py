"""Checks of reported numbers against their bounds, and the bound on the members of a secure sum."""

import reprlib
from decimal import ROUND_CEILING, ROUND_FLOOR, Context

# The largest number that a client may report: sums over clients, and their squares, then stay finite.
LARGEST_NUMBER = 1e100


def bounded(value: object, what: str, least: float = -LARGEST_NUMBER, most: float = LARGEST_NUMBER) -> float:
    """Return ``value`` if it is a number from ``least`` to ``most``; raise ``ValueError`` for anything else.

    The error begins with ``what``, the name of the value. NaN and booleans also raise.

    >>> bounded(0.25, "field 'density'", 0, 1)
    0.25
    >>> bounded(2, "field 'density'", 0, 1)
    Traceback (most recent call last):
    ValueError: field 'density' is 2, allowed: 0 to 1
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{what} is {reprlib.repr(value)}, allowed: a number")
    if not least <= value <= most:  # also rejects NaN
        raise ValueError(f"{what} is {reprlib.repr(value)}, allowed: {least:g} to {most:g}")
    return value


def threshold_of(asked: int, members: int) -> int:
    """Return how many members of a secure sum have to stay: ``asked``, or for 0 the larger of 3 and the majority."""
    return asked or max(3, members // 2 + 1)


def rounded_down_text(value: float, digits: int = 4) -> str:
    """Return a lower bound as text with ``digits`` digits, rounded up so that the printed number is in bounds.

    >>> rounded_down_text(1 / 6090)
    '0.0001643'
    >>> rounded_down_text(1.35217)
    '1.353'
    """
    return f"{float(Context(prec=digits, rounding=ROUND_CEILING).create_decimal_from_float(value)):g}"


def rounded_up_text(value: float, digits: int = 4) -> str:
    """Return an upper bound as text with ``digits`` digits, rounded down so that the printed number is in bounds.

    >>> rounded_up_text(1 / 240)
    '0.004166'
    """
    return f"{float(Context(prec=digits, rounding=ROUND_FLOOR).create_decimal_from_float(value)):g}"
