"""Tables of numbers: CSV or Parquet files with a column of labels, for networks of linear layers."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Sequence
from decimal import Decimal
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedprune_app.data.dataset import Dataset, Form, missing, owned_by, scale, visible
from fedprune_app.data.errors import FileError, check_kind, shortened
from fedprune_app.data.labels import coded, in_order, text_of

if TYPE_CHECKING:
    import pandas

_SUFFIXES = (".csv", ".parquet")


def table(folder: Path, form: Form, *, public_scale: bool) -> Dataset:
    """Read ``folder/train.csv`` and ``folder/test.csv``, or Parquet files of these names.

    Each row is an example. All columns are features, in the order of the training file, but the label's, the owner's
    and those that the form ignores. They are numbers, which are normalised by the mean and the standard deviation of
    the training rows. With ``public_scale`` they stay as they are. Labels and owners are texts: 01 is not 1, and NA is
    a name like any other. Only an empty cell is a missing one. The classes are the different labels in order, or those
    of the form. Raises a one-line ``ValueError`` naming the file and the column.
    """
    label, owner, ignored = form.label_column, form.owner_column, form.ignore_columns
    if not label or label in ignored:
        allowed = "the name of a column" + ", which ignore-columns does not name" * (label in ignored)
        raise ValueError(f"label-column is {label!r}, allowed: {allowed}")
    files = {part: path for part in ("train", "test") if (path := _file(folder, part))}
    if "train" not in files or (form.needs_test and "test" not in files):
        part = "test" if "train" in files else "train"
        advice = "; test-split=holdout holds out a share of each client's rows" if part == "test" else ""
        raise ValueError(missing("table", folder, f"{part}.csv or {part}.parquet", Path(f"{part}.csv"), advice))
    frames = {part: _read(path, [name for name in (label, owner) if name]) for part, path in files.items()}
    train = frames["train"]
    for part, frame in frames.items():
        _check_columns(files[part], frame, "label-column", [label])
        _check_columns(files[part], frame, "owner-column", [owner] if owner else [])
    _check_columns(files["train"], train, "ignore-columns", ignored)
    features = [name for name in train.columns if name not in (label, owner, *ignored)]
    if not features:
        raise _error(files["train"], "has no column but the label's, allowed: at least one feature")
    arrays = {part: _features(files[part], frame, features, label) for part, frame in frames.items()}
    labels = {part: frame[label].astype(str).tolist() for part, frame in frames.items()}
    classes = form.classes or in_order(labels["train"])
    if len(classes) < 2:
        reason, allowed = "has one label", ", allowed: at least two"
        raise _error(files["train"], f"{reason}, {classes[0]!r}{allowed}", reason + allowed)

    def refuse(part: str, value: str) -> FileError:
        allowed = shortened(classes)
        public_reason = f"has a label that classes does not name, allowed: {allowed}"
        reason = f"has the label {value!r}, allowed: {allowed}"
        return _error(files[part], reason, public_reason if form.classes else "has a label of no class")

    numbers = coded(labels, classes, refuse)
    test = (arrays["test"], numbers["test"]) if "test" in files else (arrays["train"][:0], numbers["train"][:0])
    owner_numbers = _owners(frames, owner)
    mean, std = scale(arrays["train"], public_scale)
    arguments = (arrays["train"], numbers["train"], *test, classes, mean, std, *owner_numbers)
    notes = {
        "tables that are not read": [
            item.name
            for item in visible(folder)
            if Path(item.name).suffix in _SUFFIXES and Path(item.path) not in files.values()
        ],
        "columns of the test table that are not read": [
            name for name in frames.get("test", train).columns if name not in train.columns
        ],
        "a private run does not normalise, and float32 cannot tell apart most numbers of the columns": [
            name
            for name, values in zip(features, arrays["train"][:, :, 0, 0].T, strict=True)
            if public_scale and 2 * len(np.unique(values.astype(np.float32))) < len(np.unique(values))
        ],
    }
    lines = tuple(f"{note}: {shortened(names)}" for note, names in notes.items() if names)
    return Dataset("table", *arguments, features=tuple(features), is_measured=not public_scale, notes=lines)


def rows(path: Path, features: Sequence[str]) -> NDArray[np.float64]:
    """Read the columns ``features`` of a CSV or Parquet file, in this order, as float64 (N, F, 1, 1).

    Other columns are not looked at. Raises a one-line ``ValueError`` naming the file and the column.
    """
    if path.suffix not in _SUFFIXES:
        raise ValueError(f"file {str(path)!r} is no table, allowed: a file that ends in {' or '.join(_SUFFIXES)}")
    return _features(path, _read(path, []), features)


def _file(folder: Path, part: str) -> Path | None:
    paths = [path for suffix in _SUFFIXES if (path := folder / f"{part}{suffix}").exists()]
    if len(paths) > 1:
        names = " and ".join(path.name for path in paths)
        raise ValueError(f"data-dir '{folder}' has {names}, allowed: one of them")
    for path in paths:
        check_kind(path)
    return paths[0] if paths else None


def _read(path: Path, names: Sequence[str]) -> pandas.DataFrame:
    """Return a table whose columns ``names`` are texts, and missing where a cell is empty."""
    try:
        import pandas
    except ImportError:
        raise ValueError("dataset 'table' needs pandas: install fedprune[data]") from None
    try:
        if path.suffix == ".csv":
            _check_names(path, _header(path))  # pandas makes others of names that are empty, or there twice
            # pandas takes NA and None for missing ones, whatever a converter returns; nothing that begins with = is one
            frame = pandas.read_csv(path, index_col=False, converters=dict.fromkeys(names, "={}".format))
            texts = {name: [text_of(text[1:]) for text in frame[name]] for name in names if name in frame.columns}
        else:
            frame = _with_text_names(pandas.read_parquet(path))
            _check_names(path, list(frame.columns))
            columns = [name for name in names if name in frame.columns]
            # whole numbers beside a missing one stay exact
            text_frame = _with_text_names(pandas.read_parquet(path, columns=columns, dtype_backend="numpy_nullable"))
            texts = {
                name: ["" if pandas.isna(value) else text_of(value) for value in text_frame[name]] for name in columns
            }
    except FileError:
        raise
    except Exception as error:  # pandas' readers raise what they like
        reason = f"cannot be read: {' '.join(str(error).split())}"
        raise _error(path, reason, f"cannot be read ({type(error).__name__})") from None
    return frame.assign(**{name: [text or None for text in values] for name, values in texts.items()})


def _with_text_names(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Return a table with texts as names of its columns: in Parquet they may be whole numbers."""
    return frame.set_axis([str(name) for name in frame.columns], axis=1)


