"""Image folders: each class is a folder, and decoded pixels are cached next to them.

A training image may have an owner: a client's images are then in a folder of its own. It may have a group, such as a
patient's: a folder inside the class, or an entry in ``groups.csv``. Pictures of Pillow are decoded here for all
sources: folders, Hugging Face's datasets and plug-ins.
"""

from __future__ import annotations

import csv
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedprune_app.core.named import ImageShape
from fedprune_app.data.dataset import (
    AS_IT_IS,
    Dataset,
    FileError,
    Form,
    Images,
    Scale,
    Split,
    fetch_archive,
    first_folder,
    missing,
    owned_by,
    require,
    scale,
    shortened,
    visible,
)
from fedprune_app.files import locked, make_private_folder, may_write, replacing

if TYPE_CHECKING:
    from PIL.Image import Image as Picture


Pixels = NDArray[np.uint8]
_GREY = ("1", "L", "LA")
_FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP", "PPM", "TIFF")  # Pillow passes PostScript to another program


def open_picture(file: IO[bytes]) -> Picture:
    """Open a picture by its content, if it has one of the allowed formats, whatever its name. Raises ``OSError``."""
    from PIL import Image

    return Image.open(file, formats=_FORMATS)


def stacked(
    pictures: Iterable[Picture],
    count: int,
    refuse: Callable[[int, str], ValueError],
    size: int = 0,
    fit: str = "crop",
) -> Pixels:
    """Return the pixels of ``count`` pictures as (N, C, H, W), with one channel if every picture is grey, else three.

    With ``size`` each picture becomes a square of that side, see :func:`resized`; else all must have one size. Raises
    ``refuse(position, reason)`` for a picture that cannot be read, for one of another size, and for one of more than 8
    bits per channel, which would lose levels.
    """
    images: Pixels = np.empty(0, np.uint8)
    for i, picture in enumerate(pictures):
        if is_deep(picture):
            raise refuse(i, "has more than 8 bits per channel, allowed: 8 bits")
        try:
            array = pixels(picture)
            array = resized(array, (size, size), fit) if size else array
        except Exception as error:  # Pillow's readers may raise anything, DecompressionBombError too
            raise refuse(i, f"cannot be read as an image ({type(error).__name__})") from None
        if i == 0:
            images = np.empty((count, *array.shape), np.uint8)
        if array.shape[1:] != images.shape[2:]:
            this_size, first_size = ("x".join(map(str, shape)) for shape in (array.shape[1:], images.shape[2:]))
            reason = f"is {this_size} (height x width), the images before it are {first_size}"
            raise refuse(i, f"{reason}; the key image-size makes them one size")
        images = as_deep_as(array, images)
        images[i] = array
    return images


def is_deep(picture: Picture) -> bool:
    """Return whether a picture has more than 8 bits per channel, though the mode of one may be "RGB"."""
    return picture.mode.startswith(("I", "F")) or ";16" in str(getattr(picture, "tile", ""))


def pixels(picture: Picture) -> Pixels:
    """Return a picture of 8 bits per channel as (C, H, W), rotated by its EXIF data.

    Grey has one channel, and all else has three: the colours of a palette, not its indices. Transparency is dropped.
    """
    from PIL import ImageOps

    picture.load()  # this rotates TIFF files and updates their EXIF data
    with suppress(Exception):  # damaged EXIF data are ignored
        picture = ImageOps.exif_transpose(picture)
    if picture.mode in _GREY and not picture.has_transparency_data:
        return np.asarray(picture.convert("L"))[None]
    colours = np.asarray(picture.convert("RGBA").convert("RGB")).transpose(2, 0, 1)
    return colours[:1] if picture.mode in _GREY else colours


def resized(image: Pixels, size: tuple[int, int], fit: str) -> Pixels:
    """Return pixels (C, H, W) resized to (height, width), by Pillow's bicubic interpolation with antialiasing.

    ``fit`` "crop" first cuts an image around its centre to the new proportions, "stretch" squeezes it.
    """
    from PIL import Image, ImageOps

    if image.shape[1:] == size:
        return image
    method = ImageOps.fit if fit == "crop" else Image.Image.resize
    array = np.asarray(method(picture_of(image), size[::-1], Image.Resampling.BICUBIC))
    return array[None] if len(image) == 1 else array.transpose(2, 0, 1)


