"""Hessians of clients travel, are added up to the same bits in any order, and give the best weights for a mask.

``H = 2/n Σ x xᵀ`` over a client's n sequences is all that SparseGPT asks of a text, and ``Σ_k n_k H_k / Σ_k n_k`` is
the Hessian of all clients' text together. This module is ours: FedSpaLLM's clients send weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

HESSIAN = "hessian/"
"""This prefix before the name of the first matrix with the same inputs names their Hessian in a payload."""
SCALE = "hessian-scale/"
"""This prefix names the roots of the Hessian's diagonal, where the Hessian itself travels as correlations."""
BITS = (32, 16)
_FRACTION = 2.0**40
_LARGEST = 2.0**52  # float64 holds an integer of this size with its last bit


def packed_upper(matrix: Tensor) -> Tensor:
    """Return the upper triangle of a matrix (n, n), row by row (n (n + 1) / 2,), on the CPU."""
    matrix = matrix.cpu()
    return torch.cat([row[number:] for number, row in enumerate(matrix)])


def unpacked(upper: Tensor, size: int) -> Tensor:
    """Return the symmetric matrix (size, size) whose :func:`packed_upper` this is."""
    matrix = upper.new_zeros(size, size)
    start = 0
    for number in range(size):
        matrix[number, number:] = upper[start : start + size - number]
        start += size - number
    return matrix + matrix.triu(1).T


def encoded(name: str, matrix: Tensor, bits: int = 32) -> dict[str, Tensor]:
    """Return the tensors in which a Hessian (n, n) travels.

    With 32 ``bits`` they are its upper triangle in float32. With 16 they are the correlations ``H_ij / √(H_ii H_jj)``
    in float16, which are off by at most 2⁻¹² relative to the largest, and the roots of the diagonal in float32.
    """
    if bits == 32:
        return {HESSIAN + name: packed_upper(matrix.float())}
    scale = matrix.diagonal().float().sqrt()
    safe = torch.where(scale > 0, scale, 1)
    return {HESSIAN + name: packed_upper((matrix / safe[:, None] / safe).half()), SCALE + name: scale.cpu()}


def like(name: str, size: int, bits: int = 32) -> dict[str, Tensor]:
    """Return tensors of the names, shapes and dtypes that :func:`encoded` has for ``size`` inputs, without values."""
    entries = size * (size + 1) // 2
    if bits == 32:
        return {HESSIAN + name: torch.empty(entries, device="meta")}
    half = torch.empty(entries, dtype=torch.float16, device="meta")
    return {HESSIAN + name: half, SCALE + name: torch.empty(size, device="meta")}


class HessianSum:
    """The sum of clients' Hessians of one input, by integer additions: no order of arrival changes a bit.

    A number is added as a whole part and as a fraction in units of 2⁻⁴⁰, so that inputs of very different size keep
    their digits.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.weight = 0
        self._whole = torch.zeros(size * (size + 1) // 2, dtype=torch.int64)
        self._fraction = torch.zeros_like(self._whole)

    def add(self, name: str, tensors: dict[str, Tensor], weight: int) -> None:
        """Add what :func:`encoded` made, ``weight`` times: that many sequences are behind it.

        Raises ``ValueError`` for a diagonal below 0, and for numbers that are too large for an exact sum.
        """
        upper = tensors[HESSIAN + name].double()
        if SCALE + name in tensors:
            scale = tensors[SCALE + name].double()
            # A correlation of a float16 with itself is 1, whatever was rounded.
            upper = packed_upper(unpacked(upper, self.size).fill_diagonal_(1) * scale[:, None] * scale)
        upper = upper * weight
        diagonal = upper[_diagonal(self.size)]
        largest = float(diagonal.max()) if self.size else 0.0
        if float(diagonal.min()) < 0 or float(upper.abs().max()) > largest * (1 + 1e-3):
            raise ValueError(f"tensor '{HESSIAN}{name}' is no sum of products: an entry is beyond its diagonal")
        if largest * (self.weight + weight) > _LARGEST:
            raise ValueError(f"tensor '{HESSIAN}{name}' has magnitude {largest:g}, allowed: at most {_LARGEST:g}")
        whole = upper.round()
        self._whole += whole.long()
        self._fraction += ((upper - whole) * _FRACTION).round().long()
        self.weight += weight

    def matrix(self) -> Tensor:
        """Return the mean (size, size), float32, over all sequences that were added."""
        total = self._whole.double() + self._fraction.double() / _FRACTION
        return unpacked((total / max(1, self.weight)).float(), self.size)


def _diagonal(size: int) -> Tensor:
    """Return where the diagonal is in the upper triangle of a matrix, row by row."""
    numbers = torch.arange(size)
    return numbers * size - numbers * (numbers - 1) // 2


def least_squares(weight: Tensor, mask: Tensor, hessian: Tensor, damping: float = 0.01, steps: int = 200) -> Tensor:
    """Return the weights on ``mask`` whose outputs are nearest those of ``weight``: ``min ‖(W - W₀) X‖²``.

    ``weight`` (out, in) is dense, ``mask`` (out, in) is True where a weight may be, and ``hessian`` (in, in) is
    ``2/n Σ x xᵀ``, whose diagonal grows by ``damping`` times its mean as in SparseGPT. The result has the dtype of
    ``weight``.

    Each row is a problem of its own, and all rows are solved together by conjugate gradients with the diagonal as
    preconditioner, for at most ``steps`` steps or until the residual has fallen to 10⁻⁶ of its first size.
    """
    damped = hessian.float().clone()
    damped.diagonal().add_(damping * damped.diagonal().mean())
    kept, dense = mask.float(), weight.detach().float()
    inverse = 1 / damped.diagonal().clamp(min=torch.finfo(torch.float32).tiny)
    found = dense * kept
    residual = ((dense - found) @ damped) * kept
    preconditioned = residual * inverse
    direction = preconditioned.clone()
    rho = (residual * preconditioned).sum(dim=1, keepdim=True)
    limit = 1e-12 * rho.clamp(min=torch.finfo(torch.float32).tiny)
    for _ in range(steps):
        open_rows = rho > limit
        if not bool(open_rows.any()):
            break
        image = (direction @ damped) * kept
        curvature = (direction * image).sum(dim=1, keepdim=True)
        step = torch.where(open_rows & (curvature > 0), rho / curvature, 0)
        found += step * direction
        residual -= step * image
        preconditioned = residual * inverse
        previous, rho = rho, (residual * preconditioned).sum(dim=1, keepdim=True)
        direction = preconditioned + torch.where(open_rows, rho / previous, 0) * direction
    return torch.where(mask, found, 0).to(weight.dtype)
