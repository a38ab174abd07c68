"""Types of what is held by name: tensors and their shapes, and values of any kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # who reads settings alone need not wait for torch
    from torch import Tensor

Tensors = Mapping[str, "Tensor"]  # to be read alone
TensorDict = dict[str, "Tensor"]
Values = Mapping[str, Any]  # settings, fields of a message or a row, or a JSON object; to be read alone
ValueDict = dict[str, Any]
Shapes = Mapping[str, tuple[int, ...]]
ImageShape = tuple[int, int, int]  # (channels, height, width)
