"""What the server computes reply by reply, of all replies at once."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from fedprune_app.core.aggregate import L0Mean
from fedprune_app.core.payload import Payload
from fedprune_app.core.scores import NOfM


def l0_mean(payloads: Iterable[Payload]) -> Payload:
    """Return the l0 mean of all ``payloads`` at once, as :meth:`L0Mean.mean` computes it.

    ``ValueError`` for no payload.
    """
    return _l0(payloads).mean()


def expand_masks(
    payloads: Iterable[Payload],
    mean: Payload,
    density: float,
    *,
    n_of_m: NOfM | None = None,
) -> Payload:
    """Return ``mean`` pruned further to ``density``, as in :meth:`L0Mean.expanded`; ``mean`` is ``l0_mean(payloads)``.

    ``ValueError`` for no payload, or a ``mean`` of other tensors or masks than theirs.
    """
    accumulator = _l0(payloads)
    own = accumulator.mean()
    same = own.masks.keys() == mean.masks.keys() and all(torch.equal(own.masks[n], mean.masks[n]) for n in own.masks)
    if own.tensors.keys() != mean.tensors.keys() or not same:
        raise ValueError("mean is not the l0 mean of these payloads: it has other tensors or masks")
    masks = accumulator.expanded(density, n_of_m=n_of_m).masks
    return Payload.pruned(mean.tensors, masks)


def _l0(payloads: Iterable[Payload]) -> L0Mean:
    payloads = list(payloads)
    if not payloads:
        raise ValueError("0 payloads to average, allowed: at least 1")
    accumulator = L0Mean(max_addends=len(payloads))
    for payload in payloads:
        accumulator.add(payload)
    return accumulator
