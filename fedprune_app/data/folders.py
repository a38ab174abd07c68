"""Folders of images: the classes are folders, and the pixels are kept in a cache file beside them.

A training image may belong to somebody: the images of a client are then in a folder of its own, or a file says whose
each image is.
"""

from __future__ import annotations

import csv
import hashlib
import io
import logging
import os
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedprune_app.data.datasets import (
    Dataset,
    Images,
    Split,
    channel_stats,
    fetch_archive,
    first_folder,
    missing,
    owned_by,
    require,
    visible,
)
from fedprune_app.data.errors import FileError
from fedprune_app.files import locked, replacing

if TYPE_CHECKING:
    from PIL.ImageFile import ImageFile

log = logging.getLogger("flwr.fedprune")

_CACHE_FORMAT = b"npy, sha256"  # part of the names of cache files, so that those of another format are not read
_SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff"}


OWNERS_FILE = "owners.csv"
Member = tuple[os.DirEntry[str], int]  # a file, and its label


@dataclass(frozen=True)
class Form:
    """A form says which images an image folder holds, and of which size they become.

    * ``classes``: the names of the classes, and their order; none means every class that has a folder.
    * ``needs_test``: there has to be a folder of test images.
    * ``size``: the side of the square that each image becomes; 0 leaves images as they are, and they have one size.
    * ``fit``: "crop" cuts an image to a square around its middle, "stretch" squeezes the image into the square.
    * ``by_owner``: each training image belongs to somebody.
    """

    classes: tuple[str, ...] = ()
    needs_test: bool = True
    size: int = 0
    fit: str = "crop"
    by_owner: bool = False


_AS_IT_IS = Form()


def image_folder(
    name: str,
    folder: Path,
    mean: tuple[float, ...] = (),
    std: tuple[float, ...] = (),
    form: Form = _AS_IT_IS,
) -> Dataset:
    """Read ``folder/train/<class>/*`` and ``folder/test/<class>/*``; by owner also ``folder/<owner>/<class>/*``.

    Images are normalised by ``mean`` and ``std``, by default by the statistics of the training images. Raises a
    one-line ``ValueError``.
    """
    if form.by_owner and not (folder / "train").is_dir():
        return _owners_folders(name, folder, mean, std, form)
    fixed = form.classes
    parts = ["train", "test"] if form.needs_test or (folder / "test").is_dir() else ["train"]
    found: dict[str, set[str]] = {}
    for part in parts:
        if not (folder / part).is_dir():
            advice = (
                "" if part == "train" else "; or test-split=holdout, which holds out a share of each client's images"
            )
            raise ValueError(missing(name, folder, f"{part}/<class>/* (images)", Path(part), advice))
        found[part] = {item.name for item in visible(folder / part) if item.is_dir()}
    if fixed and (strange := set.union(*found.values()) - set(fixed)):
        raise ValueError(f"data-dir '{folder}' has the class '{min(strange)}', allowed by classes: {', '.join(fixed)}")
    odd = found["train"] ^ found[parts[-1]] if form.needs_test else found[parts[-1]] - found["train"]
    if odd and not fixed:
        raise ValueError(f"data-dir '{folder}': class '{min(odd)}' is not in both train/ and test/")
    classes = fixed or tuple(sorted(found["train"]))
    members = {part: _members(folder / part, classes) for part in parts}
    splits = [_decoded(folder, part, members[part], form) for part in parts]
    owners = _listed_owners(folder, [item for item, _ in members["train"]]) if form.by_owner else None
    return _from_folder(name, folder, splits, classes, mean, std, owners)


def _owners_folders(name: str, folder: Path, mean: tuple[float, ...], std: tuple[float, ...], form: Form) -> Dataset:
    """Read ``folder/<owner>/<class>/*``: all images are training images, and none is for tests."""
    if form.needs_test:
        allowed = f"train/ and {OWNERS_FILE}, or test-split=holdout with a folder for each client"
        raise ValueError(f"data-dir '{folder}' has no train/ and test/, allowed with partition 'owners': {allowed}")
    people = [item for item in visible(folder) if item.is_dir()]
    found = {item.name for person in people for item in visible(Path(person.path)) if item.is_dir()}
    classes = form.classes or tuple(sorted(found))
    if strange := found - set(classes):
        raise ValueError(
            f"data-dir '{folder}' has the class '{min(strange)}', allowed by classes: {', '.join(classes)}"
        )
    members, owners = [], []
    for person in people:
        own = _members(Path(person.path), classes)
        members += own
        owners += [person.name] * len(own)
    splits = [_decoded(folder, "owners", members, form)] if members else []
    if not splits:
        raise ValueError(missing(name, folder, "<client>/<class>/* (images)", Path("*/*")))
    return _from_folder(name, folder, splits, classes, mean, std, owners)


def _members(folder: Path, classes: tuple[str, ...]) -> list[Member]:
    members = [(item, label) for label, name in enumerate(classes) for item in visible(folder / name)]
    return [member for member in members if _is_image(member[0].name)]


