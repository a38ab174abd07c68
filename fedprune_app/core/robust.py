"""Robust averages bound what a minority of hostile clients can do, on the coordinates that each client kept."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from fedprune_app.core.aggregate import MaskedMean
from fedprune_app.core.payload import Payload

_BLOCK = 2**16  # coordinates at a time, of all clients


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


class TrimmedMean:
    """A trimmed mean leaves out each coordinate's extreme values, over the clients that kept this coordinate.

    Of the ``n`` values of a coordinate the ``⌊trim · n⌋`` smallest and as many largest are left out. The others count
    alike. Where ``n`` is too small for any to be left out, all ``n`` clients could be hostile. Such a coordinate stays
    where it was (unless ``trim`` is 0). A larger ``trim`` trusts fewer keepers: at 0.4 three are enough, although two
    of these may be hostile; at 0.2 it takes five. If ``trim`` is above the share of hostile clients among a
    coordinate's keepers, the result lies between values of honest ones. The order of arrival changes no bit: values are
    summed in order of size. Source: Yin et al., ICML 2018, Definition 2, here per coordinate's own keepers.

    A median cannot be streamed: the trimmed mean holds all payloads that were added, O(clients x model). Weights are
    not used, because clients choose them.
    """

    def __init__(self, trim: float) -> None:
        if not 0 <= trim < 0.5:
            raise ValueError(f"trim is {trim:g}, allowed: 0 to below 0.5")
        self.trim = trim
        self.stayed: tuple[str, ...] = ()  # of the tensors that the last mean was asked for and clients sent, unmoved
        self._added: list[Payload] = []

    def add(self, payload: Payload, weight: int = 1) -> None:
        """Add one client's payload. ``ValueError`` for values that are not finite."""
        for name, tensor in payload.tensors.items():
            if not bool(torch.isfinite(tensor).all()):
                raise ValueError(f"tensor '{name}' has values that are not finite")
        self._added.append(payload)

    def mean(self, fallback: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the mean in the names, order and dtypes of ``fallback``.

        A coordinate that nobody kept has its value in ``fallback``. Afterwards ``stayed`` names the tensors of which
        too few were sent for any coordinate to move.
        """
        counts = {name: sum(name in payload.tensors for payload in self._added) for name in fallback}
        minimum = self.trim and math.ceil(1 / self.trim - 1e-9)
        self.stayed = tuple(name for name, count in counts.items() if 0 < count < minimum)
        return {name: self._tensor_mean(name, default) for name, default in fallback.items()}

    def _tensor_mean(self, name: str, default: Tensor) -> Tensor:
        senders = [payload for payload in self._added if name in payload.tensors]
        if not senders:
            return default.clone()
        result = torch.empty(default.numel(), dtype=default.dtype, device=default.device)
        values = [payload.tensors[name].reshape(-1) for payload in senders]
        masks = [payload.masks[name].reshape(-1) if name in payload.masks else None for payload in senders]
        defaults = default.reshape(-1)
        for start in range(0, default.numel(), _BLOCK):
            part = slice(start, start + _BLOCK)
            table = torch.stack([value[part].double() for value in values])  # (senders, coordinates)
            for row, mask in zip(table, masks, strict=True):
                if mask is not None:
                    row.masked_fill_(~mask[part], math.inf)
            table = table.sort(dim=0).values
            kept = torch.isfinite(table).sum(dim=0)
            cut = (kept * self.trim + 1e-9).floor()  # 0.29 · 100 is less than 29
            rank = torch.arange(len(table), device=table.device).unsqueeze(1)
            table.masked_fill_((rank < cut) | (rank >= kept - cut), 0)
            mean = table.sum(dim=0) / (kept - 2 * cut).clamp(min=1)
            has_values = cut > 0 if self.trim else kept > 0
            result[part] = torch.where(has_values, mean, defaults[part].double()).to(default.dtype)
        return result.view(default.shape)
