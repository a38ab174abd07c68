"""Grids of numbers that weights are rounded to: those of GGUF files, which llama.cpp reads.

A block is 32 neighbouring weights of a row. A weight is ``scale · level``, or ``scale · level + minimum`` on a grid
with minimums. Levels are integers; scale and minimum are float16 numbers of the block.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 32
_TINY = torch.finfo(torch.float32).tiny
_SHARES = [0.5 + 0.05 * step for step in range(12)]  # of a block's range, over which the levels are spread


@dataclass(frozen=True)
class Grid:
    """The integers from ``lowest`` to ``highest`` that weights are rounded to, stored as GGUF's ``gguf_type``."""

    gguf_type: str
    lowest: int
    highest: int

    @property
    def has_minimums(self) -> bool:
        return self.gguf_type.endswith("_1")

    def levels(self, weights: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
        """Return the levels, as floats, that are nearest to ``weights``; with a scale of 0 all levels are 0."""
        inverse = torch.where(scale == 0, 0, 1 / scale)
        return ((weights - minimum) * inverse).round_().clamp_(self.lowest, self.highest)

    def fitted(self, weights: Tensor, importance: Tensor) -> tuple[Tensor, Tensor]:
        """Return scale and minimum (rows,), representable in float16, of the blocks ``weights`` (block, rows).

        Levels are spread over several shares of the block's range. For each share, scale and minimum are fitted to its
        levels by least squares. Those with the smallest sum of ``importance · error²`` are returned; ``importance`` is
        (block, rows). Values that are not finite in float16 are returned as they are.
        """
        shares = weights.new_tensor(_SHARES)[:, None, None]
        if self.has_minimums:
            start, largest = weights.aminmax(dim=0)
            spread = (largest - start) / self.highest
        else:
            counted = torch.where(importance > 0, weights, 0)
            place = counted.abs().argmax(dim=0, keepdim=True)
            start, spread = torch.zeros_like(counted[0]), counted.gather(0, place)[0] / self.lowest
        levels = self.levels(weights, shares * spread, start)  # (shares, block, rows)
        mean_weight = mean_level = torch.zeros_like(levels[:, :1])
        if self.has_minimums:
            total = importance.sum(dim=0).clamp(min=_TINY)
            mean_weight = (importance * weights).sum(dim=0) / total
            mean_level = (importance * levels).sum(dim=1, keepdim=True) / total
        weighted = importance * (levels - mean_level)
        size = (weighted * (levels - mean_level)).sum(dim=1, keepdim=True)
        scale = (weighted * (weights - mean_weight)).sum(dim=1, keepdim=True) / torch.where(size == 0, 1, size)
        scale = scale.half().to(weights.dtype)  # (shares, 1, rows)
        minimum = (mean_weight - scale * mean_level).half().to(weights.dtype)
        residual = weights - minimum - scale * self.levels(weights, scale, minimum)
        best = (importance * residual.square()).sum(dim=1, keepdim=True).argmin(dim=0, keepdim=True)
        return scale.gather(0, best)[0, 0], minimum.gather(0, best)[0, 0]


def grid_of(bits: int, *, keeps_zeros: bool) -> Grid:
    """Return the grid with 8, 5, 4 or 3 bits; with ``keeps_zeros`` it has no minimums, so that 0 is on the grid.

    Levels of 3 bits are stored in blocks of 4: GGUF has no simple blocks with 3.
    """
    if bits == 8:
        return Grid("Q8_0", -127, 127)
    half, name = 2 ** (bits - 1), f"Q{max(bits, 4)}"
    return Grid(f"{name}_0", -half, half - 1) if keeps_zeros else Grid(f"{name}_1", 0, 2 * half - 1)


@dataclass(frozen=True)
class Quantized:
    """A matrix rounded to a grid: ``levels``, int8 (out, in); ``scales`` and ``minimums``, float16 (out, in / 32)."""

    grid: Grid
    levels: Tensor
    scales: Tensor
    minimums: Tensor

    def weights(self) -> Tensor:
        """Return the weights (out, in), float32, as llama.cpp computes them."""
        blocks = self.levels.view(len(self.levels), -1, BLOCK).float() * self.scales.float()[..., None]
        return (blocks + self.minimums.float()[..., None]).flatten(1)

    def packed(self) -> Tensor:
        """Return the matrix as bytes (out, bytes of a row) in GGUF's layout.

        A block has its scale, its minimum if the grid has any, the fifth bits, and then two levels a byte: one of the
        block's first half and one of its second. In Q8_0 each level takes a byte. Source: the structures ``block_q4_0``
        to ``block_q8_0`` in ggml.
        """
        levels = self.levels.view(len(self.levels), -1, BLOCK)  # (out, blocks, 32)
        head = [self.scales] if not self.grid.has_minimums else [self.scales, self.minimums]
        parts = [each[..., None].contiguous().view(torch.uint8) for each in head]
        if self.grid.gguf_type == "Q8_0":
            parts.append(levels.view(torch.uint8))
        else:
            num_bits = int(self.grid.gguf_type[1])
            codes = levels if self.grid.has_minimums else levels + 2 ** (num_bits - 1)
            codes = codes.view(torch.uint8)
            if num_bits == 5:
                fifth_bits = (codes >> 4).view(*codes.shape[:2], -1, 8) << torch.arange(8, dtype=torch.uint8)
                parts.append(fifth_bits.sum(dim=3, dtype=torch.uint8))
            first, second = (codes & 15).chunk(2, dim=2)
            parts.append(first | second << 4)
        return torch.cat(parts, dim=2).flatten(1)