def _check_names(path: Path, names: list[str]) -> None:
    """Raise :class:`FileError` for a column without a name, and for two columns of one name."""
    if not all(name.strip() for name in names):
        reason = "has a column without a name, allowed: a name for each (to_csv(index=False) writes no row numbers)"
        raise _error(path, reason)
    if duplicates := [name for name, count in Counter(names).items() if count > 1]:
        raise _error(
            path, f"has two columns '{duplicates[0]}', allowed: different names", "has two columns of one name"
        )


def _header(path: Path) -> list[str]:
    """Return the names in the first line of a CSV file.

    Raises :class:`FileError` for a line of the file with more or fewer values than the header: pandas takes the first
    value of longer lines for the name of the row, so that all others move by one column.
    """
    with path.open(newline="", encoding="utf-8-sig") as file:
        lines = csv.reader(file)
        header: list[str] = []
        for values in lines:
            if len(values) < 2 and not "".join(values).strip():  # a blank line, which pandas skips
                continue
            header = header or values
            if len(values) != len(header):
                reason = f"has {len(values)} values in line {lines.line_num}, allowed: {len(header)}, as in the header"
                raise _error(path, reason, "has a line with more or fewer values than the header, allowed: as many")
    return header


def _error(path: Path, reason: str, public_reason: str = "") -> FileError:
    """Return the error of a table; ``public_reason`` says the same without a word of what is in the table."""
    return FileError(path, "a table", reason, public_reason)


def _check_columns(path: Path, frame: pandas.DataFrame, key: str, names: Sequence[str]) -> None:
    for name in names:
        if name not in frame.columns:
            reason = f"has no column '{name}', which {key} names"
            raise _error(path, f"{reason}, allowed: {', '.join(frame.columns)}", reason)


def _features(path: Path, frame: pandas.DataFrame, features: Sequence[str], label: str = "") -> NDArray[np.float64]:
    """Return the features as float64 (N, F, 1, 1)."""
    if frame.empty:
        raise _error(path, "has no rows, allowed: at least one")
    if missing_names := [name for name in features if name not in frame.columns]:
        reason = "which the training rows have"
        raise _error(path, f"has no column '{missing_names[0]}', {reason}", f"lacks a column {reason}")
    for name in filter(None, (*features, label)):
        if num_missing := int(frame[name].isna().sum()):
            reason = f"has {num_missing} missing values in column '{name}', allowed: none"
            raise _error(path, reason, "has missing values, allowed: none")
    for name in features:
        if not _has_numbers(frame[name]):
            allowed = "allowed: numbers (pandas.get_dummies makes columns of 0 and 1 from texts), or ignore-columns"
            reason = f"has column '{name}' without numbers, {allowed}"
            raise _error(path, reason, f"has a column of texts, {allowed}")
    numbers: NDArray[np.float64] = frame[list(features)].to_numpy(dtype=np.float64)
    with np.errstate(over="ignore"):
        if not np.isfinite(numbers.astype(np.float32)).all():
            raise _error(path, "has a number that is infinite, or too large for float32")
    return numbers[:, :, None, None]


def _has_numbers(column: pandas.Series[Any]) -> bool:
    """Return whether a column has numbers, which may be objects, as Decimals of Parquet are."""
    kind = column.dtype.kind
    return kind in "iufb" or (kind == "O" and all(isinstance(value, Real | Decimal) for value in column))


def _owners(frames: dict[str, pandas.DataFrame], column: str) -> tuple[Any, Any]:
    if not column:
        return None, None
    names = {part: frame[column].fillna("").astype(str).tolist() for part, frame in frames.items() if column in frame}
    owners, test_owners = owned_by(names["train"], names.get("test", []))
    return owners, test_owners if "test" in names else None
