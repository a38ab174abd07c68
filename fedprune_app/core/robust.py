"""A robust average bounds what one hostile client can do, on the coordinates that each client kept."""

import math
from collections.abc import Mapping

from torch import Tensor

from fedprune_app.core.aggregate import MaskedMean
from fedprune_app.core.payload import Payload


def move_norm(update: Payload, base: Mapping[str, Tensor]) -> float:
    """Return the L2 norm of ``update - base`` over the coordinates that ``update`` keeps, summed in float64."""
    squares = 0.0
    for name, tensor in update.tensors.items():
        move = tensor.double() - base[name].double()
        if name in update.masks:
            move = move.where(update.masks[name], 0)
        squares += float(move.square().sum())
    return math.sqrt(squares)


def clipped(update: Payload, base: Mapping[str, Tensor], bound: float) -> Payload:
    """Return ``base + (update - base) · min(1, bound / ‖update - base‖)`` on kept coordinates, and 0 on the others.

    One client can then move an average of equal weights by at most ``bound`` over the number of contributors, whatever
    the client sends. This holds only if the clients do not choose the weights.
    """
    norm = move_norm(update, base)
    if norm <= bound:
        return update
    tensors = {}
    for name, tensor in update.tensors.items():
        start = base[name].double()
        values = (start + (tensor.double() - start) * (bound / norm)).to(tensor.dtype)
        tensors[name] = values.where(update.masks[name], 0) if name in update.masks else values
    return Payload(tensors, update.masks)


class BoundedMean:
    """A bounded mean is a :class:`MaskedMean` of payloads that :func:`clipped` brought within ``bound`` of ``base``."""

    def __init__(self, mean: MaskedMean, base: Mapping[str, Tensor], bound: float) -> None:
        self.bound, self.base, self._mean = bound, base, mean

    def add(self, payload: Payload, weight: int = 1) -> None:
        """Add one client's payload; an error leaves the mean as if this payload had not come."""
        self._mean.add(clipped(payload, self.base, self.bound), weight)

    def mean(self, fallback: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the mean as :meth:`MaskedMean.mean` does."""
        return self._mean.mean(fallback)
