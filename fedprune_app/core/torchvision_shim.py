"""Preparation for importing torchvision next to a CPU-only torch."""

import importlib.util
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path


@cache
def prepare_torchvision() -> None:
    """Load torchvision's compiled operators, or declare those that fail to load; call before any import of torchvision.

    transformers imports torchvision by itself, and so may a plug-in. torchvision's wheel contains operators built
    against CUDA torch. With a CPU-only torch they do not load, and torchvision then fails while it registers the
    missing operators ("operator torchvision::nms does not exist"). It needs two of them. A declaration without an
    implementation is enough for its datasets, transforms and models.
    """
    import torch

    spec = importlib.util.find_spec("torchvision") if "torchvision" not in sys.modules else None
    for folder in (spec and spec.submodule_search_locations) or []:
        for library in Path(folder).glob("_C.*"):
            with suppress(OSError):
                torch.ops.load_library(library)  # type: ignore[no-untyped-call]
    declare_operators()


def declare_operators() -> None:
    """Declare the operators that torchvision needs, where they are missing."""
    import torch

    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
