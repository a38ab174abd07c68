"""Masks: how many coordinates to keep, which ones, and how far two masks are apart. True = kept, everywhere."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from fedprune_app.core.rng import generator

Masks = dict[str, Tensor]


def keep_count(n: int, density: float) -> int:
    """How many of ``n`` coordinates a density keeps: ``floor(density * n)``, guarded against float noise.

    The one place where a density is rounded. ``density`` in [0, 1], else ``ValueError``.
    """
    if not 0.0 <= density <= 1.0:
        raise ValueError(f"density is {density}, allowed: 0 to 1")
    return min(n, math.floor(density * n + 1e-6))  # 0.7 * 10 is 7, not 6.999...


def erk_densities(shapes: Mapping[str, torch.Size | tuple[int, ...]], density: float) -> dict[str, float]:
    """Erdős-Rényi-kernel densities: small tensors stay denser, together they keep ``density`` of all coordinates.

    A tensor's density is proportional to ``sum(shape) / prod(shape)``; one that would pass 1 becomes dense and the
    others share what is left, until none does. All given tensors take part. A 1-D tensor (bias, norm scale) has
    the largest ratio, 1, and so is dense unless ``density`` is tiny (all shapes' sums together then exceed the
    coordinates to keep); a scalar or empty tensor counts as 1-D. ``density`` in [0, 1], else ``ValueError``.

    Source: Evci et al. 2020 (RigL), used by Dis-PFL, section 3.2, for the initial masks.
    """
    if not 0.0 <= density <= 1.0:
        raise ValueError(f"density is {density}, allowed: 0 to 1")
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    raw = {name: sum(shape) / sizes[name] if shape and sizes[name] else 1.0 for name, shape in shapes.items()}
    budget = density * sum(sizes.values())  # coordinates to keep, of the tensors still sparse
    sparse = set(shapes)
    epsilon = 0.0
    while sparse:
        weight = sum(raw[name] * sizes[name] for name in sparse)
        epsilon = budget / weight if weight else density
        largest = max(raw[name] for name in sparse)
        if epsilon * largest < 1 - 1e-12:  # float noise must not leave a dense tensor just below 1
            break
        dense = {name for name in sparse if raw[name] == largest}
        budget -= sum(sizes[name] for name in dense)
        sparse -= dense
    return {name: epsilon * raw[name] if name in sparse else 1.0 for name in shapes}


def uniform_densities(shapes: Mapping[str, torch.Size | tuple[int, ...]], density: float) -> dict[str, float]:
    """``density`` for every weight (2 or more dimensions); 1-D tensors stay dense.

    They cost next to nothing, and a normalisation scale masked to 0 silences its whole channel. ``density`` in
    [0, 1], else ``ValueError``.
    """
    if not 0.0 <= density <= 1.0:
        raise ValueError(f"density is {density}, allowed: 0 to 1")
    return {name: density if len(shape) > 1 else 1.0 for name, shape in shapes.items()}


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


def random_coordinates(shapes: Mapping[str, torch.Size | tuple[int, ...]], density: float, seed: int) -> Masks:
    """Masks that together keep exactly ``keep_count(d, density)`` of all d coordinates, uniformly placed.

    Unlike :func:`random_masks` all tensors are drawn from at once, biases too; ``seed`` alone decides, so that it can
    travel in place of the masks. Source: Fed-SPA's random sparsifier.
    """
    sizes = [math.prod(shape) for shape in shapes.values()]
    kept = torch.zeros(sum(sizes), dtype=torch.bool)
    order = torch.randperm(len(kept), generator=torch.Generator().manual_seed(seed))
    kept[order[: keep_count(len(kept), density)]] = True
    parts = torch.split(kept, sizes)
    return {name: part.view(tuple(shape)).clone() for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def packed(tensors: Mapping[str, Tensor], masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each masked tensor as the vector of its kept values: what is sent to somebody who knows the masks."""
    return {name: tensor[masks[name]] if name in masks else tensor for name, tensor in tensors.items()}


