"""Masks: how many coordinates to keep, which ones, and how far two masks are apart. True = kept, everywhere."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

Masks = dict[str, Tensor]


def keep_count(n: int, density: float) -> int:
    """How many of ``n`` coordinates a density keeps: ``floor(density * n)``, guarded against float noise.

    The one place where a density is rounded. ``density`` in [0, 1], else ``ValueError``.
    """
    if not 0.0 <= density <= 1.0:
        raise ValueError(f"density is {density}, allowed: 0 to 1")
    return min(n, math.floor(density * n + 1e-6))  # 0.7 * 10 is 7, not 6.999...


def full_masks(shapes: Mapping[str, torch.Size | tuple[int, ...]]) -> Masks:
    """Masks that keep everything."""
    return {name: torch.ones(tuple(shape), dtype=torch.bool) for name, shape in shapes.items()}


def random_masks(
    shapes: Mapping[str, torch.Size | tuple[int, ...]],
    densities: Mapping[str, float],
    rng: torch.Generator,
) -> Masks:
    """Masks with exactly ``keep_count(n, densities[name])`` kept coordinates, uniformly placed, per tensor."""
    masks = {}
    for name, shape in shapes.items():
        mask = torch.zeros(tuple(shape), dtype=torch.bool)
        order = torch.randperm(mask.numel(), generator=rng)
        mask.view(-1)[order[: keep_count(mask.numel(), densities[name])]] = True
        masks[name] = mask
    return masks


def prune_percent(weights: Mapping[str, Tensor], masks: Mapping[str, Tensor], percent: float) -> Masks:
    """Remove about ``percent`` % of the remaining weights of each tensor: those of smallest magnitude.

    Per tensor the threshold is the linearly interpolated percentile of ``|w|`` over the alive coordinates (kept
    and non-zero); coordinates strictly below it leave the mask. New masks are subsets of the old ones. A tensor
    without alive coordinates keeps its mask. ``percent`` in [0, 100], else ``ValueError``.

    Source: Sub-FedAvg, sections 3.5 and 4. The paper prunes "w.r.t. the full dense network"; the released code,
    followed here, prunes the *remaining* weights, so that repeated steps approach any target.
    """
    if not 0.0 <= percent <= 100.0:
        raise ValueError(f"percent is {percent}, allowed: 0 to 100")
    pruned = {}
    for name, mask in masks.items():
        magnitude = weights[name].detach().abs()
        alive = magnitude[mask & (magnitude != 0)]
        if alive.numel() == 0:
            pruned[name] = mask.clone()
            continue
        threshold = float(np.percentile(alive.double().cpu().numpy(), percent))
        pruned[name] = mask & ~(magnitude.double() < threshold)
    return pruned


def mask_distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """Mean over tensors, each counting alike, of the share of coordinates in which two masks differ.

    In [0, 1]; 0 for masks without tensors. Source: Sub-FedAvg, Algorithm 1 line 13. ``ValueError`` when the two
    do not name the same tensors.
    """
    if a.keys() != b.keys():
        raise ValueError(f"masks name different tensors: {sorted(a.keys() ^ b.keys())}")
    if not a:
        return 0.0
    return sum(float((a[name] != b[name]).double().mean()) for name in a) / len(a)