def as_deep_as(reference: Pixels, images: Pixels) -> Pixels:
    """Return images (N, C, H, W) with three channels if they are grey and ``reference``, (..., C, H, W), is not."""
    return np.repeat(images, 3, axis=1) if (images.shape[1], reference.shape[-3]) == (1, 3) else images


def picture_of(image: Pixels) -> Picture:
    from PIL import Image

    return Image.fromarray(image[0] if len(image) == 1 else np.ascontiguousarray(image.transpose(1, 2, 0)))


# --- folders ----------------------------------------------------------------------------------------------------------


_READING = b"npy3"  # version of the decoding: a cache of another version is not used
_SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff"}
Member = tuple[os.DirEntry[str], int]  # a file, and its label


def image_folder(
    name: str, folder: Path, form: Form = AS_IT_IS, norm: Scale | None = None, *, public_scale: bool = False
) -> Dataset:
    """Read ``folder/train/<class>/*`` and ``folder/test/<class>/*``; by owner ``folder/<owner>/<class>/*``.

    A folder inside a class holds the images of one group, unless ``folder/groups.csv`` lists the groups, in the columns
    ``file``, a path below ``folder``, and ``group``. Images are normalised by ``norm``, a mean and a deviation per
    channel, or else by :func:`scale`. By owner all images are training images. Raises a one-line ``ValueError``.
    """
    places_by_part: dict[str, list[Path]] = {}
    if form.by_owner:
        if form.needs_test:
            raise ValueError("test-split is not 'holdout', allowed with partition 'owners' and images in folders")
        places_by_part["owners"] = [Path(item) for item in visible(folder) if item.is_dir()]
    for part in () if form.by_owner else ("train", "test"):
        if (folder / part).is_dir():
            places_by_part[part] = [folder / part]
        elif part == "train" or form.needs_test:
            advice = "" if part == "train" else "; test-split=holdout holds out a share of each client's images"
            if people := owner_folders(folder):
                advice = f"; partition=owners reads <client>/<class>/*, here of {shortened(people)}"
            raise ValueError(missing(name, folder, f"{part}/<class>/* (images)", advice))
    training_places = places_by_part["owners" if form.by_owner else "train"]
    class_names = {class_name for place in training_places for class_name in _class_names(place)}
    if form.by_owner and {"train"} <= class_names <= {"train", "test"}:
        raise ValueError(
            f"data-dir '{folder}' has <client>/train/, allowed with partition 'owners': <client>/<class>/*"
        )
    classes = form.classes or tuple(sorted(class_names))
    members = {
        part: [member for place in places for member in _members(place, classes)]
        for part, places in places_by_part.items()
    }
    splits = [_read_split(folder, part, part_members, form) for part, part_members in members.items()]
    owners = [Path(item).relative_to(folder).parts[0] for item, _ in members["owners"]] if form.by_owner else None
    places = [place for places in places_by_part.values() for place in places]
    notes = _unread_notes(places, sum(map(len, members.values())))
    items = [item for part_members in members.values() for item, _ in part_members]
    data = _build_dataset(name, folder, splits, classes, norm, public_scale, owners, notes)
    groups = _groups(folder, items)
    num_train = len(splits[0][1])
    if any(groups):
        data = replace(data, groups=groups[:num_train], test_groups=groups[num_train:])
    return replace(data, stored=lambda: [_file_digest(Path(item)) for item in items])


