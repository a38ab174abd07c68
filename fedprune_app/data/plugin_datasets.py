"""Datasets and partitions of plug-ins: check the returned data and convert them to :class:`Dataset`.

A function that loads a dataset is called with the key ``data-dir`` and returns one of these:

* a :class:`~fedprune_app.data.dataset.Dataset`;
* a pair of a training part and a test part; the test part may be None;
* a mapping with the parts "train" and "test", such as Hugging Face's DatasetDict.

A part is a pair (examples, labels), a mapping with the columns "image" and "label", a dataset as in PyTorch whose items
are (example, label), or a ``datasets.Dataset`` of Hugging Face with an image column and a label column. Labels are
whole numbers, booleans, or texts. Examples are pictures of Pillow, 8-bit images as (H, W), (H, W, C) or (C, H, W) with
1 or 3 channels, or floating-point numbers: (C, H, W), or (F,) for a row of a table, which becomes an image of F
channels and one pixel.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedprune_app.core.rng import global_draws_of
from fedprune_app.core.texts import error_text
from fedprune_app.data.dataset import Dataset, Form, Images, Labels, coded, in_order, scale, shortened, text_of
from fedprune_app.data.folders import as_deep_as, is_deep, open_picture, stacked
from fedprune_app.data.partitions import Indices

_CHANNELS = (1, 3)


@dataclass(frozen=True)
class _Part:
    """Examples (N, C, H, W) with labels: texts, or indices into ``classes`` if these are named."""

    examples: Images
    labels: NDArray[Any]
    classes: tuple[str, ...]


def dataset(name: str, load: Callable[[str], Any], data_dir: str, form: Form, *, public_scale: bool) -> Dataset:
    """Load a plug-in's dataset: call its function ``load`` with ``data_dir``, and convert the result.

    Examples are normalised by the statistics of the training part. With ``public_scale`` they are not: images are
    scaled to [-1, 1], and numbers are not changed. Raises ``ValueError`` in one line.
    """
    try:
        with global_draws_of(0):  # each process loads the data by itself
            data = load(data_dir)
    except (Exception, SystemExit) as error:  # a user's function may raise anything
        raise ValueError(f"dataset '{name}' cannot be loaded: {error_text(error)}") from error
    if isinstance(data, Dataset):
        return _check_dataset(name, data, public_scale)
    parts = [data.get("train"), data.get("test")] if isinstance(data, Mapping) else data
    if not isinstance(parts, Sequence) or len(parts) != 2 or parts[0] is None:
        raise _error(name, f"returns a {type(data).__name__}", "a pair of training and test part, or a Dataset")
    if parts[1] is None and form.needs_test:
        raise _error(name, "has no test part", "one with a test part, or test-split 'holdout'")
    train = _part(name, "training", parts[0], form)
    if parts[1] is None:
        test = replace(train, examples=train.examples[:0], labels=train.labels[:0])
    else:
        test = _part(name, "test", parts[1], form)
    images, test_images = as_deep_as(test.examples, train.examples), as_deep_as(train.examples, test.examples)
    if images.shape[1:] != test_images.shape[1:] or images.dtype != test_images.dtype:
        shapes = f"{images.shape[1:]} {images.dtype} and {test_images.shape[1:]} {test_images.dtype}"
        raise _error(name, f"has training and test examples of {shapes}", "parts of one shape and type")
    classes, labels, test_labels = _classes(name, train, test, form)
    arguments = (images, labels, test_images, test_labels, classes, *scale(images, public_scale))
    return Dataset(name, *arguments, is_measured=not public_scale)


def on_disk(folder: Path, form: Form, *, public_scale: bool) -> Dataset:
    """Read the dataset that Hugging Face's ``save_to_disk`` wrote into ``folder``, with the splits train and test.

    Raises ``ValueError`` in one line.
    """
    try:
        import datasets
    except ImportError:
        raise ValueError("dataset 'huggingface' needs Hugging Face's datasets: install fedprune[data]") from None
    datasets.disable_progress_bars()

    def load(data_dir: str) -> Any:
        data = datasets.load_from_disk(data_dir).with_format(None)  # a format may hide columns
        return data if isinstance(data, Mapping) else (data, None)

    return dataset("huggingface", load, str(folder), form, public_scale=public_scale)


def dealt(
    name: str, deal: Callable[..., Any], labels: Labels, num_clients: int, rng: np.random.Generator
) -> list[Indices]:
    """Return each client's indices from a plug-in's function ``deal``. Raises ``ValueError``."""
    try:
        parts = [np.sort(np.asarray(part)) for part in deal(labels, num_clients, rng)]
    except (Exception, SystemExit) as error:  # a user's function may raise anything
        raise ValueError(f"partition '{name}' fails: {error_text(error)}") from error
    if len(parts) != num_clients:
        raise ValueError(f"partition '{name}' returns {len(parts)} parts, allowed: one per client, {num_clients}")
    for client, part in enumerate(parts):
        is_list = part.ndim == 1 and len(part) > 0 and np.issubdtype(part.dtype, np.integer)
        if not is_list or part[0] < 0 or part[-1] >= len(labels):
            allowed = f"at least one whole number from 0 to {len(labels) - 1}"
            raise ValueError(f"partition '{name}' gives client {client} what is not allowed: {allowed}")
    indices = np.concatenate(parts)
    if len(np.unique(indices)) < len(indices):
        raise ValueError(f"partition '{name}' gives an example to two clients, or twice, allowed: each to one client")
    return [part.astype(np.int64) for part in parts]


def _check_dataset(name: str, data: Dataset, public_scale: bool) -> Dataset:
    """Check a :class:`Dataset` that a plug-in returned, and return it.

    With ``public_scale`` measured constants are replaced by public ones.
    """
    for images, labels in ((data.train_images, data.train_labels), (data.test_images, data.test_labels)):
        is_labelled = labels.shape == (len(images),) and ((labels >= 0) & (labels < data.num_classes)).all()
        if images.ndim != 4 or not is_labelled:
            shapes = f"examples of shape {images.shape} and labels of shape {labels.shape}"
            raise _error(name, f"has {shapes}", f"(N, C, H, W), and N labels from 0 to {data.num_classes - 1}")
    for kind in ("groups", "owners"):
        for split, labels in (("", data.train_labels), ("test_", data.test_labels)):
            of_rows = getattr(data, split + kind)
            if of_rows is not None and len(of_rows) != len(labels):
                raise _error(name, f"has {len(of_rows)} {kind} for {len(labels)} examples", "one for each")
    depth = data.train_images.shape[1]
    if not (len(data.mean) == len(data.std) and len(data.mean) in (1, depth) and min(data.std) > 0):
        constants = f"the mean {data.mean} and the deviation {data.std}"
        raise _error(name, f"has {constants}", f"{depth} numbers each, deviations above 0")
    if public_scale and data.is_measured:
        mean, std = scale(data.train_images, public_scale)
        return replace(data, mean=mean, std=std, is_measured=False)
    return data


def _error(name: str, problem: str, allowed: str) -> ValueError:
    return ValueError(f"dataset '{name}' {problem}, allowed: {allowed}")


def _classes(name: str, train: _Part, test: _Part, form: Form) -> tuple[tuple[str, ...], Labels, Labels]:
    texts = {}
    for split, part in {"training": train, "test": test}.items():
        texts[split] = [str(label) for label in part.labels.tolist()]
        if (names := part.classes or train.classes) and part.labels.dtype.kind != "U":
            if (highest := part.labels.max(initial=0)) >= len(names):
                raise _error(name, f"has the {split} label {highest}", f"labels of its {len(names)} classes")
            texts[split] = [names[label] for label in part.labels]
    classes = form.classes or train.classes or in_order(texts["training"])
    if len(classes) < 2:
        raise _error(name, f"has one label, {classes[0]!r}", "at least two")

    def refuse(split: str, label: str) -> ValueError:
        return _error(name, f"has the {split} label {label!r}", shortened(classes))

    numbers = coded(texts, classes, refuse)
    return classes, numbers["training"], numbers["test"]


def _part(name: str, split: str, part: Any, form: Form) -> _Part:
    from PIL.Image import Image as Picture

    def refuse(i: int, reason: str) -> ValueError:
        return ValueError(f"{split} picture {i} {reason}")

    is_pair = isinstance(part, tuple) or (isinstance(part, list) and len(part) == 2 and hasattr(part[0], "shape"))
    class_names = getattr(part, "classes", None) or ()
    keys: tuple[Any, Any] = (0, 1)
    is_file = False
    try:
        part = _undecoded(part)
        row = part if is_pair or isinstance(part, Mapping) else part[0]
        features = getattr(part, "features", None) or {}
        if isinstance(row, Mapping):  # rows of Hugging Face's datasets are mappings too
            keys = _columns([*row], features, form)
            class_names = getattr(features.get(keys[1]), "names", None) or class_names
        if row is part:
            examples, labels = part[keys[0]], part[keys[1]]
            first_example, count = next(iter(examples), None), len(examples)
        else:
            first_example, count, labels = row[keys[0]], len(part), []
            is_file = isinstance(first_example, dict) and type(features.get(keys[0])).__name__ == "Image"
            examples = _examples(part.select_columns([*keys]) if is_file else part, keys, labels)
            if is_file:
                examples = _pictures(examples, features[keys[0]].mode)
        if is_file or isinstance(first_example, Picture):
            examples = stacked(examples, count, refuse, form.image_size, form.image_fit)
        examples = np.asarray([*examples] if isinstance(examples, Iterator) else examples)
        try:
            labels = np.asarray(labels)
        except ValueError:  # lists of several lengths
            labels = np.asarray(labels, object)
    except Exception as error:  # a user's dataset may raise anything
        raise ValueError(
            f"dataset '{name}': the {split} part, of type {type(part).__name__}, cannot be read as examples with "
            f"labels: {error_text(error)}"
        ) from error
    if labels.ndim == 2 and labels.shape[1] == 1:  # a column of a table
        labels = labels[:, 0]
    if labels.shape != (len(examples),) or not len(labels):
        problem = f"has {split} labels of shape {labels.shape} for {len(examples)} examples"
        raise _error(name, problem, "one label for each, at least one; argmax(axis=1) makes them of one-hot labels")
    names = tuple(map(str, class_names))
    return _Part(_four_dimensions(name, split, examples), _checked_labels(name, split, labels), names)


def _examples(part: Any, keys: tuple[Any, Any], labels: list[Any]) -> Iterator[Any]:
    """Yield a dataset's examples item by item, and append their labels to ``labels``."""
    for i in range(len(part)):
        item = part[i]
        labels.append(item[keys[1]])
        yield item[keys[0]]


