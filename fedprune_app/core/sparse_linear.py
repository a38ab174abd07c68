"""A linear layer with unstructured zeros is computed from its kept weights alone, on a CPU.

One token at a time, a linear layer is as fast as its weights come from memory. A packed matrix has one bit for each
entry and its kept values, so that fewer bytes have to come. The work is done by a small library in C,
``native/sparse_linear.c``, which is compiled where fedprune is installed. Without a compiler there is no library, and
linear layers stay dense.
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

# The instructions that the library can use, by the number that it has for them.
LEVELS = ("portable", "AVX2", "AVX-512")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_WORD = 64  # entries of a row in one word of the mask
_PADDING = 64  # values behind the last one, which the library reads and never uses
_FEW = 16  # inputs that are multiplied with packed rows; for more it is faster to make the rows dense, some at a time
_TILE = 1 << 22  # bytes of those dense rows, which stay in the processor's cache
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
    """Return the instructions that this processor multiplies packed matrices with, one of :data:`LEVELS`.

    The text is empty where the library was not compiled.
    """
    library = _library()
    return LEVELS[library.fedprune_level()] if library is not None else ""


@dataclass(frozen=True, eq=False)
class PackedMatrix:
    """A packed matrix (rows, columns) holds one bit for each entry and its kept values, on the CPU.

    ``words`` (rows, ceil(columns / 64)) has 64 entries of a row in each int64, the first in the lowest bit. ``values``
    has the kept values row by row, in one of :data:`DTYPES`, and some zeros behind them. Those of row r begin at
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
    """Return ``matrix`` (rows, columns), of one of :data:`DTYPES`, packed: its entries that are not 0 are kept."""
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
    gradients. The result is the same for any number of threads. ``level`` is the place in :data:`LEVELS` of the
    instructions, by default the best of this processor.

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
    """Yield the matrix as dense rows, some at a time, always in the same memory."""
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
