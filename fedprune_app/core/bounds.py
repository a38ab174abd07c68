"""Numbers that somebody else reports are checked against their bounds, here and nowhere else."""

import reprlib
from decimal import ROUND_CEILING, ROUND_FLOOR, Context

# A client may report no number of itself above this one: sums over clients, and their squares, then stay finite.
LARGEST_NUMBER = 1e100


def bounded(value: object, what: str, least: float = -LARGEST_NUMBER, most: float = LARGEST_NUMBER) -> float:
    """Return ``value`` if it is a number from ``least`` to ``most``; raise ``ValueError`` for anything else.

    The error begins with ``what``, which names the place of the value. NaN and truth values are refused, too.

    >>> bounded(0.25, "field 'density'", 0, 1)
    0.25
    >>> bounded(2, "field 'density'", 0, 1)
    Traceback (most recent call last):
    ValueError: field 'density' is 2, allowed: 0 to 1
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{what} is {reprlib.repr(value)}, allowed: a number")
    if not least <= value <= most:  # also refuses NaN
        raise ValueError(f"{what} is {reprlib.repr(value)}, allowed: {least:g} to {most:g}")
    return value


def rounded_down_text(value: float, digits: int = 4) -> str:
    """Return a least allowed value with so many digits: rounded up, so that the number that is read is allowed.

    >>> rounded_down_text(1 / 6090)
    '0.0001643'
    >>> rounded_down_text(1.35217)
    '1.353'
    """
    return f"{float(Context(prec=digits, rounding=ROUND_CEILING).create_decimal_from_float(value)):g}"


def rounded_up_text(value: float, digits: int = 4) -> str:
    """Return a largest allowed value with so many digits: rounded down, so that the number that is read is allowed.

    >>> rounded_up_text(1 / 240)
    '0.004166'
    """
    return f"{float(Context(prec=digits, rounding=ROUND_FLOOR).create_decimal_from_float(value)):g}"