def unread(folder: Path, parts: Collection[str] = ()) -> tuple[int, Counter[str]]:
    """Return what is below ``folder/<part>`` and is not read, where images are in ``folder/<part>/<class>``.

    This is the number of images in other places, and of other files by their type. No ``parts`` means all folders.
    """
    misplaced = 0
    types: Counter[str] = Counter()
    for top in [item for item in visible(folder) if item.is_dir() and (not parts or item.name in parts)]:
        items = visible(Path(top.path))
        classes = [item.path for item in items if item.is_dir()]
        places = [(False, [item.name for item in items if not item.is_dir()])]
        for place in classes:
            for inner, folders, files in os.walk(place):
                folders[:] = [name for name in folders if not name.startswith(".")]
                places.append((inner == place, [name for name in files if not name.startswith(".")]))
        for is_read, names in places:
            images = sum(map(_is_image, names))
            misplaced += 0 if is_read else images
            types.update(Path(name).suffix.lower() for name in names if not _is_image(name))
    return misplaced, types


def _is_image(name: str) -> bool:
    return Path(name).suffix.lower() in _SUFFIXES


def _listed_owners(folder: Path, items: list[os.DirEntry[str]]) -> list[str]:
    """Return whose each image is by ``owners.csv``, which has the columns file and client; "" for nobody's."""
    path = folder / OWNERS_FILE
    allowed = f"a table with the columns file and client, as train/{items[0].name},me"
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = [(os.path.normpath(row["file"]), (row["client"] or "").strip()) for row in csv.DictReader(file)]
    except FileNotFoundError:
        raise ValueError(f"'{path}' is missing, allowed with partition 'owners': {allowed}") from None
    except (OSError, UnicodeDecodeError, csv.Error, KeyError, TypeError) as error:
        raise ValueError(f"'{path}' cannot be read ({type(error).__name__}), allowed: {allowed}") from None
    whose = dict(rows)
    if twice := len(set(rows)) - len(whose):
        raise ValueError(f"'{path}' names {twice} files for several clients, allowed: one client for each file")
    owners = [whose.pop(os.path.relpath(item.path, folder), "") for item in items]
    if whose:
        raise ValueError(f"'{path}' names {len(whose)} files that are no training images of data-dir '{folder}'")
    return owners


def tiny_imagenet(folder: Path, download: bool) -> Dataset:
    """Read Tiny ImageNet; its classes are the sorted WordNet ids.

    The published validation set is the test set, since the published test set is unlabelled.
    """
    root = first_folder(folder / "tiny-imagenet-200", folder, inside="val") or folder / "tiny-imagenet-200"
    annotations = root / "val" / "val_annotations.txt"
    url, md5 = "http://cs231n.stanford.edu/tiny-imagenet-200.zip", "90528d7ca1a48142e341f4ef8d21d0de"
    require("tiny-imagenet", [root / "train", annotations], folder, download, lambda: fetch_archive(url, folder, md5))
    classes = tuple(sorted(item.name for item in visible(root / "train") if item.is_dir()))
    index = {wnid: label for label, wnid in enumerate(classes)}
    train = [(item, label) for wnid, label in index.items() for item in visible(root / "train" / wnid / "images")]
    label_of = {}
    for line in annotations.read_text().splitlines():
        file, wnid = [*line.split("\t"), ""][:2]
        if wnid not in index:
            raise ValueError(f"'{annotations}' gives '{file}' the class '{wnid}', which train/ does not have")
        label_of[file] = index[wnid]
    test = [(item, label_of[item.name]) for item in visible(root / "val" / "images") if item.name in label_of]
    half = (0.5, 0.5, 0.5)  # as Dis-PFL's code
    splits = [_decoded(root, "train", train, _AS_IT_IS), _decoded(root, "val", test, _AS_IT_IS)]
    return _from_folder("tiny-imagenet", root, splits, classes, half, half)


def _from_folder(
    name: str,
    folder: Path,
    splits: list[Split],
    classes: tuple[str, ...],
    mean: tuple[float, ...],
    std: tuple[float, ...],
    owners: Sequence[str] | None = None,
) -> Dataset:
    train, test = splits if len(splits) == 2 else (splits[0], (splits[0][0][:0], splits[0][1][:0]))
    train, test = _as_deep_as(test, train), _as_deep_as(train, test)
    if train[0].shape[1:] != test[0].shape[1:]:
        shapes = f"{train[0].shape[1:]} in train, {test[0].shape[1:]} in test"
        raise ValueError(f"data-dir '{folder}': images have shape {shapes} (channels, height, width)")
    measured = not mean
    if measured:
        mean, std = channel_stats((train[0], np.arange(len(train[0]))))
    elif len(mean) == 1:
        mean, std = mean * train[0].shape[1], std * train[0].shape[1]
    whose = owned_by(owners)[0] if owners is not None else None
    return Dataset(name, *train, *test, classes, mean, std, whose, is_measured=measured)


