"""An exported model classifies images of files, or rows of tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fedprune_app.data import tables
from fedprune_app.data.folders import read_image
from fedprune_app.exports.file import ExportInfo, load_model, read_export_info
from fedprune_app.models.vision import Build

_BATCH = 1024  # examples that go through a network together
Classes = list[tuple[str, float]]
"""These are classes with their probabilities, the likeliest first."""


class Prediction(NamedTuple):
    """A prediction is for an image, or for a row of a table, which are numbered from 1 on."""

    file: Path
    row: int | None
    classes: Classes


def predictions(
    model: Path,
    files: Sequence[Path],
    top: int = 1,
    build: Build | None = None,
    refuse: Callable[[ValueError], None] | None = None,
) -> list[Prediction]:
    """Return the ``top`` likeliest classes of each image, or of each row of each table.

    ``model`` was exported in safetensors. ``build(image_shape, num_classes)`` makes the network of a model that is none
    of fedprune's own.

    Images are scaled to [0, 1] and normalised as the model's training images were. For a model that was trained on a
    table, the files are tables, whose columns are found by their names; other columns are not looked at. Raises a
    one-line ``ValueError`` naming the file. With ``refuse`` the error of a file goes there, and the other files are
    classified. A model that was trained on other numbers is refused.
    """
    info = read_export_info(model)
    if not info.features and (info.inputs != "images" or info.image_shape[1:] == (1, 1)):
        inputs = "data of a plug-in that were not there at the export" if info.inputs == "unknown" else "numbers"
        raise ValueError(
            f"model '{model}' was trained on {inputs}, allowed: one trained on images of 8 bits, or on a table whose "
            "columns the model names; in Python, fedprune_app.load_model takes numbers"
        )
    classify = _Classifier(info, load_model(model, build=build), top)
    results = []
    for path in files:
        try:
            _check_file(path, "table" if info.features else "image")
            examples = _rows(path, info) if info.features else _pixels(path, info)[None]
        except ValueError as error:
            if refuse is None:
                raise
            refuse(error)
            continue
        for row, classes in enumerate(classify(examples), 1):
            results.append(Prediction(path, row if info.features else None, classes))
    return results


class _Classifier:
    """The classifier names the likeliest classes of examples (N, C, H, W) that are not normalised yet."""

    def __init__(self, info: ExportInfo, network: nn.Module, top: int) -> None:
        self._network = network
        self._scale = [torch.tensor(values, dtype=torch.float64).view(-1, 1, 1) for values in (info.mean, info.std)]
        self._names = info.class_names or tuple(map(str, range(info.classes)))
        self._top = min(top, len(self._names))

    def __call__(self, examples: Tensor) -> list[Classes]:
        likeliest: list[Classes] = []
        mean, std = (tensor.to(examples.dtype) for tensor in self._scale)
        for start in range(0, len(examples), _BATCH):
            batch = examples[start : start + _BATCH]
            with torch.no_grad():
                shares, classes = self._network((batch - mean).div(std).float()).softmax(1).topk(self._top)
            for row in zip(classes.tolist(), shares.tolist(), strict=True):
                likeliest.append([(self._names[k], share) for k, share in zip(*row, strict=True)])
        return likeliest


def _check_file(path: Path, kind: str) -> None:
    if not path.is_file():
        reason = "is no file" if path.exists() else "does not exist"
        raise ValueError(f"{kind} {str(path)!r} {reason}, allowed: files of {kind}s")


def _rows(path: Path, info: ExportInfo) -> Tensor:
    """Return a table's rows as float64 (N, C, H, W). Raises a one-line ``ValueError`` that names the file."""
    return torch.from_numpy(np.array(tables.rows(path, info.features))).view(-1, *info.image_shape)


def _pixels(path: Path, info: ExportInfo) -> Tensor:
    """Return an image as float32 (C, H, W) in [0, 1]. Raises a one-line ``ValueError`` that names the file."""
    return torch.from_numpy(np.array(read_image(path, info.image_shape, info.image_fit))).float().div_(255)
