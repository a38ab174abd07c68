"""Masks of the coordinates to keep: counting, choosing and comparing them. True = kept, everywhere."""

import math
from collections.abc import Container, Mapping

import numpy as np
import torch
from torch import Tensor

from fedprune_app.core.named import Shapes, TensorDict, Tensors

Masks = TensorDict


def keep_count(n: int, density: float) -> int:
    """Return how many of ``n`` coordinates a density keeps: ``floor(density * n)``, guarded against float noise.

    A density is rounded here and nowhere else. ``density`` is in [0, 1], else ``ValueError``.

    >>> keep_count(100, 0.29)  # although 0.29 * 100 is 28.999999999999996
    29
    >>> keep_count(3, 0.5)
    1
    """
    if not 0.0 <= density <= 1.0:
        raise ValueError(f"density is {density}, allowed: 0 to 1")
    return min(n, math.floor(density * n + 1e-6))  # 0.29 * 100 is 29, not 28.999...


def erk_densities(shapes: Shapes, density: float) -> dict[str, float]:
    """Return Erdős-Rényi-kernel densities: small tensors stay denser, all together keep ``density`` of the coordinates.

    A tensor's density is proportional to ``sum(shape) / prod(shape)``. A tensor whose density would exceed 1 becomes
    dense, and the others share the rest, until no density exceeds 1. A 1-D tensor (bias, norm scale) has the largest
    ratio, 1, so it is dense unless ``density`` is tiny (all shapes' sums together then exceed the coordinates to keep).
    A scalar or empty tensor counts as 1-D. ``density`` is in [0, 1], else ``ValueError``.

    Source: Evci et al. 2020 (RigL), used by Dis-PFL, section 3.2, for the initial masks.

    >>> shapes = {"conv": (6, 3, 5, 5), "fc": (120, 400)}
    >>> {name: round(share, 3) for name, share in erk_densities(shapes, 0.2).items()}
    {'conv': 0.759, 'fc': 0.195}
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


def dense_share(shapes: Shapes, prunable: Container[str]) -> float:
    """Return the share of the coordinates in matrices that are not ``prunable``, such as a recurrent layer's."""
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    dense = [sizes[name] for name, shape in shapes.items() if len(shape) > 1 and name not in prunable]
    return sum(dense) / sum(sizes.values())


def uniform_densities(shapes: Shapes, density: float) -> dict[str, float]:
    """Return ``density`` for every weight (2 or more dimensions) and 1 for every 1-D tensor.

    1-D tensors stay dense because they are small, and because a normalisation scale masked to 0 silences its whole
    channel.
    """
    return {name: density if len(shape) > 1 else 1.0 for name, shape in shapes.items()}


def full_masks(shapes: Shapes) -> Masks:
    return {name: torch.ones(tuple(shape), dtype=torch.bool) for name, shape in shapes.items()}


def random_masks(
    shapes: Shapes,
    densities: Mapping[str, float],
    rng: torch.Generator,
) -> Masks:
    """Draw masks with exactly ``keep_count(n, densities[name])`` kept coordinates per tensor, uniformly placed."""
    masks = {}
    for name, shape in shapes.items():
        mask = torch.zeros(tuple(shape), dtype=torch.bool)
        order = torch.randperm(mask.numel(), generator=rng)
        mask.view(-1)[order[: keep_count(mask.numel(), densities[name])]] = True
        masks[name] = mask
    return masks


