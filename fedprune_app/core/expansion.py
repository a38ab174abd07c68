"""FedSpaLLM's mask expansion over many layers together, of which one is in memory at a time.

Bai et al., "FedSpaLLM: Federated Pruning of Large Language Models", 2024, equations (6) and (7), with ``d`` the entries
of the whole model. The order in which entries go is a total one, so where it is cut is found by counting: first clients
that pruned an entry, then the upper and the lower half of the bits of what ties go by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedprune_app.core.masks import keep_count
from fedprune_app.core.payload import Payload

TIES = ("magnitude", "wanda", "index")
INPUT_NORMS = "input-norms/"
"""Before a matrix' name: the root mean square of each of its inputs (in,), which ``wanda`` ties need."""


def tie_break(mean: Payload, name: str, ties: str) -> Tensor:
    """What equally often pruned entries of a matrix go by, smallest first: float32 (entries,), not negative.

    ``magnitude`` is ``|w|`` of the mean, ``wanda`` ``|w| · ‖x_j‖``, ``index`` 0. ``ValueError`` for a payload that
    lacks the norms, and for another name.
    """
    if ties not in TIES:
        raise ValueError(f"ties is {ties!r}, allowed: {', '.join(TIES)}")
    size = mean.tensors[name].abs().float()
    if ties == "wanda":
        if INPUT_NORMS + name not in mean.tensors:
            raise ValueError(
                f"tensor '{INPUT_NORMS}{name}' is not there, allowed with ties 'wanda': payloads that have it"
            )
        size = size * mean.tensors[INPUT_NORMS + name].float()  # (out, in) * (in,)
    return torch.zeros_like(size).view(-1) if ties == "index" else size.reshape(-1)


@dataclass(frozen=True)
class Votes:
    """A layer before its expansion: the l0 mean, and by masked tensor how many clients pruned each entry (``C``)."""

    mean: Payload
    pruned: dict[str, Tensor]


class Cut:
    """Where the order of all entries is cut so that ``keep_count(d, density)`` of them stay.

    ``layers`` gives all layers, each time it is called; it is called three times. What all clients of a layer pruned
    stays pruned. Layers that nobody pruned should not be among them.
    """

    def __init__(self, layers: Callable[[], Iterable[Votes]], density: float, ties: str = "magnitude") -> None:
        self.ties = ties
        levels: dict[int, int] = {}  # C -> entries that somebody kept
        total = 0
        for votes in layers():
            for name, pruned in votes.pruned.items():
                total += pruned.numel()
                found = torch.bincount(pruned[votes.mean.masks[name]].long())
                for level, count in enumerate(found.tolist()):
                    levels[level] = levels.get(level, 0) + count
        missing = sum(levels.values()) - keep_count(total, density)
        # Of what somebody kept, all with a count above the level go, at the level those of smaller bits than the
        # threshold, and as many more of equal bits.
        self.level, self.threshold, self.equal = max(levels, default=0) + 1, 0, 0
        if missing <= 0:
            return
        for level in sorted(levels, reverse=True):
            self.level = level
            if missing <= levels[level]:
                break
            missing -= levels[level]
        high, missing = _position(self._histogram(layers, lambda bits: bits >> 16), missing)
        low, self.equal = _position(self._histogram(layers, lambda bits: bits[bits >> 16 == high] & 0xFFFF), missing)
        self.threshold = high << 16 | low

    def applied(self, votes: Votes) -> Payload:
        """A layer's expanded masks. Layers come in the order of ``layers``: of equals, the first ones go."""
        masks = {}
        for name, pruned in votes.pruned.items():
            kept = votes.mean.masks[name]
            bits = self._bits(votes, name)
            at_level = (pruned == self.level).view(-1) & kept.reshape(-1)
            equal = (at_level & (bits == self.threshold)).nonzero().squeeze(1)[: self.equal]
            self.equal -= len(equal)
            gone = (pruned > self.level).view(-1) | (at_level & (bits < self.threshold))
            gone[equal] = True
            masks[name] = kept & ~gone.view(kept.shape)
        return Payload.pruned(votes.mean.tensors, masks)

    def _bits(self, votes: Votes, name: str) -> Tensor:
        """Floats that are not negative are in the order of their bits."""
        return tie_break(votes.mean, name, self.ties).view(torch.int32)

    def _histogram(self, layers: Callable[[], Iterable[Votes]], part: Callable[[Tensor], Tensor]) -> Tensor:
        found = torch.zeros(2**16, dtype=torch.int64)
        for votes in layers():
            for name, pruned in votes.pruned.items():
                chosen = (pruned == self.level) & votes.mean.masks[name]
                found += torch.bincount(part(self._bits(votes, name)[chosen.view(-1)]), minlength=2**16).cpu()
        return found


def _position(histogram: Tensor, rank: int) -> tuple[int, int]:
    """(bin of the ``rank``-th smallest, from 1; its rank within the bin)."""
    up_to = histogram.cumsum(0)
    place = int(torch.searchsorted(up_to, rank))
    return place, rank - int(up_to[place] - histogram[place])
