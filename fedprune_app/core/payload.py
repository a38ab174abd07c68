"""The payload, in which every model and update is held: named tensors with explicit masks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from fedprune_app.core import masked_tensors
from fedprune_app.core.named import Tensors

_BFLOAT16 = np.dtype([("bfloat16", "<u2")])  # numpy has no bfloat16: two bytes under a field of that name


@dataclass(frozen=True, eq=False)
class Payload:
    """Named tensors and, for the pruned ones, a boolean mask of the same shape (True = kept).

    A name without a mask is dense. A name that is absent was not sent. Tensors are zero where their mask is False
    (:meth:`pruned` sets these zeros). A zero does not imply pruned: a weight just grown is 0 and kept.

    Raises ``ValueError`` for a mask without tensor, of another shape, or not boolean, and ``TypeError`` for a value
    that is no tensor.

    >>> payload = Payload.pruned({"w": torch.tensor([3.0, 4.0])}, {"w": torch.tensor([True, False])})
    >>> payload.tensors["w"].tolist(), payload.density()
    ([3.0, 0.0], 0.5)
    """

    tensors: Tensors
    masks: Tensors = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, tensor in (*self.tensors.items(), *self.masks.items()):
            if not isinstance(tensor, Tensor):
                raise TypeError(f"'{name}' of a payload is of type {type(tensor).__name__}, allowed: a tensor")
        for name, mask in self.masks.items():
            if name not in self.tensors:
                raise ValueError(f"mask '{name}' has no tensor of that name")
            if mask.dtype != torch.bool or mask.shape != self.tensors[name].shape:
                allowed = f"torch.bool and {tuple(self.tensors[name].shape)}, as its tensor"
                raise ValueError(
                    f"mask '{name}' has dtype {mask.dtype} and shape {tuple(mask.shape)}, allowed: {allowed}"
                )
        object.__setattr__(self, "tensors", MappingProxyType(dict(self.tensors)))
        object.__setattr__(self, "masks", MappingProxyType(dict(self.masks)))

    @classmethod
    def pruned(cls, tensors: Tensors, masks: Tensors) -> Payload:
        """Return a payload of new tensors, zero wherever their mask is False."""
        pruned_tensors = {
            name: _apply_mask(tensor, masks[name]) if name in masks else tensor.clone()
            for name, tensor in tensors.items()
        }
        return cls(pruned_tensors, {name: mask.clone() for name, mask in masks.items()})

    def within(self, whole: Tensors) -> Payload:
        """Return a payload with all names of ``whole``; what was not sent is 0, and False in the mask."""
        absent = {name: torch.zeros_like(tensor) for name, tensor in whole.items() if name not in self.tensors}
        masks = {name: tensor.bool() for name, tensor in absent.items()}
        return Payload({**self.tensors, **absent}, {**self.masks, **masks})

    def num_elements(self) -> int:
        """Return the number of coordinates of all tensors, kept or not."""
        return sum(tensor.numel() for tensor in self.tensors.values())

    def num_kept(self) -> int:
        """Return the number of kept coordinates: all of a dense tensor, the True ones of a masked tensor."""
        return sum(
            int(self.masks[name].sum()) if name in self.masks else tensor.numel()
            for name, tensor in self.tensors.items()
        )

    def density(self) -> float:
        """Return the kept share of all coordinates, in [0, 1]; an empty payload has density 1."""
        total = self.num_elements()
        return self.num_kept() / total if total else 1.0

    def digest(self) -> str:
        """Return the SHA-256, in hexadecimal, of names, dtypes, shapes, values and masks.

        The order of the names is ignored. Equal models have equal digests, whether they come from memory, a file or a
        message.
        """
        total = hashlib.sha256()
        for part, tensors in (("tensor", self.tensors), ("mask", self.masks)):
            for name, tensor in sorted(tensors.items()):
                total.update(f"{part} {name} {tensor.dtype} {tuple(tensor.shape)};".encode())
                values = tensor.detach().cpu().contiguous()
                flat = values.as_strided((values.numel(),), (1,))  # one value, or none, may have any stride
                total.update(flat.view(torch.uint8).numpy().data)
        return total.hexdigest()

    def to_ndarrays(self) -> list[np.ndarray]:
        """Return the values in the payload's order, then the masks in theirs, as a Flower ``NumPyClient`` sends."""
        return [_to_ndarray(tensor) for tensor in (*self.tensors.values(), *self.masks.values())]

    @classmethod
    def from_ndarrays(
        cls, arrays: Sequence[np.ndarray], names: Iterable[str], mask_names: Iterable[str] = ()
    ) -> Payload:
        """Undo :meth:`to_ndarrays`, given the names in order.

        ``ValueError`` for a wrong number of arrays.
        """
        names, mask_names = list(names), list(mask_names)
        if len(arrays) != len(names) + len(mask_names):
            raise ValueError(f"{len(arrays)} arrays do not make {len(names)} tensors and {len(mask_names)} masks")
        tensors = [_from_ndarray(array) for array in arrays]
        return cls(
            dict(zip(names, tensors[: len(names)], strict=True)),
            dict(zip(mask_names, tensors[len(names) :], strict=True)),
        )


def _apply_mask(tensor: Tensor, mask: Tensor) -> Tensor:
    result = masked_tensors.keep(tensor, mask)
    return torch.where(mask, tensor, tensor.new_zeros(())) if result is None else result


def _to_ndarray(tensor: Tensor) -> np.ndarray:
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        return np.asarray(tensor.contiguous().view(torch.uint16)).view(_BFLOAT16)
    return np.asarray(tensor)


def _from_ndarray(array: np.ndarray) -> Tensor:
    array = np.asarray(array, order="C")  # unlike ascontiguousarray, leaves a scalar a scalar
    if array.dtype == _BFLOAT16:
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)
