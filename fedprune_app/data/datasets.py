"""Image datasets are uint8 arrays: embedded digits, the papers' public sets, and folders of images.

Nothing here unpickles: MNIST-like sets are read from IDX files, CIFAR from its binary version, decoded images
from ``.npy`` files.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray

from fedprune_app.core.rng import numpy_generator
from fedprune_app.data.errors import FileError
from fedprune_app.data.names import DATASETS
from fedprune_app.data.partitions import stratified_holdout
from fedprune_app.files import replacing

log = logging.getLogger("flwr.fedprune")

if TYPE_CHECKING:
    from PIL.ImageFile import ImageFile

Images = NDArray[np.uint8]
Labels = NDArray[np.int64]
Split = tuple[Images, Labels]


@dataclass(frozen=True, eq=False)
class Dataset:
    """A dataset is a labelled image set in memory (or mapped from a cache file); its arrays are read-only.

    Images are uint8 of shape (N, C, H, W), C = 1 for grey; labels int64 of shape (N,) in [0, num_classes).
    ``mean`` and ``std`` per channel are for images scaled to [0, 1].
    """

    name: str
    train_images: Images
    train_labels: Labels
    test_images: Images
    test_labels: Labels
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        for array in (self.train_images, self.train_labels, self.test_images, self.test_labels):
            array.setflags(write=False)  # one copy serves every client of a process

    @property
    def num_classes(self) -> int:
        """Return the number of classes."""
        return len(self.classes)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Return (C, H, W)."""
        channels, height, width = self.train_images.shape[1:]
        return channels, height, width


def load_dataset(
    name: str,
    data_dir: str | Path = "",
    download: bool = False,
    classes: tuple[str, ...] = (),
    needs_test: bool = True,
    public_scale: bool = False,
) -> Dataset:
    """Load the dataset of a name in :data:`fedprune_app.data.names.DATASETS`, once per process.

    * ``data_dir`` is the folder of its files (unused for digits).
    * With ``download`` missing files are fetched into this folder.
    * An image folder has the classes for which it has folders, empty ones too. With ``classes`` it has just these, in
      that order.
    * Without ``needs_test`` an image folder may be without test/, and then has no test images.
    * An image folder is normalised by the statistics of its training images. With ``public_scale`` it is normalised to
      [-1, 1], whatever the images are.

    Raises a one-line ``ValueError`` for an unknown name, for missing files (with the expected files and how to get
    them) and for damaged files. The error names the damaged file. The exception are images of folders, which only the
    log names.
    """
    return _load(name, str(data_dir), download, classes, needs_test, public_scale)


@lru_cache(maxsize=2)
def _load(
    name: str, data_dir: str, download: bool, classes: tuple[str, ...], needs_test: bool, public_scale: bool
) -> Dataset:
    if name not in DATASETS:
        raise ValueError(f"dataset is '{name}', allowed: {', '.join(DATASETS)}")
    if name == "digits":
        return _digits()
    if not data_dir:
        raise ValueError(f"data-dir is empty: dataset '{name}' is read from files, give the folder that has them")
    folder = Path(data_dir).expanduser().absolute()
    if name in _IDX:
        return _idx_dataset(name, folder, download)
    if name == "tiny-imagenet":
        return _tiny_imagenet(folder, download)
    if name == "image-folder":
        half = (0.5,) if public_scale else ()
        return _image_folder(name, folder, half, half, fixed=classes, needs_test=needs_test)
    if name == "cifar10" and (images := _first_folder(folder / "cifar10", folder, inside="train")):
        return _image_folder(name, images, *_CIFAR10_NORM)
    return _cifar_binary(name, folder, download)


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
        "digits", images[train], labels[train], images[test], labels[test], names, *_channel_stats(images[train])
    )


# --- MNIST and its relatives: IDX files -----------------------------------------------------------------------


@dataclass(frozen=True)
class _IdxSet:
    """An IDX set says where torchvision keeps a set, and describes the set.

    The place is torchvision's class, its arguments, and the prefixes of the train and test files.
    """

    torchvision_class: str
    arguments: dict[str, str]
    prefixes: tuple[str, str]
    classes: tuple[str, ...]
    mean: float
    std: float
    first_label: int = 0
    transposed: bool = False


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
    "emnist-letters": _IdxSet(
        "EMNIST", {"split": "letters"}, _EMNIST_L, _LETTERS, 0.1736, 0.3248, first_label=1, transposed=True
    ),
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

    _require(name, files, folder, download, fetch)
    splits = []
    for image_file, label_file in (files[:2], files[2:]):
        images, labels = _read_idx(image_file, 3)[:, None], _read_idx(label_file, 1).astype(np.int64)
        if kind.transposed:
            images = images.swapaxes(2, 3)
        splits.append(_checked(label_file, np.ascontiguousarray(images), labels - kind.first_label, kind.classes))
    return Dataset(name, *splits[0], *splits[1], kind.classes, (kind.mean,), (kind.std,))


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
    _require(name, files, folder, download, lambda: _fetch(url, folder, md5), other)
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