def _groups(folder: Path, items: Sequence[os.DirEntry[str]]) -> list[str]:
    """Return the name of each image's group, empty for an image without group."""
    paths = [Path(item).relative_to(folder) for item in items]
    table = folder / "groups.csv"
    if not table.exists():
        return [path.parent.name if len(path.parts) == _DEPTH + 1 else "" for path in paths]
    with table.open(encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    if not rows or not {"file", "group"} <= rows[0].keys():
        raise FileError(table, "has no columns 'file' and 'group', allowed: both, and a row for each image of a group")
    names = {}
    for row in rows:
        names[Path(row["file"] or "")] = (row["group"] or "").strip()
    if len(names) < len(rows):
        raise FileError(table, "names a file twice, allowed: one row for each image")
    if unknown_paths := sorted(names.keys() - {*paths}):
        raise FileError(table, f"names the file '{unknown_paths[0]}', allowed: paths of images, below the folder of it")
    return [names.get(path, "") for path in paths]


def owner_folders(folder: Path) -> list[str]:
    """Return the names of the owners in ``folder/<owner>/<class>/*``; none for a folder with a part train/."""
    if (folder / "train").is_dir():
        return []
    owners = [item for item in visible(folder) if item.is_dir()]
    return [item.name for item in owners if any(next(image_files(Path(c)), None) for c in visible(Path(item)))]


def image_files(folder: Path) -> Iterator[Path]:
    """Yield the images below a folder by their suffixes, without hidden files."""
    return (path for path in folder.rglob("[!.]*") if path.suffix.lower() in _SUFFIXES)


_DEPTH = 3  # parts of an image's path: `train` or an owner, the class, the file


def _file_digest(path: Path) -> bytes:
    """Return a digest of a file and of its class, the folder that holds it."""
    return hashlib.sha256(os.fsencode(f"{path.parent.name}/") + path.read_bytes()).digest()


def _class_names(folder: Path) -> set[str]:
    return {item.name for item in visible(folder) if item.is_dir()}


def _members(folder: Path, classes: tuple[str, ...]) -> list[Member]:
    if unknown_classes := _class_names(folder) - set(classes):
        allowed = f"those of train/, or of the key classes: {', '.join(classes)}"
        raise ValueError(f"'{folder}' has the class '{min(unknown_classes)}', allowed: {allowed}")
    return [
        (item, label)
        for label, name in enumerate(classes)
        for item in _files(folder / name)
        if Path(item.name).suffix.lower() in _SUFFIXES
    ]


def _files(folder: Path) -> Iterator[os.DirEntry[str]]:
    """Yield the files of a class, and those in its folders, which are groups."""
    for item in visible(folder):
        yield from visible(Path(item)) if item.is_dir() else [item]


def _unread_notes(places: Sequence[Path], num_read: int) -> tuple[str, ...]:
    """Return a note of how many files in these folders are not read, as no images or too deep."""
    num_files = sum(len(files) for place in places for _, _, files in os.walk(place))
    note = f"files that are no images in the folder of a class ({', '.join(sorted(_SUFFIXES))}) are not read"
    return (f"{note}: {num_files - num_read:,}",) if num_files > num_read else ()


def tiny_imagenet(folder: Path, download: bool) -> Dataset:
    """Read Tiny ImageNet; its classes are the sorted WordNet ids.

    The published validation set is the test set, because the published test set has no labels.
    """
    root = first_folder(folder / "tiny-imagenet-200", folder, inside="val") or folder / "tiny-imagenet-200"
    annotations = root / "val" / "val_annotations.txt"
    url, md5 = "http://cs231n.stanford.edu/tiny-imagenet-200.zip", "90528d7ca1a48142e341f4ef8d21d0de"
    require("tiny-imagenet", [root / "train", annotations], folder, download, lambda: fetch_archive(url, folder, md5))
    classes = tuple(sorted(item.name for item in visible(root / "train") if item.is_dir()))
    index = {wnid: label for label, wnid in enumerate(classes)}
    train = [(item, label) for wnid, label in index.items() for item in visible(root / "train" / wnid / "images")]
    rows = (line.split("\t")[:2] for line in annotations.read_text().splitlines())
    label_of = {file: index[wnid] for file, wnid in rows if wnid in index}
    test = [(item, label_of[item.name]) for item in visible(root / "val" / "images") if item.name in label_of]
    splits = [_read_split(root, "train", train, AS_IT_IS), _read_split(root, "val", test, AS_IT_IS)]
    norm = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))  # as Dis-PFL's code
    return _build_dataset("tiny-imagenet", root, splits, classes, norm)


