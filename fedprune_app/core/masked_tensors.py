"""Passes over masked tensors in C: sums, means, kept values, and the entries that an expansion prunes.

``native/masked_tensors.c`` does in one pass over memory the work of many PyTorch operations. A function here returns
None, and changes nothing, where the library was not compiled or does not support a dtype or a device. The caller then
computes the same bits with PyTorch.
"""

import ctypes
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedprune_app.core import compiled

_NAME = "masked_tensors"
_BINS = 2**16
_LARGE = 2**20  # coordinates; a smaller tensor is done before a thread starts on a busy core
_threads_of_large = 1
_Pointer, _Long, _Int, _Double = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_double
_Level = ctypes.c_int32
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)  # by their number in C
# The integer of each item size, in whose memory another dtype is viewed.
_NUMPY = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}
_ARGUMENTS = {
    "add": [_Pointer, _Pointer, _Long, _Pointer, _Pointer, _Double, ctypes.c_int32, _Int],
    "mean": [_Pointer, _Pointer, _Pointer, _Pointer, _Double],
    "keep": [_Pointer, _Pointer, _Pointer, _Int],
    "spread": [_Pointer, _Pointer, _Long, _Pointer, _Int],
    "gather": [_Pointer, _Pointer, _Pointer, _Long, _Int],
    "push": [_Pointer, ctypes.c_uint32, _Pointer, _Pointer],
    "pop": [_Pointer, ctypes.c_uint32, _Pointer, _Pointer],
    "levels": [_Pointer, _Pointer, _Long],
    "histogram": [_Pointer, _Pointer, _Level, _Long, _Pointer, _Int],
    "cut": [_Pointer, _Pointer, _Level, ctypes.c_uint32, _Long, _Pointer, _Int],
}  # between the number of coordinates and that of threads


def is_compiled() -> bool:
    return compiled.library(_NAME) is not None


def is_usable() -> bool:
    return sys.byteorder == "little" and is_compiled()


def use_threads(number: int) -> None:
    """Set this process' number of threads for a large tensor, beyond PyTorch's; no result depends on it."""
    global _threads_of_large
    _threads_of_large = number


