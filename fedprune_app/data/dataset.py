"""The dataset in memory, and helpers of its readers: labels, files, errors."""

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedprune_app.core.named import ImageShape
from fedprune_app.core.texts import one_line
from fedprune_app.core.torchvision_shim import prepare_torchvision
from fedprune_app.files import locked


def shortened(names: Sequence[str], limit: int = 12) -> str:
    """Return the first ``limit`` names as text, and the number of the others.

    >>> shortened(["a", "b", "c"], limit=2)
    'a, b, ... (1 more)'
    """
    suffix = f", ... ({len(names) - limit} more)" if len(names) > limit else ""
    return ", ".join(names[:limit]) + suffix


class FileError(ValueError):
    """Raised for a data file that cannot be used."""

    def __init__(self, path: Path | str, reason: str) -> None:
        super().__init__(f"'{path}' {reason}")


def text_of(value: object) -> str:
    """Return the text of a label or an owner; bytes are UTF-8, and a whole number has no fraction.

    >>> text_of(b"cat"), text_of(1.0), text_of("1.0")
    ('cat', '1', '1.0')
    """
    if isinstance(value, bytes):
        return value.decode()
    return str(int(value) if isinstance(value, float | np.floating) and value.is_integer() else value)


def in_order(labels: Collection[str]) -> tuple[str, ...]:
    """Return the distinct labels in order: numerically if all are numbers, else alphabetically."""
    sorted_labels = sorted({*labels})  # orders 01 and 1, which are equal as numbers
    try:
        return tuple(sorted(sorted_labels, key=float))
    except ValueError:
        return tuple(sorted_labels)


def coded(
    labels: Mapping[str, Sequence[str]], classes: Sequence[str], refuse: Callable[[str, str], ValueError]
) -> dict[str, NDArray[np.int64]]:
    """Return the labels of each part as indices into ``classes``.

    Raises ``refuse(part, label)`` for an unknown label.
    """
    numbers = {name: number for number, name in enumerate(classes)}
    for part, names in labels.items():
        if unknown_labels := sorted({*names} - {*classes}):
            raise refuse(part, unknown_labels[0])
    return {part: np.array([numbers[name] for name in names], dtype=np.int64) for part, names in labels.items()}


# --- the dataset ------------------------------------------------------------------------------------------------------


Images = NDArray[Any]  # uint8, float32 from a plug-in, or float64 from a table
Labels = NDArray[np.int64]
Split = tuple[Images, Labels]
Scale = tuple[tuple[float, ...], tuple[float, ...]]  # a mean and a standard deviation by channel
_MOST_DIGESTED = 256 << 20  # bytes of each part: 0.2 s