# --- folders of images ----------------------------------------------------------------------------------------

_CACHE_FORMAT = b"npy, sha256"  # part of the names of cache files, so that those of another format are not read
_SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff"}


def _image_folder(
    name: str,
    folder: Path,
    mean: tuple[float, ...] = (),
    std: tuple[float, ...] = (),
    fixed: tuple[str, ...] = (),
    needs_test: bool = True,
) -> Dataset:
    parts = ["train", "test"] if needs_test or (folder / "test").is_dir() else ["train"]
    found: dict[str, set[str]] = {}
    for part in parts:
        if not (folder / part).is_dir():
            raise ValueError(_missing(name, folder, f"{part}/<class>/* (images)", Path(part)))
        found[part] = {item.name for item in _visible(folder / part) if item.is_dir()}
    if fixed and (strange := set.union(*found.values()) - set(fixed)):
        raise ValueError(f"data-dir '{folder}' has the class '{min(strange)}', allowed by classes: {', '.join(fixed)}")
    odd = found["train"] ^ found[parts[-1]] if needs_test else found[parts[-1]] - found["train"]
    if odd and not fixed:
        raise ValueError(f"data-dir '{folder}': class '{min(odd)}' is not in both train/ and test/")
    classes = fixed or tuple(sorted(found["train"]))
    splits = []
    for part in parts:
        members = [(item, label) for label, c in enumerate(classes) for item in _visible(folder / part / c)]
        splits.append(_decoded(folder, part, members))
    if len(splits) == 1:
        splits.append((splits[0][0][:0], splits[0][1][:0]))
    return _from_folder(name, folder, splits, classes, mean, std)


def _tiny_imagenet(folder: Path, download: bool) -> Dataset:
    """Read Tiny ImageNet; its classes are the sorted WordNet ids.

    The published validation set is the test set, since the published test set is unlabelled.
    """
    root = _first_folder(folder / "tiny-imagenet-200", folder, inside="val") or folder / "tiny-imagenet-200"
    annotations = root / "val" / "val_annotations.txt"
    url, md5 = "http://cs231n.stanford.edu/tiny-imagenet-200.zip", "90528d7ca1a48142e341f4ef8d21d0de"
    _require("tiny-imagenet", [root / "train", annotations], folder, download, lambda: _fetch(url, folder, md5))
    classes = tuple(sorted(item.name for item in _visible(root / "train") if item.is_dir()))
    index = {wnid: label for label, wnid in enumerate(classes)}
    train = [(item, label) for wnid, label in index.items() for item in _visible(root / "train" / wnid / "images")]
    label_of = {}
    for line in annotations.read_text().splitlines():
        file, wnid = [*line.split("\t"), ""][:2]
        if wnid not in index:
            raise ValueError(f"'{annotations}' gives '{file}' the class '{wnid}', which train/ does not have")
        label_of[file] = index[wnid]
    test = [(item, label_of[item.name]) for item in _visible(root / "val" / "images") if item.name in label_of]
    half = (0.5, 0.5, 0.5)  # as Dis-PFL's code
    splits = [_decoded(root, "train", train), _decoded(root, "val", test)]
    return _from_folder("tiny-imagenet", root, splits, classes, half, half)


def _from_folder(
    name: str,
    folder: Path,
    splits: list[Split],
    classes: tuple[str, ...],
    mean: tuple[float, ...],
    std: tuple[float, ...],
) -> Dataset:
    train, test = splits
    if train[0].shape[1:] != test[0].shape[1:]:
        shapes = f"{train[0].shape[1:]} in train, {test[0].shape[1:]} in test"
        raise ValueError(f"data-dir '{folder}': images have shape {shapes} (channels, height, width)")
    if not mean:
        mean, std = _channel_stats(train[0])
    elif len(mean) == 1:
        mean, std = mean * train[0].shape[1], std * train[0].shape[1]
    return Dataset(name, *train, *test, classes, mean, std)


