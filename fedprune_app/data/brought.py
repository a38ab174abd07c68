"""Datasets and partitions that plug-ins bring: what their functions return is checked and made the product's own.

A function that loads a dataset is called with the key ``data-dir`` and returns one of these:

* a :class:`~fedprune_app.data.dataset.Dataset`;
* a pair of a training part and a test part, of which the test part may be None;
* a mapping with the parts "train" and "test", as Hugging Face's DatasetDict is one.

A part is a pair (examples, labels), or a mapping with the columns "image" and "label", or a dataset in the manner of
PyTorch whose items are (example, label), or a ``datasets.Dataset`` of Hugging Face with an image column and a label
column. Labels are whole numbers, truth values, or texts. Numbers count from 0 without gaps where nothing names the
classes. Examples are pictures of Pillow, images of 8 bits as (H, W), (H, W, C) or (C, H, W) with 1 or 3 channels, or
floating-point numbers: (C, H, W), or (F,) for a row of a table, which becomes an image of F channels and one pixel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedprune_app.data.dataset import AS_IT_IS, Dataset, Form, Images, Labels, missing, scale
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
    columns: tuple[str, ...]  # of examples and labels
    unread: tuple[str, ...]  # other columns

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
        data = load(data_dir)
    except (Exception, SystemExit) as error:  # a user's function raises what it likes
        raise ValueError(f"dataset '{name}' cannot be loaded: {type(error).__name__}: {error}") from error
    if isinstance(data, Dataset):
        _check_idle(name, form, "classes", "label_column", "image_column", "image_size")
        return _check_dataset(name, data, public_scale)
    parts, notes = data, []
    if isinstance(data, Mapping):
        parts = [data.get("train"), data.get("test")]
        if unread := [str(key) for key in data if key not in ("train", "test")]:
            notes.append(f"parts that are not read: {shortened(unread)}")
    if not isinstance(parts, Sequence) or len(parts) != 2 or parts[0] is None:
        keys = f" with {shortened([*map(str, data)])}" if isinstance(data, Mapping) else ""
        raise _error(name, f"returns a {type(data).__name__}{keys}", "a pair of training and test part, or a Dataset")
    if parts[1] is None and form.needs_test:
        raise _error(name, "has no test part", "one with a test part, or test-split 'holdout'")
    train = _part(name, "training", parts[0], form)
    test = replace(train, examples=train.examples[:0], labels=train.labels[:0])
    if parts[1] is not None:
        test = _part(name, "test", parts[1], form, train.columns)
    images = as_deep_as(test.examples, train.examples), as_deep_as(train.examples, test.examples)
    if images[0].shape[1:] != images[1].shape[1:] or images[0].dtype != images[1].dtype:
        shapes = f"examples of {images[0].shape[1:]} {images[0].dtype} and {images[1].shape[1:]} {images[1].dtype}"
        raise _error(name, f"has training and test {shapes}", "parts of one shape and type")
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
        data = datasets.load_from_disk(data_dir).with_format(None)  # a format may hide columns
        return data if isinstance(data, Mapping) else (data, None)

    return dataset("huggingface", load, str(folder), form, public_scale=public_scale)


def dealt(
    name: str, deal: Callable[..., Any], labels: Labels, num_clients: int, rng: np.random.Generator
) -> list[Indices]:
    """Return the indices that the function ``deal`` of a plug-in gives to each client. Raises ``ValueError``."""
    try:
        arrays = [np.asarray(part) for part in deal(labels, num_clients, rng)]
    except (Exception, SystemExit) as error:  # a user's function raises what it likes
        raise ValueError(f"partition '{name}' fails: {type(error).__name__}: {error}") from error
    for client, part in enumerate(arrays):
        if part.size and (part.ndim != 1 or not np.issubdtype(part.dtype, np.integer)):
            problem = f"an array of shape {part.shape} and type {part.dtype}"
            raise ValueError(f"partition '{name}' gives client {client} {problem}, allowed: a list of whole numbers")
    parts = [np.sort(part.astype(np.int64)) for part in arrays]
    if len(parts) != num_clients:
        raise ValueError(f"partition '{name}' returns {len(parts)} parts, allowed: one per client, {num_clients}")
    for client, part in enumerate(parts):
        if not len(part) or part[0] < 0 or part[-1] >= len(labels):
            problem = f"indices from {part[0]} to {part[-1]}" if len(part) else "nothing"
            allowed = f"0 to {len(labels) - 1}" if len(part) else "at least one example for each client"
            raise ValueError(f"partition '{name}' gives client {client} {problem}, allowed: {allowed}")
    indices = np.concatenate(parts)
    if len(np.unique(indices)) < len(indices):
        raise ValueError(f"partition '{name}' gives an example to two clients, or twice, allowed: each to one client")
    return parts


def _check_dataset(name: str, data: Dataset, public_scale: bool) -> Dataset:
    """Return a dataset that a plug-in made itself, if it is as all others are.

    With ``public_scale`` constants that were measured are replaced by public ones.
    """
    parts = ("training", data.train_images, data.train_labels), ("test", data.test_images, data.test_labels)
    for split, images, labels in parts:
        if images.ndim != 4 or labels.ndim != 1 or len(images) != len(labels):
            shapes = f"examples of shape {images.shape} and labels of shape {labels.shape}"
            raise _error(name, f"has {split} {shapes}", "(N, C, H, W) and (N,)")
        if len(labels) and not (labels.min() >= 0 and labels.max() < data.num_classes):
            label_range = f"{split} labels from {labels.min()} to {labels.max()}"
            raise _error(name, f"has {label_range}", f"labels of its {data.num_classes} classes, from 0 on")
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


def _check_idle(name: str, form: Form, *fields: str) -> None:
    """Raise ``ValueError`` for a field of the form that is given, and has no effect on these data."""
    for field in fields:
        if (value := getattr(form, field)) != (default := getattr(AS_IT_IS, field)):
            key, value_text = field.replace("_", "-"), ", ".join(value) if isinstance(value, tuple) else value
            allowed = f"allowed with what dataset '{name}' has: {default or 'nothing'!r}"
            raise ValueError(f"{key} is {value_text!r}, {allowed}")


def _classes(name: str, train: _Part, test: _Part, form: Form) -> tuple[tuple[str, ...], tuple[Labels, Labels]]:
    """Return the names of the classes, and the labels of both parts as their numbers."""
    parts, class_names = {"training": train, "test": test}, train.classes or test.classes
    for split, part in parts.items():
        names = part.classes or class_names
        if names and not part.has_texts and (highest := int(part.labels.max(initial=0))) >= len(names):
            raise _error(name, f"has the {split} label {highest}", f"labels of its {len(names)} classes")
    classes_differ = train.classes and test.classes and train.classes != test.classes
    if not (form.classes or classes_differ or train.has_texts or test.has_texts):
        labels = train.labels, test.labels
        label_values = np.unique(np.concatenate(labels))
        if not class_names and (highest := int(label_values[-1])) >= len(label_values):
            gap = int(np.argmax(label_values != np.arange(len(label_values))))
            allowed = "labels that count from 0 without gaps, texts, or a Dataset that names its classes"
            raise _error(name, f"has labels up to {highest} and no example with the label {gap}", allowed)
        return class_names or tuple(map(str, range(max(int(label_values[-1]) + 1, 2)))), labels
    texts = {}
    for split, part in parts.items():
        names = () if part.has_texts else part.classes or class_names
        texts[split] = [names[label] if names else str(label) for label in part.labels.tolist()]
    classes = form.classes or class_names or in_order(texts["training"])

    def refuse(split: str, label: str) -> ValueError:
        return _error(name, f"has the {split} label {label!r}", shortened(classes))

    numbers = coded(texts, classes, refuse)
    if len(classes) < 2:
        raise _error(name, f"has one label, {classes[0]!r}", "at least two")
    return classes, (numbers["training"], numbers["test"])


class _Items(Sequence[Any]):
    """These are the examples of a dataset that is read item by item, at ``places`` of each.

    ``labels`` has the labels of the items that were read, by their numbers.
    """

    def __init__(self, part: Any, keys: tuple[Any, ...], refuse: Callable[[], ValueError]) -> None:
        self._part, self._keys, self._refuse = part, keys, refuse
        self.labels: dict[int, object] = {}

    def __len__(self) -> int:
        return len(self._part)

    def __getitem__(self, i: Any) -> Any:
        if i >= len(self):
            raise IndexError(i)
        try:
            item = self._part[i]
            example, label = (item[key] for key in self._keys)
            self.labels[i] = getattr(label, "item", lambda: label)()
            return example if _is_picture(example) else _channels_first(np.asarray(example))
        except Exception as error:  # a user's dataset raises what it likes
            raise self._refuse() from error


def _part(name: str, split: str, part: Any, form: Form, columns: tuple[str, ...] = ()) -> _Part:
    """Return a part, whose ``columns`` are those of the training part."""
    kind, unread, classes = type(part).__name__, tuple[str, ...](), getattr(part, "classes", None) or ()
    is_pair = isinstance(part, tuple) or (isinstance(part, list) and len(part) == 2 and hasattr(part[0], "shape"))

    def unreadable() -> ValueError:
        allowed = "(examples, labels) as arrays, or a dataset of (example, label)"
        return _error(name, f"has a {split} part of type {kind}, whose items cannot be read", allowed)

    try:
        row = part if is_pair or isinstance(part, Mapping) else part[0]  # with Hugging Face's, a mapping
    except Exception as error:  # a user's dataset raises what it likes
        raise unreadable() from error
    if isinstance(row, Mapping):
        features = value if isinstance(value := getattr(part, "features", None), Mapping) else {}
        columns = _columns(name, split, [*row], features, form, columns)
        unread = tuple(str(key) for key in row if key not in columns)
        classes = getattr(features.get(columns[1]), "names", None) or classes
        is_pair = row is part
        part = [part[column] for column in columns] if is_pair else _select_columns(part, columns, features)
    if is_pair and len(part) != 2:
        raise unreadable()
    examples, labels = part if is_pair else (items := _Items(part, columns or (0, 1), unreadable), None)
    has_pictures = False
    with suppress(LookupError, TypeError):  # examples that are no sequence, or an empty one
        has_pictures = _is_picture(examples[0])
    if has_pictures:

        def refuse(i: int, reason: str) -> ValueError:
            return ValueError(f"dataset '{name}': {split} picture {i} {reason}")

        examples = stacked(examples, len(examples), refuse, form.image_size, form.image_fit)
    try:
        examples = np.asarray(examples if is_pair or has_pictures else [*examples])
        labels = np.asarray(labels if is_pair else [items.labels[i] for i in range(len(items))])
    except (TypeError, ValueError, RuntimeError) as error:  # tensors that need a gradient raise it
        raise _error(name, f"has a {split} part that is no array: {error}", "arrays of NumPy") from error
    if labels.ndim == 2 and labels.shape[1] == 1:  # a column of a table
        labels = labels[:, 0]
    if labels.ndim != 1:
        problem = f"has {split} labels of shape {labels.shape} for {len(examples)} examples"
        raise _error(name, problem, "one whole number for each example; argmax(axis=1) makes them of one-hot labels")
    if len(labels) != len(examples) or not len(labels):
        raise _error(
            name, f"has {len(labels)} {split} labels for {len(examples)} examples", "one label for each, at least one"
        )
    names = tuple(same_text(str(class_name)) for class_name in classes)
    arrays = _four_dimensions(name, split, examples), _checked_labels(name, split, labels)
    return _Part(*arrays, names, has_pictures, columns, unread)


def _checked_labels(name: str, split: str, labels: NDArray[Any]) -> NDArray[Any]:
    """Return labels (N,) as whole numbers from 0 on, or as texts."""
    if labels.dtype == object:  # they may all be of one type
        labels = np.array(labels.tolist())
    if labels.dtype.kind in "biu" and labels.min() >= 0:
        return labels.astype(np.int64)
    values = labels.tolist()
    if num_missing := sum(value in (None, "", b"") for value in values):
        raise _error(name, f"has {num_missing} {split} examples without a label", "a label for each")
    if not all(isinstance(value, str | bytes) for value in values):
        problem = f"label {labels.min()}" if labels.dtype.kind == "i" else f"labels of type {labels.dtype}"
        raise _error(name, f"has the {split} {problem}", "whole numbers from 0 on, or texts")
    try:
        return np.array([*map(text_of, values)], np.str_)
    except UnicodeDecodeError:
        raise _error(name, f"has a {split} label of bytes that are no text", "texts, in UTF-8") from None


def _columns(
    name: str,
    split: str,
    names: list[str],
    features: Mapping[str, object],
    form: Form,
    training_columns: tuple[str, ...],
) -> tuple[str, ...]:
    """Return the column of the examples and the column of the labels: the training part's, or the form's.

    Where a column has another name than the usual one, it is the only one of its kind, or has to be named. Raises
    ``ValueError`` with the columns that it may be.
    """
    columns = []
    for i, (field, kind) in enumerate((("image_column", "Image"), ("label_column", "ClassLabel"))):
        column, default = training_columns[i] if training_columns else getattr(form, field), getattr(AS_IT_IS, field)
        candidates = [candidate for candidate, feature in features.items() if type(feature).__name__ == kind]
        if column not in names and column == default and len(candidates) == 1 and not training_columns:
            column = candidates[0]
        if column not in names:
            key = field.replace("_", "-")
            raise _error(name, f"has no {split} column {column!r}, which {key} names", shortened(candidates or names))
        columns.append(column)
    return tuple(columns)


def _select_columns(part: Any, columns: tuple[str, ...], features: Mapping[str, object]) -> Any:
    """Return a dataset of Hugging Face whose pictures are pictures of Pillow, and which has these columns alone.

    A format of arrays would make the indices of a palette of them. A function of the user's that makes items of rows
    stays.
    """
    feature: Any = features.get(columns[0])
    if type(feature).__name__ != "Image" or part.format["type"] == "custom":
        return part
    return part.select_columns([*columns]).with_format(None).cast_column(columns[0], replace(feature, decode=True))


def _is_picture(example: object) -> bool:
    from PIL.Image import Image

    return isinstance(example, Image)


def _channels_first(image: NDArray[Any]) -> NDArray[Any]:
    """Return one example with its channels first; Pillow's images have them last."""
    is_last = image.ndim == 3 and image.shape[2] in _CHANNELS and image.shape[0] not in _CHANNELS
    return image.transpose(2, 0, 1) if is_last else image


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
