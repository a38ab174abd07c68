"""Image datasets are uint8 arrays: embedded digits, the papers' public sets, and folders of images.

Nothing here unpickles: MNIST-like sets are read from IDX files, CIFAR from its binary version, decoded images
from ``.npy`` files.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedprune_app.core.rng import numpy_generator
from fedprune_app.data.errors import check_kind
from fedprune_app.data.labels import same_text
from fedprune_app.data.names import DATASETS, LOADERS
from fedprune_app.data.partitions import stratified_holdout
from fedprune_app.files import locked

log = logging.getLogger("flwr.fedprune")

Images = NDArray[Any]  # uint8, float32 from a plug-in, or float64 from a table
Labels = NDArray[np.int64]
Split = tuple[Images, Labels]
_MOST_DIGESTED = 256 << 20  # bytes of each part: 0.2 s


@dataclass(frozen=True, eq=False)
class Dataset:
    """A dataset is a labelled image set in memory (or mapped from a cache file); its arrays are read-only.

    Images are uint8 of shape (N, C, H, W), C = 1 for grey; labels int64 of shape (N,) in [0, num_classes). A dataset of
    a plug-in may hold float32 numbers instead, and a table holds float64 numbers, which are normalised before they
    become float32. ``mean`` and ``std`` per channel are for images scaled to [0, 1], and for numbers as they are.
    ``owners`` (N,) says whose each training example is, as a number from 0 on, and -1 where it is nobody's; None where
    a dataset does not say that. Each number up to the highest one has an example. ``test_owners`` says that of the test
    examples, and is -1 for who has no training example. ``features`` are the names of the C numbers of an example, in
    order, where numbers have names. ``is_measured`` says that ``mean`` and ``std`` are those of the training examples,
    and no published constants. ``notes`` say what is there and is not read.
    """

    name: str
    train_images: Images
    train_labels: Labels
    test_images: Images
    test_labels: Labels
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    owners: NDArray[np.int64] | None = None
    test_owners: NDArray[np.int64] | None = None
    features: tuple[str, ...] = ()
    is_measured: bool = False
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for array in (self.train_images, self.train_labels, self.test_images, self.test_labels):
            array.setflags(write=False)  # one copy serves every client of a process

    @property
    def num_classes(self) -> int:
        """Return the number of classes."""
        return len(self.classes)

    @property
    def features_digest(self) -> str:
        """Return a SHA-256 of the names of the features in their order, which is empty without names."""
        return hashlib.sha256(json.dumps(self.features).encode()).hexdigest() if self.features else ""

    @cached_property
    def content_sha256(self) -> str:
        """The digest is of all labels and classes, and of all images or of 256 MiB of them, evenly spaced.

        Two datasets of the same digest are taken for one. A change of a few images among many GiB may go unseen.
        """
        total = hashlib.sha256(json.dumps(self.classes).encode())
        for images, labels in ((self.train_images, self.train_labels), (self.test_images, self.test_labels)):
            step = max(1, -(-images.nbytes // _MOST_DIGESTED))
            total.update(f"{images.shape} {images.dtype}".encode())
            total.update(np.ascontiguousarray(labels).data)
            for start in range(0, len(images), 1000 * step):  # a thousand images at a time are read
                total.update(np.ascontiguousarray(images[start : start + 1000 * step : step]).data)
        return total.hexdigest()

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Return (C, H, W)."""
        channels, height, width = self.train_images.shape[1:]
        return channels, height, width


@dataclass(frozen=True)
class Form:
    """A form says how data of a user's own are read. Fields that are keys of the configuration are described there.

    * ``classes``: the names of the classes, and their order. None means those that the data have: every class that has
      a folder or a name, or every label.
    * ``needs_test``: there has to be a test part. Without it data may be without one, and then have no test examples.
    * ``image_size``: the side of the square that each picture becomes; 0 leaves pictures as they are.
    * ``image_fit``: "crop" cuts a picture to a square around its middle, "stretch" squeezes it into the square.
    * ``by_owner``: an image folder says whose each training image is.
    * ``label_column``, ``image_column``, ``owner_column``: names of columns.
    * ``ignore_columns``: names of a table's columns that are no features.
    """

    classes: tuple[str, ...] = ()
    needs_test: bool = True
    image_size: int = 0
    image_fit: str = "crop"
    by_owner: bool = False
    label_column: str = "label"
    image_column: str = "image"
    owner_column: str = ""
    ignore_columns: tuple[str, ...] = ()


