"""SparseGPT: prune a matrix column by column; the columns to the right compensate for removed weights.

Frantar and Alistarh, "SparseGPT: Massive Language Models Can Be Accurately Pruned in One-Shot", ICML 2023, Algorithm 1.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from fedprune_app.core.graphs import CudaGraphs, RepeatedSteps
from fedprune_app.core.masks import keep_count
from fedprune_app.core.scores import PRUNED, NOfM, check_n_of_m, missing_until, n_of_m_mask, one_target, smallest

DAMPING = 0.01  # of the diagonal's mean, as in the released code
_WIDE, _PANELS = 1024, 8
_SMALL = 256  # rows of a triangle that is inverted by substitution


class Hessian:
    """The second moments ``H = 2/n Σ x xᵀ`` of a layer's inputs, in float32.

    ``n`` counts sequences, as the released code does. It only scales ``H``; the damping is relative to ``H``, so masks
    and weights do not depend on the scale.
    """

    def __init__(self, num_inputs: int, device: torch.device | str = "cpu") -> None:
        self.num_sequences = 0
        self._upper = torch.zeros(num_inputs, num_inputs, device=device)  # right of and on the diagonal
        self._is_whole = True
        # H is symmetric: if wide, it is computed in column panels, each down to the diagonal, which saves two fifths.
        self._panel = num_inputs if num_inputs < _WIDE else -(-num_inputs // _PANELS)

    @property
    def matrix(self) -> Tensor:
        """Return ``H`` (in, in)."""
        if not self._is_whole:
            self._upper.triu_().add_(self._upper.triu(1).T)
            self._is_whole = True
        return self._upper

    def add(self, inputs: Tensor) -> None:
        """Add the inputs (sequences, ..., in) of a batch."""
        num_added, size = inputs.shape[0], inputs.shape[-1]
        total = self.num_sequences + num_added
        tokens = inputs.detach().reshape(-1, size).float() * math.sqrt(2 / total)
        self._upper.mul_(self.num_sequences / total)
        for start in range(0, size, self._panel):
            stop = min(start + self._panel, size)
            self._upper[:stop, start:stop].addmm_(tokens[:, :stop].T, tokens[:, start:stop])
        self._is_whole = self._panel >= size
        self.num_sequences = total

    def input_norms(self) -> Tensor:
        """Return ``‖x_j‖₂``, Wanda's weight of each input ``j``: (in,).

        It is the root of the mean over sequences of the squared norm of input ``j``.
        """
        return (self._upper.diagonal() / 2).sqrt()


class InputNorms:
    """The diagonal of :class:`Hessian` alone, for methods that need nothing else."""

    def __init__(self, num_inputs: int, device: torch.device | str = "cpu") -> None:
        self.num_sequences = 0
        self._squares = torch.zeros(num_inputs, device=device)

    def add(self, inputs: Tensor) -> None:
        """Add the inputs (sequences, ..., in) of a batch."""
        total = self.num_sequences + inputs.shape[0]
        tokens = inputs.detach().reshape(-1, inputs.shape[-1]).float()
        self._squares.mul_(self.num_sequences / total).add_(tokens.square().sum(dim=0), alpha=1 / total)
        self.num_sequences = total

    def input_norms(self) -> Tensor:
        """Return the same norms as :meth:`Hessian.input_norms`."""
        return self._squares.sqrt()


def sparsegpt(
    matrices: Sequence[Tensor],
    hessian: Tensor,
    density: float | None = None,
    n_of_m: NOfM | None = None,
    block_size: int = 128,
    recorder: CudaGraphs | None = None,
) -> list[tuple[Tensor, Tensor]]:
    """Return each pruned and updated matrix and its mask, both (out, in), in the matrix's dtype.

    The ``matrices`` (out, in) share their inputs, whose ``hessian`` is (in, in): one factor and one pass over the
    columns serve all. Each has its own mask and count of kept entries.

    Blocks of ``block_size`` columns are pruned left to right. When a block is reached, the entries of all its rows
    compete by ``w² / U_jj²``, ``U`` being the upper Cholesky factor of ``H⁻¹``. With ``n_of_m`` every ``m`` columns of
    a row compete when they are reached. Then, column by column, the columns to the right compensate for the removed
    weights.

    With ``density`` a matrix keeps exactly ``keep_count(n, density)`` entries, and each block its share to within one
    entry. Among equal entries the one at the block's lowest flat index is pruned. Zeros of the given matrix stay
    pruned, and the blocks share the remaining removals in proportion to their other entries, so masks only shrink. The
    released code removes one entry more per block: all up to and including the one at position ``⌊n · sparsity⌋`` when
    sorted.

    The diagonal grows by a hundredth of its mean. The column of an input that was never seen (0 on the diagonal)
    counts as 0, so it is pruned as far as the count allows.

    With a ``recorder`` the sweep over a block's columns is recorded, and replayed for the other blocks.

    Raises ``ValueError`` unless exactly one of ``density`` and ``n_of_m`` is given, for values that are not finite, and
    when the damped ``hessian`` is not positive definite. There is no fallback to another method.
    """
    for matrix in matrices:
        if not (bool(matrix.isfinite().all()) and bool(hessian.isfinite().all())):
            raise ValueError("weight or hessian holds values that are NaN or infinite")
    if n_of_m is not None and density is None:
        check_n_of_m(n_of_m, len(hessian))
    else:
        keep_count(1, one_target(density, n_of_m))
    sizes = [len(matrix) for matrix in matrices]
    num_columns = hessian.shape[0]
    weights = torch.cat([matrix.detach().float() for matrix in matrices])
    pruned_before = weights == 0
    is_unseen = hessian.diagonal() == 0
    weights[:, is_unseen] = 0
    factor = inverse_factor(hessian.float(), is_unseen)
    mask = torch.ones_like(weights, dtype=torch.bool)
    bounds = [*range(0, num_columns, block_size), num_columns]
    zeros = torch.split(pruned_before, sizes)
    kept_until = [_kept_until(bounds, matrix_zeros, density) for matrix_zeros in zeros] if density is not None else []
    was_pruned = bool(pruned_before.any())

    repeated_steps = None if recorder is None else RepeatedSteps(recorder)
    blocks = dict[int, _Block]()
    for number, (start, stop) in enumerate(pairwise(bounds)):
        if density is not None:
            scores = (weights[:, start:stop] / factor.diagonal()[start:stop]).square()  # (rows, block) / (block,)
            if was_pruned:  # earlier columns have updated the zeros
                scores.masked_fill_(pruned_before[:, start:stop], PRUNED)
            parts = zip(torch.split(scores, sizes), torch.split(mask, sizes), kept_until, strict=True)
            for part_scores, part_mask, kept_counts in parts:
                part_mask[:, start:stop] = ~smallest(
                    part_scores, part_scores.numel() - (kept_counts[number + 1] - kept_counts[number])
                )
        if stop - start not in blocks:
            blocks[stop - start] = _Block(stop - start, weights, n_of_m)
        block = blocks[stop - start]
        columns = slice(start, stop)
        block.put(weights[:, columns], mask[:, columns], pruned_before[:, columns], factor[columns, columns])
        if repeated_steps is None:
            block.sweep()
        else:
            repeated_steps(stop - start, block.sweep)
        weights[:, start:stop], mask[:, start:stop] = block.weights.T, block.kept.T
        weights[:, stop:].addmm_(block.errors.T, factor[start:stop, stop:], alpha=-1)
    weights.mul_(mask)
    results = []
    for matrix, pruned, part_mask in zip(matrices, torch.split(weights, sizes), torch.split(mask, sizes), strict=True):
        pruned = pruned.to(matrix.dtype)
        if not bool(pruned.isfinite().all()):
            raise ValueError(f"updated weights are not finite in {matrix.dtype}, allowed: more calibration text")
        results.append((pruned, part_mask))
    return results


class _Block:
    """Some columns of all rows; blocks of one width share their memory, so that a recorded sweep repeats.

    Stored transposed: the sweep reads and writes whole columns.
    """

    def __init__(self, columns: int, template: Tensor, n_of_m: NOfM | None) -> None:
        self.weights = template.new_zeros(columns, len(template))
        self.errors = template.new_zeros(columns, len(template))
        self.kept = self.weights.bool()
        self._pruned_before = self.kept.clone()
        self._factor = template.new_zeros(columns, columns)
        self._n_of_m = n_of_m

    def put(self, weights: Tensor, kept: Tensor, pruned_before: Tensor, factor: Tensor) -> None:
        """Copy in weights, mask and zeros (rows, block), and the block (block, block) of ``U``."""
        self.weights.copy_(weights.T)
        self.kept.copy_(kept.T)
        self._pruned_before.copy_(pruned_before.T)
        self._factor.copy_(factor)

    def sweep(self) -> None:
        """Compensate for removed weights in the columns to the right, column by column."""
        block, diagonal = self.weights, self._factor.diagonal()
        for i in range(len(block)):
            if self._n_of_m is not None and i % self._n_of_m[1] == 0:
                group = slice(i, i + self._n_of_m[1])
                scores = (block[group].T / diagonal[group]).square()
                scores = scores.masked_fill(self._pruned_before[group].T, PRUNED)
                self.kept[group] = n_of_m_mask(scores, self._n_of_m).T
            torch.div(torch.where(self.kept[i], 0, block[i]), diagonal[i], out=self.errors[i])
            # In exact arithmetic the update leaves 0 at the column's removed weights; floats need the final mask.
            block[i:].addr_(self._factor[i, i:], self.errors[i], alpha=-1)


def inverse_factor(hessian: Tensor, is_unseen: Tensor) -> Tensor:
    """Return the upper Cholesky factor ``U`` of the inverse of the damped Hessian: ``H⁻¹ = UᵀU``.

    With rows and columns in reverse order, one factorisation gives ``H = V Vᵀ`` with an upper triangle ``V``, and ``U``
    is the inverse of ``V``. This takes half the operations of inverting ``H``.
    """
    damped_hessian = hessian.detach().clone()
    diagonal = damped_hessian.diagonal()
    diagonal[is_unseen] = 1
    diagonal.add_(DAMPING * diagonal.mean())
    reverse_factor: Tensor
    reverse_factor, failure = torch.linalg.cholesky_ex(damped_hessian.flip(0, 1))
    factor = reverse_factor if int(failure) else _upper_inverse(reverse_factor.flip(0, 1))
    if int(failure) or not bool(factor.isfinite().all()):
        place = f" (Cholesky fails at input {len(damped_hessian) - int(failure)})" if int(failure) else ""
        raise ValueError(
            f"the hessian with damping {DAMPING} is not positive definite{place}, allowed: more calibration text"
        )
    return factor


def _upper_inverse(upper: Tensor) -> Tensor:
    """Return the inverse of an upper triangle (n, n), by halves, so that nearly all work is matrix products."""
    size = len(upper)
    if size <= _SMALL:
        small_inverse: Tensor = torch.linalg.solve_triangular(upper, torch.eye(size).to(upper), upper=True)
        return small_inverse
    half = size // 2
    left, right = _upper_inverse(upper[:half, :half]), _upper_inverse(upper[half:, half:])
    inverse = torch.zeros_like(upper)
    inverse[:half, :half], inverse[half:, half:] = left, right
    inverse[:half, half:] = -(left @ upper[:half, half:] @ right)
    return inverse


def _kept_until(bounds: Sequence[int], zeros: Tensor, density: float) -> list[int]:
    """Return for each of ``bounds`` how many entries are kept in the columns before it.

    ``zeros`` (out, in) are the entries pruned before. The remaining removals are shared out over the other entries.
    """
    rows, num_columns = zeros.shape
    if not bool(zeros.any()):
        return [keep_count(rows * columns, density) for columns in bounds]
    alive_counts = (~zeros).sum(dim=0).cumsum(0)
    num_missing = (alive_counts[-1] - keep_count(rows * num_columns, density)).clamp(min=0)
    kept_counts = [0, *(alive_counts - missing_until(alive_counts, num_missing)).tolist()]
    return [kept_counts[columns] for columns in bounds]
