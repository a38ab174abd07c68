"""Datasets and partitions that plug-ins bring: what their functions return is checked and made the product's own.

A function that loads a dataset is called with the key ``data-dir`` and returns one of these:

* a :class:`~fedprune_app.data.datasets.Dataset`;
* a pair of a training part and a test part, of which the test part may be None;
* a mapping with the parts "train" and "test", as Hugging Face's DatasetDict is one.

A part is a pair of arrays (examples, labels), or a mapping with the arrays "image" and "label", or a dataset in the
manner of PyTorch whose items are (example, label), or a ``datasets.Dataset`` of Hugging Face with an image column and a
label column. Labels are whole numbers, or truth values. They count from 0 without gaps where nothing names the classes.
Examples are images of 8 bits as (H, W), (H, W, C) or (C, H, W) with 1 or 3 channels, images of Pillow, or
floating-point numbers: (C, H, W), or (F,) for a row of a table, which becomes an image of F channels and one pixel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedprune_app.data.datasets import Dataset, Labels, channel_stats, missing
from fedprune_app.data.partitions import Indices

_CHANNELS = (1, 3)
Part = tuple[NDArray[Any], Labels, tuple[str, ...]]
"""These are examples of shape (N, C, H, W), labels, and the names of the classes if the part knows them."""


def dataset(name: str, load: Callable[[str], Any], data_dir: str, *, needs_test: bool, public_scale: bool) -> Dataset:
    """Return what the function ``load`` of a plug-in returns for ``data_dir``, as a dataset called ``name``.

    Examples are normalised by the statistics of the training part. With ``public_scale`` they are not: images are
    scaled to [-1, 1], and numbers stay as they are. Raises ``ValueError`` in one line.
    """
    try:
        found = load(data_dir)
    except (Exception, SystemExit) as error:  # a user's function raises what it likes
        raise ValueError(f"dataset '{name}' cannot be loaded: {type(error).__name__}: {error}") from error
    if isinstance(found, Dataset):
        return _checked(name, found, public_scale)
    parts = [found.get("train"), found.get("test")] if isinstance(found, Mapping) else found
    if not isinstance(parts, Sequence) or len(parts) != 2 or parts[0] is None:
        raise _wrong(name, f"returns a {type(found).__name__}", "a pair of training and test part, or a Dataset")
    if parts[1] is None and needs_test:
        raise _wrong(name, "has no test part", "one with a test part, or test-split 'holdout'")
    train = _part(name, "training", parts[0])
    test = (train[0][:0], train[1][:0], ()) if parts[1] is None else _part(name, "test", parts[1])
    if train[0].shape[1:] != test[0].shape[1:] or train[0].dtype != test[0].dtype:
        shapes = f"examples of {train[0].shape[1:]} {train[0].dtype} and {test[0].shape[1:]} {test[0].dtype}"
        raise _wrong(name, f"has training and test {shapes}", "parts of one shape and type")
    found_labels = np.unique(np.concatenate([train[1], test[1]]))
    highest = int(found_labels[-1])
    if not (train[2] or test[2]) and highest >= len(found_labels):
        unused = int(np.argmax(found_labels != np.arange(len(found_labels))))
        allowed = "labels that count from 0 without gaps, or a Dataset that names its classes"
        raise _wrong(name, f"has labels up to {highest} and no example with the label {unused}", allowed)
    classes = train[2] or test[2] or tuple(str(label) for label in range(max(highest + 1, 2)))
    if highest >= len(classes):
        raise _wrong(name, f"has the label {highest}", f"labels of its {len(classes)} classes")
    mean, std = scale(train[0], public_scale)
    measured = not public_scale
    return Dataset(name, train[0], train[1], test[0], test[1], classes, mean, std, is_measured=measured)


def on_disk(folder: Path, *, needs_test: bool, public_scale: bool) -> Dataset:
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
        found = datasets.load_from_disk(data_dir)
        return found if isinstance(found, Mapping) else (found, None)

    return dataset("huggingface", load, str(folder), needs_test=needs_test, public_scale=public_scale)


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


def _part(name: str, which: str, part: Any) -> Part:
    if isinstance(part, Mapping) and {"image", "label"} <= part.keys():
        part = part["image"], part["label"]
    is_pair = isinstance(part, tuple | list) and len(part) == 2 and hasattr(part[0], "shape")
    examples, labels, classes = (*part, ()) if is_pair else _items(name, which, part)
    try:
        examples, labels = np.asarray(examples), np.asarray(labels)
    except (TypeError, ValueError, RuntimeError) as error:  # as of tensors that need a gradient
        raise _wrong(name, f"has a {which} part that is no array: {error}", "arrays of NumPy") from error
    if labels.ndim == 2 and labels.shape[1] == 1:  # a column of a table
        labels = labels[:, 0]
    if labels.dtype == np.bool_:
        labels = labels.astype(np.int64)
    if labels.ndim != 1:
        found = f"has {which} labels of shape {labels.shape} for {len(examples)} examples"
        raise _wrong(name, found, "one whole number for each example; argmax(axis=1) makes them of one-hot labels")
    if len(labels) != len(examples) or not len(labels):
        raise _wrong(
            name, f"has {len(labels)} {which} labels for {len(examples)} examples", "one label for each, at least one"
        )
    if not np.issubdtype(labels.dtype, np.integer):
        hint = "; numpy.unique(labels, return_inverse=True) makes them of texts" if labels.dtype.kind in "UO" else ""
        raise _wrong(name, f"has {which} labels of type {labels.dtype}", f"whole numbers from 0 on{hint}")
    if labels.min() < 0:
        raise _wrong(name, f"has the {which} label {labels.min()}", "whole numbers from 0 on")
    return _four_dimensions(name, which, examples), labels.astype(np.int64), tuple(map(str, classes))


def _items(name: str, which: str, part: Any) -> tuple[NDArray[Any], Labels, Iterable[str]]:
    """Read a dataset item by item: PyTorch's gives pairs, Hugging Face's mappings."""
    try:
        items = [part[i] for i in range(len(part))]
        first = items[0]
    except Exception as error:  # as above
        raise _unreadable(name, which, part) from error
    columns: tuple[Any, Any] = (0, 1)
    if isinstance(first, Mapping):
        by_kind = {type(feature).__name__: column for column, feature in getattr(part, "features", {}).items()}
        columns = by_kind.get("Image", "image"), by_kind.get("ClassLabel", "label")
        for column in columns:
            if column not in first:
                raise _wrong(name, f"has the {which} columns {', '.join(first)}", "an image and a label column")
    label_feature = getattr(part, "features", {}).get(columns[1]) if isinstance(first, Mapping) else None
    classes = getattr(part, "classes", None) or getattr(label_feature, "names", None) or ()
    try:
        examples = [_channels_first(np.asarray(item[columns[0]])) for item in items]
        labels = np.array([int(item[columns[1]]) for item in items], dtype=np.int64)
    except (TypeError, ValueError, IndexError, KeyError) as error:
        raise _unreadable(name, which, part) from error
    if len({example.shape for example in examples}) > 1:
        raise _wrong(name, f"has {which} examples of several sizes", "examples of one size")
    return np.stack(examples), labels, classes


def _unreadable(name: str, which: str, part: Any) -> ValueError:
    found = f"has a {which} part of type {type(part).__name__}, whose items cannot be read"
    allowed = "a function that returns ((X, y), (X_test, y_test)) of arrays, or two datasets of (example, label)"
    return _wrong(name, found, allowed)


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
        numbers = examples.astype(np.float32)
        if not np.isfinite(numbers).all():
            raise _wrong(name, f"has {which} examples with NaN or infinity", "finite numbers")
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
    mean, std = wide.mean(axis=(0, 2, 3)), wide.std(axis=(0, 2, 3))
    return tuple(map(float, mean)), tuple(float(each) or 1.0 for each in std)