AS_IT_IS = Form()


def load_dataset(
    name: str, data_dir: str | Path = "", download: bool = False, *, public_scale: bool = False, **form: Any
) -> Dataset:
    """Load the dataset of a name in :data:`fedprune_app.data.names.DATASETS`, once per process.

    * ``data_dir`` is the folder of its files (unused for digits).
    * With ``download`` missing files are fetched into this folder.
    * Data of a user's own are normalised by the statistics of the training examples. With ``public_scale`` images are
      normalised to [-1, 1], whatever they are, and numbers stay as they are.
    * ``form`` has fields of :class:`Form`, which say how data of a user's own are read.

    Raises a one-line ``ValueError`` for an unknown name, for missing files (with the expected files and how to get
    them) and for damaged files. The error names the damaged file. The exception are images of folders, which only the
    log names.
    """
    return _load(name, str(data_dir), download, Form(**form), public_scale)


@lru_cache(maxsize=2)
def _load(name: str, data_dir: str, download: bool, form: Form, public_scale: bool) -> Dataset:
    from fedprune_app.data import brought, folders, leaf, tables  # which know this module

    if name not in DATASETS:
        raise ValueError(f"dataset is '{name}', allowed: {', '.join(DATASETS)}")
    if name == "digits":
        return _digits()
    if name in LOADERS:
        return brought.dataset(name, LOADERS[name], data_dir, form, public_scale=public_scale)
    if not data_dir:
        raise ValueError(f"data-dir is empty: dataset '{name}' is read from files, give the folder that has them")
    folder = Path(data_dir).expanduser().absolute()
    if name in _IDX:
        return _idx_dataset(name, folder, download)
    if name == "tiny-imagenet":
        return folders.tiny_imagenet(folder, download)
    if name == "femnist":
        return leaf.femnist(folder, public_scale=public_scale)
    if name == "huggingface":
        return brought.on_disk(folder, form, public_scale=public_scale)
    if name == "table":
        return tables.table(folder, form, public_scale=public_scale)
    if name == "image-folder":
        half = (0.5,) if public_scale else ()
        return folders.image_folder(name, folder, half, half, form)
    if name == "cifar10" and (images := first_folder(folder / "cifar10", folder, inside="train")):
        return folders.image_folder(name, images, *_CIFAR10_NORM)
    return _cifar_binary(name, folder, download)


def forget() -> None:
    """Drop the datasets that are kept."""
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
        "digits", images[train], labels[train], images[test], labels[test], names, *channel_stats((images, train))
    )


# --- MNIST and its relatives: IDX files -----------------------------------------------------------------------


@dataclass(frozen=True)
class _IdxSet:
    """An IDX set says where torchvision keeps a set, and describes the set.

    The place is torchvision's class, its arguments, and the prefixes of the train and test files. Of the classes the
    first ``taken`` are read, or all.
    """

    torchvision_class: str
    arguments: dict[str, str]
    prefixes: tuple[str, str]
    classes: tuple[str, ...]
    mean: float
    std: float
    first_label: int = 0
    transposed: bool = False
    taken: int | None = None


_DIGITS = tuple("0123456789")
_CLOTHES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"
)  # fmt: skip
_LETTERS = tuple("abcdefghijklmnopqrstuvwxyz")
_EMNIST_D, _EMNIST_L = ((f"emnist-{split}-train", f"emnist-{split}-test") for split in ("digits", "letters"))
_IDX = {
    "mnist": _IdxSet("MNIST", {}, ("train", "t10k"), _DIGITS, 0.1307, 0.3081),
    "fashion-mnist": _IdxSet("FashionMNIST", {}, ("train", "t10k"), _CLOTHES, 0.2860, 0.3530),
    "emnist-digits": _IdxSet("EMNIST", {"split": "digits"}, _EMNIST_D, _DIGITS, 0.1733, 0.3317, transposed=True),
    **{
        name: _IdxSet(
            "EMNIST", {"split": "letters"}, _EMNIST_L, _LETTERS, 0.1736, 0.3248, 1, transposed=True, taken=taken
        )
        for name, taken in (("emnist-letters", None), ("emnist-letters-10", 10))
    },
}


