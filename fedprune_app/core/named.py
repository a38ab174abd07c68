"""Types of named values: tensors, their shapes, and values of any kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # reading settings alone need not wait for torch
    from torch import Tensor

Tensors = Mapping[str, "Tensor"]  # read-only
TensorDict = dict[str, "Tensor"]
Values = Mapping[str, Any]  # settings, fields of a message or a row, or a JSON object; read-only
ValueDict = dict[str, Any]
Shapes = Mapping[str, tuple[int, ...]]
ImageShape = tuple[int, int, int]  # (channels, height, width)
