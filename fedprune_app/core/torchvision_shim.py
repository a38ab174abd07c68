"""torchvision can be imported beside a CPU-only torch once it was made ready here."""

import importlib.util
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path


@cache
def prepare_torchvision() -> None:
    """Load torchvision's compiled operators, or declare those that do not load: before any import of torchvision.

    transformers imports torchvision in its own time, and so may a plug-in. torchvision's wheel brings operators built
    against CUDA torch. Beside a CPU-only torch they do not load, and torchvision then fails while it describes the
    operators that are not there ("operator torchvision::nms does not exist"). torchvision asks for two of them. Their
    declaration without an implementation is enough for its datasets, transforms and models.
    """
    import torch

    spec = importlib.util.find_spec("torchvision") if "torchvision" not in sys.modules else None
    for folder in (spec and spec.submodule_search_locations) or []:
        for library in Path(folder).glob("_C.*"):
            with suppress(OSError):
                torch.ops.load_library(library)  # type: ignore[no-untyped-call]
    declare_operators()


def declare_operators() -> None:
    """Declare the operators that torchvision asks for and that are not there."""
    import torch

    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
