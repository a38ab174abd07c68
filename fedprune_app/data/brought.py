"""Datasets and partitions that plug-ins bring: what their functions return is checked and made the product's own.

A function that loads a dataset is called with the key ``data-dir`` and returns one of these:

* a :class:`~fedprune_app.data.datasets.Dataset`;
* a pair of a training part and a test part, of which the test part may be None;
* a mapping with the parts "train" and "test", as Hugging Face's DatasetDict is one.

A part is a pair (examples, labels), or a mapping with the columns "image" and "label", or a dataset in the manner of
PyTorch whose items are (example, label), or a ``datasets.Dataset`` of Hugging Face with an image column and a label
column. Labels are whole numbers, truth values, or texts. Numbers count from 0 without gaps where nothing names the
classes. Examples are pictures of Pillow, images of 8 bits as (H, W), (H, W, C) or (C, H, W) with 1 or 3 channels, or
floating-point numbers: (C, H, W), or (F,) for a row of a table, which becomes an image of F channels and one pixel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedprune_app.data.datasets import AS_IT_IS, Dataset, Form, Images, Labels, channel_stats, missing
from fedprune_app.data.errors import shortened
from fedprune_app.data.labels import coded, in_order, same_text, text_of
from fedprune_app.data.partitions import Indices
from fedprune_app.data.pictures import as_deep_as, stacked

_CHANNELS = (1, 3)


@dataclass(frozen=True)
class _Part:
    """A part has examples (N, C, H, W) and labels, which are texts, or numbers of ``classes`` if these have names."""

    examples: Images
    labels: NDArray[Any]
    classes: tuple[str, ...]
    has_pictures: bool
    columns: tuple[str, ...] = ()  # of examples and labels
    unread: tuple[str, ...] = ()  # other columns

    @property
    def has_texts(self) -> bool:
        return self.labels.dtype.kind == "U"


def dataset(name: str, load: Callable[[str], Any], data_dir: str, form: Form, *, public_scale: bool) -> Dataset:
    """Return what the function ``load`` of a plug-in returns for ``data_dir``, as a dataset called ``name``.

    Examples are normalised by the statistics of the training part. With ``public_scale`` they are not: images are
    scaled to [-1, 1], and numbers stay as they are. Raises ``ValueError`` in one line, also where the form asks for
    something that has no effect on what is returned.
    """
    try:
        found = load(data_dir)
    except (Exception, SystemExit) as error:  # a user's function raises what it likes
        raise ValueError(f"dataset '{name}' cannot be loaded: {type(error).__name__}: {error}") from error
    if isinstance(found, Dataset):
        _check_idle(name, form, "classes", "label_column", "image_column", "image_size")
        return _checked(name, found, public_scale)
    parts, notes = found, []
    if isinstance(found, Mapping):
        parts = [found.get("train"), found.get("test")]
        if unread := [str(key) for key in found if key not in ("train", "test")]:
            notes.append(f"parts that are not read: {shortened(unread)}")
    if not isinstance(parts, Sequence) or len(parts) != 2 or parts[0] is None:
        has = f" with {shortened([*map(str, found)])}" if isinstance(found, Mapping) else ""
        raise _wrong(name, f"returns a {type(found).__name__}{has}", "a pair of training and test part, or a Dataset")
    if parts[1] is None and form.needs_test:
        raise _wrong(name, "has no test part", "one with a test part, or test-split 'holdout'")
    train = _part(name, "training", parts[0], form)
    test = replace(train, examples=train.examples[:0], labels=train.labels[:0])
    if parts[1] is not None:
        test = _part(name, "test", parts[1], form, train.columns)
    images = as_deep_as(test.examples, train.examples), as_deep_as(train.examples, test.examples)
    if images[0].shape[1:] != images[1].shape[1:] or images[0].dtype != images[1].dtype:
        shapes = f"examples of {images[0].shape[1:]} {images[0].dtype} and {images[1].shape[1:]} {images[1].dtype}"
        raise _wrong(name, f"has training and test {shapes}", "parts of one shape and type")
    if not train.has_pictures:
        _check_idle(name, form, "image_size")
    if not train.columns:
        _check_idle(name, form, "label_column", "image_column")
    if train.unread:
        notes.append(f"columns that are not read: {shortened(train.unread)}")
    classes, labels = _classes(name, train, test, form)
    mean, std = scale(images[0], public_scale)
    arguments = (images[0], labels[0], images[1], labels[1], classes, mean, std)
    return Dataset(name, *arguments, is_measured=not public_scale, notes=tuple(notes))


def on_disk(folder: Path, form: Form, *, public_scale: bool) -> Dataset:
    """Return the dataset that Hugging Face's ``save_to_disk`` wrote into ``folder``: with the splits train and test.

    Raises ``ValueError`` in one line.
    """
    try:
        import datasets
    except ImportError:
        raise ValueError("dataset 'huggingface' needs Hugging Face's datasets: install fedprune[data]") from None
    markers = ("dataset_dict.json", "state.json")
    if not any((folder / marker).is_file() for marker in markers):
        raise ValueError(missing("huggingface", folder, "dataset that save_to_disk wrote", Path(markers[0])))
    datasets.disable_progress_bars()

    def load(data_dir: str) -> Any:
        found = datasets.load_from_disk(data_dir).with_format(None)  # a format may hide columns
        return found if isinstance(found, Mapping) else (found, None)

    return dataset("huggingface", load, str(folder), form, public_scale=public_scale)


def dealt(
    name: str, deal: Callable[..., Any], labels: Labels, num_clients: int, rng: np.random.Generator
) -> list[Indices]:
    """Return the indices that the function ``deal`` of a plug-in gives to each client. Raises ``ValueError``."""
    try:
        given = [np.asarray(part) for part in deal(labels, num_clients, rng)]
    except (Exception, SystemExit) as error:  # as above
        raise ValueError(f"partition '{name}' fails: {type(error).__name__}: {error}") from error
    for client, part in enumerate(given):
        if part.size and (part.ndim != 1 or not np.issubdtype(part.dtype, np.integer)):
            found = f"an array of shape {part.shape} and type {part.dtype}"
            raise ValueError(f"partition '{name}' gives client {client} {found}, allowed: a list of whole numbers")
    parts = [np.sort(part.astype(np.int64)) for part in given]
    if len(parts) != num_clients:
        raise ValueError(f"partition '{name}' returns {len(parts)} parts, allowed: one per client, {num_clients}")
    for client, part in enumerate(parts):
        if not len(part) or part[0] < 0 or part[-1] >= len(labels):
            found = f"indices from {part[0]} to {part[-1]}" if len(part) else "nothing"
            allowed = f"0 to {len(labels) - 1}" if len(part) else "at least one example for each client"
            raise ValueError(f"partition '{name}' gives client {client} {found}, allowed: {allowed}")
    together = np.concatenate(parts)
    if len(np.unique(together)) < len(together):
        raise ValueError(f"partition '{name}' gives an example to two clients, or twice, allowed: each to one client")
    return parts


def _checked(name: str, found: Dataset, public_scale: bool) -> Dataset:
    """Return a dataset that a plug-in made itself, if it is as all others are.

    With ``public_scale`` constants that were measured are replaced by public ones.
    """
    parts = ("training", found.train_images, found.train_labels), ("test", found.test_images, found.test_labels)
    for which, images, labels in parts:
        if images.ndim != 4 or labels.ndim != 1 or len(images) != len(labels):
            shapes = f"examples of shape {images.shape} and labels of shape {labels.shape}"
            raise _wrong(name, f"has {which} {shapes}", "(N, C, H, W) and (N,)")
        if len(labels) and not (labels.min() >= 0 and labels.max() < found.num_classes):
            ends = f"{which} labels from {labels.min()} to {labels.max()}"
            raise _wrong(name, f"has {ends}", f"labels of its {found.num_classes} classes, from 0 on")
    depth = found.train_images.shape[1]
    if not (len(found.mean) == len(found.std) and len(found.mean) in (1, depth) and min(found.std) > 0):
        constants = f"the mean {found.mean} and the deviation {found.std}"
        raise _wrong(name, f"has {constants}", f"{depth} numbers each, deviations above 0")
    if public_scale and found.is_measured:
        mean, std = scale(found.train_images, public_scale)
        return replace(found, mean=mean, std=std, is_measured=False)
    return found


def _wrong(name: str, found: str, allowed: str) -> ValueError:
    return ValueError(f"dataset '{name}' {found}, allowed: {allowed}")


def _check_idle(name: str, form: Form, *fields: str) -> None:
    """Raise ``ValueError`` for a field of the form that is given, and has no effect on these data."""
    for field in fields:
        if (value := getattr(form, field)) != (nothing := getattr(AS_IT_IS, field)):
            key, given = field.replace("_", "-"), ", ".join(value) if isinstance(value, tuple) else value
            allowed = f"allowed with what dataset '{name}' has: {nothing or 'nothing'!r}"
            raise ValueError(f"{key} is {given!r}, {allowed}")


def _classes(name: str, train: _Part, test: _Part, form: Form) -> tuple[tuple[str, ...], tuple[Labels, Labels]]:
    """Return the names of the classes, and the labels of both parts as their numbers."""
    parts, named = {"training": train, "test": test}, train.classes or test.classes
    for which, part in parts.items():
        names = part.classes or named
        if names and not part.has_texts and (highest := int(part.labels.max(initial=0))) >= len(names):
            raise _wrong(name, f"has the {which} label {highest}", f"labels of its {len(names)} classes")
    differ = train.classes and test.classes and train.classes != test.classes
    if not (form.classes or differ or train.has_texts or test.has_texts):
        labels = train.labels.astype(np.int64), test.labels.astype(np.int64)
        known = np.unique(np.concatenate(labels))
        if not named and (highest := int(known[-1])) >= len(known):
            unused = int(np.argmax(known != np.arange(len(known))))
            allowed = "labels that count from 0 without gaps, texts, or a Dataset that names its classes"
            raise _wrong(name, f"has labels up to {highest} and no example with the label {unused}", allowed)
        return named or tuple(map(str, range(max(int(known[-1]) + 1, 2)))), labels
    texts = {}
    for which, part in parts.items():
        names = () if part.has_texts else part.classes or named
        texts[which] = [names[label] if names else str(label) for label in part.labels.tolist()]
    classes = form.classes or named or in_order(texts["training"])

    def refuse(which: str, strange: str) -> ValueError:
        return _wrong(name, f"has the {which} label {strange!r}", shortened(classes))

    numbers = coded(texts, classes, refuse)
    if len(classes) < 2:
        raise _wrong(name, f"has one label, {classes[0]!r}", "at least two")
    return classes, (numbers["training"], numbers["test"])


def _part(name: str, which: str, part: Any, form: Form, columns: tuple[str, ...] = ()) -> _Part:
    """Return a part, whose ``columns`` are those of the training part."""
    unread: tuple[str, ...] = ()
    if isinstance(part, Mapping):
        columns = _columns(name, which, [*part], {}, form, columns)
        unread = tuple(str(key) for key in part if key not in columns)
        part = tuple(part[column] for column in columns)
    elif not isinstance(part, tuple) and not (isinstance(part, list) and len(part) == 2 and hasattr(part[0], "shape")):
        return _items(name, which, part, form, columns)
    if len(part) != 2:
        raise _unreadable(name, which, part)
    examples, labels = part
    has_pictures = False
    with suppress(Exception):  # what has no first item is no sequence of pictures
        has_pictures = _is_picture(examples[0])
    if has_pictures:
        examples = _stacked(name, which, examples, len(examples), form)
    return _made(name, which, examples, labels, (), has_pictures, columns, unread)


def _items(name: str, which: str, part: Any, form: Form, columns: tuple[str, ...]) -> _Part:
    """Read a dataset item by item: PyTorch's gives pairs, Hugging Face's mappings."""
    try:
        count, first = len(part), part[0]
        is_named = isinstance(first, Mapping)
        has_pictures = not is_named and _is_picture(first[0])
    except Exception as error:  # as above
        raise _unreadable(name, which, part) from error
    places: tuple[Any, ...] = (0, 1)
    classes, unread = getattr(part, "classes", None), tuple[str, ...]()
    if is_named:
        features = found if isinstance(found := getattr(part, "features", None), Mapping) else {}
        places = columns = _columns(name, which, [*first], features, form, columns)
        unread = tuple(str(key) for key in first if key not in columns)
        classes = getattr(features.get(columns[1]), "names", None) or classes
        part = _of_columns(part, columns, features)
        has_pictures = _is_picture(part[0][columns[0]])
    labels = []

    def examples() -> Iterator[Any]:
        for i in range(count):
            try:
                item = part[i]
                example, label = (item[place] for place in places)
                labels.append(getattr(label, "item", lambda label=label: label)())
                yield example if has_pictures else _channels_first(np.asarray(example))
            except Exception as error:  # as above
                raise _unreadable(name, which, part, i) from error

    if has_pictures:
        found = _stacked(name, which, examples(), count, form)
    else:
        arrays = [*examples()]
        if len(shapes := {array.shape for array in arrays}) > 1:
            some = " and ".join(map(str, sorted(shapes)[:2]))
            raise _wrong(name, f"has {which} examples of several shapes, as {some}", "examples of one shape")
        found = np.stack(arrays)
    return _made(name, which, found, labels, classes or (), has_pictures, columns, unread)


def _made(
    name: str,
    which: str,
    examples: Any,
    labels: Any,
    classes: Iterable[object],
    has_pictures: bool,
    columns: tuple[str, ...],
    unread: tuple[str, ...],
) -> _Part:
    """Return a part of examples and labels that are checked."""
    try:
        examples, labels = np.asarray(examples), np.asarray(labels)
    except (TypeError, ValueError, RuntimeError) as error:  # as of tensors that need a gradient
        raise _wrong(name, f"has a {which} part that is no array: {error}", "arrays of NumPy") from error
    if labels.ndim == 2 and labels.shape[1] == 1:  # a column of a table
        labels = labels[:, 0]
    if labels.ndim != 1:
        found = f"has {which} labels of shape {labels.shape} for {len(examples)} examples"
        raise _wrong(name, found, "one whole number for each example; argmax(axis=1) makes them of one-hot labels")
    if len(labels) != len(examples) or not len(labels):
        raise _wrong(
            name, f"has {len(labels)} {which} labels for {len(examples)} examples", "one label for each, at least one"
        )
    if labels.dtype == object:  # they may all be of one type
        labels = np.array(labels.tolist())
    if labels.dtype.kind in "USTO":
        labels = _texts(name, which, labels.tolist())
    elif not np.issubdtype(labels.dtype, np.integer) and labels.dtype != np.bool_:
        raise _wrong(name, f"has {which} labels of type {labels.dtype}", "whole numbers from 0 on, or texts")
    elif labels.min() < 0:
        raise _wrong(name, f"has the {which} label {labels.min()}", "whole numbers from 0 on")
    names = tuple(same_text(str(each)) for each in classes)
    return _Part(_four_dimensions(name, which, examples), labels, names, has_pictures, columns, unread)


def _texts(name: str, which: str, labels: list[object]) -> NDArray[np.str_]:
    if absent := sum(label in (None, "", b"") for label in labels):
        raise _wrong(name, f"has {absent} {which} examples without a label", "a label for each")
    kinds = {type(label).__name__ for label in labels if not isinstance(label, str | bytes)}
    if kinds:
        raise _wrong(name, f"has {which} labels of type {min(kinds)}", "whole numbers from 0 on, or texts")
    try:
        return np.array([text_of(label) for label in labels], np.str_)
    except UnicodeDecodeError:
        raise _wrong(name, f"has a {which} label of bytes that are no text", "texts, in UTF-8") from None


def _columns(
    name: str, which: str, names: list[str], features: Mapping[str, object], form: Form, chosen: tuple[str, ...]
) -> tuple[str, ...]:
    """Return the column of the examples and the column of the labels: as ``chosen`` before, or as the form says.

    Where a column has another name than the usual one, it is the only one of its kind, or has to be named. Raises
    ``ValueError`` with the columns that it may be.
    """
    found = []
    for i, (field, kind) in enumerate((("image_column", "Image"), ("label_column", "ClassLabel"))):
        asked, usual = chosen[i] if chosen else getattr(form, field), getattr(AS_IT_IS, field)
        alike = [column for column, feature in features.items() if type(feature).__name__ == kind]
        if asked not in names and asked == usual and len(alike) == 1 and not chosen:
            asked = alike[0]
        if asked not in names:
            key = field.replace("_", "-")
            raise _wrong(name, f"has no {which} column {asked!r}, which {key} names", shortened(alike or names))
        found.append(asked)
    return tuple(found)


def _of_columns(part: Any, columns: tuple[str, ...], features: Mapping[str, object]) -> Any:
    """Return a dataset of Hugging Face with these columns alone, and pictures as pictures of Pillow.

    A format of arrays that was saved with it would make the indices of a palette of them. A function of the user's that
    makes items of rows stays.
    """
    if not hasattr(part, "select_columns") or part.format["type"] == "custom":
        return part
    feature: Any = features[columns[0]]
    part = part.select_columns([*dict.fromkeys(columns)])
    if type(feature).__name__ != "Image":
        return part.with_format("numpy")
    return part.with_format(None).cast_column(columns[0], replace(feature, decode=True))


def _is_picture(example: object) -> bool:
    from PIL.Image import Image

    return isinstance(example, Image)


def _stacked(name: str, which: str, pictures: Iterable[Any], count: int, form: Form) -> Images:
    def refuse(i: int, why: str) -> ValueError:
        return ValueError(f"dataset '{name}': {which} picture {i} {why}")

    return stacked(pictures, count, refuse, form.image_size, form.image_fit)


def _unreadable(name: str, which: str, part: Any, item: int | None = None) -> ValueError:
    items = "whose items cannot be read" if item is None else f"whose item {item} cannot be read"
    found = f"has a {which} part of type {type(part).__name__}, {items}"
    return _wrong(name, found, "(examples, labels) as arrays, or a dataset of (example, label)")


def _channels_first(image: NDArray[Any]) -> NDArray[Any]:
    """Return one example with its channels first; Pillow's images have them last."""
    is_last = image.ndim == 3 and image.shape[2] in _CHANNELS and image.shape[0] not in _CHANNELS
    return image.transpose(2, 0, 1) if is_last else image