def unpacked(
    values: Mapping[str, Tensor], masks: Mapping[str, Tensor], fallback: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The inverse of :func:`packed`; coordinates that were not sent are those of ``fallback``."""
    tensors = dict(values)
    for name in values.keys() & masks.keys():
        tensors[name] = fallback[name].clone()
        tensors[name][masks[name]] = values[name]
    return tensors


def magnitude_masks(weights: Mapping[str, Tensor], density: float) -> Masks:
    """Per tensor, keep the ``keep_count(n, density)`` weights of largest magnitude; ties go to the lowest flat index.

    Source: FedP3, section 4.3.1, as its released code has it (``int(p n)`` per weight tensor).
    """
    masks = {}
    for name, weight in weights.items():
        count = keep_count(weight.numel(), density)
        everywhere = torch.ones(weight.shape, dtype=torch.bool, device=weight.device)
        if 0 < count < weight.numel():
            masks[name] = _largest(weight.detach().abs(), everywhere, count)
        else:
            masks[name] = everywhere if count else ~everywhere
    return masks


def sketch_masks(
    weights: Mapping[str, Tensor], density: float, kind: str, seed: int, partition: int, round: int
) -> Masks:
    """FedP3's P_i: per tensor, ``keep_count(n, density)`` weights.

    ``kind`` is "magnitude", or "random" for a client's own draw, once, and "random-per-round" for one every round.
    Server and client make the same.
    """
    if kind == "magnitude":
        return magnitude_masks(weights, density)
    draw = generator(seed, "global pruning", partition, round if kind == "random-per-round" else 0)
    shapes = {name: weight.shape for name, weight in weights.items()}
    return random_masks(shapes, dict.fromkeys(shapes, density), draw)


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


def relative_threshold_masks(weights: Mapping[str, Tensor], ratio: float) -> Masks:
    """Keep what is larger than ``ratio`` times the largest magnitude of its tensor: ``|w| > ratio · max |w|``.

    How many that are depends on the weights' distribution; the largest always stays. With ratio 0 exact zeros go, and
    a tensor of zeros loses everything. ``ratio`` in [0, 1), else ``ValueError``, as for a weight that is NaN.

    Source: Fed-LTP, equation 9, whose "largest value" is read as the largest magnitude.
    """
    if not 0.0 <= ratio < 1.0:
        raise ValueError(f"ratio is {ratio}, allowed: at least 0 and below 1")
    kept = {}
    for name, weight in weights.items():
        magnitude = weight.detach().abs()
        if magnitude.isnan().any():
            raise ValueError(f"weight '{name}' holds NaN, allowed: numbers")
        kept[name] = magnitude > ratio * magnitude.max() if magnitude.numel() else magnitude.bool()
    return kept


def prune_and_grow(
    weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor], masks: Mapping[str, Tensor], fraction: float
) -> Masks:
    """Move a fraction of each mask: drop the kept weights of smallest magnitude, grow where the gradient is largest.

    Per tensor ``n = ceil(fraction * kept)``, at least 1 if anything is kept and ``fraction`` > 0. The n kept
    coordinates of smallest ``|w|`` are dropped; then, among all that are now off, the ones just dropped included,
    the n of largest ``|gradient|`` are kept. Ties go to the lowest flat index. Every tensor keeps exactly as many
    coordinates as before; one that is dense or empty does not change. Weights are not touched: a grown coordinate
    has the value that the caller gives it.

    ``gradients`` are those of the dense model, off the mask too (RigL); random numbers in their place make growth
    uniform (SET). All tensors of a name have one shape and device. ``ValueError`` when ``fraction`` is outside
    [0, 1] or a weight or gradient is NaN.

    Source: Dis-PFL, Algorithm 2; Evci et al. 2020 (RigL), Mocanu et al. 2018 (SET).
    """
    if not 0.0 <= fraction <= 1.0:
        raise ValueError(f"fraction is {fraction}, allowed: 0 to 1")
    moved = {}
    for name, mask in masks.items():
        magnitude, growth = weights[name].detach().abs(), gradients[name].detach().abs()
        for kind, scores in (("weight", magnitude), ("gradient", growth)):
            if scores.sum().isnan():  # of magnitudes, so only if one of them is
                raise ValueError(f"{kind} '{name}' holds NaN, allowed: numbers")
        kept = int(mask.count_nonzero())
        if fraction == 0 or kept in (0, mask.numel()):
            moved[name] = mask.clone()
            continue
        count = max(1, math.ceil(fraction * kept - 1e-6))  # 0.28 * 25 is 7, not 8
        stay = mask & ~_largest(-magnitude, mask, count)
        moved[name] = stay | _largest(growth, ~stay, count)
    return moved


def _largest(scores: Tensor, eligible: Tensor, count: int) -> Tensor:
    """Mask of the ``count`` eligible coordinates of largest score, at least 1; ties go to the lowest flat index.

    Selects the last score to enter and then compares, which is many times faster than a stable sort.
    """
    shape, scores, eligible = eligible.shape, scores.reshape(-1), eligible.reshape(-1)
    if scores.device.type == "cpu":
        candidates = scores.numpy()[np.flatnonzero(eligible.numpy())]  # both of these outrun torch's on a CPU
        last = float(np.partition(candidates, -count)[-count])
    else:
        last = float(scores[eligible].topk(count, sorted=False).values.min())
    chosen = eligible & (scores > last)
    ties = (eligible & (scores == last)).nonzero().squeeze(1)
    chosen[ties[: count - int(chosen.count_nonzero())]] = True
    return chosen.view(shape)


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
