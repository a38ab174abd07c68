"""An exported model classifies images of files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedprune_app.data.folders import read_image
from fedprune_app.models.vision import Build
from fedprune_app.results.load import ExportInfo, load_model, read_export_info

Classes = list[tuple[str, float]]
"""These are classes with their probabilities, the likeliest first."""


def predictions(
    model: Path,
    images: Sequence[Path],
    top: int = 1,
    build: Build | None = None,
    refuse: Callable[[ValueError], None] | None = None,
) -> list[tuple[Path, Classes]]:
    """Return the ``top`` likeliest classes of each image, by an exported model in safetensors.

    ``build(image_shape, num_classes)`` makes the network of a model that is none of fedprune's own.

    Images are scaled to [0, 1] and normalised as the model's training images were. Raises a one-line ``ValueError``
    naming the file. With ``refuse`` the error of an image goes there, and the other images are classified. A model that
    was trained on numbers, such as those of a table, is refused.
    """
    info = read_export_info(model)
    if info.inputs != "images" or info.image_shape[1:] == (1, 1):
        trained = "data of a plug-in that were not there at the export" if info.inputs == "unknown" else "numbers"
        raise ValueError(
            f"model '{model}' was trained on {trained}, allowed: one trained on images of 8 bits; in Python, "
            "fedprune_app.load_model takes numbers"
        )
    network = load_model(model, build=build)
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (info.mean, info.std))
    names = info.class_names or tuple(map(str, range(info.classes)))
    found = []
    for path in images:
        try:
            pixels = _pixels(path, info)
        except ValueError as error:
            if refuse is None:
                raise
            refuse(error)
            continue
        with torch.no_grad():
            shares = network((pixels - mean).div(std)[None]).softmax(1)[0]
        best = shares.topk(min(top, len(names)))
        found.append((path, [(names[k], float(share)) for share, k in zip(*best, strict=True)]))
    return found


def _pixels(path: Path, info: ExportInfo) -> Tensor:
    """Return an image as float32 (C, H, W) in [0, 1]. Raises a one-line ``ValueError`` that names the file."""
    if not path.is_file():
        why = "is a folder" if path.is_dir() else "does not exist"
        raise ValueError(f"image {str(path)!r} {why}, allowed: files of images")
    return torch.from_numpy(np.array(read_image(path, info.image_shape, info.image_fit))).float().div_(255)