def random_coordinates(shapes: Shapes, density: float, seed: int) -> Masks:
    """Draw masks that together keep exactly ``keep_count(d, density)`` of all d coordinates, uniformly placed.

    Unlike :func:`random_masks` it draws from all tensors at once, biases included. The masks depend on ``seed`` alone,
    so the seed can be sent in their place. Source: Fed-SPA's random sparsifier.
    """
    sizes = [math.prod(shape) for shape in shapes.values()]
    kept = torch.zeros(sum(sizes), dtype=torch.bool)
    order = torch.randperm(len(kept), generator=torch.Generator().manual_seed(seed))
    kept[order[: keep_count(len(kept), density)]] = True
    parts = torch.split(kept, sizes)
    return {name: part.view(tuple(shape)).clone() for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def packed(tensors: Tensors, masks: Tensors) -> TensorDict:
    """Return each masked tensor as the vector of its kept values, for a receiver that knows the masks."""
    return {name: tensor[masks[name]] if name in masks else tensor for name, tensor in tensors.items()}


def unpacked(values: Tensors, masks: Tensors, fallback: Tensors) -> TensorDict:
    """Undo :func:`packed`; coordinates that were not sent come from ``fallback``."""
    tensors = dict(values)
    for name in values.keys() & masks.keys():
        tensors[name] = fallback[name].clone()
        tensors[name][masks[name]] = values[name]
    return tensors


def magnitude_masks(weights: Tensors, density: float) -> Masks:
    """Return masks of the ``keep_count(n, density)`` weights of largest magnitude, per tensor.

    Ties go to the lowest flat index. Source: FedP3, section 4.3.1, as in its released code (``int(p n)`` per weight
    tensor).
    """
    masks = {}
    for name, weight in weights.items():
        count = keep_count(weight.numel(), density)
        full_mask = torch.ones(weight.shape, dtype=torch.bool, device=weight.device)
        is_full = count == weight.numel()
        masks[name] = full_mask if is_full else _largest(weight.detach().abs(), full_mask, count)
    return masks


def magnitude_masks_across(weights: Tensors, density: float) -> Masks:
    """Return masks of the ``keep_count(n, density)`` weights of largest magnitude across all tensors.

    Ties go to the earlier tensor, then to the lowest flat index. Source: SNIP, Lee et al., ICLR 2019.
    """
    kept = magnitude_masks({"all": torch.cat([weight.reshape(-1) for weight in weights.values()])}, density)["all"]
    parts = torch.split(kept, [weight.numel() for weight in weights.values()])
    return {name: part.view(weights[name].shape).clone() for name, part in zip(weights, parts, strict=True)}


def prune_percent(weights: Tensors, masks: Tensors, percent: float) -> Masks:
    """Return masks without about ``percent`` % of the remaining weights of each tensor: those of smallest magnitude.

    Per tensor the threshold is the linearly interpolated percentile of ``|w|`` over the alive coordinates (kept and
    non-zero). Coordinates strictly below the threshold are pruned. New masks are subsets of the old ones. A tensor
    without alive coordinates keeps its mask. ``percent`` is in [0, 100], else ``ValueError``.

    Source: Sub-FedAvg, sections 3.5 and 4. The paper prunes "w.r.t. the full dense network". The released code,
    followed here, prunes the *remaining* weights, so that repeated steps approach any target.
    """
    new_masks = {}
    for name, mask in masks.items():
        magnitude = weights[name].detach().abs()
        magnitudes = magnitude[mask & (magnitude != 0)]
        if magnitudes.numel() == 0:
            new_masks[name] = mask.clone()
            continue
        threshold = float(np.percentile(magnitudes.double().cpu().numpy(), percent))
        new_masks[name] = mask & ~(magnitude.double() < threshold)
    return new_masks


def relative_threshold_masks(weights: Tensors, ratio: float) -> Masks:
    """Return masks that keep ``|w| > ratio · max |w|``, where the maximum is over the weight's own tensor.

    The number of kept weights depends on the weights' distribution. The largest weight is always kept. Ratio 0 prunes
    exact zeros, and so all of a tensor of zeros. ``ValueError`` for a ``ratio`` outside [0, 1) and for NaN.

    Source: Fed-LTP, equation 9, whose "largest value" is read as the largest magnitude.
    """
    if not 0.0 <= ratio < 1.0:
        raise ValueError(f"ratio is {ratio}, allowed: at least 0 and below 1")
    new_masks = {}
    for name, weight in weights.items():
        magnitude = weight.detach().abs()
        if magnitude.isnan().any():
            raise ValueError(f"weight '{name}' holds NaN, allowed: numbers")
        new_masks[name] = magnitude > ratio * magnitude.max() if magnitude.numel() else magnitude.bool()
    return new_masks


def prune_and_grow(weights: Tensors, gradients: Tensors, masks: Tensors, fraction: float) -> Masks:
    """Move a fraction of each mask: drop the kept weights of smallest magnitude, grow where the gradient is largest.

    Per tensor ``n = ceil(fraction * kept)``, at least 1 if anything is kept and ``fraction`` > 0.

    1. The n kept coordinates of smallest ``|w|`` are dropped.
    2. Of all coordinates now off, including those just dropped, the n of largest ``|gradient|`` are kept.

    Ties go to the lowest flat index. Every tensor keeps exactly as many coordinates as before. A tensor that is dense
    or empty does not change. The weights do not change: the caller sets the value of a grown coordinate.

    ``gradients`` are those of the dense model, off the mask too (RigL); random numbers in their place make growth
    uniform (SET). Tensors of one name have the same shape and device. ``ValueError`` when ``fraction`` is outside [0,
    1] or a weight or gradient is NaN.

    Source: Dis-PFL, Algorithm 2; Evci et al. 2020 (RigL), Mocanu et al. 2018 (SET).

    >>> weights, gradients = torch.tensor([5.0, 0.1, 0.0, 0.0]), torch.tensor([0.0, 0.0, 1.0, 9.0])
    >>> masks = {"w": torch.tensor([True, True, False, False])}
    >>> prune_and_grow({"w": weights}, {"w": gradients}, masks, fraction=0.5)["w"].tolist()
    [True, False, False, True]
    """
    if not 0.0 <= fraction <= 1.0:
        raise ValueError(f"fraction is {fraction}, allowed: 0 to 1")
    new_masks = {}
    for name, mask in masks.items():
        magnitude, growth = weights[name].detach().abs(), gradients[name].detach().abs()
        for kind, scores in (("weight", magnitude), ("gradient", growth)):
            if scores.sum().isnan():  # a sum of magnitudes is NaN only if one of them is
                raise ValueError(f"{kind} '{name}' holds NaN, allowed: numbers")
        num_kept = int(mask.count_nonzero())
        if fraction == 0 or num_kept in (0, mask.numel()):
            new_masks[name] = mask.clone()
            continue
        count = max(1, math.ceil(fraction * num_kept - 1e-6))  # 0.28 * 25 is 7, not 8
        kept = mask & ~_largest(-magnitude, mask, count)
        new_masks[name] = kept | _largest(growth, ~kept, count)
    return new_masks


def _largest(scores: Tensor, eligible: Tensor, count: int) -> Tensor:
    """Return the mask of the ``count`` eligible coordinates of largest score; ties go to the lowest flat index.

    It selects the smallest score that enters and compares all scores with it, many times faster than a stable sort.
    """
    if not count:
        return torch.zeros_like(eligible)
    shape, scores, eligible = eligible.shape, scores.reshape(-1), eligible.reshape(-1)
    if scores.device.type == "cpu":
        candidates = torch.from_numpy(scores.numpy()[np.flatnonzero(eligible.numpy())])  # six times as fast as torch's
    else:
        candidates = scores[eligible]
    threshold = kth_smallest(candidates, len(candidates) - count + 1)
    selection = eligible & (scores > threshold)
    ties = (eligible & (scores == threshold)).nonzero().squeeze(1)
    selection[ties[: count - int(selection.count_nonzero())]] = True
    return selection.view(shape)


def kth_smallest(flat: Tensor, rank: int) -> Tensor:
    """Return the ``rank``-th smallest value, counted from 1, by the fastest way on the device.

    On the CPU NumPy's selection is many times as fast as PyTorch's; on a GPU a sort is, which uses the whole device.
    """
    if flat.device.type == "cpu":
        return torch.as_tensor(np.partition(flat.detach().numpy(), rank - 1)[rank - 1])
    return flat.sort().values[rank - 1]


def mask_distance(a: Tensors, b: Tensors) -> float:
    """Return the share of coordinates in which two masks differ, averaged over tensors with equal weight.

    The distance is in [0, 1], and 0 for masks without tensors. Source: Sub-FedAvg, Algorithm 1 line 13. ``ValueError``
    when ``a`` and ``b`` do not name the same tensors.

    >>> mask_distance({"w": torch.tensor([True, True])}, {"w": torch.tensor([True, False])})
    0.5
    """
    if a.keys() != b.keys():
        raise ValueError(f"masks name different tensors: {sorted(a.keys() ^ b.keys())}")
    if not a:
        return 0.0
    return sum(float((a[name] != b[name]).double().mean()) for name in a) / len(a)