def _build_dataset(
    name: str,
    folder: Path,
    splits: list[Split],
    classes: tuple[str, ...],
    norm: Scale | None,
    public_scale: bool = False,
    owners: Sequence[str] | None = None,
    notes: tuple[str, ...] = (),
) -> Dataset:
    train, test = splits if len(splits) == 2 else (splits[0], (splits[0][0][:0], splits[0][1][:0]))
    train, test = (as_deep_as(test[0], train[0]), train[1]), (as_deep_as(train[0], test[0]), test[1])
    if train[0].shape[1:] != test[0].shape[1:]:
        shapes = f"{train[0].shape[1:]} in train, {test[0].shape[1:]} in test"
        raise ValueError(f"data-dir '{folder}': images have shape {shapes} (channels, height, width)")
    mean, std = norm or scale(train[0], public_scale)
    is_measured = norm is None and not public_scale
    dataset = Dataset(name, *train, *test, classes, mean, std, is_measured=is_measured, notes=notes)
    if owners is None:
        return dataset
    owned = owned_by(owners)
    return replace(dataset, owners=owned.train, owner_names=owned.names)


def _read_split(folder: Path, part: str, members: list[Member], form: Form) -> Split:
    """Return decoded images and labels; images come from a cache keyed by the names, sizes and times of the files.

    A truncated cache is rebuilt. A lock prevents the processes of a run from decoding the same folder.
    """
    if not members:
        raise ValueError(f"data-dir '{folder}' has no images in {part}/")
    labels = np.array([label for _, label in members], dtype=np.int64)
    digest = hashlib.sha256(_READING)
    if form.image_size:
        digest.update(f"{form.image_fit} {form.image_size}\n".encode())
    for item, _ in members:
        try:
            status = item.stat()
        except OSError as error:  # a dangling link
            raise FileError(item.path, f"cannot be read as an image ({type(error).__name__})") from None
        relative_path = item.path.removeprefix(str(folder))
        digest.update(os.fsencode(f"{relative_path}/{status.st_size}/{status.st_mtime_ns}\n"))
    paths = [item.path for item, _ in members]
    directory = _cache_directory(folder)
    file = directory / f"{part}-{digest.hexdigest()[:32]}.npy"
    try:
        if (images := _read_cache(file)) is None:
            make_private_folder(directory)
            with locked(directory / f"{part}.lock", f"reads the images in {part}/ of {str(folder)!r}"):
                if (images := _read_cache(file)) is None:  # no other process wrote it meanwhile
                    with replacing(file, private=True) as new_file:
                        np.save(new_file, _decode(paths, form))
                    images = np.load(file, mmap_mode="r")
    except OSError:  # no cache can be written
        images = _decode(paths, form)
    return images, labels


def _decode(paths: list[str], form: Form = AS_IT_IS) -> Images:
    """Decode images into (N, C, H, W), see :func:`stacked`. The error for an unreadable image names its file."""

    def refuse(i: int, reason: str) -> FileError:
        return FileError(paths[i], reason)

    def pictures() -> Iterator[Picture]:
        for i, path in enumerate(paths):
            with ExitStack() as stack:
                try:  # a file that Pillow opens itself is mapped into memory, and a rotated TIFF is then misread
                    picture = stack.enter_context(open_picture(stack.enter_context(Path(path).open("rb"))))
                except Exception as error:  # Pillow's readers may raise anything
                    raise refuse(i, f"cannot be read as an image ({type(error).__name__})") from None
                yield picture

    return stacked(pictures(), len(paths), refuse, form.image_size, form.image_fit)


def read_image(path: Path, shape: ImageShape, fit: str = "crop") -> Images:
    """Return one image as uint8 of ``shape`` (C, H, W), with C = 1 for grey.

    An image of another size is resized by ``fit``, see :func:`resized`. Colour becomes grey by luminance. Raises a
    one-line ``ValueError`` naming the file.
    """
    channels, height, width = shape
    image = resized(_decode([str(path)])[0], (height, width), fit)
    if channels == 1 and len(image) == 3:
        return np.asarray(picture_of(image).convert("L"))[None]
    return np.broadcast_to(image, shape)


def _cache_directory(folder: Path) -> Path:
    """Return the folder of the cache: inside the data's own, or the user's cache where that is read-only."""
    if may_write(own_cache := folder / ".fedprune-cache"):
        return own_cache
    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return user_cache / "fedprune" / hashlib.sha256(str(folder).encode()).hexdigest()[:32]


def _read_cache(path: Path) -> Images | None:
    """Return the cached images, mapped into memory; None if the file is missing or truncated."""
    try:
        images: Images = np.load(path, mmap_mode="r", allow_pickle=False)
    except (FileNotFoundError, ValueError, EOFError):
        return None
    return images
