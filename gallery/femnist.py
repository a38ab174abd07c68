"""FEMNIST of LEAF: handwritten characters by writer, from the files that LEAF's scripts make.

Caldas et al., "LEAF: A Benchmark for Federated Settings", 2018. ``data-dir/train/*.json`` and ``data-dir/test/*.json``
have the lists ``users`` and ``num_samples``, and ``user_data``: for each user ``x``, images of 784 numbers from 0
(black) to 1 (white), and ``y``, labels from 0 to 61. The writers are the owners of their images: ``partition=owners``
makes each one a client, and ``test-split=holdout`` tests a writer on a part of the writer's own images.

Deviations: pixels are rounded to 8 bits, as in NIST's pictures. A writer without a training image is no client.
"""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedprune_app import extend as fp
from fedprune_app.data.dataset import owned_by, scale

CLASSES = tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase)
Part = tuple[NDArray[np.uint8], NDArray[np.int64], list[str]]


def femnist(data_dir: str) -> fp.Dataset:
    """Read the images with their writers; raise ``ValueError`` in one line for files that are not LEAF's."""
    images, labels, writers = _read(Path(data_dir) / "train")
    test_images, test_labels, test_writers = _read(Path(data_dir) / "test")
    owned = owned_by(writers, test_writers)
    return fp.Dataset(
        "femnist",
        *(images, labels, test_images, test_labels, CLASSES, *scale(images, public_scale=False)),
        owners=owned.train,
        test_owners=owned.test,
        owner_names=owned.names,
        is_measured=True,
    )


def _read(folder: Path) -> Part:
    images, labels, writers = [], [], []
    for path in sorted(folder.glob("*.json")):
        try:
            content = json.loads(path.read_bytes())
            for writer in content["users"]:
                pixels, own_labels = _images_of(content["user_data"][writer])
                images.append(pixels)
                labels.append(own_labels)
                writers += [str(writer)] * len(own_labels)
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise ValueError(f"'{path}' is no file of LEAF's ({type(error).__name__}: {error})") from None
    if not images:
        raise ValueError(f"'{folder}' has no *.json of LEAF's preprocess.sh")
    return np.concatenate(images), np.concatenate(labels), writers


def _images_of(user_data: Any) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    pixels = np.asarray(user_data["x"], dtype=np.float64).reshape(-1, 1, 28, 28)
    labels = np.asarray(user_data["y"], dtype=np.int64)
    in_range = ((pixels >= 0) & (pixels <= 1)).all() and ((labels >= 0) & (labels < len(CLASSES))).all()
    if labels.shape != (len(pixels),) or not in_range:
        raise ValueError("allowed: as many labels from 0 to 61 as images of numbers from 0 to 1")
    return np.rint(pixels * 255).astype(np.uint8), labels


fp.register_dataset(
    "femnist",
    femnist,
    "28x28 grey characters by writer, 62 classes, of LEAF; needs train/*.json and test/*.json",
    model="cnn5",
)
