"""Image datasets as uint8 arrays: embedded digits, the papers' public sets, image folders, a server's public images.

Nothing here unpickles: MNIST-like sets are read from IDX files, CIFAR from its binary version, decoded images from
``.npy`` files.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedprune_app.core.named import ImageShape
from fedprune_app.core.rng import numpy_generator
from fedprune_app.core.torchvision_shim import prepare_torchvision
from fedprune_app.data import folders, partitions, plugin_datasets, tables
from fedprune_app.data.dataset import (
    Dataset,
    Form,
    Images,
    Labels,
    Split,
    fetch_archive,
    first_folder,
    measured_scale,
    require,
)
from fedprune_app.data.names import LOADERS
from fedprune_app.data.partitions import Indices, stratified_holdout


@dataclass(frozen=True)
class _IdxSet:
    """Where torchvision stores a dataset of IDX files, and its classes and normalisation.

    The location is torchvision's class, its arguments, and the prefixes of the train and test files. Only the first
    ``num_classes`` classes are read, or all.
    """

    torchvision_class: str
    arguments: dict[str, str]
    prefixes: tuple[str, str]
    classes: tuple[str, ...]
    mean: float
    std: float
    first_label: int = 0
    transposed: bool = False
    num_classes: int | None = None


_DIGITS = tuple("0123456789")


_CLOTHES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"
)  # fmt: skip


_LETTERS = tuple("abcdefghijklmnopqrstuvwxyz")


_EMNIST_D, _EMNIST_L = ((f"emnist-{split}-train", f"emnist-{split}-test") for split in ("digits", "letters"))


IDX = {
    "mnist": _IdxSet("MNIST", {}, ("train", "t10k"), _DIGITS, 0.1307, 0.3081),
    "fashion-mnist": _IdxSet("FashionMNIST", {}, ("train", "t10k"), _CLOTHES, 0.2860, 0.3530),
    "emnist-digits": _IdxSet("EMNIST", {"split": "digits"}, _EMNIST_D, _DIGITS, 0.1733, 0.3317, transposed=True),
    **{
        name: _IdxSet(
            "EMNIST",
            {"split": "letters"},
            _EMNIST_L,
            _LETTERS,
            0.1736,
            0.3248,
            1,
            transposed=True,
            num_classes=num_classes,
        )
        for name, num_classes in (("emnist-letters", None), ("emnist-letters-10", 10))
    },
}


def idx_dataset(name: str, folder: Path, download: bool) -> Dataset:
    """Read an IDX set; torchvision only downloads the files, because its classes also unpickle an older format."""
    kind = IDX[name]
    raw = folder / kind.torchvision_class / "raw"
    files = [
        raw / f"{prefix}-{part}" for prefix in kind.prefixes for part in ("images-idx3-ubyte", "labels-idx1-ubyte")
    ]

    def fetch() -> None:
        prepare_torchvision()
        from torchvision import datasets

        getattr(datasets, kind.torchvision_class)(folder, download=True, **kind.arguments)

    require(name, files, folder, download, fetch)
    splits = []
    for image_file, label_file in (files[:2], files[2:]):
        images, labels = _read_idx(image_file, 3)[:, None], _read_idx(label_file, 1).astype(np.int64)
        if kind.transposed:
            images = images.swapaxes(2, 3)
        images, labels = np.ascontiguousarray(images), labels - kind.first_label
        selection = slice(None) if kind.num_classes is None else labels < kind.num_classes
        splits.append((images[selection], labels[selection]))
    return Dataset(name, *splits[0], *splits[1], kind.classes[: kind.num_classes], (kind.mean,), (kind.std,))


def _read_idx(path: Path, ndim: int) -> Images:
    """Read an IDX file of unsigned bytes: magic 0, 0, 8 (the type), ndim; big-endian uint32 sizes; the values.

    The values are mapped from the file, shared by all processes of this machine, and read on use.
    """
    header = 4 + 4 * ndim
    is_empty = not path.stat().st_size  # an empty file cannot be mapped
    content: Images = np.empty(0, np.uint8) if is_empty else np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
    if len(content) < header or content[:4].tolist() != [0, 0, 8, ndim]:
        raise ValueError(f"'{path}' is not an IDX file of unsigned bytes in {ndim} dimensions")
    shape = content[4:header].view(">u4").astype(np.int64)
    if len(content) - header != shape.prod():
        raise ValueError(f"'{path}' has {len(content) - header} values, its header says {shape.prod()}")
    return content[header:].reshape(shape)


# --- CIFAR ------------------------------------------------------------------------------------------------------------


CIFAR10_NORM = ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))  # as Sub-FedAvg; Dis-PFL's std differs
_CIFAR100_NORM = ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))
_CIFAR_HOME = "https://www.cs.toronto.edu/~kriz"


def cifar_binary(name: str, folder: Path, download: bool) -> Dataset:
    """Read CIFAR's binary version: records of label bytes (CIFAR-100: coarse, fine) and 3072 pixels, by channel."""
    if name == "cifar10":
        folder_name, archive, md5 = "cifar-10-batches-bin", "cifar-10-binary", "c32a1d4ab5d03f1284b67883e8d87530"
        batches, test = [f"data_batch_{i}.bin" for i in range(1, 6)], "test_batch.bin"
        names, label_bytes, norm = "batches.meta.txt", 1, CIFAR10_NORM
    else:
        folder_name, archive, md5 = "cifar-100-binary", "cifar-100-binary", "03b5dce01913d631647c71ecec9e9cb8"
        batches, test = ["train.bin"], "test.bin"
        names, label_bytes, norm = "fine_label_names.txt", 2, _CIFAR100_NORM
    root = folder / folder_name
    files = [root / file for file in (*batches, test, names)]
    hint = " (nor train/<class>/* and test/<class>/*; pickled batches are not read)" if name == "cifar10" else ""
    url = f"{_CIFAR_HOME}/{archive}.tar.gz"
    require(name, files, folder, download, lambda: fetch_archive(url, folder, md5), hint)
    classes = tuple(files[-1].read_text().split())

    def read(paths: Iterable[Path]) -> Split:
        parts = []
        for path in paths:
            content = np.fromfile(path, dtype=np.uint8)
            if not len(content) or len(content) % (label_bytes + 3072):
                raise ValueError(f"'{path}' has {len(content)} bytes, not whole records of {label_bytes + 3072}")
            records = content.reshape(-1, label_bytes + 3072)
            images = records[:, label_bytes:].reshape(-1, 3, 32, 32)
            parts.append((images, records[:, label_bytes - 1].astype(np.int64)))
        return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])

    return Dataset(name, *read(files[: len(batches)]), *read(files[-2:-1]), classes, *norm)