def _decoded(folder: Path, part: str, members: list[tuple[os.DirEntry[str], int]]) -> Split:
    """Return decoded images and labels; images come from a cache keyed by the names, sizes and times of the files.

    The cache is a file in ``<folder>/.fedprune-cache``, or in the user's cache directory where that folder is
    read-only. The file holds a digest of its content, and a damaged file is made again. A lock keeps the processes of a
    run from decoding the same folder.
    """
    members = [member for member in members if Path(member[0].name).suffix.lower() in _SUFFIXES]
    if not members:
        raise ValueError(f"data-dir '{folder}' has no images in {part}/")
    labels = np.array([label for _, label in members], dtype=np.int64)
    digest = hashlib.sha256(_CACHE_FORMAT + _READING)
    for item, _ in members:
        try:
            status = item.stat()
        except OSError as error:  # a link to nothing
            raise _refused(item.path, folder, f"cannot be read as an image ({type(error).__name__})") from None
        inner = item.path.removeprefix(str(folder))
        digest.update(os.fsencode(f"{inner}/{status.st_size}/{status.st_mtime_ns}\n"))
    paths = [item.path for item, _ in members]
    file_name = f"{part}-{digest.hexdigest()[:32]}.npy"
    images = None
    for directory in _cache_directories(folder):
        file = directory / file_name
        try:
            if (cached := _cached(file)) is None:
                directory.mkdir(parents=True, exist_ok=True)
                with FileLock(directory / f"{part}.lock"):
                    if (cached := _cached(file)) is None:  # no other process made it meanwhile
                        if file.exists():
                            log.warning("the cache '%s' is damaged and is made again", file)
                        images = _decode(folder, paths) if images is None else images
                        _write_cache(file, images)
                        cached = _cached(file)
            if cached is not None:
                return cached, labels
        except OSError:  # read-only or full: try the next place
            continue
    return (_decode(folder, paths) if images is None else images), labels


_READING = b"2"  # version of the way in which files become pixels: a cache of another version is not used
_DIM = 1 << 12


class _Unreadable(ValueError):
    """A file's pixels cannot be had as 8 bits per channel without losing information; the text says why."""


def _decode(folder: Path, paths: list[str]) -> Images:
    """Decode images into (N, C, H, W), with one channel if every image is grey, else three.

    Of 16 bits per channel the higher 8 are taken, so 0 is black and 65535 white, as for colour in Pillow. Transparency
    is dropped. The error for a refused image names its file. These images are refused:

    * integers of 32 bits and floating-point numbers, whose range a file does not say;
    * an image of one colour that differs in its transparency alone;
    * images of 16 bits of which none uses more than a sixteenth of the range (12 bits in a file of 16, say), since few
      levels would be left.
    """
    from PIL import Image

    images = np.empty(0, dtype=np.uint8)
    all_grey = True
    brightest, deep = 0, ""  # of the images of 16 bits: the largest value, and the first file
    for i, path in enumerate(paths):
        try:
            with Image.open(path) as image:
                all_grey = all_grey and (image.mode in ("1", "L") or _is_deep_grey(image))
                if _is_deep_grey(image):
                    values = np.asarray(image)
                    brightest, deep = max(brightest, int(values.max())), deep or path
                    pixels = np.broadcast_to((values >> 8).astype(np.uint8), (3, *values.shape))
                else:
                    pixels = _colours(image).transpose(2, 0, 1)
        except _Unreadable as error:
            raise _refused(path, folder, str(error)) from None
        except Exception as error:  # Pillow's readers raise what they like, DecompressionBombError too
            raise _refused(path, folder, f"cannot be read as an image ({type(error).__name__})") from None
        if i == 0:
            images = np.empty((len(paths), *pixels.shape), dtype=np.uint8)
        if pixels.shape != images.shape[1:]:
            size, first = "x".join(map(str, pixels.shape[1:])), "x".join(map(str, images.shape[2:]))
            raise _refused(path, folder, f"is {size} (height x width), the images before it are {first}")
        images[i] = pixels
    if deep and brightest < _DIM:
        why = f"and the others of 16 bits have no value above {brightest}, allowed: values up to 65535, or 8 bits"
        raise _refused(deep, folder, why)
    return images[:, :1].copy() if all_grey else images


def _is_deep_grey(image: ImageFile) -> bool:
    """Return whether an image is grey of 16 bits; before version 11 Pillow opens such PNG files as 32-bit integers."""
    return image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM"))


def _colours(image: ImageFile) -> NDArray[np.uint8]:
    """Return the pixels (H, W, 3) of an image of 8 bits per channel. Raises :class:`_Unreadable`."""
    if image.mode in ("I", "F"):
        kind = "32-bit integers" if image.mode == "I" else "floating-point numbers"
        raise _Unreadable(f"has {kind}, allowed: 8 or 16 bits per channel")
    pixels = np.asarray(image.convert("RGBA" if image.has_transparency_data else "RGB"))
    colours, transparency = pixels[..., :3], pixels[..., 3:]
    if transparency.size and np.ptp(transparency) and not np.ptp(colours, axis=(0, 1)).any():
        raise _Unreadable("is of one colour and differs in its transparency alone, allowed: an image in its colours")
    return colours


