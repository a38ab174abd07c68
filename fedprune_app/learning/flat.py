"""The trained parameters of a network become one flat tensor, with their masks in the same layout."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from types import TracebackType
from typing import Self

import torch
from torch import Tensor, nn


class FlatParameters:
    """While entered, this makes a model's trained parameters views of one flat tensor, their gradients of another.

    A training step's own arithmetic (zero, clip, mask, momentum, update) is then one operation each on
    ``values`` and ``gradients`` instead of one per parameter. The model works as usual meanwhile; on exit
    every parameter is back in its own memory, with the new values and without a gradient.

    Parameters that need no gradient, or are in ``frozen`` (which then need none while entered), stay out. A
    parameter the loss does not reach has gradient zero rather than none. Strides stay as they are.

    Raises ``ValueError`` if the parameters differ in dtype or device, or none is left to train.
    """

    ALIGNMENT = 64  # bytes; torch aligns tensors so, and kernels then give the same bits as on a tensor's own memory

    def __init__(self, model: nn.Module, frozen: Collection[str] = ()) -> None:
        parameters = dict(model.named_parameters())
        _check_names("frozen", frozen, parameters)
        self._frozen = [p for name, p in parameters.items() if name in frozen and p.requires_grad]
        self._trained = {n: p for n, p in parameters.items() if p.requires_grad and n not in frozen}
        kinds = {(p.dtype, p.device) for p in self._trained.values()}
        if len(kinds) != 1:
            found = ", ".join(f"{dtype} on {device}" for dtype, device in kinds) or "none"
            raise ValueError(f"parameters to train are {found}, allowed: one dtype on one device")
        dtype, device = kinds.pop()
        self._strides: dict[str, tuple[int, ...]] = {}
        self._offsets: dict[str, int] = {}
        slot = self.ALIGNMENT // dtype.itemsize
        size = 0
        for name, parameter in self._trained.items():
            self._strides[name] = torch.empty_like(parameter, device="meta").stride()  # dense, same order
            self._offsets[name] = size
            size += math.ceil(parameter.numel() / slot) * slot
        self.values = torch.zeros(size, dtype=dtype, device=device)
        self.gradients = torch.zeros_like(self.values)
        self.named_values = self.views(self.values)
        self.named_gradients = self.views(self.gradients)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """This returns the parts of a tensor laid out like ``values``, by parameter name and in its shape."""
        return {
            name: flat.as_strided(parameter.shape, self._strides[name], self._offsets[name])
            for name, parameter in self._trained.items()
        }

    def bind_gradients(self) -> None:
        """This makes autograd accumulate into ``gradients``, also after someone called ``model.zero_grad()``."""
        for name, parameter in self._trained.items():
            parameter.grad = self.named_gradients[name]

    def __enter__(self) -> Self:
        self._own_memory = {name: parameter.data for name, parameter in self._trained.items()}
        for name, parameter in self._trained.items():
            self.named_values[name].copy_(parameter.data)
            parameter.data = self.named_values[name]
        self.bind_gradients()
        for parameter in self._frozen:
            parameter.requires_grad_(False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name, parameter in self._trained.items():
            parameter.data = self._own_memory[name].copy_(self.named_values[name])
            parameter.grad = None
        for parameter in self._frozen:
            parameter.requires_grad_(True)


def flat_masks(model: nn.Module, flat: FlatParameters, masks: Mapping[str, Tensor]) -> Tensor:
    """This returns the masks of the trained weights as 1 or 0, laid out like ``flat.values``.

    Raises ``ValueError`` for a mask that does not fit the model.
    """
    parameters = dict(model.named_parameters())
    _check_names("masks", masks, parameters)
    for name, mask in masks.items():
        if mask.dtype != torch.bool:
            raise ValueError(f"mask '{name}' has dtype {mask.dtype}, allowed: torch.bool")
        if mask.shape != parameters[name].shape:
            shapes = f"{tuple(mask.shape)}, allowed: {tuple(parameters[name].shape)}"
            raise ValueError(f"mask '{name}' has shape {shapes}")
    kept = torch.ones_like(flat.values)
    kept_views = flat.views(kept)
    for name, mask in masks.items():
        if name in kept_views:
            kept_views[name].copy_(mask)
    return kept


def _check_names(kind: str, names: Collection[str], parameters: Collection[str]) -> None:
    if unknown := [name for name in names if name not in parameters]:
        raise ValueError(f"{kind} names '{unknown[0]}', allowed: {', '.join(parameters)}")
