"""ALPS: prune a matrix by one least-squares problem, for the outputs nearest the dense ones.

The problem is ``min ‖(W - W₀) X‖²`` over matrices ``W`` with a given number of weights. It needs only ``H = X Xᵀ`` of
the inputs ``X``. Source: Meng, Behdin, Wang, Mazumder, "ALPS: Improved Optimization for Highly Sparse One-Shot Pruning
for Large Language Models", NeurIPS 2024, Algorithms 1 and 2.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedprune_app.core.scores import NOfM, magnitude_mask
from fedprune_app.core.sparsegpt import DAMPING

# The penalty grows from _FIRST to _LAST in _STEPS steps, by a constant factor. In the paper the factor depends on how
# many weights of the mask changed.
_FIRST, _LAST, _STEPS = 0.01, 2.0, 40
_TINY = torch.finfo(torch.float32).tiny


def alps(
    matrices: Sequence[Tensor],
    hessian: Tensor,
    density: float | None = None,
    n_of_m: NOfM | None = None,
) -> list[tuple[Tensor, Tensor]]:
    """Return the pruned matrix and its mask, both (out, in), for each of ``matrices``, which share their inputs.

    ``hessian`` (in, in) is ``X Xᵀ`` up to a factor; its diagonal grows by a hundredth of its mean. A matrix keeps
    exactly ``keep_count(n, density)`` of its entries, wherever they are, or with ``n_of_m`` n of every m neighbours of
    a row. The results have the dtypes of the matrices.

    The method of multipliers keeps two copies of the weights. One solves the problem without a mask, the other has the
    required number of weights, and a growing penalty draws them together. The mask is the second copy's. Then
    :func:`least_squares` computes the weights. Both scale inputs to unit size, as in the paper.

    Raises ``ValueError`` unless exactly one of ``density`` and ``n_of_m`` is given, and for results that are not
    finite.
    """
    damped_hessian = hessian.detach().float().clone()
    damped_hessian.diagonal().add_(DAMPING * damped_hessian.diagonal().mean())
    sizes = damped_hessian.diagonal().clamp(min=_TINY).sqrt()  # (in,)
    damped_hessian /= sizes * sizes[:, None]
    rows = [len(matrix) for matrix in matrices]
    dense = torch.cat([matrix.detach().float() for matrix in matrices]) * sizes  # (out, in) * (in,)
    values, vectors = torch.linalg.eigh(damped_hessian)
    target = dense @ damped_hessian

    def mask_of(weights: Tensor) -> Tensor:
        return torch.cat([magnitude_mask(matrix, density, n_of_m) for matrix in torch.split(weights, rows)])

    mask = mask_of(dense)
    sparse, dual, penalty = dense * mask, torch.zeros_like(dense), _FIRST
    growth = (_LAST / _FIRST) ** (1 / _STEPS)
    for _ in range(_STEPS):
        dual += ((target + penalty * (sparse - dual)) @ vectors / (values + penalty)) @ vectors.T
        mask = mask_of(dual)
        sparse = dual * mask
        dual, penalty = (dual - sparse) / growth, penalty * growth
    pruned = least_squares(dense, mask, damped_hessian, sparse) / sizes
    results = zip(matrices, torch.split(pruned, rows), torch.split(mask, rows), strict=True)
    pairs = [(weight.to(matrix.dtype), kept_mask) for matrix, weight, kept_mask in results]
    if not all(bool(weight.isfinite().all()) for weight, _ in pairs):
        raise ValueError("pruned weights are not finite, allowed: finite weights and sums")
    return pairs


def least_squares(dense: Tensor, mask: Tensor, hessian: Tensor, start: Tensor) -> Tensor:
    """Return the weights on ``mask`` (out, in) whose outputs are nearest those of ``dense``: ``min ‖(W - W₀) X‖²``.

    Each row is a problem of its own. All rows are solved together by conjugate gradients from ``start``, for at most
    200 steps or until a row's residual is 10⁻⁵ of what it is at 0. ``hessian`` (in, in) is ``X Xᵀ`` with 1 on
    the diagonal, which leaves a diagonal preconditioner nothing to do.
    """
    kept = mask.float()
    weights = start * kept
    direction = residual = ((dense - weights) @ hessian) * kept
    size = residual.square().sum(dim=1, keepdim=True)  # (out, 1)
    limit = 1e-10 * ((dense @ hessian) * kept).square().sum(dim=1, keepdim=True)
    for _ in range(200):
        is_open = size > limit
        if not bool(is_open.any()):
            break
        image = (direction @ hessian) * kept
        step = torch.where(is_open, size / (direction * image).sum(dim=1, keepdim=True).clamp(min=_TINY), 0)
        weights, residual = weights + step * direction, residual - step * image
        last_size, size = size, residual.square().sum(dim=1, keepdim=True)
        direction = residual + torch.where(is_open, size / last_size, 0) * direction
    return weights