def load_dataset(
    name: str, data_dir: str | Path = "", download: bool = False, *, public_scale: bool = False, **form: Any
) -> Dataset:
    """Load a dataset by its name in :data:`fedprune_app.data.names.DATASETS`, once per process.

    * ``data_dir`` is the folder of its files (unused for digits).
    * With ``download`` missing files are downloaded into this folder.
    * A user's own data are normalised by the statistics of the training examples. With ``public_scale`` images are
      normalised to [-1, 1] independent of the data, and numbers are not changed.
    * ``form`` are fields of :class:`Form`: how a user's own data are read.

    Raises a one-line ``ValueError`` for missing files (with the expected files and how to get them) and for damaged
    files. The error names the damaged file; images of folders are named in the log only.
    """
    return _load(name, str(data_dir), download, Form(**form), public_scale)


@lru_cache(maxsize=2)
def _load(name: str, data_dir: str, download: bool, form: Form, public_scale: bool) -> Dataset:
    if name == "digits":
        return _digits()
    if name in LOADERS:
        return plugin_datasets.dataset(name, LOADERS[name], data_dir, form, public_scale=public_scale)
    if not data_dir:
        raise ValueError(f"data-dir is empty: dataset '{name}' is read from files, give the folder that has them")
    folder = Path(data_dir).expanduser().absolute()
    if name in IDX:
        return idx_dataset(name, folder, download)
    if name == "tiny-imagenet":
        return folders.tiny_imagenet(folder, download)
    if name == "huggingface":
        return plugin_datasets.on_disk(folder, form, public_scale=public_scale)
    if name == "table":
        return tables.table(folder, form, public_scale=public_scale)
    if name == "image-folder":
        return folders.image_folder(name, folder, form, public_scale=public_scale)
    if name == "cifar10" and (images := first_folder(folder / "cifar10", folder, inside="train")):
        return folders.image_folder(name, images, norm=CIFAR10_NORM)
    return cifar_binary(name, folder, download)


