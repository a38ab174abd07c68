"""Make ``import torchvision`` work beside a CPU-only torch."""

from __future__ import annotations

from importlib.machinery import PathFinder
from importlib.util import find_spec

import torch


def prepare_torchvision() -> None:
    """Call before the first import of torchvision (or of a library that imports it); idempotent.

    torchvision's wheel brings compiled operators built against CUDA torch. Beside a CPU-only torch they do not
    load, and torchvision then fails while it describes the operators that are not there ("operator
    torchvision::nms does not exist"). Declaring the two it asks for, without an implementation, is enough for
    its datasets, transforms and models. Where the compiled operators load, nothing is declared.
    """
    if not hasattr(torch.ops.torchvision, "nms") and not _compiled_operators_load():
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def _compiled_operators_load() -> bool:
    package = find_spec("torchvision")
    library = package and PathFinder.find_spec("_C", package.submodule_search_locations)
    if not library or not library.origin:
        return False
    try:
        # What torchvision itself does first; loading twice is harmless. (torch leaves the call untyped.)
        torch.ops.load_library(library.origin)  # type: ignore[no-untyped-call]
    except OSError:
        return False
    return True
