"""Linear layers with unstructured zeros, computed on a CPU from their kept weights alone.

With one token at a time, a linear layer is as fast as its weights are read from memory. A packed matrix has one bit per
entry and its kept values, so fewer bytes are read. A small library in C, ``native/sparse_linear.c``, does the work. It
is compiled at installation; without a compiler, linear layers stay dense.
"""

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedprune_app.core import compiled

# The library's instruction sets, by their number in C.
LEVELS = ("portable", "AVX2", "AVX-512")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_WORD = 64  # entries of a row in one word of the mask
_PADDING = 64  # values after the last one, which the library reads and never uses
_FEW = 16  # inputs that are multiplied with packed rows; for more, dense tiles of rows are faster
_TILE = 1 << 22  # bytes of such a tile, which stays in the processor's cache
_Pointer, _Long, _Int = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL | None:
    library = compiled.library("sparse_linear")
    if library is None:
        return None
    library.fedprune_linear.argtypes = [
        _Pointer, _Long, _Long, _Pointer, _Pointer, _Pointer, _Pointer, _Pointer, _Long, _Int, _Int, _Int,
    ]  # fmt: skip
    library.fedprune_dense.argtypes = [
        _Long, _Pointer, _Pointer, _Pointer, _Pointer, _Long, _Long, _Int, _Int, _Int,
    ]  # fmt: skip
    library.fedprune_linear.restype = library.fedprune_dense.restype = None
    return library


def instructions() -> str:
    """Return the instruction set, one of :data:`LEVELS`, with which this processor multiplies packed matrices.

    Empty where the library was not compiled.
    """
    library = _library()
    return LEVELS[library.fedprune_level()] if library is not None else ""


@dataclass(frozen=True, eq=False)
class PackedMatrix:
    """A pruned matrix (rows, columns) as one bit per entry and its kept values, on the CPU.

    ``words`` (rows, ceil(columns / 64)) has 64 entries of a row in each int64, the first in the lowest bit. ``values``
    has the kept values row by row, in one of :data:`DTYPES`, and some zeros after them. Those of row r begin at
    ``starts[r]``; ``starts`` (rows + 1,) is int64.
    """

    columns: int
    words: Tensor
    starts: Tensor
    values: Tensor

    @property
    def rows(self) -> int:
        return len(self.words)

    @property
    def density(self) -> float:
        return float(self.starts[-1]) / max(1, self.rows * self.columns)


def pack(matrix: Tensor) -> PackedMatrix:
    """Pack ``matrix`` (rows, columns), of one of :data:`DTYPES`; its non-zero entries are kept."""
    mask = matrix.detach().cpu() != 0
    rows, columns = matrix.shape
    count = -(-columns // _WORD)
    words = np.zeros((rows, 8 * count), dtype=np.uint8)
    words[:, : -(-columns // 8)] = np.packbits(mask.numpy(), axis=1, bitorder="little")
    starts = torch.zeros(rows + 1, dtype=torch.int64)
    torch.cumsum(mask.sum(1), 0, out=starts[1:])
    values = matrix.detach().cpu()[mask]
    return PackedMatrix(
        columns, torch.from_numpy(words.view(np.int64)), starts, torch.cat([values, values.new_zeros(_PADDING)])
    )


def linear(inputs: Tensor, matrix: PackedMatrix, bias: Tensor | None = None, *, level: int | None = None) -> Tensor:
    """Return ``inputs`` (..., columns) times the transposed matrix, plus ``bias`` (rows,): (..., rows).

    The result has the inputs' dtype; sums are in float32 for a few inputs, and torch's own for many. There are no
    gradients. The result does not depend on the number of threads. ``level`` is an index into :data:`LEVELS`, by
    default the processor's best.

    Raises ``RuntimeError`` where the library was not compiled, or for inputs that need gradients or are not on the CPU.
    """
    library = _library()
    if library is None:
        raise RuntimeError("packed matrices need fedprune's library in C, which was not compiled: install a C compiler")
    if inputs.device.type != "cpu" or (inputs.requires_grad and torch.is_grad_enabled()):
        raise RuntimeError("a packed matrix multiplies inputs on the CPU that need no gradients")
    if level is None:
        level = library.fedprune_level()
    flat = inputs.reshape(-1, matrix.columns)
    if len(flat) > _FEW:
        tiles = [F.linear(flat.to(tile.dtype), tile) for tile in _tiles(library, matrix, level)]
        outputs = torch.cat(tiles, dim=1)
        if bias is not None:
            outputs += bias
        return outputs.to(inputs.dtype).reshape(*inputs.shape[:-1], matrix.rows)
    width = matrix.words.shape[1] * _WORD
    x = flat.float()
    x = F.pad(x, (0, width - matrix.columns)) if width > matrix.columns else x.contiguous()
    bias_values = None if bias is None else bias.float().contiguous()
    y = torch.empty(len(x), matrix.rows)
    library.fedprune_linear(
        x.data_ptr(),
        len(x),
        matrix.words.shape[1],
        matrix.words.data_ptr(),
        matrix.starts.data_ptr(),
        matrix.values.data_ptr(),
        None if bias_values is None else bias_values.data_ptr(),
        y.data_ptr(),
        matrix.rows,
        DTYPES.index(matrix.values.dtype),
        level,
        torch.get_num_threads(),
    )
    return y.to(inputs.dtype).reshape(*inputs.shape[:-1], matrix.rows)


def _tiles(library: ctypes.CDLL, matrix: PackedMatrix, level: int) -> Iterator[Tensor]:
    """Yield the matrix as tiles of dense rows, always in the same memory."""
    size = matrix.values.element_size()
    num_rows = max(16, _TILE // max(1, matrix.columns * size))
    tile = torch.empty(min(num_rows, matrix.rows), matrix.columns, dtype=matrix.values.dtype)
    for first in range(0, matrix.rows, num_rows):
        last = min(first + num_rows, matrix.rows)
        library.fedprune_dense(
            matrix.columns,
            matrix.words.data_ptr(),
            matrix.starts.data_ptr(),
            matrix.values.data_ptr(),
            tile.data_ptr(),
            first,
            last,
            DTYPES.index(matrix.values.dtype),
            level,
            torch.get_num_threads(),
        )
        yield tile[: last - first]
