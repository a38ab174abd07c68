"""FedSpaLLM's mask expansion runs over many layers together, of which one is in memory at a time.

Bai et al., "FedSpaLLM: Federated Pruning of Large Language Models", 2024, equations (6) and (7), with ``d`` the entries
of the whole model. The order in which entries go is total, so counting finds the place where this order is cut:

1. count the entries by the number of clients that pruned them;
2. count the upper half of the bits of the tie-breaking value;
3. count the lower half of these bits.
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
"""This prefix before a matrix' name gives the root mean square of each of its inputs (in,), which ``wanda`` ties need.
"""


def tie_break(mean: Payload, name: str, ties: str) -> Tensor:
    """Return the ranks among equally often pruned entries of a matrix: the one with the smallest magnitude goes first.

    Ranks are float32 (entries,), and their signs mean nothing. They may share the memory of ``mean``.

    ``ties`` is one of these:

    * ``magnitude``: ``|w|`` of the mean;
    * ``wanda``: ``|w| · ‖x_j‖`` of the mean;
    * ``index``: 0.

    ``ValueError`` for another ``ties``, and for a payload that lacks the norms.
    """
    if ties not in TIES:
        raise ValueError(f"ties is {ties!r}, allowed: {', '.join(TIES)}")
    rank = mean.tensors[name].float()
    if ties == "wanda":
        if INPUT_NORMS + name not in mean.tensors:
            raise ValueError(
                f"tensor '{INPUT_NORMS}{name}' is not there, allowed with ties 'wanda': payloads that have it"
            )
        rank = rank * mean.tensors[INPUT_NORMS + name].float()  # (out, in) * (in,)
    return torch.zeros_like(rank).view(-1) if ties == "index" else rank.reshape(-1)


@dataclass(frozen=True)
class Votes:
    """Votes are a layer before its expansion.

    ``mean`` is the l0 mean. ``pruned`` says, by masked tensor, how many clients pruned each entry (``C``).
    """

    mean: Payload
    pruned: dict[str, Tensor]


class Cut:
    """A cut says where the order of all entries ends, so that ``keep_count(d, density)`` of the entries stay.

    ``layers`` gives all layers, each time it is called; it is called three times. Entries that all clients of a layer
    pruned stay pruned. Layers that nobody pruned should not be among ``layers``.
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
        # Of the entries that somebody kept, these go:
        # - all with a count C above `level`;
        # - at `level`, all with bits below `threshold`;
        # - at `level`, the first `equal` entries with bits equal to `threshold`.
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
        """Return a layer's expanded masks.

        Layers come in the order of ``layers``. Of equal entries the first ones go.
        """
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
        """Return the bits of the ranks without their signs: they are in the order of the ranks' magnitudes."""
        return tie_break(votes.mean, name, self.ties).view(torch.int32) & 0x7FFFFFFF

    def _histogram(self, layers: Callable[[], Iterable[Votes]], part: Callable[[Tensor], Tensor]) -> Tensor:
        found = torch.zeros(2**16, dtype=torch.int64)
        for votes in layers():
            for name, pruned in votes.pruned.items():
                chosen = (pruned == self.level) & votes.mean.masks[name]
                found += torch.bincount(part(self._bits(votes, name)[chosen.view(-1)]), minlength=2**16).cpu()
        return found


def _position(histogram: Tensor, rank: int) -> tuple[int, int]:
    """Return the bin of the ``rank``-th smallest value, counted from 1, and the rank of that value within the bin."""
    up_to = histogram.cumsum(0)
    place = int(torch.searchsorted(up_to, rank))
    return place, rank - int(up_to[place] - histogram[place])