def _idx_dataset(name: str, folder: Path, download: bool) -> Dataset:
    """Read an IDX set; torchvision only downloads the files, because its classes also unpickle an older form."""
    kind = _IDX[name]
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
        images, labels = _checked(label_file, np.ascontiguousarray(images), labels - kind.first_label, kind.classes)
        kept = slice(None) if kind.taken is None else labels < kind.taken
        splits.append((images[kept], labels[kept]))
    return Dataset(name, *splits[0], *splits[1], kind.classes[: kind.taken], (kind.mean,), (kind.std,))


def _read_idx(path: Path, ndim: int) -> Images:
    """Read an IDX file of unsigned bytes: magic 0, 0, 8 (the type), ndim; big-endian uint32 sizes; the values.

    The values stay in the file, which all processes of this machine share, and are read when they are used.
    """
    header = 4 + 4 * ndim
    is_empty = not path.stat().st_size  # which cannot be mapped
    content: Images = np.empty(0, np.uint8) if is_empty else np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
    if len(content) < header or content[:4].tolist() != [0, 0, 8, ndim]:
        raise ValueError(f"'{path}' is not an IDX file of unsigned bytes in {ndim} dimensions")
    shape = content[4:header].view(">u4").astype(np.int64)
    if len(content) - header != shape.prod():
        raise ValueError(f"'{path}' has {len(content) - header} values, its header says {shape.prod()}")
    return content[header:].reshape(shape)


# --- CIFAR: binary version ------------------------------------------------------------------------------------

_CIFAR10_NORM = ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))  # as Sub-FedAvg; Dis-PFL's std differs
_CIFAR100_NORM = ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))
_CIFAR_HOME = "https://www.cs.toronto.edu/~kriz"


def _cifar_binary(name: str, folder: Path, download: bool) -> Dataset:
    """Read CIFAR's binary version: records of label bytes (CIFAR-100: coarse, fine) and 3072 pixels, by channel."""
    if name == "cifar10":
        inner, archive, md5 = "cifar-10-batches-bin", "cifar-10-binary", "c32a1d4ab5d03f1284b67883e8d87530"
        batches, test = [f"data_batch_{i}.bin" for i in range(1, 6)], "test_batch.bin"
        names, label_bytes, norm = "batches.meta.txt", 1, _CIFAR10_NORM
    else:
        inner, archive, md5 = "cifar-100-binary", "cifar-100-binary", "03b5dce01913d631647c71ecec9e9cb8"
        batches, test = ["train.bin"], "test.bin"
        names, label_bytes, norm = "fine_label_names.txt", 2, _CIFAR100_NORM
    root = folder / inner
    files = [root / file for file in (*batches, test, names)]
    other = " (nor train/<class>/* and test/<class>/*; pickled batches are not read)" if name == "cifar10" else ""
    url = f"{_CIFAR_HOME}/{archive}.tar.gz"
    require(name, files, folder, download, lambda: fetch_archive(url, folder, md5), other)
    classes = tuple(files[-1].read_text().split())

    def read(paths: Iterable[Path]) -> Split:
        parts = []
        for path in paths:
            content = np.fromfile(path, dtype=np.uint8)
            if not len(content) or len(content) % (label_bytes + 3072):
                raise ValueError(f"'{path}' has {len(content)} bytes, not whole records of {label_bytes + 3072}")
            records = content.reshape(-1, label_bytes + 3072)
            images = records[:, label_bytes:].reshape(-1, 3, 32, 32)
            parts.append(_checked(path, images, records[:, label_bytes - 1].astype(np.int64), classes))
        return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])

    return Dataset(name, *read(files[: len(batches)]), *read(files[-2:-1]), classes, *norm)


# --- common ---------------------------------------------------------------------------------------------------


