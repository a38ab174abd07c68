"""Image datasets are uint8 arrays: embedded digits, the papers' public sets, and folders of images.

Nothing here unpickles: MNIST-like sets are read from IDX files, CIFAR from its binary version, decoded images
from ``.npy`` files.
"""

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from fedprune_app.core.rng import numpy_generator
from fedprune_app.data import brought, folders, leaf, tables
from fedprune_app.data.cifar import CIFAR10_NORM, cifar_binary
from fedprune_app.data.dataset import (
    Dataset,
    Form,
    first_folder,
    measured_scale,
)
from fedprune_app.data.idx import IDX, idx_dataset
from fedprune_app.data.names import LOADERS
from fedprune_app.data.partitions import stratified_holdout


def load_dataset(
    name: str, data_dir: str | Path = "", download: bool = False, *, public_scale: bool = False, **form: Any
) -> Dataset:
    """Load the dataset of a name in :data:`fedprune_app.data.names.DATASETS`, once per process.

    * ``data_dir`` is the folder of its files (unused for digits).
    * With ``download`` missing files are fetched into this folder.
    * Data of a user's own are normalised by the statistics of the training examples. With ``public_scale`` images are
      normalised to [-1, 1], whatever they are, and numbers stay as they are.
    * ``form`` has fields of :class:`Form`, which say how data of a user's own are read.

    Raises a one-line ``ValueError`` for missing files (with the expected files and how to get
    them) and for damaged files. The error names the damaged file. The exception are images of folders, which only the
    log names.
    """
    return _load(name, str(data_dir), download, Form(**form), public_scale)


@lru_cache(maxsize=2)
def _load(name: str, data_dir: str, download: bool, form: Form, public_scale: bool) -> Dataset:
    if name == "digits":
        return _digits()
    if name in LOADERS:
        return brought.dataset(name, LOADERS[name], data_dir, form, public_scale=public_scale)
    if not data_dir:
        raise ValueError(f"data-dir is empty: dataset '{name}' is read from files, give the folder that has them")
    folder = Path(data_dir).expanduser().absolute()
    if name in IDX:
        return idx_dataset(name, folder, download)
    if name == "tiny-imagenet":
        return folders.tiny_imagenet(folder, download)
    if name == "femnist":
        return leaf.femnist(folder, public_scale=public_scale)
    if name == "huggingface":
        return brought.on_disk(folder, form, public_scale=public_scale)
    if name == "table":
        return tables.table(folder, form, public_scale=public_scale)
    if name == "image-folder":
        return folders.image_folder(name, folder, form, public_scale=public_scale)
    if name == "cifar10" and (images := first_folder(folder / "cifar10", folder, inside="train")):
        return folders.image_folder(name, images, norm=CIFAR10_NORM)
    return cifar_binary(name, folder, download)


def forget() -> None:
    _load.cache_clear()


# --- embedded -------------------------------------------------------------------------------------------------


def _digits() -> Dataset:
    """Split the digits 80/20 by label, the same for every seed, so that runs compare on the same test images."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    images = np.rint(pixels * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8)
    labels = labels.astype(np.int64)
    train, test = stratified_holdout(labels, 0.2, numpy_generator(0, "digits test split"))
    names = tuple(str(digit) for digit in range(10))
    return Dataset(
        "digits", images[train], labels[train], images[test], labels[test], names, *measured_scale((images, train))
    )
