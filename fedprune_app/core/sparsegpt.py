"""SparseGPT prunes one matrix column by column and lets the columns to the right make up for the removed weights.

Frantar and Alistarh, "SparseGPT: Massive Language Models Can Be Accurately Pruned in One-Shot", ICML 2023, Algorithm 1.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedprune_app.core.masks import keep_count
from fedprune_app.core.scores import NOfM, check_n_of_m, n_of_m_mask, one_target, smallest

COUNTS = ("exact", "code")


class Hessian:
    """A Hessian is ``H = 2/n Σ x xᵀ`` over a layer's inputs, in float32.

    ``n`` counts sequences, as the released code does. The choice of ``n`` only scales ``H``. The damping is relative to
    ``H``, and masks and weights do not depend on the scale.
    """

    def __init__(self, num_inputs: int, device: torch.device | str = "cpu") -> None:
        self.num_sequences = 0
        self.matrix = torch.zeros(num_inputs, num_inputs, device=device)

    def add(self, inputs: Tensor) -> None:
        """Add the inputs (sequences, ..., in) of some sequences."""
        added = inputs.shape[0]
        total = self.num_sequences + added
        tokens = inputs.detach().reshape(-1, inputs.shape[-1]).float() * math.sqrt(2 / total)
        self.matrix.mul_(self.num_sequences / total).addmm_(tokens.T, tokens)
        self.num_sequences = total

    def input_norms(self) -> Tensor:
        """Return ``‖x_j‖₂``, by which Wanda weighs, for every input ``j`` (in,).

        The norm is the root of the mean over sequences of the squared norm of input ``j``.
        """
        return (self.matrix.diagonal() / 2).sqrt()


class InputNorms:
    """Input norms are the diagonal of :class:`Hessian` alone, for methods that need nothing else."""

    def __init__(self, num_inputs: int, device: torch.device | str = "cpu") -> None:
        self.num_sequences = 0
        self._squares = torch.zeros(num_inputs, device=device)

    def add(self, inputs: Tensor) -> None:
        """Add the inputs (sequences, ..., in) of some sequences."""
        total = self.num_sequences + inputs.shape[0]
        tokens = inputs.detach().reshape(-1, inputs.shape[-1]).float()
        self._squares.mul_(self.num_sequences / total).add_(tokens.square().sum(dim=0), alpha=1 / total)
        self.num_sequences = total

    def input_norms(self) -> Tensor:
        """Return the norms that :meth:`Hessian.input_norms` returns."""
        return self._squares.sqrt()


def sparsegpt(
    weight: Tensor,
    hessian: Tensor,
    density: float | None = None,
    n_of_m: NOfM | None = None,
    block_size: int = 128,
    damping: float = 0.01,
    count: str = "exact",
) -> tuple[Tensor, Tensor]:
    """Return the pruned and updated matrix and its mask, both (out, in).

    ``weight`` is (out, in), and the result has its dtype. ``hessian`` is (in, in).

    Blocks of ``block_size`` columns are pruned left to right. When a block is reached, the entries of all its rows
    compete by ``w² / U_jj²``, ``U`` being the upper Cholesky factor of ``H⁻¹``. With ``n_of_m`` every ``m`` columns of
    a row compete when they are reached. Then, column by column, the columns to the right take over the contribution of
    the removed weights.

    With ``density`` the matrix keeps exactly ``keep_count(n, density)`` entries, and each block its share to within one
    entry. Of equal entries the one at the lowest flat index of the block goes. ``count="code"`` removes, as the
    released code does, all entries up to and including the one at position ``⌊n · sparsity⌋`` of the sorted block: one
    more per block.

    The diagonal grows by ``damping`` times its mean. Inputs that were never seen (0 on the diagonal) have
    their column removed, or as much of the column as the count allows, since such a column counts as 0.

    Raises ``ValueError`` unless exactly one of ``density`` and ``n_of_m`` is given, for shapes and values out of range,
    and when the damped ``hessian`` is not positive definite. The function never falls back to another method.
    """
    num_rows, num_columns = weight.shape
    _check(weight, hessian, density, n_of_m, block_size, damping, count)
    weights = weight.detach().float().clone()
    unseen = hessian.diagonal() == 0
    weights[:, unseen] = 0
    factor = _inverse_factor(hessian, unseen, damping)
    mask = torch.ones_like(weights, dtype=torch.bool)

    for start in range(0, num_columns, block_size):
        stop = min(start + block_size, num_columns)
        block, kept = weights[:, start:stop], mask[:, start:stop]  # views
        block_factor = factor[start:stop, start:stop]
        if density is not None:
            scores = (block / block_factor.diagonal()).square()  # (out, block) / (block,)
            before, after = (keep_count(num_rows * columns, density) for columns in (start, stop))
            kept.copy_(~_removed(scores, after - before, density, count))
        errors = torch.zeros_like(block)
        for i in range(stop - start):
            if n_of_m is not None and i % n_of_m[1] == 0:
                group = slice(i, i + n_of_m[1])
                scores = (block[:, group] / block_factor.diagonal()[group]).square()
                kept[:, group] = n_of_m_mask(scores, n_of_m)
            column = block[:, i]
            errors[:, i] = torch.where(kept[:, i], 0, column) / block_factor[i, i]
            # In exact arithmetic the update leaves 0 at the column's removed weights; floats need the mask below.
            block[:, i:].addr_(errors[:, i], block_factor[i, i:], alpha=-1)
        weights[:, stop:].addmm_(errors, factor[start:stop, stop:], alpha=-1)
    pruned = torch.where(mask, weights, 0).to(weight.dtype)
    if not bool(pruned.isfinite().all()):
        raise ValueError(f"updated weights are not finite in {weight.dtype}; allowed: a larger damping")
    return pruned, mask


def _inverse_factor(hessian: Tensor, unseen: Tensor, damping: float) -> Tensor:
    """Return the upper Cholesky factor ``U`` of the inverse of the damped Hessian: ``H⁻¹ = UᵀU``."""
    damped = hessian.detach().float().clone()
    diagonal = damped.diagonal()
    diagonal[unseen] = 1
    diagonal.add_(damping * diagonal.mean())
    factor: Tensor
    factor, failed = torch.linalg.cholesky_ex(damped)
    if not int(failed):
        factor, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(factor), upper=True)
    if int(failed) or not bool(factor.isfinite().all()):
        raise ValueError(
            f"the hessian with damping {damping} is not positive definite (Cholesky fails at input {int(failed)}), "
            "allowed: more calibration text, or a larger damping"
        )
    return factor


def _removed(scores: Tensor, num_kept: int, density: float, count: str) -> Tensor:
    if count == "exact":
        return smallest(scores, scores.numel() - num_kept)
    position = keep_count(scores.numel(), 1 - density)
    if position == scores.numel():
        raise ValueError(f"density is {density}, allowed with count 'code': one that keeps something of every block")
    threshold: Tensor = scores.reshape(-1).sort().values[position]
    return torch.le(scores, threshold)


def _check(
    weight: Tensor,
    hessian: Tensor,
    density: float | None,
    n_of_m: NOfM | None,
    block_size: int,
    damping: float,
    count: str,
) -> None:
    num_columns = weight.shape[1]
    if hessian.shape != (num_columns, num_columns):
        raise ValueError(f"hessian has shape {tuple(hessian.shape)}, allowed: {(num_columns, num_columns)}")
    if not (bool(weight.isfinite().all()) and bool(hessian.isfinite().all())):
        raise ValueError("weight or hessian holds values that are NaN or infinite")
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}, allowed: at least 1")
    if not damping >= 0:
        raise ValueError(f"damping is {damping}, allowed: at least 0")
    if count not in COUNTS:
        raise ValueError(f"count is {count!r}, allowed: {', '.join(COUNTS)}")
    if n_of_m is None or density is not None:
        keep_count(1, one_target(density, n_of_m))
        return
    check_n_of_m(n_of_m, num_columns)
    if block_size % n_of_m[1]:
        raise ValueError(f"block_size is {block_size}, allowed with {n_of_m[0]}:{n_of_m[1]}: a multiple of m")
