"""GPTQ: round a matrix column by column; the columns to the right compensate for the rounding error.

Frantar, Ashkboos, Hoefler and Alistarh, "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers", ICLR 2023, Algorithm 1. It is the sweep of :mod:`fedprune_app.core.sparsegpt` with a rounded weight in
the place of 0. A block's scale and minimum are chosen when the sweep reaches it, so they fit the weights that are
rounded. All arithmetic is in float64, so that the number of threads changes no level.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from fedprune_app.core.grids import BLOCK, Grid, Quantized
from fedprune_app.core.sparsegpt import inverse_factor

_PANEL = 4 * BLOCK  # columns that are updated one by one; those to the right of a panel are updated together


def gptq(
    matrices: Sequence[Tensor],
    hessian: Tensor,
    grid: Grid,
    masks: Sequence[Tensor] | None = None,
) -> list[Quantized]:
    """Return each of ``matrices`` (out, in), which share their inputs, quantized; one pass covers the rows of all.

    ``hessian`` (in, in) is ``X Xᵀ`` up to a factor. Its diagonal grows by a hundredth of its mean. A row
    that ends within a block is padded with 0. Weights off the boolean ``masks`` (out, in) are exactly 0 in the result,
    which requires a grid without minimums. Weights of unseen inputs (0 on the diagonal) are set to 0 before
    rounding.

    A block's scale and minimum minimise the sum of ``error² / U_jj²``, ``U`` being the upper Cholesky factor of
    ``H⁻¹``: the cost of a column's error after the columns to the right have compensated for it.

    Raises ``ValueError`` for masks on a grid with minimums, for values that are not finite or too large for float16,
    and when the damped ``hessian`` is not positive definite.
    """
    if masks is not None and grid.has_minimums:
        raise ValueError(f"grid {grid.gguf_type} has no exact 0, allowed with a mask: one without minimums")
    missing = -len(hessian) % BLOCK
    mean = hessian.diagonal().mean()
    hessian = F.pad(hessian.double(), (0, missing, 0, missing))
    num_inputs = len(hessian)
    hessian.diagonal()[num_inputs - missing :] = mean
    weights = F.pad(torch.cat([matrix.detach().double() for matrix in matrices]).T, (0, 0, 0, missing))  # (in, rows)
    kept = weights.new_ones(weights.shape, dtype=torch.bool)
    if masks is not None:
        kept = F.pad(torch.cat([*masks]).T, (0, 0, 0, missing))
    is_unseen = hessian.diagonal() == 0
    weights[is_unseen] = 0
    factor = inverse_factor(hessian, is_unseen)
    importance = factor.diagonal().reciprocal().square()[:, None] * (kept & ~is_unseen[:, None])
    levels = torch.empty_like(weights, dtype=torch.int8)
    scales, minimums = weights.new_empty((2, num_inputs // BLOCK, weights.shape[1]))
    for start, stop in pairwise([*range(0, num_inputs, _PANEL), num_inputs]):
        errors = torch.empty_like(weights[start:stop])
        for i in range(start, stop):
            block = i // BLOCK
            if i % BLOCK == 0:
                columns = slice(i, i + BLOCK)
                scales[block], minimums[block] = grid.fitted(weights[columns], importance[columns])
            level = grid.levels(weights[i], scales[block], minimums[block]).mul_(kept[i])
            rounded = level * scales[block] + minimums[block]
            levels[i] = level
            torch.div(weights[i] - rounded, factor[i, i], out=errors[i - start])
            weights[i + 1 : stop].addr_(factor[i, i + 1 : stop], errors[i - start], alpha=-1)
        weights[stop:].addmm_(factor[start:stop, stop:].T, errors, alpha=-1)
    halves = scales.T.half(), minimums.T.half()
    if not all(bool(half.isfinite().all()) for half in halves):
        raise ValueError("weights are not finite or beyond float16, allowed: finite weights and sums")
    sizes = [len(matrix) for matrix in matrices]
    parts = zip(*(torch.split(each, sizes) for each in (levels.T, *halves)), strict=True)
    return [Quantized(grid, *(part.contiguous() for part in each)) for each in parts]
