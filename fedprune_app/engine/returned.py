"""What a method that may be a plug-in's returned is checked where it comes from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def returned(value: object, kind: type[T], owner: object, method: str, does: str = "returns") -> T:
    """Return what a ``method`` of ``owner`` returned. Raises ``TypeError`` that names both for another ``kind``."""
    if not isinstance(value, kind):
        found = "nothing" if value is None else f"a value of type {type(value).__name__}"
        raise TypeError(f"{type(owner).__name__}.{method}() {does} {found}, allowed: {kind.__name__}")
    return value


def yielded(values: object, kind: type[T], owner: object, method: str) -> Iterator[T]:
    """Yield what a ``method`` of ``owner`` yields, each checked as :func:`returned` does."""
    for value in returned(values, Iterable, owner, method):  # type: ignore[type-abstract]
        yield returned(value, kind, owner, method, "yields")
