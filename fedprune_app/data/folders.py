"""Folders of images: the classes are folders, and the pixels are kept in a cache file beside them.

A training image may belong to somebody: the images of a client are then in a folder of its own, or a file says whose
each image is.
"""

from __future__ import annotations

import csv
import hashlib
import logging
import os
import stat
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from fedprune_app.data.dataset import (
    AS_IT_IS,
    Dataset,
    Form,
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
from fedprune_app.data.errors import SPECIAL, FileError, check_kind, shortened
from fedprune_app.data.labels import same_text
from fedprune_app.data.pictures import as_deep_as, in_grey, resized, stacked
from fedprune_app.files import locked, replacing

log = logging.getLogger("flwr.fedprune")

_CACHE_FORMAT = b"npy"  # part of the names of cache files, so that those of another format are not read
_SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff"}
OWNERS_FILE = "owners.csv"
Member = tuple[os.DirEntry[str], int]  # a file, and its label


def image_folder(
    name: str,
    folder: Path,
    mean: tuple[float, ...] = (),
    std: tuple[float, ...] = (),
    form: Form = AS_IT_IS,
) -> Dataset:
    """Read ``folder/train/<class>/*`` and ``folder/test/<class>/*``; by owner also ``folder/<owner>/<class>/*``.

    Images are normalised by ``mean`` and ``std``, by default by the statistics of the training images. Raises a
    one-line ``ValueError``.
    """
    if form.by_owner and not (folder / "train").is_dir():
        return _read_owner_folders(name, folder, mean, std, form)
    fixed = form.classes
    parts = ["train", "test"] if form.needs_test or (folder / "test").is_dir() else ["train"]
    names_by_part: dict[str, set[str]] = {}
    for part in parts:
        if not (folder / part).is_dir():
            advice = (
                "" if part == "train" else "; or test-split=holdout, which holds out a share of each client's images"
            )
            raise ValueError(missing(name, folder, f"{part}/<class>/* (images)", Path(part), advice))
        names_by_part[part] = {*_class_folders(folder / part)}
    if fixed and (unknown_classes := set.union(*names_by_part.values()) - set(fixed)):
        raise ValueError(
            f"data-dir '{folder}' has the class '{min(unknown_classes)}', allowed by classes: {', '.join(fixed)}"
        )
    unpaired = (
        names_by_part["train"] ^ names_by_part[parts[-1]]
        if form.needs_test
        else names_by_part[parts[-1]] - names_by_part["train"]
    )
    if unpaired and not fixed:
        raise ValueError(f"data-dir '{folder}': class '{min(unpaired)}' is not in both train/ and test/")
    classes = fixed or tuple(sorted(names_by_part["train"]))
    members = {part: _members(folder / part, classes) for part in parts}
    splits = [_read_split(folder, part, members[part], form) for part in parts]
    owners = _read_owners(folder, [item for item, _ in members["train"]]) if form.by_owner else None
    return _build_dataset(name, folder, splits, classes, mean, std, owners, _unread_notes(folder, ("train", "test")))


def _read_owner_folders(
    name: str, folder: Path, mean: tuple[float, ...], std: tuple[float, ...], form: Form
) -> Dataset:
    """Read ``folder/<owner>/<class>/*``: all images are training images, and none is for tests."""
    if form.needs_test:
        allowed = f"train/ and {OWNERS_FILE}, or test-split=holdout with a folder for each client"
        raise ValueError(f"data-dir '{folder}' has no train/ and test/, allowed with partition 'owners': {allowed}")
    people = [item for item in visible(folder) if item.is_dir()]
    class_names = {class_name for person in people for class_name in _class_folders(Path(person.path))}
    classes = form.classes or tuple(sorted(class_names))
    if unknown_classes := class_names - set(classes):
        raise ValueError(
            f"data-dir '{folder}' has the class '{min(unknown_classes)}', allowed by classes: {', '.join(classes)}"
        )
    members, owners = [], []
    for person in people:
        own_members = _members(Path(person.path), classes)
        members += own_members
        owners += [person.name] * len(own_members)
    splits = [_read_split(folder, "owners", members, form)] if members else []
    if not splits:
        raise ValueError(missing(name, folder, "<client>/<class>/* (images)", Path("*/*")))
    return _build_dataset(name, folder, splits, classes, mean, std, owners, _unread_notes(folder))


def _class_folders(folder: Path) -> dict[str, list[Path]]:
    """Return the folders of each class. One class has two where a system wrote its name in another form of Unicode."""
    paths_by_class: dict[str, list[Path]] = {}
    for item in visible(folder):
        if item.is_dir():
            paths_by_class.setdefault(same_text(item.name), []).append(Path(item.path))
    return paths_by_class


def _members(folder: Path, classes: tuple[str, ...]) -> list[Member]:
    paths_by_class = _class_folders(folder)
    members = [
        (item, label)
        for label, name in enumerate(classes)
        for path in paths_by_class.get(name, ())
        for item in visible(path)
    ]
    return [member for member in members if _is_image(member[0].name)]


def _unread_notes(folder: Path, parts: Collection[str] = ()) -> tuple[str, ...]:
    """Return what is below ``folder`` and is not read, where images are in ``<part>/<class>``; all parts by default."""
    num_elsewhere = num_hidden = 0
    types: Counter[str] = Counter()
    for directory, _, files in os.walk(folder):
        names = Path(directory).relative_to(folder).parts
        is_part = bool(names) and (not parts or names[0] in parts)
        for name in files:
            is_hidden = any(component.startswith(".") for component in (*names, name))
            if _is_image(name):
                num_hidden += is_hidden and not name.startswith("._")  # what macOS keeps beside a file
                num_elsewhere += not is_hidden and not (is_part and len(names) == 2)
            elif is_part and not is_hidden:
                types[Path(name).suffix.lower()] += 1
    types_text = shortened([f"{count:,} {name or 'without a type'}" for name, count in sorted(types.items())])
    lines = {
        f"images in other places than the folders of the classes are not read: {num_elsewhere:,}": num_elsewhere,
        f"images in hidden folders, or with hidden names, are not read: {num_hidden:,}": num_hidden,
        f"files of types that are not read as images: {types_text}": types_text,
    }
    return tuple(line for line, count in lines.items() if count)


def _is_image(name: str) -> bool:
    return Path(name).suffix.lower() in _SUFFIXES


def _read_owners(folder: Path, items: list[os.DirEntry[str]]) -> list[str]:
    """Return whose each image is by ``owners.csv``, which has the columns file and client; "" for nobody's."""
    path = folder / OWNERS_FILE
    allowed = f"a table with the columns file and client, as train/{items[0].name},me"
    try:
        check_kind(path)
        with path.open(newline="", encoding="utf-8") as file:
            lines = [(same_text(row["file"]), (row["client"] or "").strip()) for row in csv.DictReader(file)]
    except FileNotFoundError:
        raise ValueError(f"'{path}' is missing, allowed with partition 'owners': {allowed}") from None
    except (OSError, ValueError, csv.Error, KeyError, TypeError) as error:
        raise ValueError(f"'{path}' cannot be read ({type(error).__name__}), allowed: {allowed}") from None
    rows = [(os.path.normpath(file), client) for file, client in lines]
    owner_by_file = dict(rows)
    if num_conflicts := len(set(rows)) - len(owner_by_file):
        raise ValueError(f"'{path}' names {num_conflicts} files for several clients, allowed: one client for each file")
    owners = [owner_by_file.pop(same_text(os.path.relpath(item.path, folder)), "") for item in items]
    if owner_by_file:
        raise ValueError(
            f"'{path}' names {len(owner_by_file)} files that are no training images of data-dir '{folder}'"
        )
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
    splits = [_read_split(root, "train", train, AS_IT_IS), _read_split(root, "val", test, AS_IT_IS)]
    return _build_dataset("tiny-imagenet", root, splits, classes, half, half)


def _build_dataset(
    name: str,
    folder: Path,
    splits: list[Split],
    classes: tuple[str, ...],
    mean: tuple[float, ...],
    std: tuple[float, ...],
    owners: Sequence[str] | None = None,
    notes: tuple[str, ...] = (),
) -> Dataset:
    train, test = splits if len(splits) == 2 else (splits[0], (splits[0][0][:0], splits[0][1][:0]))
    train, test = (as_deep_as(test[0], train[0]), train[1]), (as_deep_as(train[0], test[0]), test[1])
    if train[0].shape[1:] != test[0].shape[1:]:
        shapes = f"{train[0].shape[1:]} in train, {test[0].shape[1:]} in test"
        raise ValueError(f"data-dir '{folder}': images have shape {shapes} (channels, height, width)")
    is_measured = not mean
    if is_measured:
        mean, std = channel_stats((train[0], np.arange(len(train[0]))))
    elif len(mean) == 1:
        mean, std = mean * train[0].shape[1], std * train[0].shape[1]
    owner_numbers = owned_by(owners)[0] if owners is not None else None
    return Dataset(name, *train, *test, classes, mean, std, owner_numbers, is_measured=is_measured, notes=notes)


def _read_split(folder: Path, part: str, members: list[Member], form: Form) -> Split:
    """Return decoded images and labels; images come from a cache keyed by the names, sizes and times of the files.

    The cache is a file in ``<folder>/.fedprune-cache``, or in the user's cache directory where that folder is
    read-only. A file that is cut is made again. A lock keeps the processes of a run from decoding the same folder.
    """
    if not members:
        raise ValueError(f"data-dir '{folder}' has no images in {part}/")
    labels = np.array([label for _, label in members], dtype=np.int64)
    digest = hashlib.sha256(_CACHE_FORMAT + _READING)
    if form.image_size:
        digest.update(f"{form.image_fit} {form.image_size}\n".encode())
    for item, _ in members:
        try:
            status = item.stat()
        except OSError as error:  # a link to nothing
            raise _image_error(item.path, folder, f"cannot be read as an image ({type(error).__name__})") from None
        if not stat.S_ISREG(status.st_mode):
            raise _image_error(item.path, folder, "is a folder" if stat.S_ISDIR(status.st_mode) else SPECIAL)
        relative_path = item.path.removeprefix(str(folder))
        digest.update(os.fsencode(f"{relative_path}/{status.st_size}/{status.st_mtime_ns}\n"))
    paths = [item.path for item, _ in members]
    file_name = f"{part}-{digest.hexdigest()[:32]}.npy"
    images = None
    for directory in _cache_directories(folder):
        file = directory / file_name
        try:
            if (pixels := _read_cache(file)) is None:
                directory.mkdir(parents=True, exist_ok=True)
                with locked(directory / f"{part}.lock", f"reads the images in {part}/ of {str(folder)!r}"):
                    if (pixels := _read_cache(file)) is None:  # no other process made it meanwhile
                        images = _decode(folder, paths, form) if images is None else images
                        with replacing(file) as new_file:
                            np.save(new_file, images)
                        pixels = _read_cache(file)
            if pixels is not None:
                return pixels, labels
        except OSError:  # read-only or full: try the next place
            continue
    return (_decode(folder, paths, form) if images is None else images), labels


_READING = b"3"  # version of the way in which files become pixels: a cache of another version is not used


def _decode(folder: Path, paths: list[str], form: Form = AS_IT_IS, *, is_set: bool = True) -> Images:
    """Decode images into (N, C, H, W), see :func:`stacked`. The error for a refused image names its file."""
    from PIL import Image

    def refuse(i: int, reason: str) -> FileError:
        return _image_error(paths[i], folder, reason)

    def pictures() -> Iterator[Image.Image]:
        for i, path in enumerate(paths):
            with ExitStack() as stack:
                try:  # a file that Pillow opens itself is mapped into memory, and a TIFF to be turned is then misread
                    picture = stack.enter_context(Image.open(stack.enter_context(Path(path).open("rb"))))
                except Exception as error:  # Pillow's readers raise what they like
                    raise refuse(i, f"cannot be read as an image ({type(error).__name__})") from None
                yield picture

    return stacked(pictures(), len(paths), refuse, form.image_size, form.image_fit, is_set=is_set)


def read_image(path: Path, shape: tuple[int, int, int], fit: str = "crop") -> Images:
    """Return one image as uint8 of ``shape`` (C, H, W), with C = 1 for grey.

    An image of another size is brought to it as ``fit`` says, see :func:`resized`. Grey comes from colours by
    luminance. Raises a one-line ``ValueError`` naming the file.
    """
    channels, height, width = shape
    image = resized(_decode(path.parent, [str(path)], is_set=False)[0], (height, width), fit)
    return in_grey(image) if channels == 1 else np.broadcast_to(image, (3, height, width))


def _image_error(path: str, folder: Path, reason: str) -> FileError:
    return FileError(path, f"an image in {os.path.dirname(os.path.relpath(path, folder))}", reason)


def _cache_directories(folder: Path) -> list[Path]:
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    key = hashlib.sha256(str(folder).encode()).hexdigest()[:32]
    return [folder / ".fedprune-cache", home / "fedprune" / key]


def _read_cache(path: Path) -> Images | None:
    """Return the cached images, mapped into memory; None without a file, or for one that is cut."""
    try:
        images: Images = np.load(path, mmap_mode="r", allow_pickle=False)
    except (FileNotFoundError, ValueError, EOFError):
        return None
    return images
