"""This module makes ``import torchvision`` work beside a CPU-only torch, whoever imports it."""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class _Hook(MetaPathFinder):
    """A hook lets torchvision load its compiled operators, and calls :func:`declare_operators` after that."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torchvision.extension":  # the first module that torchvision imports: it loads the operators
            return None
        specs = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, specs), None)
        if spec is not None and (loader := spec.loader) is not None:
            run = loader.exec_module

            def run_and_declare(module: ModuleType) -> None:
                run(module)
                declare_operators()

            loader.exec_module = run_and_declare  # type: ignore[method-assign]  # of this one loader
        return spec


def prepare_when_imported() -> None:
    """Arrange that :func:`declare_operators` is called when torchvision is imported; until then nothing is imported.

    transformers and Opacus import torchvision in their own time. So this call must come before any use of them:
    ``import fedprune_app`` calls it.
    """
    if not any(isinstance(finder, _Hook) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Hook())


def declare_operators() -> None:
    """Declare the operators of torchvision that did not load; a second call changes nothing.

    torchvision's wheel brings compiled operators built against CUDA torch. Beside a CPU-only torch they do not load,
    and torchvision then fails while it describes the operators that are not there ("operator torchvision::nms does not
    exist"). torchvision asks for two operators. Their declaration without an implementation is enough for its datasets,
    transforms and models.
    """
    import torch

    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