def _four_dimensions(name: str, which: str, examples: NDArray[Any]) -> NDArray[Any]:
    if examples.dtype == np.uint8 and examples.ndim in (3, 4):
        if examples.ndim == 3:
            return examples[:, None]
        if examples.shape[1] in _CHANNELS:
            return examples
        if examples.shape[3] in _CHANNELS:
            return np.ascontiguousarray(examples.transpose(0, 3, 1, 2))
    elif np.issubdtype(examples.dtype, np.floating) and examples.ndim in (2, 4):
        numbers = examples.astype(np.float64 if examples.ndim == 2 else np.float32)
        with np.errstate(over="ignore"):
            is_finite = np.isfinite(numbers.astype(np.float32)).all()
        if not is_finite:
            raise _wrong(name, f"has {which} examples with NaN or infinity", "finite numbers, as of float32")
        if numbers.ndim == 2:
            return numbers[:, :, None, None]
        _, first, second, last = numbers.shape
        if last in _CHANNELS and first not in _CHANNELS and first == second:  # squares, with their channels last
            return np.ascontiguousarray(numbers.transpose(0, 3, 1, 2))
        return numbers
    found = f"{which} examples of shape {examples.shape} and type {examples.dtype}"
    raise _wrong(name, f"has {found}", "uint8 images with 1 or 3 channels, or floating-point (N, C, H, W) or (N, F)")


def scale(examples: NDArray[Any], public_scale: bool) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and the standard deviation by channel that examples are normalised with."""
    channels = examples.shape[1]
    if public_scale:
        centre, width = (0.5, 0.5) if examples.dtype == np.uint8 else (0.0, 1.0)
        return (centre,) * channels, (width,) * channels
    return measured_scale((examples, np.arange(len(examples))))


def measured_scale(*parts: tuple[NDArray[Any], NDArray[np.int64]]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation by channel: of images in [0, 1], or of numbers as they are.

    A part has examples, and the positions of those that count.
    """
    if parts[0][0].dtype == np.uint8:
        return channel_stats(*parts)
    wide = np.concatenate([examples[positions] for examples, positions in parts]).astype(np.float64)
    axes = (0, 2, 3)
    std = np.where(np.ptp(wide, axis=axes) > 0, wide.std(axis=axes), 1.0)  # which rounding keeps from 0 for a constant
    return tuple(map(float, wide.mean(axis=axes))), tuple(map(float, std))