def _as_deep_as(other: Split, part: Split) -> Split:
    """Return a part with three channels if the other part has them, as a part has of which one image is coloured."""
    images, labels = part
    return (np.repeat(images, 3, axis=1), labels) if (images.shape[1], other[0].shape[1]) == (1, 3) else part


def _decoded(folder: Path, part: str, members: list[Member], form: Form) -> Split:
    """Return decoded images and labels; images come from a cache keyed by the names, sizes and times of the files.

    The cache is a file in ``<folder>/.fedprune-cache``, or in the user's cache directory where that folder is
    read-only. The file holds a digest of its content, and a damaged file is made again. A lock keeps the processes of a
    run from decoding the same folder.
    """
    if not members:
        raise ValueError(f"data-dir '{folder}' has no images in {part}/")
    labels = np.array([label for _, label in members], dtype=np.int64)
    digest = hashlib.sha256(_CACHE_FORMAT + _READING)
    if form.size:
        digest.update(f"{form.fit} {form.size}\n".encode())
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
                with locked(directory / f"{part}.lock", f"reads the images in {part}/ of {str(folder)!r}"):
                    if (cached := _cached(file)) is None:  # no other process made it meanwhile
                        if file.exists():
                            log.warning("the cache '%s' is damaged and is made again", file)
                        images = _decode(folder, paths, form) if images is None else images
                        _write_cache(file, images)
                        cached = _cached(file)
            if cached is not None:
                return cached, labels
        except OSError:  # read-only or full: try the next place
            continue
    return (_decode(folder, paths, form) if images is None else images), labels


_READING = b"2"  # version of the way in which files become pixels: a cache of another version is not used
_DIM = 1 << 12


class _Unreadable(ValueError):
    """A file's pixels cannot be had as 8 bits per channel without losing information; the text says why."""


def _decode(folder: Path, paths: list[str], form: Form = _AS_IT_IS, *, is_set: bool = True) -> Images:
    """Decode images into (N, C, H, W), with one channel if every image is grey, else three.

    Of 16 bits per channel the higher 8 are taken, so 0 is black and 65535 white, as for colour in Pillow. Transparency
    is dropped. The error for a refused image names its file. These images are refused:

    * integers of 32 bits and floating-point numbers, whose range a file does not say;
    * an image of one colour that differs in its transparency alone;
    * images of 16 bits of which none uses more than a sixteenth of the range (12 bits in a file of 16, say), since few
      levels would be left. They are taken where they are no set (``is_set``), as one alone may be dark.
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
            pixels = _resized(pixels, form) if form.size else pixels
        except _Unreadable as error:
            raise _refused(path, folder, str(error)) from None
        except Exception as error:  # Pillow's readers raise what they like, DecompressionBombError too
            raise _refused(path, folder, f"cannot be read as an image ({type(error).__name__})") from None
        if i == 0:
            images = np.empty((len(paths), *pixels.shape), dtype=np.uint8)
        if pixels.shape != images.shape[1:]:
            size, first = "x".join(map(str, pixels.shape[1:])), "x".join(map(str, images.shape[2:]))
            why = f"is {size} (height x width), the images before it are {first}"
            raise _refused(path, folder, f"{why}; the key image-size makes them one size")
        images[i] = pixels
    if deep and brightest < _DIM and is_set:
        why = f"and the others of 16 bits have no value above {brightest}, allowed: values up to 65535, or 8 bits"
        raise _refused(deep, folder, why)
    return images[:, :1].copy() if all_grey else images


def _resized(pixels: NDArray[np.uint8], form: Form) -> NDArray[np.uint8]:
    """Return pixels (3, H, W) as a square of the form's size, by Pillow's bicubic interpolation with antialiasing."""
    from PIL import Image, ImageOps

    image, size = Image.fromarray(pixels.transpose(1, 2, 0)), (form.size, form.size)
    if form.fit == "crop":
        square = ImageOps.fit(image, size, Image.Resampling.BICUBIC)
    else:
        square = image.resize(size, Image.Resampling.BICUBIC)
    return np.asarray(square).transpose(2, 0, 1)


def read_image(path: Path, shape: tuple[int, int, int], fit: str = "crop") -> Images:
    """Return one image as uint8 of ``shape`` (C, H, W), with C = 1 for grey.

    An image of another size is brought to it as ``fit`` says, see :class:`Form`. Grey comes from colours by luminance.
    Raises a one-line ``ValueError`` naming the file.
    """
    from PIL import Image, ImageOps

    channels, *size = shape
    pixels = _decode(path.parent, [str(path)], is_set=False)[0]  # with one channel, or three
    image = Image.fromarray(pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0))
    if image.size != (size[1], size[0]):
        way = ImageOps.fit if fit == "crop" else Image.Image.resize
        image = way(image, (size[1], size[0]), Image.Resampling.BICUBIC)
    found = np.asarray(image.convert("L" if channels == 1 else "RGB"))
    return found[None] if channels == 1 else found.transpose(2, 0, 1)


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
