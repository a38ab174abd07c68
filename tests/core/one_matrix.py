"""SparseGPT of a single matrix."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fedprune_app.core import sparsegpt as product


def sparsegpt(weight: Tensor, *args: Any, **how: Any) -> tuple[Tensor, Tensor]:
    (result,) = product.sparsegpt([weight], *args, **how)
    return result
