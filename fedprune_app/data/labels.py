"""Labels are texts or numbers where data come from, and numbers of classes here."""

from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray


def text_of(value: object) -> str:
    """Return the text of a label or an owner. Bytes are UTF-8, and a whole number has no fraction.

    >>> text_of(b"cat"), text_of(1.0), text_of("1.0")
    ('cat', '1', '1.0')
    """
    if isinstance(value, bytes):
        return value.decode()
    return str(int(value) if isinstance(value, float | np.floating) and value.is_integer() else value)


def in_order(labels: Collection[str]) -> tuple[str, ...]:
    """Return the different labels in order: numbers by their value, texts by their letters."""
    sorted_labels = sorted({*labels})  # it also orders 01 and 1
    try:
        return tuple(sorted(sorted_labels, key=float))
    except ValueError:
        return tuple(sorted_labels)


def coded(
    labels: Mapping[str, Sequence[str]], classes: Sequence[str], refuse: Callable[[str, str], ValueError]
) -> dict[str, NDArray[np.int64]]:
    """Return the labels of each part as numbers of ``classes``.

    What ``refuse`` makes of a part and of a label that is no class is raised.
    """
    numbers = {name: number for number, name in enumerate(classes)}
    for part, names in labels.items():
        if unknown_labels := sorted({*names} - {*classes}):
            raise refuse(part, unknown_labels[0])
    return {part: np.array([numbers[name] for name in names], dtype=np.int64) for part, names in labels.items()}
