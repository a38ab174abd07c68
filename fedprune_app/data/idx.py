"""MNIST, Fashion-MNIST and EMNIST are read from IDX files."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedprune_app.data.dataset import (
    Dataset,
    Images,
    require,
)


@dataclass(frozen=True)
class _IdxSet:
    """An IDX set says where torchvision keeps a set, and describes the set.

    The place is torchvision's class, its arguments, and the prefixes of the train and test files. Of the classes the
    first ``num_classes`` are read, or all.
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
    """Read an IDX set; torchvision only downloads the files, because its classes also unpickle an older form."""
    kind = IDX[name]
    raw = folder / kind.torchvision_class / "raw"
    files = [
        raw / f"{prefix}-{part}" for prefix in kind.prefixes for part in ("images-idx3-ubyte", "labels-idx1-ubyte")
    ]

    def fetch() -> None:
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

    The values stay in the file, which all processes of this machine share, and are read when they are used.
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
