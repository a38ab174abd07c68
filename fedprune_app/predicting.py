"""An exported model classifies images of files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from fedprune_app.data.folders import read_image
from fedprune_app.models.vision import Build
from fedprune_app.results.load import load_model, read_export_info

Classes = list[tuple[str, float]]
"""These are classes with their probabilities, the likeliest first."""


def predictions(
    model: Path, images: Sequence[Path], top: int = 1, build: Build | None = None
) -> list[tuple[Path, Classes]]:
    """Return the ``top`` likeliest classes of each image, by an exported model in safetensors.

    ``build(image_shape, num_classes)`` makes the network of a model that is none of fedprune's own.

    Images are scaled to [0, 1] and normalised as the model's training images were. Raises a one-line ``ValueError``
    naming the file.
    """
    info, network = read_export_info(model), load_model(model, build=build)
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (info.mean, info.std))
    names = info.class_names or tuple(map(str, range(info.classes)))
    found = []
    for path in images:
        if not path.is_file():
            raise ValueError(f"image {str(path)!r} does not exist, allowed: files of images")
        pixels = torch.from_numpy(np.array(read_image(path, info.image_shape, info.image_fit))).float().div_(255)
        with torch.no_grad():
            shares = network((pixels - mean).div(std)[None]).softmax(1)[0]
        best = shares.topk(min(top, len(names)))
        found.append((path, [(names[k], float(share)) for share, k in zip(*best, strict=True)]))
    return found