def clear_cache() -> None:
    _load.cache_clear()


# --- embedded -------------------------------------------------------------------------------------------------


def _digits() -> Dataset:
    """Split the digits 80/20 by label, equal for every seed, so that all runs have the same test images."""
    package = find_spec("sklearn")  # not imported, which takes as long as to import torch
    assert package is not None
    table = np.loadtxt(Path(package.origin or "").parent / "datasets/data/digits.csv.gz", delimiter=",")
    images = np.rint(table[:, :-1] * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8)
    labels = table[:, -1].astype(np.int64)
    train, test = stratified_holdout(labels, 0.2, numpy_generator(0, "digits test split"))
    names = tuple(str(digit) for digit in range(10))
    return Dataset(
        "digits", images[train], labels[train], images[test], labels[test], names, *measured_scale((images, train))
    )


# --- a server's public images -----------------------------------------------------------------------------------------


_LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601, which image libraries use for grey


def public_dataset(
    name: str, data_dir: str, shape: ImageShape, samples: int, seed: int, download: bool = False
) -> tuple[Tensor, Tensor, int]:
    """Return training images of a dataset as float32 (N, *shape), their labels (N,), and the number of classes.

    ``samples`` images are drawn with the label distribution of the dataset; 0 returns all. The images are normalised by
    their own mean and standard deviation per channel. Raises ``ValueError`` as
    :func:`~fedprune_app.data.datasets.load_dataset`, and for more samples than available.
    """
    dataset = load_dataset(name, data_dir, download)
    indices = some_of(dataset.train_labels, samples, seed)
    images = adapted(dataset.train_images[indices], shape)
    std, mean = torch.std_mean(images, dim=(0, 2, 3), keepdim=True, correction=0)
    images = images.sub_(mean).div_(std.clamp(min=1e-6))
    return images, torch.from_numpy(dataset.train_labels[indices]), dataset.num_classes


def some_of(labels: Labels, samples: int, seed: int) -> Indices:
    """Return sorted positions of ``samples`` labels with the overall label distribution; 0 returns all positions.

    ``ValueError`` for more samples than available.
    """
    if samples > len(labels):
        raise ValueError(f"fedltp.public-samples is {samples}, allowed: at most {len(labels)}, which are public")
    rng = numpy_generator(seed, "public samples")
    return partitions.stratified_sample(labels, samples, rng) if samples else np.arange(len(labels))


def adapted(images: Images, shape: ImageShape) -> Tensor:
    """Return uint8 images (N, C, H, W) as float32 (N, *shape) in [0, 1].

    * Colour becomes grey by luminance.
    * Grey becomes colour by repetition.
    * Images are resized by bilinear interpolation with antialiasing.
    """
    channels, *size = shape
    pixels = torch.from_numpy(np.ascontiguousarray(images)).float().div_(255)
    if pixels.shape[1] == 3 and channels == 1:
        pixels = torch.einsum("nchw,c->nhw", pixels, torch.tensor(_LUMA))[:, None]
    elif pixels.shape[1] == 1 and channels == 3:
        pixels = pixels.expand(-1, 3, -1, -1)
    if list(pixels.shape[2:]) != size:
        pixels = F.interpolate(pixels, size, mode="bilinear", antialias=True, align_corners=False)
    return pixels.clamp(0, 1)