def _refused(path: str, folder: Path, why: str) -> FileError:
    return FileError(path, f"an image in {os.path.dirname(os.path.relpath(path, folder))}", why)


def _cache_directories(folder: Path) -> list[Path]:
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    key = hashlib.sha256(str(folder).encode()).hexdigest()[:32]
    return [folder / ".fedprune-cache", home / "fedprune" / key]


def _write_cache(path: Path, images: Images) -> None:
    """Write a ``.npy`` file with the SHA-256 of its content behind it, where numpy does not look."""
    with replacing(path) as file:
        digest = hashlib.sha256()
        for block in _npy_blocks(images):
            digest.update(block)
            file.write(block)
        file.write(digest.digest())


def _npy_blocks(images: Images) -> Iterator[bytes | memoryview]:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(images))
    yield header.getvalue()
    yield np.ascontiguousarray(images).data.cast("B")


def _cached(path: Path) -> Images | None:
    """Return the images of :func:`_write_cache`, mapped into memory; None without a file or for a damaged one."""
    if not path.exists():
        return None
    with path.open("rb") as file:
        digest, left = hashlib.sha256(), os.fstat(file.fileno()).st_size - hashlib.sha256().digest_size
        while left > 0 and (block := file.read(min(left, 2**20))):
            digest.update(block)
            left -= len(block)
        if file.read() != digest.digest():
            return None
    images: Images = np.load(path, mmap_mode="r", allow_pickle=False)
    return images


def _visible(folder: Path) -> list[os.DirEntry[str]]:
    """Return the entries of a folder in the order of their names; an absent folder has none."""
    if not folder.is_dir():
        return []
    with os.scandir(folder) as entries:
        return sorted((item for item in entries if not item.name.startswith(".")), key=lambda item: item.name)


# --- common ---------------------------------------------------------------------------------------------------


def _channel_stats(images: Images) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the exact mean and standard deviation per channel of images scaled to [0, 1], from a histogram."""
    levels = np.arange(256) / 255
    mean, std = [], []
    for channel in range(images.shape[1]):
        histogram = np.zeros(256, dtype=np.int64)
        for start in range(0, len(images), 1000):
            histogram += np.bincount(images[start : start + 1000, channel].ravel(), minlength=256)
        average = float(histogram @ levels / histogram.sum())
        mean.append(average)
        std.append(float(np.sqrt(histogram @ (levels - average) ** 2 / histogram.sum())) or 1.0)
    return tuple(mean), tuple(std)


def _first_folder(*folders: Path, inside: str) -> Path | None:
    """Return the first folder that has a folder named ``inside``."""
    return next((folder for folder in folders if (folder / inside).is_dir()), None)


def _checked(path: Path, images: Images, labels: Labels, classes: tuple[str, ...]) -> Split:
    if len(images) != len(labels):
        raise ValueError(f"'{path}' has {len(labels)} labels for {len(images)} images")
    if len(labels) and not 0 <= labels.min() <= labels.max() < len(classes):
        raise ValueError(f"'{path}' has a label outside the {len(classes)} classes")
    return images, labels


def _missing(name: str, folder: Path, expected: str, wanted: Path, advice: str = "") -> str:
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
    if not meant and any((Path(each) / wanted).exists() for each in _visible(folder) if each.is_dir()):
        meant = ["a folder in it has it"]
    hint = f"; {meant[0]}, give that one" if meant else advice
    return f"data-dir '{folder}' has no {expected}, which dataset '{name}' is read from{hint}"


def _require(
    name: str, files: list[Path], folder: Path, download: bool, fetch: Callable[[], object], other: str = ""
) -> None:
    """Make sure that the files exist; with ``download`` missing files are fetched once (one process at a time).

    ``other`` is a text for the error: which other files the dataset could be read from.
    """
    if all(file.exists() for file in files):
        return
    if download:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with FileLock(folder / ".fedprune-download.lock"):
                if not all(file.exists() for file in files):
                    fetch()
        except (OSError, RuntimeError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ValueError(f"data-dir '{folder}': download of dataset '{name}' failed: {reason}") from error
    for file in files:
        if not file.exists():
            advice = "" if download else "; set download=true to fetch it"
            wanted = file.relative_to(folder)
            raise ValueError(_missing(name, folder, f"{wanted}{other}", wanted, advice))


def _fetch(url: str, folder: Path, md5: str) -> None:
    from torchvision.datasets.utils import download_and_extract_archive

    download_and_extract_archive(url, str(folder), md5=md5)
