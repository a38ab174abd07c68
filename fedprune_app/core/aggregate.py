"""Streaming accumulators: payloads are added one at a time, in any order, in O(model) memory, to the same bits.

Float sums depend on their order (float64 too: a few of millions of coordinates flip per round), and replies
arrive in any order. So each addend is rounded once to a grid of 2^-40 and then added as an integer, which is
exact and therefore commutative and associative.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from fedprune_app.core.payload import Payload

FRACTION_BITS = 40
_GRID = 2.0**FRACTION_BITS
_HEADROOM = 2.0 ** (63 - FRACTION_BITS)


class MaskedMean:
    """Weighted mean over the clients that kept each coordinate.

    ``mean[i] = Σ_k a_k m_k[i] w_k[i] / Σ_k a_k m_k[i]`` over the payloads added, with integer weights ``a_k``
    (1, or sample counts). A payload that lacks a name does not take part in that tensor; a tensor without mask
    counts everywhere. With full masks this is FedAvg. Source: Sub-FedAvg, Algorithm 1 line 9.

    ``max_addends`` and ``max_weight`` bound what will be added; a value too large to be summed exactly within
    them (``|w| > 2^23 / max_addends``) is refused with ``ValueError`` rather than allowed to wrap around.
    """

    def __init__(self, max_addends: int, max_weight: int = 1) -> None:
        if max_addends < 1 or max_weight < 1:
            raise ValueError(f"max_addends {max_addends} and max_weight {max_weight} must be at least 1")
        self.max_addends = max_addends
        self.max_weight = max_weight
        self.max_magnitude = _HEADROOM / (max_addends + 1)
        self.num_added = 0
        self._sums: dict[str, Tensor] = {}  # int64, in units of 2^-40 / max_weight
        self._weights: dict[str, Tensor] = {}  # int64 Σ a_k m_k; 0-dim while every addend was dense

    def add(self, payload: Payload, weight: int = 1) -> None:
        """Add one client's payload; nothing is added when this raises."""
        if self.num_added >= self.max_addends:
            raise ValueError(f"more than {self.max_addends} payloads added")
        if not 1 <= weight <= self.max_weight:
            raise ValueError(f"weight is {weight}, allowed: 1 to {self.max_weight}")
        for name, tensor in payload.tensors.items():
            largest = float(tensor.abs().max()) if tensor.numel() else 0.0
            if not largest <= self.max_magnitude:  # also refuses NaN
                limit = f"finite and at most {self.max_magnitude:g} for {self.max_addends} payloads"
                raise ValueError(f"tensor '{name}' has magnitude {largest:g}, allowed: {limit}")
        scale = weight / self.max_weight * _GRID
        for name, tensor in payload.tensors.items():
            addend = tensor.detach().double().mul(scale).round_().to(torch.int64)
            mask = payload.masks.get(name)
            if mask is None:
                count = torch.tensor(weight)
            else:
                addend.mul_(mask)
                count = mask.to(torch.int64).mul_(weight)
            if name not in self._sums:
                self._sums[name] = addend
                self._weights[name] = count
            else:
                self._sums[name].add_(addend)
                held = self._weights[name]
                # 0-dim counts broadcast, so dense and masked addends of one tensor mix freely
                self._weights[name] = held.add_(count) if held.shape == count.shape else held + count
        self.num_added += 1

    def mean(self, fallback: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The mean, in the names, order and dtypes of ``fallback``, which also stands where nobody kept."""
        result = {}
        for name, old in fallback.items():
            if name not in self._sums:
                result[name] = old.clone()
                continue
            weights = self._weights[name].double()
            mean = self._sums[name].double() / weights.clamp(min=1) * (self.max_weight / _GRID)
            result[name] = torch.where(weights > 0, mean, old.double()).to(old.dtype)
        return result


def masked_mean(
    payloads: Iterable[Payload], fallback: Mapping[str, Tensor], weights: Sequence[int] | None = None
) -> dict[str, Tensor]:
    """All at once what :class:`MaskedMean` does one by one; see there. ``weights`` are positive integers."""
    payloads = list(payloads)
    weights = [1] * len(payloads) if weights is None else list(weights)
    if len(weights) != len(payloads):
        raise ValueError(f"{len(weights)} weights for {len(payloads)} payloads")
    accumulator = MaskedMean(max_addends=max(1, len(payloads)), max_weight=max([1, *weights]))
    for payload, weight in zip(payloads, weights, strict=True):
        accumulator.add(payload, weight)
    return accumulator.mean(fallback)