@dataclass(frozen=True, eq=False)
class Dataset:
    """Labelled images in memory or mapped from a cache file, with classes and normalisation; arrays are read-only.

    Images are uint8 of shape (N, C, H, W), C = 1 for grey; labels int64 of shape (N,) in [0, num_classes). A plug-in's
    dataset may hold float32 numbers instead, and a table holds float64 numbers, which are normalised before they become
    float32. ``mean`` and ``std`` per channel apply to images scaled to [0, 1], and to numbers as they are. ``owners``
    (N,) numbers the owner of each training example from 0 on, -1 for an example without owner; None if the dataset has
    no owners. Each number up to the highest one has an example. ``test_owners`` are the owners of the test examples, -1
    for an owner without training examples. ``groups`` (N,) names or numbers the group of each training example, such as
    a patient's, and ``test_groups`` that of each test example. An example with an empty name is a group of its own.
    ``features`` are the names of the C numbers of an example, in order, if they have names. ``is_measured`` means that
    ``mean`` and ``std`` were measured on the training examples, and are not published constants. ``notes`` describe
    data that were found and not read. ``owner_names`` are by number. ``stored`` returns digests of the training and
    then the test examples as they are stored, independent of the settings.
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
    groups: Sequence[object] | None = None
    test_groups: Sequence[object] | None = None
    features: tuple[str, ...] = ()
    is_measured: bool = False
    notes: tuple[str, ...] = ()
    owner_names: tuple[str, ...] = ()
    stored: Callable[[], list[bytes]] | None = None

    def __post_init__(self) -> None:
        for array in (self.train_images, self.train_labels, self.test_images, self.test_labels):
            array.setflags(write=False)  # one copy serves every client of a process

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    @property
    def features_digest(self) -> str:
        """Return a SHA-256 of the features' names in their order; empty without names."""
        return hashlib.sha256(json.dumps(self.features).encode()).hexdigest() if self.features else ""

    @cached_property
    def content_sha256(self) -> str:
        """Return a SHA-256 of all labels and classes, and of all images or 256 MiB of them, evenly spaced.

        Two datasets with the same digest are considered equal. A change of a few images among many GiB may not be
        detected.
        """
        total = hashlib.sha256(json.dumps(self.classes).encode())
        for images, labels in ((self.train_images, self.train_labels), (self.test_images, self.test_labels)):
            step = max(1, -(-images.nbytes // _MOST_DIGESTED))
            total.update(f"{images.shape} {images.dtype}".encode())
            total.update(np.ascontiguousarray(labels).data)
            total.update(np.ascontiguousarray(images[::step]).data)
        return total.hexdigest()

    @property
    def image_shape(self) -> ImageShape:
        """Return (C, H, W)."""
        channels, height, width = self.train_images.shape[1:]
        return channels, height, width


@dataclass(frozen=True)
class Owned:
    """The owner of each training example and of each test example, as a number in the order of the ``names``.

    -1 stands for an empty name, and for an owner of test examples alone.
    """

    train: NDArray[np.int64]
    test: NDArray[np.int64]
    names: tuple[str, ...]


def owned_by(owners: Sequence[str], test_owners: Sequence[str] = ()) -> Owned:
    """Return whose examples are whose. Owners are in natural order: site2 is before site10."""
    names = tuple(sorted({*owners} - {""}, key=_natural))
    numbers = {name: number for number, name in enumerate(names)}
    train, test = (np.array([numbers.get(name, -1) for name in part], np.int64) for part in (owners, test_owners))
    return Owned(train, test, names)


def _natural(name: str) -> tuple[list[tuple[float, str]], str]:
    """Return what orders a name by the numbers in it; the name itself orders 01 and 1."""
    parts = re.findall(r"[0-9]+|[^0-9]+", name)
    return [(int(part), "") if part.isdecimal() else (math.inf, part) for part in parts], name


def visible(folder: Path) -> list[os.DirEntry[str]]:
    """Return the entries of a folder ordered by name, without hidden ones; an absent folder has none."""
    if not folder.is_dir():
        return []
    entries = (entry for entry in os.scandir(folder) if not entry.name.startswith("."))
    return sorted(entries, key=lambda entry: entry.name)


def first_folder(*folders: Path, inside: str) -> Path | None:
    return next((folder for folder in folders if (folder / inside).is_dir()), None)


def missing(name: str, folder: Path, expected: str, advice: str = "") -> str:
    if not folder.is_dir():
        return f"data-dir '{folder}' is no folder; dataset '{name}' is read from {expected} in it{advice}"
    return f"data-dir '{folder}' has no {expected}, which dataset '{name}' is read from{advice}"


def require(
    name: str, files: list[Path], folder: Path, download: bool, fetch: Callable[[], object], alternatives: str = ""
) -> None:
    """Check that the files exist; with ``download``, fetch missing ones once (one process at a time).

    ``alternatives`` is a text for the error: other files from which the dataset could be read.
    """
    if download and not all(file.exists() for file in files):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with locked(folder / ".fedprune-download.lock", f"fetches dataset {name!r} into {str(folder)!r}"):
                if not all(file.exists() for file in files):
                    fetch()
        except (OSError, RuntimeError) as error:
            raise ValueError(f"data-dir '{folder}': download of dataset '{name}' failed: {one_line(error)}") from error
    for file in files:
        if not file.exists():
            advice = "" if download else "; set download=true to fetch it"
            raise ValueError(missing(name, folder, f"{file.relative_to(folder)}{alternatives}", advice))


def fetch_archive(url: str, folder: Path, md5: str) -> None:
    prepare_torchvision()
    from torchvision.datasets.utils import download_and_extract_archive

    download_and_extract_archive(url, str(folder), md5=md5)


def scale(examples: NDArray[Any], public_scale: bool) -> Scale:
    """Return the mean and the standard deviation per channel with which examples are normalised."""
    channels = examples.shape[1]
    if public_scale:
        centre, width = (0.5, 0.5) if examples.dtype == np.uint8 else (0.0, 1.0)
        return (centre,) * channels, (width,) * channels
    return measured_scale((examples, np.arange(len(examples))))


def measured_scale(*parts: tuple[NDArray[Any], NDArray[np.int64]]) -> Scale:
    """Return mean and standard deviation per channel: of images in [0, 1], or of numbers as they are.

    A part is examples and the positions that count. For images the result is exact, from a histogram, which reads a
    thousand images at a time.
    """
    if parts[0][0].dtype != np.uint8:
        numbers = np.concatenate([examples[positions] for examples, positions in parts]).astype(np.float64)
        axes = (0, 2, 3)
        deviations = np.where(np.ptp(numbers, axis=axes) > 0, numbers.std(axis=axes), 1.0)  # not 0 for a constant
        return tuple(map(float, numbers.mean(axis=axes))), tuple(map(float, deviations))
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


@dataclass(frozen=True)
class Form:
    """How a user's own data are read; fields that are configuration keys are described there.

    * ``classes``: the names of the classes, in order. Empty means those found in the data: every class that has
      a folder or a name, or every label.
    * ``needs_test``: a test part is required. Otherwise the data may have no test examples.
    * ``image_size``: the side of the square to which each picture is resized; 0 keeps pictures as they are.
    * ``image_fit``: "crop" cuts a picture to a square around its centre, "stretch" squeezes it into the square.
    * ``by_owner``: the folders of an image folder are owners.
    * ``label_column``, ``image_column``, ``owner_column``, ``group_column``: names of columns.
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
    group_column: str = ""
    ignore_columns: tuple[str, ...] = ()


AS_IT_IS = Form()