def owned_by(owners: Sequence[str], test_owners: Sequence[str] = ()) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return whose each training example and each test example is as a number.

    It is that of the name among all names of training examples in order. It is -1 for an empty name, and for somebody
    who has test examples alone.
    """
    names = [[same_text(name) for name in part] for part in (owners, test_owners)]
    numbers = {name: number for number, name in enumerate(sorted({*names[0]} - {""}))}
    train, test = (np.array([numbers.get(name, -1) for name in part], np.int64) for part in names)
    return train, test


def visible(folder: Path) -> list[os.DirEntry[str]]:
    """Return the entries of a folder in the order of their names; an absent folder has none."""
    if not folder.is_dir():
        return []
    with os.scandir(folder) as entries:
        return sorted((item for item in entries if not item.name.startswith(".")), key=lambda item: item.name)


def channel_stats(*parts: tuple[Images, NDArray[np.int64]]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the exact mean and standard deviation per channel of images scaled to [0, 1], from a histogram.

    A part has images, and the positions of those that count. A thousand images at a time are read.
    """
    levels = np.arange(256) / 255
    mean, std = [], []
    histograms = np.zeros((parts[0][0].shape[1], 256), dtype=np.int64)
    for images, positions in parts:
        for start in range(0, len(positions), 1000):
            block = images[positions[start : start + 1000]]
            for channel, histogram in enumerate(histograms):
                histogram += np.bincount(block[:, channel].ravel(), minlength=256)
    for histogram in histograms:
        average = float(histogram @ levels / histogram.sum())
        mean.append(average)
        std.append(float(np.sqrt(histogram @ (levels - average) ** 2 / histogram.sum())) or 1.0)
    return tuple(mean), tuple(std)


def first_folder(*folders: Path, inside: str) -> Path | None:
    """Return the first folder that has a folder named ``inside``."""
    return next((folder for folder in folders if (folder / inside).is_dir()), None)


def _checked(path: Path, images: Images, labels: Labels, classes: tuple[str, ...]) -> Split:
    if len(images) != len(labels):
        raise ValueError(f"'{path}' has {len(labels)} labels for {len(images)} images")
    if len(labels) and not 0 <= labels.min() <= labels.max() < len(classes):
        raise ValueError(f"'{path}' has a label outside the {len(classes)} classes")
    return images, labels


def missing(name: str, folder: Path, expected: str, wanted: Path, advice: str = "") -> str:
    """Return the error for a folder without ``expected``, with the folder that was probably meant.

    ``wanted`` is a file or folder, relative to the right folder, that would be there. No other name is told: on a node
    names of files may tell whom they are about.
    """
    if not folder.exists():
        return f"data-dir '{folder}' does not exist; dataset '{name}' is read from {expected} in it{advice}"
    if not folder.is_dir():
        return f"data-dir '{folder}' is a file, allowed: a folder with {expected}; an archive has to be unpacked"
    above = {"the folder above has it": folder.parent, "the folder two above has it": folder.parent.parent}
    meant = [words for words, other in above.items() if (other / wanted).exists()]
    if not meant and any((Path(each) / wanted).exists() for each in visible(folder) if each.is_dir()):
        meant = ["a folder in it has it"]
    hint = f"; {meant[0]}, give that one" if meant else advice
    return f"data-dir '{folder}' has no {expected}, which dataset '{name}' is read from{hint}"


def require(
    name: str, files: list[Path], folder: Path, download: bool, fetch: Callable[[], object], other: str = ""
) -> None:
    """Make sure that the files exist; with ``download`` missing files are fetched once (one process at a time).

    ``other`` is a text for the error: which other files the dataset could be read from.
    """
    if download and not all(file.exists() for file in files):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with locked(folder / ".fedprune-download.lock", f"fetches dataset {name!r} into {str(folder)!r}"):
                if not all(file.exists() for file in files):
                    fetch()
        except (OSError, RuntimeError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ValueError(f"data-dir '{folder}': download of dataset '{name}' failed: {reason}") from error
    for file in files:
        if not file.exists():
            advice = "" if download else "; set download=true to fetch it"
            wanted = file.relative_to(folder)
            raise ValueError(missing(name, folder, f"{wanted}{other}", wanted, advice))
        check_kind(file)


def fetch_archive(url: str, folder: Path, md5: str) -> None:
    """Download an archive with this MD5 digest, and unpack it in ``folder``."""
    from torchvision.datasets.utils import download_and_extract_archive

    download_and_extract_archive(url, str(folder), md5=md5)
