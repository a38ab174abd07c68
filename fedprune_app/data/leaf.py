"""LEAF's FEMNIST: handwritten characters by writer, from the files that LEAF's scripts make.

Caldas et al., "LEAF: A Benchmark for Federated Settings", 2018. ``data-dir/train/*.json`` and ``data-dir/test/*.json``
have the lists ``users`` and ``num_samples``, and ``user_data``: for each user ``x``, images of 784 numbers from 0
(black) to 1 (white), and ``y``, labels from 0 to 61.
"""

import json
import string
from pathlib import Path
from typing import Any

import numpy as np

from fedprune_app.data.dataset import Dataset, Images, Labels, missing, owned_by, scale, visible

CLASSES = tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase)


def femnist(folder: Path, *, public_scale: bool) -> Dataset:
    """Read FEMNIST with its writers, who are the owners of its images.

    Images are normalised by the statistics of the training images, or to [-1, 1] with ``public_scale``. Raises a
    one-line ``ValueError``.
    """
    parts = {part: _read(folder, part) for part in ("train", "test")}
    (images, labels, writers), (test_images, test_labels, test_writers) = parts["train"], parts["test"]
    owners, test_owners = owned_by(writers, test_writers)
    return Dataset(
        "femnist",
        *(images, labels, test_images, test_labels, CLASSES, *scale(images, public_scale)),
        owners=owners,
        test_owners=test_owners,
        is_measured=not public_scale,
    )


def _read(folder: Path, part: str) -> tuple[Images, Labels, list[str]]:
    files = [Path(item.path) for item in visible(folder / part) if item.name.endswith(".json")]
    if not files:
        raise ValueError(missing("femnist", folder, f"{part}/*.json (of LEAF's preprocess.sh)"))
    images, labels, writers = [], [], []
    for path in files:
        try:
            content = json.loads(path.read_bytes())
            for writer in content["users"]:
                pixels, own_labels = _user_images(content["user_data"][writer])
                images.append(pixels)
                labels.append(own_labels)
                writers += [str(writer)] * len(own_labels)
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise ValueError(f"'{path}' is no file of LEAF's ({type(error).__name__}: {error})") from None
    return np.concatenate(images), np.concatenate(labels), writers


def _user_images(user_data: Any) -> tuple[Images, Labels]:
    pixels = np.asarray(user_data["x"], dtype=np.float64).reshape(-1, 1, 28, 28)
    labels = np.asarray(user_data["y"], dtype=np.int64)
    in_range = ((pixels >= 0) & (pixels <= 1)).all() and ((labels >= 0) & (labels < len(CLASSES))).all()
    if labels.shape != (len(pixels),) or not in_range:
        raise ValueError("allowed: as many labels from 0 to 61 as images of numbers from 0 to 1")
    return np.rint(pixels * 255).astype(np.uint8), labels
