"""This module makes ``import torchvision`` work beside a CPU-only torch, whoever imports it."""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from types import ModuleType


class _Hook(MetaPathFinder):
    """A hook finds torchvision as the other finders do, and calls :func:`prepare_torchvision` before its code runs."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torchvision":
            return None
        specs = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, specs), None)
        if spec is not None and (loader := spec.loader) is not None:
            run = loader.exec_module

            def prepare_and_run(module: ModuleType) -> None:
                prepare_torchvision()
                run(module)

            loader.exec_module = prepare_and_run  # type: ignore[method-assign]  # of this one loader
        return spec


def prepare_when_imported() -> None:
    """Arrange that :func:`prepare_torchvision` is called when torchvision is imported; until then nothing is imported.

    transformers and Opacus import torchvision in their own time. So this call must come before any use of them:
    ``import fedprune_app`` calls it.
    """
    if not any(isinstance(finder, _Hook) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Hook())


def prepare_torchvision() -> None:
    """Declare the operators that torchvision lacks, before its code runs; a second call changes nothing.

    torchvision's wheel brings compiled operators built against CUDA torch. Beside a CPU-only torch they do not load,
    and torchvision then fails while it describes the operators that are not there ("operator torchvision::nms does not
    exist"). torchvision asks for two operators. Their declaration without an implementation is enough for its datasets,
    transforms and models. Where the compiled operators load, nothing is declared.
    """
    import torch

    if not hasattr(torch.ops.torchvision, "nms") and not _compiled_operators_load():
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def _compiled_operators_load() -> bool:
    import torch

    package = find_spec("torchvision")
    library = package and PathFinder.find_spec("_C", package.submodule_search_locations)
    if not library or not library.origin:
        return False
    try:
        # torchvision itself makes this call first; loading twice is harmless. (torch leaves the call untyped.)
        torch.ops.load_library(library.origin)  # type: ignore[no-untyped-call]
    except OSError:
        return False
    return True