def _checked_labels(name: str, split: str, labels: NDArray[Any]) -> NDArray[Any]:
    allowed = "whole numbers from 0 on, or texts"
    if labels.dtype == object:  # they may all be of one type
        for label in labels.tolist():
            if label is None or isinstance(label, list | tuple):
                raise _error(name, f"has the {split} label {label!r}", f"{allowed}, one for each example")
        labels = np.array(labels.tolist())
    if labels.dtype.kind in "biu" and labels.min() >= 0:
        return labels.astype(np.int64)
    for label in labels.tolist():
        if not isinstance(label, str | bytes) or not label:
            raise _error(name, f"has the {split} label {label!r}", allowed)
    return np.array([*map(text_of, labels.tolist())], np.str_)


def _columns(names: list[str], features: Mapping[str, object], form: Form) -> tuple[str, str]:
    """Return the column of the examples and the column of the labels.

    If no column has the usual name, the only one of its type is used. Raises ``ValueError`` with the candidates if
    there is no such column.
    """
    columns = []
    for usual, column, kind in (("image", form.image_column, "Image"), ("label", form.label_column, "ClassLabel")):
        candidates = [candidate for candidate, feature in features.items() if type(feature).__name__ == kind]
        if column not in names and column == usual and len(candidates) == 1:
            column = candidates[0]
        if column not in names:
            allowed = shortened(candidates or names)
            raise ValueError(f"no column {column!r}, which {usual}-column names, allowed: {allowed}")
        columns.append(column)
    return columns[0], columns[1]