def zeros(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of zeros; on the CPU in NumPy's memory, which the system allocates in large pages.

    PyTorch's memory comes in pages of 4 KiB. Allocating so many takes longer than a pass over them.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(shape, _NUMPY[dtype.itemsize])).view(dtype)


def empty(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialised tensor, in memory as that of :func:`zeros`."""
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.empty(shape, _NUMPY[dtype.itemsize])).view(dtype)


def add(sums: Tensor, counts: Tensor, values: Sequence[Tensor], masks: Sequence[Tensor | None], *, scale: float,
        weight: int) -> bool | None:  # fmt: skip
    """Add ``round(scale · values)``, half to even, to ``sums`` where masks keep; add ``weight`` to ``counts`` there.

    ``sums`` is int64. ``counts`` is int32 of the same shape, and unused if no tensor has a mask. A tensor without mask
    is added everywhere and not counted in ``counts``. All products must be below 2^51 in magnitude. The values of all
    tensors are of one type: float32, float16 or bfloat16.
    """
    is_masked = any(mask is not None for mask in masks)
    shape, dtype = sums.shape, values[0].dtype
    if not _fits(sums, torch.int64, shape) or (is_masked and not _fits(counts, torch.int32, shape)):
        return None
    if dtype not in _FLOATS or not all(_fits(value, dtype, shape) for value in values):
        return None
    if not all(mask is None or _fits(mask, torch.bool, shape) for mask in masks):
        return None
    lists = _Pointer * len(values)
    addresses = lists(*(value.data_ptr() for value in values))
    mask_addresses = lists(*(None if mask is None else mask.data_ptr() for mask in masks))
    held_address = counts.data_ptr() if is_masked else None
    _call("add", sums.numel(), addresses, mask_addresses, len(values), sums.data_ptr(), held_address, scale, weight,
          _FLOATS.index(dtype))  # fmt: skip
    return True


def mean(out: Tensor, sums: Tensor, counts: Tensor, factor: float, default: Tensor | None = None) -> bool | None:
    """Write ``sums / counts · factor`` to ``out`` (float32), and ``default`` (or 0) where ``counts`` is 0."""
    shape = sums.shape
    if not _fits(sums, torch.int64, shape) or not _fits(counts, torch.int32, shape):
        return None
    if not _fits(out, torch.float32, shape):
        return None
    if default is not None and not _fits(default, torch.float32, shape):
        return None
    default_address = None if default is None else default.data_ptr()
    _call("mean", sums.numel(), sums.data_ptr(), counts.data_ptr(), default_address, out.data_ptr(), factor)
    return True


def keep(values: Tensor, mask: Tensor) -> Tensor | None:
    """Return a new tensor with ``values`` where ``mask`` is True, and 0 elsewhere."""
    shape = values.shape
    if not _fits(mask, torch.bool, shape) or not _fits(values, values.dtype, shape) or values.dtype.is_complex:
        return None
    result = empty(shape, values.dtype, values.device)
    _call("keep", values.numel(), mask.data_ptr(), values.data_ptr(), result.data_ptr(), values.element_size())
    return result


def spread(kept: NDArray[np.uint8], mask: NDArray[np.bool_], dtype: np.dtype[Any]) -> NDArray[Any] | None:
    """Return an array of ``mask``'s length with the ``kept`` values, given as bytes, where ``mask`` is True, else 0.

    ``mask`` keeps exactly as many. ``dtype`` is the integer of a value's size.
    """
    if not is_usable():
        return None
    result = np.empty(mask.size, dtype)
    _call("spread", mask.size, mask.ctypes.data, kept.ctypes.data, kept.size // dtype.itemsize, result.ctypes.data,
          dtype.itemsize)  # fmt: skip
    return result


def gather(values: NDArray[Any], mask: NDArray[np.bool_], num_kept: int) -> NDArray[Any] | None:
    """Return the ``num_kept`` values that ``mask`` keeps of the flat integers ``values``."""
    if not is_usable() or not values.flags.c_contiguous or not mask.flags.c_contiguous:
        return None
    result = np.empty(num_kept, values.dtype)
    _call("gather", mask.size, mask.ctypes.data, values.ctypes.data, result.ctypes.data, num_kept,
          values.dtype.itemsize)  # fmt: skip
    return result


def push(mask: NDArray[np.bool_], numerator: int, stack: NDArray[np.uint64], words: NDArray[np.uint32]) -> None:
    """Put ``mask`` on a stack of asymmetric numeral systems, for the probability ``numerator`` of 2^24 to keep.

    ``stack`` has the state and the number of used ``words``, of which there are ``mask.size // 16 + 4`` free ones. Only
    where :func:`is_usable`.
    """
    mask = np.ascontiguousarray(mask)
    _call("push", mask.size, mask.ctypes.data, numerator, stack.ctypes.data, words.ctypes.data)


def pop(size: int, numerator: int, stack: NDArray[np.uint64], words: NDArray[np.uint32]) -> NDArray[np.bool_]:
    """Take a mask of ``size`` coordinates from a stack, as :func:`push` put it there."""
    mask = np.empty(size, np.bool_)
    _call("pop", size, mask.ctypes.data, numerator, stack.ctypes.data, words.ctypes.data)
    return mask


def most_held(holders: Tensor, order: Tensor, target: int) -> Tensor | None:
    """Return the mask of what remains when ``target`` entries are pruned, or all entries that no client holds if more.

    Entries that no client holds are pruned first. Then come those with the fewest ``holders`` (int32), of equal numbers
    those with the smallest magnitude of ``order`` (float32, float16 or bfloat16, and finite), and of equal magnitudes
    those at the lowest index.
    """
    shape, size = holders.shape, holders.numel()
    are_fit = _fits(holders, torch.int32, shape) and order.dtype in _FLOATS and _fits(order, order.dtype, shape)
    if not are_fit or not size:
        return None
    levels = np.empty(int(holders.max()) + 1, np.int64)
    _call("levels", size, holders.data_ptr(), levels.ctypes.data, len(levels) - 1)
    num_missing = target - int(levels[0])
    level, threshold, num_ties = 1, 0, 0  # prune all with fewer holders than `level`, and none at it
    while num_missing > 0 and level < len(levels):
        if levels[level] > num_missing:
            high, num_missing = _position(_histogram(holders, order, level), num_missing)
            low, num_ties = _position(_histogram(holders, order, level, high), num_missing)
            threshold = high << 16 | low
            break
        num_missing -= int(levels[level])
        level += 1
    mask = empty(shape, torch.bool, holders.device)
    _call("cut", size, holders.data_ptr(), order.data_ptr(), level, threshold, num_ties, mask.data_ptr(),
          _FLOATS.index(order.dtype))  # fmt: skip
    return mask


def _histogram(holders: Tensor, order: Tensor, level: int, high: int = -1) -> NDArray[np.int64]:
    """Count the upper 16 bits of ``order`` at a level of holders, or the lower 16 where the upper ones are ``high``."""
    histogram = np.empty(_BINS, np.int64)
    _call("histogram", holders.numel(), holders.data_ptr(), order.data_ptr(), level, high, histogram.ctypes.data,
          _FLOATS.index(order.dtype))  # fmt: skip
    return histogram


def _position(histogram: NDArray[np.int64], rank: int) -> tuple[int, int]:
    """Return the bin of the ``rank``-th smallest value, counted from 1, and the rank of that value within the bin."""
    cumulative = histogram.cumsum()
    position = int(np.searchsorted(cumulative, rank))
    return position, rank - int(cumulative[position] - histogram[position])


def _fits(tensor: Tensor, dtype: torch.dtype, shape: torch.Size) -> bool:
    is_plain = tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_neg()
    is_alike = tensor.dtype == dtype and tensor.shape == shape
    return is_usable() and is_plain and is_alike and tensor.data_ptr() % tensor.element_size() == 0


def _call(name: str, size: int, *arguments: object) -> None:
    """Call a function of the library, with the number of coordinates first and the number of threads last."""
    threads = max(torch.get_num_threads(), _threads_of_large if size >= _LARGE else 1)
    _function(name)(size, *arguments, threads)


@cache
def _function(name: str) -> Callable[..., None]:
    function: Callable[..., None] = getattr(compiled.library(_NAME), f"fedprune_{name}")
    function.argtypes, function.restype = [_Long, *_ARGUMENTS[name], _Int], None  # type: ignore[attr-defined]
    return function