def _undecoded(part: Any) -> Any:
    """Return Hugging Face's dataset with its pictures as files, for :func:`open_picture`; other datasets unchanged.

    A format of arrays would turn a palette into its indices. A user's own transformation of rows is kept.
    """
    features = getattr(part, "features", None) or {}
    names = [name for name, feature in features.items() if type(feature).__name__ == "Image"]
    if names and part.format["type"] != "custom":
        part = part.with_format(None)
        for name in names:
            part = part.cast_column(name, replace(features[name], decode=False))
    return part


def _pictures(files: Iterator[Any], mode: str | None) -> Iterator[Any]:
    for entry in files:
        with BytesIO(entry["bytes"]) if entry["bytes"] is not None else Path(entry["path"]).open("rb") as file:
            picture = open_picture(file)
            yield picture.convert(mode) if mode and not is_deep(picture) else picture


def _four_dimensions(name: str, split: str, examples: NDArray[Any]) -> NDArray[Any]:
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
            raise _error(name, f"has {split} examples with NaN or infinity", "finite numbers, as of float32")
        if numbers.ndim == 2:
            return numbers[:, :, None, None]
        _, first, second, last = numbers.shape
        if last in _CHANNELS and first not in _CHANNELS and first == second:  # squares, with their channels last
            return np.ascontiguousarray(numbers.transpose(0, 3, 1, 2))
        return numbers
    text = f"{split} examples of shape {examples.shape} and type {examples.dtype}"
    raise _error(name, f"has {text}", "uint8 images with 1 or 3 channels, or floating-point (N, C, H, W) or (N, F)")
